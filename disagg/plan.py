"""Which records a sequence is made of: layer groups, the plan of a model, the state of a sequence.

A sequence of n tokens in one layer group is `sealed(n) = T * floor(max(0, n - R) / T)` tokens in
pages, then R .. R+T-1 tokens in raw pages: the tail.

    position 0                             sealed(n)                      n
    │ page │ page │ ... │ page │ page │ ... │ raw │ raw │ ... │ raw (part) │
    └────── segment 0 ─────────┘└ segment 1 ┘└────────── tail ────────────┘

Everywhere: append, then seal, then attend. Pure arithmetic over ids; the bytes are page.py's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from disagg.errors import DisaggError, LayoutError
from disagg.page import (
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
class Inventory:
    """How many records of each kind hold n tokens of one group; `tail_len` tokens are raw."""

    pages: int
    segments: int
    sides: int
    raws: int
    tail_len: int

    def count(self, kind: Kind) -> int:
        """The field of that kind."""
        return int(getattr(self, f"{kind}s"))


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share codec, attention window, KV heads and head dim, with their layouts.

    layers:   model layer indices, ascending
    window:   tokens a query sees, itself included; None: all
    residual: R, the least number of exact tokens in the tail
    flush_page, flush_segment: layouts of pages sealed while decoding, where they differ
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
    flush_segment: Layout | None = None
    kept: int = 0
    kept_limit: int = 0

    @cached_property
    def fingerprint(self) -> str:
        layouts = [x.fingerprint for x in self.layouts()]
        return fingerprint_of((self.layers, self.window, self.heads, self.head_dim, layouts))

    def layouts(self) -> Iterator[Layout]:
        """The layouts in use, pages first."""
        prompt = (self.page, self.raw, self.segment, self.side)
        yield from (x for x in (*prompt, self.flush_page, self.flush_segment) if x is not None)

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

    def address(self, layout: Layout, page: int, layer: int, head: int = 0) -> int:
        """Byte offset in the arena of one block."""
        offset = self.layer_offset(layout, layer) + head * layout.block_bytes
        return page * ARENA_UNIT + offset

    def record(self, layout: Layout) -> RecordShape:
        """What to ask the pool for; records that may be partly filled come zeroed."""
        nbytes = align(len(self.layers) * self.layer_bytes(layout), ARENA_UNIT)
        zeroed = layout.kind in (Kind.RAW, Kind.SIDE)
        return RecordShape(layout.fingerprint, nbytes, zeroed)

    def sealed(self, n: int) -> int:
        """Tokens in pages when the sequence has n: a pure function of n."""
        tokens = self.page.tokens
        return tokens * (max(0, n - self.residual) // tokens)

    def inventory(self, n: int) -> Inventory:
        """The records that a prompt of n tokens fills."""
        sealed = self.sealed(n)
        segments = -(-sealed // SEGMENT_TOKENS) if self.segment else 0
        tail_len = n - sealed
        raws = -(-tail_len // RAW_TOKENS) + self.kept_raws(1 if sealed else 0)
        pages, sides = sealed // self.page.tokens, 1 if self.side else 0
        return Inventory(pages, segments, sides, raws, tail_len)

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
        return fingerprint_of((self.group_of, [group.fingerprint for group in self.groups]))

    @property
    def spec(self) -> str:
        """The codec spec of the only group, or "layers:spec; ..." of all of them."""
        if len(self.groups) == 1:
            return self.groups[0].codec
        return ";".join(f"{','.join(map(str, g.layers))}:{g.codec}" for g in self.groups)

    def nbytes(self, n: int) -> int:
        """Bytes resident for n tokens: pages, segments, side records and tail, all layers."""
        total = 0
        for group in self.groups:
            inventory = group.inventory(n)
            for kind in Kind:
                if count := inventory.count(kind):
                    total += count * group.record(group.layout(kind)).nbytes
        return total


class Allocator(Protocol):
    """Who hands out records: the pool, or the private store of a one-layer cache."""

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids, each owned once; CapacityError and nothing taken if no room."""

    def release(self, pages: Sequence[int]) -> None:
        """Give up one ownership of each page."""


@dataclass
class Run:
    """Pages in token order under one layout and one segment. A kernel never crosses one."""

    layout: Layout
    segment: int | None
    first: int
    pages: list[int] = field(default_factory=list)


@dataclass
class GroupState:
    """One sequence in one group, as page ids; `seals`: how often a prompt or tail was sealed."""

    runs: list[Run] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    side: int | None = None
    kept: list[int] = field(default_factory=list)
    seals: int = 0

    def page_ids(self) -> list[int]:
        """The pages of all runs, in token order."""
        return [page for run in self.runs for page in run.pages]

    def ids(self) -> Iterator[int]:
        """Every record owned, each once."""
        yield from self.page_ids()
        yield from dict.fromkeys(run.segment for run in self.runs if run.segment is not None)
        yield from (*self.tail, *self.kept)
        if self.side is not None:
            yield self.side


def allocate_group(group: LayerGroup, n: int, allocator: Allocator) -> GroupState:
    """The records that n tokens need, ready to be written; CapacityError and nothing taken if not.

    Pages of one segment form one run; a codec without segments has a single run.
    """
    inventory = group.inventory(n)
    ids: dict[Kind, list[int]] = {}
    try:
        for kind in Kind:
            if count := inventory.count(kind):
                ids[kind] = allocator.allocate(group.record(group.layout(kind)), count)
    except DisaggError:
        for taken in ids.values():
            allocator.release(taken)
        raise
    pages, segments = ids.get(Kind.PAGE, []), ids.get(Kind.SEGMENT, [])
    step = SEGMENT_TOKENS // group.page.tokens if segments else max(1, len(pages))
    runs = [
        Run(group.page, s if segments else None, i * group.page.tokens, pages[i : i + step])
        for i, s in zip(range(0, len(pages), step), segments or [0], strict=False)
    ]
    side = ids[Kind.SIDE][0] if Kind.SIDE in ids else None
    raws, split = ids.get(Kind.RAW, []), -(-inventory.tail_len // RAW_TOKENS)
    return GroupState(runs, raws[:split], side, raws[split:], 1 if pages else 0)


def record_id(state: GroupState, kind: Kind, index: int) -> int:
    """The page id of one record of a prompt; LayoutError where the state has no such record."""
    if kind is Kind.PAGE:
        found = state.page_ids()
    elif kind is Kind.RAW:
        found = state.tail + state.kept
    else:
        ids = {Kind.SEGMENT: [run.segment for run in state.runs]}.get(kind, [state.side])
        found = [page for page in ids if page is not None]
    if not 0 <= index < len(found):
        raise LayoutError(f"no {kind} record {index}; the sequence has {len(found)}")
    return found[index]
