"""Layer groups and the plan of a model: how many records a sequence has, and of which layouts.

A sequence of n tokens in one layer group is `sealed(n) = T * floor(max(0, n - sink - R) / T)`
tokens in pages, after the sink and before R .. R+T-1 tokens of the tail, both in raw pages.

    position 0    sink                                  sink + sealed(n)                n
    │ raw │ raw ...│ page │ page │ ... │ page │ page │ ...│ raw │ raw │ ... │ raw (part) │
    └──── sink ───┘└────── segment 0 ─────────┘└ segment 1 ┘└───────── tail ────────────┘

The raw pages are one list, with those of the sink in front: a token at position p is in slot p of
the sink, and in slot p - sealed(n) of the tail.

Everywhere: append, then seal, then attend. Pure arithmetic over ids; page.py knows the bytes.

A layer that keeps a state of fixed size, not K and V, is a layer group too: of one side record and
no pages. So records of states are counted, allocated, sent, checked and freed as all others are.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeVar

from disagg.errors import LayoutError
from disagg.kv.page import (
    ARENA_UNIT,
    EXACT,
    RAW_TOKENS,
    SEGMENT_TOKENS,
    STATE,
    FinalAt,
    Kind,
    Layout,
    align,
    fingerprint_of,
    make_wire_layout,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Positions = TypeVar("Positions", int, "NDArray[np.signedinteger]")


@dataclass(frozen=True)
class RecordShape:
    """Size of a record, for the pool.

    fingerprint: of its layout; records of one fingerprint share slabs
    zeroed:      whether it may be partly filled, so that its bytes must be zeroed
    """

    fingerprint: str
    nbytes: int
    zeroed: bool


@dataclass(frozen=True)
class LayerShape:
    """The K and V of one layer.

    heads:    KV heads
    head_dim: D, channels of a key
    window:   most tokens that a query sees, itself included; None: all
    chunked:  the window does not slide: a query sees those of its chunk of `window` tokens
    latent:   channels of a key that are its value too; None: values are stored
    first_head: the model's number of the first of these heads, on a rank that has some of them
    """

    heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False
    latent: int | None = None
    first_head: int = 0

    @property
    def values_per_token(self) -> int:
        """Numbers of the K and V of a token."""
        planes = 2 if self.latent is None else 1
        return planes * self.heads * self.head_dim


def window_start(position: Positions, window: int, chunked: bool) -> Positions:
    """The first position that a query sees; below 0 where its window begins before the text."""
    if chunked:
        return position - position % window
    return position + 1 - window


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a codec and a shape, with their layouts.

    layers:   model layer indices, ascending
    window:   most tokens that a query sees, itself included; None: all
    chunked:  the window does not slide, as in `LayerShape`
    first_head: the model's number of the first head, as in `LayerShape`: some bytes depend on it
    residual: R, the least number of exact tokens in the tail
    sink:     first tokens that stay exact, a multiple of 16; 0 where there is a window
    lead:     first tokens of a prompt that all its pages depend on, besides those they hold
    flush_page: layout of pages sealed while decoding, which need no segment; None:
            the layout of a prompt's pages
    kept_per_seal, kept_limit: exact tokens that one seal sets aside in raw pages, and all of them
    """

    layers: tuple[int, ...]
    codec: str
    window: int | None
    heads: int
    head_dim: int
    residual: int
    final_at: FinalAt
    page: Layout
    raw: Layout
    segment: Layout | None = None
    side: Layout | None = None
    flush_page: Layout | None = None
    kept_per_seal: int = 0
    kept_limit: int = 0
    sink: int = 0
    lead: int = 0
    chunked: bool = False
    first_head: int = 0

    @cached_property
    def fingerprint(self) -> str:
        layouts = [layout.fingerprint for layout in self.layouts()]
        window = f"chunks of {self.window}" if self.chunked else self.window
        identity = (self.layers, window, self.heads, self.head_dim, layouts)
        return fingerprint_of(identity)

    @property
    def latent(self) -> int | None:
        """Channels of K that are V too, which is not stored then; None: it is."""
        return self.raw.latent

    @property
    def segment_tokens(self) -> int:
        """Tokens that share a segment, or would if the codec had segments."""
        return self.segment.tokens if self.segment else SEGMENT_TOKENS

    @property
    def decode_page(self) -> Layout:
        """The layout of pages sealed while decoding."""
        return self.flush_page or self.page

    def segment_of(self, page: Layout) -> Layout | None:
        """The layout of the segments that pages of a layout belong to."""
        return None if page == self.flush_page else self.segment

    def layouts(self) -> Iterator[Layout]:
        """The layouts in use, pages first."""
        layouts = (self.page, self.raw, self.segment, self.side, self.flush_page)
        yield from (layout for layout in layouts if layout is not None)

    def layout(self, kind: Kind) -> Layout:
        """The layout of a prompt's records of `kind`; LayoutError where the codec has none."""
        layout: Layout | None = getattr(self, kind, None)
        if layout is None:
            raise LayoutError(f"codec {self.codec} has no {kind} records")
        return layout

    def rank(self, layer: int) -> int:
        """The index of a model layer inside this group."""
        return self.layers.index(layer)

    def layer_bytes(self, layout: Layout) -> int:
        """Bytes of a layer page: one block per KV head."""
        return self.heads * layout.block_bytes

    def layer_offset(self, layout: Layout, layer: int) -> int:
        """Bytes from the start of a record to the layer page of `layer`."""
        return self.rank(layer) * self.layer_bytes(layout)

    def address(self, layout: Layout, page: int, layer: int) -> int:
        """Byte offset in the arena of one layer page."""
        return page * ARENA_UNIT + self.layer_offset(layout, layer)

    def record(self, layout: Layout) -> RecordShape:
        """The shape of a record to allocate; records that may be partly filled come zeroed."""
        nbytes = align(len(self.layers) * self.layer_bytes(layout), ARENA_UNIT)
        zeroed = layout.kind in (Kind.RAW, Kind.SIDE)
        return RecordShape(layout.fingerprint, nbytes, zeroed)

    def sealed(self, n: int) -> int:
        """Tokens in pages when the sequence has n: a pure function of n."""
        tokens = self.page.tokens
        return tokens * (max(0, n - self.sink - self.residual) // tokens)

    def dropped(self, n: int) -> int:
        """Leading tokens in pages that no query after n tokens sees: neither kept nor sent.

        Pages that become final together are dropped together. Nothing is dropped where a codec
        keeps positions of tokens. One segment stays, for the next page to join.
        """
        if self.window is None or self.kept_limit or self.final_at is FinalAt.PROMPT:
            return 0
        droppable = self.sealed(n)
        if self.segment is not None:
            droppable -= 1
        first_visible = window_start(n, self.window, self.chunked)
        unseen = max(0, min(droppable, first_visible))
        return unseen // self.step * self.step

    def dropped_pages(self, n: int) -> int:
        """Leading pages of those tokens."""
        return self.dropped(n) // self.page.tokens

    @property
    def reach(self) -> int | None:
        """How many of the last computed tokens a prefill may still need, to attend to or to seal;
        None: all."""
        needs_all = self.lead or self.kept_limit or self.final_at is FinalAt.PROMPT
        if self.window is None or needs_all:
            return None
        return max(self.window, self.residual + self.page.tokens) + self.step

    @property
    def step(self) -> int:
        """Tokens in pages that become final, and are shared and dropped, together."""
        if self.segment is not None or self.final_at is FinalAt.SEGMENT:
            return self.segment_tokens
        return self.page.tokens

    def numbers(self, n: int) -> int:
        """Values of K and V of n tokens, as far as the last one sees them.

        Those of latents count once.
        """
        tokens = n
        if self.window is not None:
            tokens -= max(0, window_start(n - 1, self.window, self.chunked))
        sides = 2 if self.latent is None else 1
        return sides * tokens * len(self.layers) * self.heads * self.head_dim

    def inventory(self, n: int) -> Counter[Kind]:
        """How many records of each kind a prompt of n tokens fills; kinds without any left out."""
        sealed = self.sealed(n)
        paged = sealed - self.dropped(n)
        segments = -(-paged // self.segment_tokens) if self.segment else 0
        tail = -(-(n - sealed) // RAW_TOKENS)
        kept_raws = self.kept_raws(1 if sealed else 0)
        counts = Counter(
            {
                Kind.PAGE: paged // self.page.tokens,
                Kind.SEGMENT: segments,
                Kind.SIDE: 1 if self.side else 0,
                Kind.RAW: tail + kept_raws,
            }
        )
        return +counts  # without zeros

    def is_side_sent(self, n: int) -> bool:
        """Whether the side record of a prompt of n tokens says anything.

        It describes the prompt's pages, once there are any; in groups with a lead it says what the
        first page will need, until there is one.
        """
        if self.side is None:
            return False
        has_pages = self.sealed(n) > 0
        return not has_pages if self.lead else has_pages

    def divided(self, parts: int) -> Self:
        """The group of one of `parts` equal parts of the heads.

        LayoutError where they do not divide. A latent is one for all heads, and does not.
        """
        if self.heads % parts:
            heads = (
                "one latent for all heads" if self.latent else f"{self.heads} KV heads"
            )
            raise LayoutError(
                f"layer {self.layers[0]} has {heads}, which cannot be divided among {parts} ranks"
            )
        return replace(self, heads=self.heads // parts)

    def kept_raws(self, seals: int) -> int:
        """Raw pages for the tokens that `seals` seals set aside; a whole prompt is one seal."""
        return -(-min(seals * self.kept_per_seal, self.kept_limit) // RAW_TOKENS)


@dataclass(frozen=True)
class StateGroup(LayerGroup):
    """A layer that keeps a state instead of K and V: one side record, whatever the length.

    The record is final with the prompt. No query sees a token of it, and no token is in a page.

    wire:  the record that is handed off in its place; None: the side record itself is
    moves: the sequence moves in the middle of its answer: its state is sent as it is
    """

    wire: Layout | None = None
    moves: bool = False

    def layouts(self) -> Iterator[Layout]:
        yield self.layout(Kind.SIDE)
        if self.wire is not None:
            yield self.wire

    @property
    def sent(self) -> Layout:
        """The layout of the record that is handed off."""
        return self.page if self.wire is None or self.moves else self.wire

    @property
    def is_rounded(self) -> bool:
        """Whether the state is handed off in a record of its own."""
        return self.sent.kind is Kind.WIRE

    def record(self, layout: Layout) -> RecordShape:
        """Not zeroed: the first chunk of a prompt writes all of it, or a sender does."""
        return replace(super().record(layout), zeroed=False)

    def sealed(self, n: int) -> int:
        return n

    def dropped(self, n: int) -> int:
        return n

    def dropped_pages(self, n: int) -> int:
        return 0

    def divided(self, parts: int) -> Self:
        raise LayoutError(
            f"layer {self.layers[0]} keeps a state, which is not divided among ranks: "
            f"a worker of this model has one rank"
        )

    @property
    def step(self) -> int:
        return 1

    def inventory(self, n: int) -> Counter[Kind]:
        kinds = (Kind.SIDE, Kind.WIRE) if self.is_rounded else (Kind.SIDE,)
        return Counter(dict.fromkeys(kinds, 1))

    def is_side_sent(self, n: int) -> bool:
        return not self.is_rounded


def state_group(layer: int, layout: Layout, form: str = EXACT) -> StateGroup:
    """The group of one layer with a state of this layout, and the form of its hand-off."""
    return StateGroup(
        layers=(layer,),
        codec=STATE,
        window=None,
        heads=1,
        head_dim=0,
        residual=0,
        final_at=FinalAt.PROMPT,
        page=layout,
        raw=layout,
        side=layout,
        wire=make_wire_layout(layout, form),
    )


@dataclass(frozen=True)
class Plan:
    """Which group every layer belongs to. Equal fingerprints: two workers agree on every byte.

    Groups of layers with K and V come first. Layers with a state are numbered behind all others.

    rope_switch: the keys of texts of at most this many tokens have one rotation, those of longer
                 texts another; None: all texts have the same
    """

    groups: tuple[LayerGroup, ...]
    group_of: tuple[int, ...]
    rope_switch: int | None = None

    def is_long(self, length: int) -> bool:
        """Whether the keys of a text of `length` tokens have the rotation of long texts."""
        return self.rope_switch is not None and length > self.rope_switch

    @cached_property
    def fingerprint(self) -> str:
        groups = [group.fingerprint for group in self.groups]
        return fingerprint_of((self.group_of, groups))

    @cached_property
    def paged(self) -> tuple[LayerGroup, ...]:
        """The groups with K and V, which are the first ones."""
        return tuple(x for x in self.groups if not isinstance(x, StateGroup))

    @cached_property
    def states(self) -> tuple[StateGroup, ...]:
        """The groups with a state, which are the last ones."""
        return tuple(x for x in self.groups if isinstance(x, StateGroup))

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence, whatever its length."""
        return sum(group.record(group.page).nbytes for group in self.states)

    @cached_property
    def wire_state_bytes(self) -> int:
        """Bytes of these states as they are handed off."""
        return sum(group.record(group.sent).nbytes for group in self.states)

    @cached_property
    def moving(self) -> "Plan":
        """The plan of a sequence that moves in the middle of its answer."""
        groups = tuple(
            replace(group, moves=True) if isinstance(group, StateGroup) else group
            for group in self.groups
        )
        return replace(self, groups=groups)

    def divided(self, parts: int) -> "Plan":
        """The plan of one of `parts` equal parts of the heads of every layer.

        LayoutError where heads do not divide, and for layers with states.
        """
        if parts == 1:
            return self
        return replace(self, groups=tuple(x.divided(parts) for x in self.groups))

    def of_group(self, ranks: int) -> "Plan":
        """The plan of a group of ranks, of which each has this one."""
        if ranks == 1:
            return self
        groups = tuple(replace(x, heads=x.heads * ranks) for x in self.groups)
        return replace(self, groups=groups)

    @property
    def spec(self) -> str:
        """The codec spec of the only group with K and V, or "layers:spec; ..." of all of them."""
        if len(self.paged) == 1:
            return self.paged[0].codec
        specs = []
        for group in self.paged:
            layers = ",".join(map(str, group.layers))
            specs.append(f"{layers}:{group.codec}")
        return ";".join(specs)

    @property
    def reaches(self) -> tuple[int | None, ...]:
        """`reach` of the group of every layer with K and V."""
        num_layers = sum(len(group.layers) for group in self.paged)
        groups = map(self.groups.__getitem__, self.group_of[:num_layers])
        return tuple(group.reach for group in groups)

    def numbers(self, n: int) -> int:
        """Values of K and V of n tokens in all layers, as far as the next query sees them."""
        return sum(group.numbers(n) for group in self.paged)

    def full(self, n: int) -> int:
        """The length of a text of about n tokens that holds as much as one of that length may.

        At the end of a chunk, layers that see only chunks hold nothing; a token before, all of it.
        """
        ends = [x.window for x in self.paged if x.chunked and x.window is not None]
        return n - 1 if n > 1 and any(n % window == 0 for window in ends) else n

    def records(self, n: int) -> Counter[RecordShape]:
        """Records of n tokens in all layers, by shape: pages, segments, side records and tail."""
        records = Counter[RecordShape]()
        for group in self.groups:
            for kind, count in group.inventory(n).items():
                records[group.record(group.layout(kind))] += count
        return records

    def nbytes(self, n: int) -> int:
        """Bytes of all records of n tokens, those included that only the hand-off needs."""
        return sum(count * shape.nbytes for shape, count in self.records(n).items())

    def resident_records(self, n: int) -> Counter[RecordShape]:
        """Records of n tokens while they decode: states that were handed off rounded are exact."""
        records = self.records(n)
        for group in self.states:
            if group.is_rounded:
                records[group.record(group.sent)] -= 1
        return +records

    def resident_bytes(self, n: int) -> int:
        """Bytes of these records."""
        records = self.resident_records(n)
        return sum(count * shape.nbytes for shape, count in records.items())
