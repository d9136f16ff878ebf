"""Append m tokens to sequences: slots in raw pages for the new tokens, pages for sealed ones.

    tail before   │ raw │ raw │ raw │ raw │ raw │          the oldest T tokens of a full tail are
    tail after                            │ raw │ raw +    sealed; their raw pages are freed after
                                                           the last layer
The sink comes before the tail and never changes.

Pages sealed while decoding have the layout `flush_page` where the group has one, which needs no
segment. Otherwise, in a group with segments, the page joins the first segment of the sequence; if
the sequence has no page yet, it begins that segment.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.errors import CapacityError
from disagg.kernels.sealing import NO_PAGE, STRETCH_TOKENS, SealRows
from disagg.kv.page import RAW_TOKENS, Kind, Layout
from disagg.kv.plan import LayerGroup
from disagg.kv.state import Allocator, GroupState, Run


@dataclass(frozen=True)
class SequenceGrowth:
    """One sequence of a step: `n` tokens so far, `m` more; its new rows begin at `row`."""

    state: GroupState
    n: int
    m: int
    row: int


@dataclass(frozen=True)
class RecordIds:
    """Records of a sequence in a layer group, each kind in its order: int32 page ids.

    tail:       raw pages of tokens in order
    kept_pages: raw pages of the tokens that the side record names
    """

    pages: Tensor
    segments: Tensor
    tail: Tensor
    kept_pages: Tensor
    side: Tensor

    @classmethod
    def of(cls, state: GroupState) -> "RecordIds":
        """All records of a state, on the host."""
        ids = state.ids_by_kind()
        return cls(
            pages=_int32(ids.get(Kind.PAGE, [])),
            segments=_int32(ids.get(Kind.SEGMENT, [])),
            tail=_int32(state.tail),
            kept_pages=_int32(state.kept_pages),
            side=_int32(ids.get(Kind.SIDE, [])),
        )


def _int32(ids: Sequence[int] | Sequence[list[int]]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


@dataclass(frozen=True)
class Seal:
    """The oldest T tokens of a tail become a page.

    index:   of the row whose token fills the tail, among the rows of the group
    first:   position of the first sealed token
    begins_segment: the page is the first of its segment
    records: the new page and its segment, the raw pages of the sealed tokens, and the side record
             and kept pages of the sequence
    """

    index: int
    first: int
    begins_segment: bool
    records: RecordIds


@dataclass
class NewRecords:
    """Records taken for a whole step, handed out one by one."""

    raws: deque[int]
    pages: deque[int]
    segments: deque[int]

    def ids(self) -> list[int]:
        """The records not handed out yet."""
        return [*self.raws, *self.pages, *self.segments]


def begins_segment(group: LayerGroup, state: GroupState) -> bool:
    """Whether the next page sealed while decoding begins a segment."""
    return group.segment_of(group.decode_page) is not None and not state.runs


def take_records(
    group: LayerGroup, growths: Sequence[SequenceGrowth], allocator: Allocator
) -> NewRecords:
    """Take the records of a whole step, before any state changes; CapacityError takes nothing."""
    num_raws = num_pages = num_segments = 0
    for growth in growths:
        state, n = growth.state, growth.n + growth.m
        sealed = state.num_pages * group.page.tokens
        num_raws += -(-(n - sealed) // RAW_TOKENS) - len(state.tail)
        if group.page != group.raw and group.sealed(n) > sealed:
            num_pages += 1
            num_raws += _more_kept(group, state)
            if begins_segment(group, state):
                num_segments += 1
    allocated: list[list[int]] = []
    try:
        for layout, count in (
            (group.raw, num_raws),
            (group.decode_page, num_pages),
            (group.segment, num_segments),
        ):
            ids: list[int] = []
            if layout and count:
                ids = allocator.allocate(group.record(layout), count)
            allocated.append(ids)
    except CapacityError:
        for ids in allocated:
            allocator.release(ids)
        raise
    raws, pages, segments = map(deque, allocated)
    return NewRecords(raws, pages, segments)


def _more_kept(group: LayerGroup, state: GroupState) -> int:
    """Raw pages that the next seal may need for tokens that the codec keeps."""
    return group.kept_raws(state.seals + 1) - len(state.kept_pages)


def append_tokens(
    group: LayerGroup, growths: Sequence[SequenceGrowth], records: NewRecords
) -> tuple[list[int], list[int]]:
    """The raw page and slot of every new token; the tails grow."""
    pages, slots = [], []
    for growth in growths:
        tail = growth.state.tail
        sealed = growth.state.num_pages * group.page.tokens
        first = growth.n - sealed
        end = first + growth.m
        while len(tail) * RAW_TOKENS < end:
            tail.append(records.raws.popleft())
        for position in range(first, end):
            pages.append(tail[position // RAW_TOKENS])
            slots.append(position % RAW_TOKENS)
    return pages, slots


def take_back(group: LayerGroup, state: GroupState, n: int) -> list[int]:
    """Forget the tokens behind the first n, none of which is sealed; raw pages to release.

    New tokens are written over them.
    """
    sealed = state.num_pages * group.page.tokens
    pages = -(-(n - sealed) // RAW_TOKENS)
    unused = state.tail[pages:]
    del state.tail[pages:]
    return unused


def seal_tails(
    group: LayerGroup, growths: Sequence[SequenceGrowth], records: NewRecords
) -> list[Seal]:
    """Seal each full tail. The raw codec's pages are raw pages, so only their ids move."""
    seals: list[Seal] = []
    raws_per_page = group.page.tokens // RAW_TOKENS
    sink = group.sink // RAW_TOKENS
    index = 0
    for growth in growths:
        state = growth.state
        first = state.num_pages * group.page.tokens
        while group.sealed(growth.n + growth.m) > first:
            tail = state.tail[sink : sink + raws_per_page]
            del state.tail[sink : sink + raws_per_page]
            if group.page == group.raw:
                _extend(state, group.raw, None, first, tail[0])
            else:
                seals.append(_seal_one(group, state, index, tail, first, records))
            first += group.page.tokens
        index += growth.m
    return seals


