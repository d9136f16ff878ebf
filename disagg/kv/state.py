"""The records that a sequence owns in a layer group, as page ids. Pure arithmetic; no bytes."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from disagg.errors import DisaggError
from disagg.kv.page import RAW_TOKENS, Kind, Layout
from disagg.kv.plan import LayerGroup, Plan, RecordShape


class Allocator(Protocol):
    """Hands out records: the pool, or the private arena of a one-layer cache."""

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids, each owned once; CapacityError and nothing taken if no room."""

    def release(self, pages: Sequence[int]) -> None:
        """Give up one ownership of each page."""


@dataclass
class Run:
    """Pages in token order with one layout and one segment; a kernel's work never crosses its end.

    first: tokens in the pages before it
    pages: 32-bit ids in one buffer, so that a page table of thousands is a single copy
    """

    layout: Layout
    segment: int | None
    first: int
    pages: "array[int]" = field(default_factory=lambda: array("i"))


@dataclass
class GroupState:
    """The records of one sequence in one group, as page ids.

    tail:       raw pages in token order, those of the sink in front
    side:       the side record, where the codec has one
    kept_pages: raw pages of the tokens that the side record names
    seals:      how often a prompt or a tail was sealed
    dropped:    pages in front of the runs that were released, since no query sees them any more
    wire:       the state as it is handed off, until the first step
    """

    runs: list[Run] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    side: int | None = None
    kept_pages: list[int] = field(default_factory=list)
    seals: int = 0
    dropped: int = 0
    wire: int | None = None

    @property
    def num_pages(self) -> int:
        """Pages sealed so far: those of all runs, and those dropped."""
        if not self.runs:
            return self.dropped
        last = self.runs[-1]
        return last.first // last.layout.tokens + len(last.pages)

    def drop(self, pages: int) -> list[int]:
        """Drop the first `pages` of all that were sealed; returns the records to release."""
        if pages <= self.dropped:
            return []
        segments_before = self._segments()
        freed: list[int] = []
        while self.dropped < pages:
            run = self.runs[0]
            head = run.pages[: pages - self.dropped]
            freed += head
            del run.pages[: len(head)]
            run.first += len(head) * run.layout.tokens
            self.dropped += len(head)
            if not run.pages:
                del self.runs[0]
        segments = set(self._segments())
        freed += [segment for segment in segments_before if segment not in segments]
        return freed

    def _segments(self) -> list[int]:
        """The segments of all runs, each once, in order."""
        segments = dict.fromkeys(run.segment for run in self.runs)
        return [segment for segment in segments if segment is not None]

    def page_ids(self) -> list[int]:
        """The pages of all runs, in token order."""
        return [page for run in self.runs for page in run.pages]

    def ids_by_kind(self) -> dict[Kind, list[int]]:
        """The records of each kind, in order; kinds without records are left out."""
        records = {
            Kind.PAGE: self.page_ids(),
            Kind.SEGMENT: self._segments(),
            Kind.RAW: self.tail + self.kept_pages,
            Kind.SIDE: [] if self.side is None else [self.side],
            Kind.WIRE: [] if self.wire is None else [self.wire],
        }
        return {kind: ids for kind, ids in records.items() if ids}

    def ids(self) -> list[int]:
        """Every record owned, each once."""
        return [*chain.from_iterable(self.ids_by_kind().values())]


def allocate_group(group: LayerGroup, n: int, allocator: Allocator) -> GroupState:
    """The records that n tokens need, ready to be written; CapacityError and none taken if not."""
    ids: dict[Kind, list[int]] = {}
    try:
        for kind, count in group.inventory(n).items():
            ids[kind] = allocator.allocate(group.record(group.layout(kind)), count)
    except DisaggError:
        allocator.release(list(chain.from_iterable(ids.values())))
        raise
    return lay_out(group, n, ids)


def allocate_groups(plan: Plan, n: int, allocator: Allocator) -> tuple[GroupState, ...]:
    """The records that n tokens need in all groups; CapacityError and none taken if not."""
    states: list[GroupState] = []
    try:
        for group in plan.groups:
            states.append(allocate_group(group, n, allocator))
    except DisaggError:
        for state in states:
            allocator.release(state.ids())
        raise
    return tuple(states)


def lay_out(group: LayerGroup, n: int, ids: Mapping[Kind, list[int]]) -> GroupState:
    """A prompt of n tokens in these records, as many of each kind as the inventory says."""
    sealed = group.sealed(n)
    num_tail = -(-(n - sealed) // RAW_TOKENS)
    raws = ids.get(Kind.RAW, [])
    side = ids[Kind.SIDE][0] if Kind.SIDE in ids else None
    wire = ids[Kind.WIRE][0] if Kind.WIRE in ids else None
    segments = ids.get(Kind.SEGMENT, [])
    return GroupState(
        runs=_runs(group, group.dropped(n), ids.get(Kind.PAGE, []), segments),
        tail=raws[:num_tail],
        side=side,
        wire=wire,
        kept_pages=raws[num_tail:],
        seals=1 if sealed else 0,
        dropped=group.dropped_pages(n),
    )


def _runs(
    group: LayerGroup, dropped: int, pages: list[int], segments: list[int]
) -> list[Run]:
    """The pages of one segment form one run; a codec without segments has a single run."""
    if not segments:
        return [Run(group.page, None, dropped, array("i", pages))] if pages else []
    pages_per_run = group.segment_tokens // group.page.tokens
    runs = []
    for index, segment in zip(
        range(0, len(pages), pages_per_run), segments, strict=False
    ):
        first = dropped + index * group.page.tokens
        run_pages = array("i", pages[index : index + pages_per_run])
        runs.append(Run(group.page, segment, first, run_pages))
    return runs
