"""Which records a sequence is made of: layer groups and the plan of a model.

A sequence of n tokens in one layer group is `sealed(n) = T * floor(max(0, n - sink - R) / T)`
tokens in pages, behind the sink and before R .. R+T-1 tokens of the tail, both in raw pages.

    position 0    sink                                  sink + sealed(n)                n
    │ raw │ raw ...│ page │ page │ ... │ page │ page │ ...│ raw │ raw │ ... │ raw (part) │
    └──── sink ───┘└────── segment 0 ─────────┘└ segment 1 ┘└───────── tail ────────────┘

The raw pages are one list, the sink's in front: token p of them is in slot p - sealed(n) behind the
pages, in slot p before.

Everywhere: append, then seal, then attend. Pure arithmetic over ids; the bytes are page.py's.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from disagg.errors import LayoutError
from disagg.kv.page import (
    ARENA_UNIT,
    RAW_TOKENS,
    SEGMENT_TOKENS,
    FinalAt,
    Kind,
    Layout,
    align,
    fingerprint_of,
)


@dataclass(frozen=True)
class RecordShape:
    """What the pool needs to know of a record: whose slab, what size, zeroed or not."""

    fingerprint: str
    nbytes: int
    zeroed: bool


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share codec, attention window, KV heads and head dim, with their layouts.

    layers:   model layer indices, ascending
    window:   tokens a query sees, itself included; None: all
    residual: R, the least number of exact tokens in the tail
    sink:     first tokens that stay exact, a multiple of 16; 0 where there is a window
    lead:     first tokens of a prompt that all its pages depend on, besides those they hold
    flush_page: of pages sealed while decoding, with all that belongs to them; None: as prompts have
    kept, kept_limit: exact tokens that a seal, and that all of them, set aside in raw pages
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
    kept: int = 0
    kept_limit: int = 0
    sink: int = 0
    lead: int = 0

    @cached_property
    def fingerprint(self) -> str:
        layouts = [x.fingerprint for x in self.layouts()]
        return fingerprint_of(
            (self.layers, self.window, self.heads, self.head_dim, layouts)
        )

    @property
    def segment_tokens(self) -> int:
        """Tokens that share a segment, or would."""
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
        prompt = (self.page, self.raw, self.segment, self.side)
        yield from (x for x in (*prompt, self.flush_page) if x is not None)

    def layout(self, kind: Kind) -> Layout:
        """The layout of a prompt's records of `kind`; LayoutError where the codec has none."""
        found: Layout | None = getattr(self, kind)
        if found is None:
            raise LayoutError(f"codec {self.codec} has no {kind} records")
        return found

    def rank(self, layer: int) -> int:
        """The place of a model layer inside this group."""
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
        """What to ask the pool for; records that may be partly filled come zeroed."""
        nbytes = align(len(self.layers) * self.layer_bytes(layout), ARENA_UNIT)
        zeroed = layout.kind in (Kind.RAW, Kind.SIDE)
        return RecordShape(layout.fingerprint, nbytes, zeroed)

    def sealed(self, n: int) -> int:
        """Tokens in pages when the sequence has n: a pure function of n."""
        tokens = self.page.tokens
        return tokens * (max(0, n - self.sink - self.residual) // tokens)

    def dropped(self, n: int) -> int:
        """Leading tokens in pages that no query behind n tokens sees: neither kept nor sent.

        Of what becomes final together all or nothing; nothing where pages say their positions. One
        segment stays, which the next page joins.
        """
        if self.window is None or self.kept_limit or self.final_at is FinalAt.PROMPT:
            return 0
        most = self.sealed(n) - (self.segment is not None)
        return max(0, min(most, n + 1 - self.window)) // self.step * self.step

    @property
    def reach(self) -> int | None:
        """Tokens up to the last one computed that a prefill may still ask for, to attend to or to
        seal; None: all."""
        if (
            self.window is None
            or self.lead
            or self.kept_limit
            or self.final_at is FinalAt.PROMPT
        ):
            return None
        return max(self.window, self.residual + self.page.tokens) + self.step

    @property
    def step(self) -> int:
        """Tokens in pages that become final, and are shared and dropped, together."""
        whole = self.segment is not None or self.final_at is FinalAt.SEGMENT
        return self.segment_tokens if whole else self.page.tokens

    def numbers(self, n: int) -> int:
        """Values of K and V that n tokens have, of those that the next query sees."""
        seen = n if self.window is None else min(n, self.window)
        return 2 * seen * len(self.layers) * self.heads * self.head_dim

    def inventory(self, n: int) -> Counter[Kind]:
        """How many records of each kind a prompt of n tokens fills, of those it fills any of."""
        sealed = self.sealed(n)
        paged = sealed - self.dropped(n)
        raws = -(-(n - sealed) // RAW_TOKENS) + self.kept_raws(1 if sealed else 0)
        segments = -(-paged // self.segment_tokens) if self.segment else 0
        found = {Kind.PAGE: paged // self.page.tokens, Kind.SEGMENT: segments}
        return +Counter(found | {Kind.SIDE: 1 if self.side else 0, Kind.RAW: raws})

    def is_side_sent(self, n: int) -> bool:
        """Whether the side record of a prompt of n tokens says anything: of its pages; in groups
        with a lead only while there is none, of what the first one will need."""
        return self.side is not None and bool(self.sealed(n)) != bool(self.lead)

    def kept_raws(self, seals: int) -> int:
        """Raw pages for what `seals` seals set aside; all of a prompt is one."""
        return -(-min(seals * self.kept, self.kept_limit) // RAW_TOKENS)


@dataclass(frozen=True)
class Plan:
    """Which group every layer belongs to. Equal fingerprints: two workers agree on every byte."""

    groups: tuple[LayerGroup, ...]
    group_of: tuple[int, ...]

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(
            (self.group_of, [group.fingerprint for group in self.groups])
        )

    @property
    def spec(self) -> str:
        """The codec spec of the only group, or "layers:spec; ..." of all of them."""
        if len(self.groups) == 1:
            return self.groups[0].codec
        return ";".join(
            f"{','.join(map(str, g.layers))}:{g.codec}" for g in self.groups
        )

    @property
    def reaches(self) -> tuple[int | None, ...]:
        """`reach` of every layer's group."""
        return tuple(self.groups[index].reach for index in self.group_of)

    def numbers(self, n: int) -> int:
        """Values of K and V that n tokens have in all layers, of those that the next query sees."""
        return sum(group.numbers(n) for group in self.groups)

    def records(self, n: int) -> Counter[RecordShape]:
        """What n tokens are in, all layers: pages, segments, side records and tail, by shape."""
        found = Counter[RecordShape]()
        for group in self.groups:
            for kind, count in group.inventory(n).items():
                found[group.record(group.layout(kind))] += count
        return found

    def nbytes(self, n: int) -> int:
        """Bytes resident for n tokens."""
        return sum(count * shape.nbytes for shape, count in self.records(n).items())
