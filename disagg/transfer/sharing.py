"""What prompts share on a decode worker: units found by their keys, and kept for the next.

    reserve   leading units that are kept  ──► records of the new hand-off, offered with digests
    write     other bytes for one of them  ──► the hand-off gets a record of its own
    commit    verified units               ──► kept under their keys
    scrub     digests do not match         ──► no longer kept, offered to nobody

Only what was committed is kept. A `KeepingPool` does the keeping; with any other allocator every
hand-off has all its records to itself.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.errors import CapacityError, CorruptFrameError, DisaggError, PromptTooLongError
from disagg.page import Kind
from disagg.plan import Plan, RecordShape
from disagg.pool import Pool
from disagg.state import Allocator, GroupState, allocate_group
from disagg.transfer.handoff import Handoff
from disagg.transfer.items import ids_by_kind
from disagg.transfer.keeping import KeepingPool, Kept
from disagg.transfer.messages import Request
from disagg.transfer.shares import Manifest, Note, Place, Shares
from disagg.wire import PageFrame, digest


@dataclass(frozen=True)
class Damage:
    """Kept pages whose bytes are not those that were committed.

    requests: (rid, attempt) of those that the engine decoded with them; it has dropped them
    """

    pages: frozenset[int]
    error: CorruptFrameError
    requests: list[tuple[str, int]] = field(default_factory=list)


class Given:
    """An allocator that hands out known pages of each shape first.

    Fresh ones are not zeroed where that can be avoided: a prompt is admitted when all its bytes
    have arrived.
    """

    def __init__(self, allocator: Allocator, known: dict[RecordShape, list[int]]):
        self._allocator = allocator
        self._claim = allocator.claim if isinstance(allocator, Pool) else allocator.allocate
        self._known = known

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """The known pages of a shape, and fresh ones up to `count`."""
        known = self._known.get(shape, [])
        fresh = self._claim(shape, count - len(known))
        self._known.pop(shape, None)
        return known + fresh

    def release(self, pages: Sequence[int]) -> None:
        """Give up one ownership of each page."""
        self._allocator.release(pages)

    def release_rest(self) -> None:
        """Give up what was known and not handed out."""
        for pages in self._known.values():
            self._allocator.release(pages)
        self._known.clear()


class Library:
    """The kept units of a decode worker."""

    def __init__(self, allocator: Allocator):
        self._allocator = allocator
        self._pool = allocator if isinstance(allocator, KeepingPool) else None
        self._to_scrub: list[bytes] = []

    def check(self, plan: Plan, tokens: int) -> None:
        """PromptTooLongError for a prompt whose records do not fit an empty pool.

        Slabs count, as a slab holds records of one shape; what others hold now does not.
        """
        if self._pool is None:
            return
        size, counts = self._pool.slab_bytes, Counter[RecordShape]()
        for group in plan.groups:
            inventory = group.inventory(tokens)
            for kind in filter(inventory.count, Kind):
                counts[group.record(group.layout(kind))] += inventory.count(kind)
        fits = all(shape.nbytes <= size for shape in counts) and self._pool.num_slabs >= sum(
            -(-count // (size // shape.nbytes)) for shape, count in counts.items()
        )
        if not fits:
            raise PromptTooLongError(
                f"a prompt of {tokens} tokens is {sum(counts.values())} records; "
                f"a pool of {self._pool.num_slabs} slabs of {size} bytes cannot hold them"
            )

    def hold(self, plan: Plan, request: Request) -> tuple[list[GroupState], Shares]:
        """Records for a prompt, shared where that is possible; CapacityError and nothing taken."""
        try:
            return self._hold(plan, request, self._pool)
        except CapacityError:
            if self._pool is None or self._pool.referenced_pages:
                raise
            # nobody else holds anything: what it would share lies scattered over too many slabs
            return self._hold(plan, request, None)

    def _hold(
        self, plan: Plan, request: Request, kept: KeepingPool | None
    ) -> tuple[list[GroupState], Shares]:
        shares = Shares(plan, request)
        given = []
        for index in range(len(plan.groups)):
            found: dict[RecordShape, list[int]] = {}
            if kept is not None and shares.units:
                found = shares.found(plan, index, kept.take(shares.keys[index]))
            given.append(Given(self._allocator, found))
        groups: list[GroupState] = []
        try:
            for group, known in zip(plan.groups, given, strict=True):
                groups.append(allocate_group(group, request.tokens, known))
        except DisaggError:
            self.release(groups)
            for known in given:
                known.release_rest()
            raise
        if kept is not None:
            for keys, count in zip(shares.keys, shares.cached, strict=True):
                kept.used(keys[:count])
        return groups, shares

    def release(self, groups: Sequence[GroupState]) -> None:
        """Give up all records of some groups."""
        for state in groups:
            self._allocator.release(list(state.ids()))

    def own(self, handoff: Handoff, frame: PageFrame) -> None:
        """Shared records that a frame has other bytes for become the hand-off's own.

        CapacityError if there is no room for them; LayoutError for what is not of this prompt.
        """
        shares = handoff.shares
        if not shares.places:
            return
        handoff.checklist.check(frame)
        for item, expected in zip(frame.items(), frame.digests, strict=True):
            place = (item.kind, item.group, item.record)
            if place in shares.places and handoff.offered.get(item) != expected:
                self._own(handoff, place)

    def keep(self, shares: Shares, manifest: Manifest, groups: Sequence[GroupState]) -> None:
        """Keep the verified units of a prompt for the next one; the first is the last to go."""
        if self._pool is None:
            return
        for index, units in enumerate(shares.units):
            ids = ids_by_kind(groups[index])
            for unit, key in zip(reversed(units), reversed(shares.keys[index]), strict=True):
                self._pool.keep(key, unit.ids(ids), Note(manifest, unit))

    def scrub(self, max_bytes: int) -> list[Damage]:
        """Verify the next kept units, at least one, up to `max_bytes`; the damaged are dropped."""
        pool, checked, damages = self._pool, 0, list[Damage]()
        if pool is None:
            return damages
        self._to_scrub = self._to_scrub or pool.kept_keys
        while self._to_scrub and checked < max_bytes:
            key = self._to_scrub.pop()
            for kept in pool.take([key]):
                nbytes, error = _verify(pool, kept)
                checked += nbytes
                if error is not None:
                    pool.drop(key)
                    damages.append(Damage(frozenset(kept.pages), error))
                pool.release(kept.pages)
        return damages

    def _own(self, handoff: Handoff, place: Place) -> None:
        """A record with the bytes it had, in a page that nobody else owns."""
        assert self._pool is not None
        assert handoff.groups is not None
        shares, (kind, index, record) = handoff.shares, place
        self._pool.drop(shares.keys[index][shares.forget(place)])
        page = ids_by_kind(handoff.groups[index])[kind][record]
        if self._pool.owners(page) > 1:
            group = handoff.checklist.plan.groups[index]
            shape = group.record(group.layout(kind))
            (fresh,) = self._pool.claim(shape, 1)
            self._pool.write(fresh, 0, self._pool.read(page, 0, shape.nbytes))
            handoff.replace(place, fresh)
            self._pool.release([page])
        shares.places.discard(place)


def _verify(pool: KeepingPool, kept: Kept) -> tuple[int, CorruptFrameError | None]:
    """Bytes read, and what is wrong with them."""
    note = kept.note
    assert isinstance(note, Note)
    group, nbytes = note.manifest.checklist.plan.groups[note.unit.group], 0
    pages = dict(zip(note.unit.records(), kept.pages, strict=True))
    for item, expected in zip(note.unit.items(group), note.digests(), strict=True):
        layout = group.layout(item.kind)
        size, offset = group.layer_bytes(layout), group.layer_offset(layout, item.layer)
        page = pages[item.kind, item.record]
        nbytes += size
        if (seen := digest(pool.read(page, offset, size))) != expected:
            message = f"{item} was altered in the pool: it is {seen:x}, committed was {expected:x}"
            return nbytes, CorruptFrameError(message)
    return nbytes, None
