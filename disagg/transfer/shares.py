"""Which records a hand-off shares with others, and what is known of those that are kept.

A unit that was committed is kept with a note: of which prompt it was, and the digests of all items
of that prompt. Whoever finds it by its key is offered the items with those digests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from disagg.page import Kind
from disagg.plan import Plan, RecordShape
from disagg.transfer.items import Checklist
from disagg.transfer.keeping import Kept
from disagg.transfer.messages import Request
from disagg.transfer.units import Unit, units_of
from disagg.wire import Item

Place = tuple[Kind, int, int]  # kind, group, record


@dataclass(frozen=True)
class Manifest:
    """The digests of a committed prompt."""

    checklist: Checklist
    digests: tuple[int, ...]

    @cached_property
    def of_item(self) -> Mapping[Item, int]:
        return dict(zip(self.checklist.items, self.digests, strict=True))


@dataclass(frozen=True)
class Note:
    """Where kept pages come from: a unit of a committed prompt."""

    manifest: Manifest
    unit: Unit

    def digests(self) -> list[int]:
        """Of the items of the unit, in its order."""
        group = self.manifest.checklist.plan.groups[self.unit.group]
        return [self.manifest.of_item[item] for item in self.unit.items(group)]


class Shares:
    """What one hand-off shares with others.

    cached:  how many leading units of each group are as they were found
    offered: their items, with digests
    places:  records that others may own too: nothing is written to them
    """

    def __init__(self, plan: Plan, request: Request):
        self.units = units_of(plan, request.tokens) if request.keys else ()
        self.keys: list[list[bytes]] = []
        self.cached = [0] * len(self.units)
        self.offered: dict[Item, int] = {}
        self.places: set[Place] = set()
        keys = iter(request.keys)
        for index, units in enumerate(self.units):
            layouts = plan.groups[index].fingerprint.encode()
            self.keys.append([b"%s %d %s" % (layouts, unit.end, next(keys)) for unit in units])

    def found(self, plan: Plan, index: int, kept: Sequence[Kept]) -> dict[RecordShape, list[int]]:
        """Note what was found for a group; the page ids by shape, in the order of the records."""
        group, ids = plan.groups[index], dict[RecordShape, list[int]]()
        self.cached[index] = len(kept)
        for unit, each in zip(self.units[index], kept, strict=False):
            assert isinstance(each.note, Note)
            self.offered |= zip(unit.items(group), each.note.digests(), strict=True)
            for (kind, record), page in zip(unit.records(), each.pages, strict=True):
                self.places.add((kind, index, record))
                ids.setdefault(group.record(group.layout(kind)), []).append(page)
        return ids

    def forget(self, place: Place) -> int:
        """A record is not as it was found; the number of its unit, which is not either."""
        kind, group, record = place
        first = self.units[group][0]
        number = record // len(first.pages if kind is Kind.PAGE else first.segments)
        self.cached[group] = min(self.cached[group], number)
        return number
