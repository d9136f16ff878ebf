"""Which records a sequence owns in a layer group, as page ids. Pure arithmetic; no bytes."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from disagg.errors import DisaggError
from disagg.kv.page import RAW_TOKENS, Kind, Layout
from disagg.kv.plan import LayerGroup, RecordShape


class Allocator(Protocol):
    """Who hands out records: the pool, or the private store of a one-layer cache."""

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids, each owned once; CapacityError and nothing taken if no room."""

    def release(self, pages: Sequence[int]) -> None:
        """Give up one ownership of each page."""


@dataclass
class Run:
    """Pages in token order under one layout and one segment. A kernel never crosses one.

    first: tokens in pages before it
    pages: 32-bit ids side by side, so that a page table of thousands is copied, not counted out
    """

    layout: Layout
    segment: int | None
    first: int
    pages: "array[int]" = field(default_factory=lambda: array("i"))


@dataclass
class GroupState:
    """One sequence in one group, as page ids; `seals`: how often a prompt or tail was sealed.

    tail:    the raw pages in token order, those of the sink in front
    dropped: pages in front of the runs that are not kept, since no query sees them any more
    """

    runs: list[Run] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    side: int | None = None
    kept: list[int] = field(default_factory=list)
    seals: int = 0
    dropped: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that were sealed: those of all runs, and those dropped."""
        last = self.runs[-1] if self.runs else None
        return (
            last.first // last.layout.tokens + len(last.pages) if last else self.dropped
        )

    def drop(self, pages: int) -> list[int]:
        """Keep the first `pages` of all that were sealed no longer; the records to release."""
        if pages <= self.dropped:
            return []
        segments = {run.segment: None for run in self.runs}
        freed: list[int] = []
        while self.dropped < pages:
            run = self.runs[0]
            some = run.pages[: pages - self.dropped]
            freed += some
            del run.pages[: len(some)]
            run.first += len(some) * run.layout.tokens
            self.dropped += len(some)
            if not run.pages:
                del self.runs[0]
        left = {run.segment for run in self.runs}
        return freed + [x for x in segments if x is not None and x not in left]

    def page_ids(self) -> list[int]:
        """The pages of all runs, in token order."""
        return [page for run in self.runs for page in run.pages]

    def ids_by_kind(self) -> dict[Kind, list[int]]:
        """The records of each kind, in their order, of the kinds that it has."""
        segments = dict.fromkeys(
            run.segment for run in self.runs if run.segment is not None
        )
        found = {
            Kind.PAGE: self.page_ids(),
            Kind.SEGMENT: list(segments),
            Kind.RAW: self.tail + self.kept,
            Kind.SIDE: [] if self.side is None else [self.side],
        }
        return {kind: ids for kind, ids in found.items() if ids}

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
        allocator.release([*chain.from_iterable(ids.values())])
        raise
    return lay_out(group, n, ids)


def lay_out(group: LayerGroup, n: int, ids: Mapping[Kind, list[int]]) -> GroupState:
    """A prompt of n tokens in these records, as many of each kind as the inventory says.

    Pages of one segment form one run; a codec without segments has a single run.
    """
    sealed, dropped = group.sealed(n), group.dropped(n)
    pages, segments = ids.get(Kind.PAGE, []), ids.get(Kind.SEGMENT, [])
    step = group.segment_tokens // group.page.tokens if segments else max(1, len(pages))
    owners: Sequence[int | None] = segments or [None]
    runs = [
        Run(
            group.page,
            owner,
            dropped + i * group.page.tokens,
            array("i", pages[i : i + step]),
        )
        for i, owner in zip(range(0, len(pages), step), owners, strict=False)
    ]
    side = ids[Kind.SIDE][0] if Kind.SIDE in ids else None
    raws, split = ids.get(Kind.RAW, []), -(-(n - sealed) // RAW_TOKENS)
    before = dropped // group.page.tokens
    return GroupState(runs, raws[:split], side, raws[split:], int(sealed > 0), before)
