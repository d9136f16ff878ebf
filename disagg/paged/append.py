"""Growing sequences by m tokens: raw slots for the new ones, pages and segments for what is full.

    tail before   │ raw │ raw │ raw │ raw │ raw │          the oldest T tokens of a full tail become
    tail after                            │ raw │ raw +    a page; the raw pages read are freed last

A sink is in front of both, and stays.

Pages sealed while decoding have the layout `flush_page` where the group has one: all that belongs
to such a page is in it. Else, in a group with segments, a page joins the first one of the sequence,
and only the first page of all begins one.
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

    tail: raw pages of tokens in order · kept: those of tokens that the side record names
    """

    pages: Tensor
    segments: Tensor
    tail: Tensor
    kept: Tensor
    side: Tensor

    @classmethod
    def of(cls, state: GroupState) -> "RecordIds":
        """All records of a state, on the host."""
        ids = state.ids_by_kind()
        paged, segments, side = (
            ids.get(x, []) for x in (Kind.PAGE, Kind.SEGMENT, Kind.SIDE)
        )
        found = paged, segments, state.tail, state.kept, side
        return cls(*(torch.tensor(x, dtype=torch.int32) for x in found))


@dataclass(frozen=True)
class Seal:
    """T tokens of a tail become a page.

    index:  of the row that completes the page, among those of the group
    first:  position of the first token sealed
    fresh:  the segment of the page, which may have none, begins with it
    places: of the page, its segment, the tail that it is read from, and what its sequence keeps
    """

    index: int
    first: int
    fresh: bool
    places: RecordIds


@dataclass
class NewRecords:
    """Records taken for a whole step, handed out in turn."""

    raws: deque[int]
    pages: deque[int]
    segments: deque[int]

    def ids(self) -> list[int]:
        """Those that were not handed out yet."""
        return [*self.raws, *self.pages, *self.segments]


def begins_segment(group: LayerGroup, state: GroupState) -> bool:
    """Whether the next page sealed while decoding begins a segment."""
    return group.segment_of(group.decode_page) is not None and not state.runs


def take_records(
    group: LayerGroup, growths: Sequence[SequenceGrowth], allocator: Allocator
) -> NewRecords:
    """Records for a whole step, before any state changes; CapacityError and nothing taken."""
    raws = pages = segments = 0
    for growth in growths:
        sealed = growth.state.num_pages * group.page.tokens
        raws += -(-(growth.n + growth.m - sealed) // RAW_TOKENS) - len(
            growth.state.tail
        )
        if group.page != group.raw and group.sealed(growth.n + growth.m) > sealed:
            pages += 1
            segments += begins_segment(group, growth.state)
            raws += _more_kept(group, growth.state)
    wanted = ((group.raw, raws), (group.decode_page, pages), (group.segment, segments))
    taken: list[list[int]] = []
    try:
        for layout, count in wanted:
            ids = (
                allocator.allocate(group.record(layout), count)
                if layout and count
                else []
            )
            taken.append(ids)
    except CapacityError:
        for ids in taken:
            allocator.release(ids)
        raise
    return NewRecords(*map(deque, taken))


def _more_kept(group: LayerGroup, state: GroupState) -> int:
    """Raw pages that the next seal may need for the tokens it sets aside."""
    return group.kept_raws(state.seals + 1) - len(state.kept)


def append_tokens(
    group: LayerGroup, growths: Sequence[SequenceGrowth], fresh: NewRecords
) -> tuple[list[int], list[int]]:
    """The raw page and slot of every new token; the tails grow."""
    pages, slots = [], []
    for growth in growths:
        tail = growth.state.tail
        sealed = growth.state.num_pages * group.page.tokens
        while len(tail) * RAW_TOKENS < growth.n + growth.m - sealed:
            tail.append(fresh.raws.popleft())
        for position in range(growth.n - sealed, growth.n - sealed + growth.m):
            pages.append(tail[position // RAW_TOKENS])
            slots.append(position % RAW_TOKENS)
    return pages, slots


def seal_tails(
    group: LayerGroup, growths: Sequence[SequenceGrowth], fresh: NewRecords
) -> list[Seal]:
    """Move the oldest T tokens of each full tail into a page; the raw codec only moves the id."""
    found: list[Seal] = []
    raws, sink = group.page.tokens // RAW_TOKENS, group.sink // RAW_TOKENS
    index = 0
    for growth in growths:
        state = growth.state
        first = state.num_pages * group.page.tokens
        while group.sealed(growth.n + growth.m) > first:
            tail = state.tail[sink : sink + raws]
            del state.tail[sink : sink + raws]
            if group.page == group.raw:
                _extend(state, group.raw, None, first, tail[0])
            else:
                found.append(_seal_one(group, state, index, tail, first, fresh))
            first += group.page.tokens
        index += growth.m
    return found


def _seal_one(
    group: LayerGroup,
    state: GroupState,
    index: int,
    tail: list[int],
    first: int,
    fresh: NewRecords,
) -> Seal:
    begins = begins_segment(group, state)
    segment = fresh.segments.popleft() if begins else None
    if segment is None and group.segment_of(group.decode_page) is not None:
        segment = state.runs[0].segment
    page = fresh.pages.popleft()
    _extend(state, group.decode_page, segment, first, page)
    state.kept.extend(fresh.raws.popleft() for _ in range(_more_kept(group, state)))
    state.seals += 1
    run = Run(group.decode_page, segment, first, array("i", [page]))
    places = RecordIds.of(GroupState([run], tail, state.side, state.kept))
    return Seal(index, group.sink + first, begins, places)


def seal_rows(group: LayerGroup, seals: Sequence[Seal], count: int) -> SealRows:
    """What an append of `count` rows is told of the pages that they complete; on the host."""
    pages, segments, stretches = [NO_PAGE] * count, [0] * count, [0] * count
    tails = [[0] * (group.page.tokens // RAW_TOKENS)] * count
    for seal in seals:
        at = seal.places
        pages[seal.index], tails[seal.index] = int(at.pages), at.tail.tolist()
        segments[seal.index] = int(at.segments) if len(at.segments) else 0
        stretches[seal.index] = seal.first // STRETCH_TOKENS
    found = pages, tails, segments, stretches
    return SealRows(*(torch.tensor(x, dtype=torch.int32) for x in found))


def _extend(
    state: GroupState, layout: Layout, segment: int | None, first: int, page: int
) -> None:
    """Put a page behind the last one: into its run, or into a new one."""
    last = state.runs[-1] if state.runs else None
    if last is None or last.layout != layout or last.segment != segment:
        last = Run(layout, segment, first)
        state.runs.append(last)
    last.pages.append(page)