def _seal_one(
    group: LayerGroup,
    state: GroupState,
    index: int,
    tail: list[int],
    first: int,
    records: NewRecords,
) -> Seal:
    layout = group.decode_page
    segment = None
    begins = begins_segment(group, state)
    if begins:
        segment = records.segments.popleft()
    elif group.segment_of(layout) is not None:
        segment = state.runs[0].segment
    page = records.pages.popleft()
    _extend(state, layout, segment, first, page)
    for _ in range(_more_kept(group, state)):
        state.kept_pages.append(records.raws.popleft())
    state.seals += 1
    run = Run(layout, segment, first, array("i", [page]))
    read = GroupState([run], tail, state.side, state.kept_pages)
    return Seal(index, group.sink + first, begins, RecordIds.of(read))


def seal_rows(group: LayerGroup, seals: Sequence[Seal], count: int) -> SealRows:
    """The seals of a step by row, of `count` rows, as the append kernel reads them; on the host."""
    pages = [NO_PAGE] * count
    tails = [[0] * (group.page.tokens // RAW_TOKENS)] * count
    segments = [0] * count
    stretches = [0] * count
    for seal in seals:
        ids = seal.records
        pages[seal.index] = int(ids.pages)
        tails[seal.index] = ids.tail.tolist()
        segments[seal.index] = int(ids.segments) if len(ids.segments) else 0
        stretches[seal.index] = seal.first // STRETCH_TOKENS
    return SealRows(_int32(pages), _int32(tails), _int32(segments), _int32(stretches))


def _extend(
    state: GroupState, layout: Layout, segment: int | None, first: int, page: int
) -> None:
    """Add a page after the last one: to its run, or to a new one."""
    last = state.runs[-1] if state.runs else None
    if last is None or last.layout != layout or last.segment != segment:
        last = Run(layout, segment, first)
        state.runs.append(last)
    last.pages.append(page)
