"""What prompts share on a decode worker: units found by their keys, and kept for the next.

    reserve   leading units that are kept  ──► records of the new prompt, with their digests
    commit    verified units               ──► kept under their keys
    scrub     digests do not match         ──► no longer kept

Only what was committed is kept, and nothing is ever written to a record that others may own too.
The pool does the keeping. Knows no peer, no lease and no clock.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from disagg.errors import CapacityError, CorruptFrameError, PromptTooLongError
from disagg.kv.page import Kind
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import PrefixBlock, content_keys, units_of
from disagg.kv.state import GroupState, lay_out
from disagg.transfer.messages import Job
from disagg.transfer.records import Addresses, Manifest, ReceivedItems, Span
from disagg.wire import digest

Keys = Sequence[Sequence[bytes]]  # of the units of a prompt, by layer group


@dataclass(frozen=True)
class CachedBlock:
    """A kept unit, of a committed prompt: its key and its page ids.

    digests: of all items of that prompt, in the order of its manifest
    """

    key: bytes
    pages: tuple[int, ...]
    unit: PrefixBlock
    manifest: Manifest
    digests: "array[int]"

    @property
    def group(self) -> LayerGroup:
        """The layer group that the records belong to."""
        return self.manifest.plan.groups[self.unit.group]

    def seen(self) -> list[int]:
        """The digests of the unit's items, in their order."""
        places = self.manifest.indices_of(self.unit)
        return [x for some in places for x in self.digests[some.start : some.stop]]

    def spans(self) -> list[Span]:
        """Where these items lie."""
        starts = dict(zip(self.unit.records(), self.pages, strict=True))
        spans = []
        for kind, _, layer, record in self.unit.items(self.group):
            layout = self.group.layout(kind)
            start = self.group.address(layout, starts[kind, record], layer)
            spans.append((start, self.group.layer_bytes(layout)))
        return spans


@dataclass(frozen=True)
class PendingHandoff:
    """What a job that waits for its pages holds: their records, and what has arrived of them.

    keys:     of its units, by layer group
    arrivals: at the beginning of those that were found
    shared:   page ids that others may own too
    cached_tokens: leading ones that all layer groups have the units of, or need none of
    """

    job: Job
    keys: Keys
    groups: tuple[GroupState, ...]
    arrivals: ReceivedItems
    shared: frozenset[int]
    cached_tokens: int


@dataclass(frozen=True)
class Scrub:
    """Kept units that are owned while they are verified. `copies` waits for their bytes."""

    notes: Sequence[CachedBlock]
    copies: Callable[[], list[memoryview]]

    def verify(self) -> dict[bytes, CorruptFrameError]:
        """By key, what is not as it was committed. For any thread: it only reads."""
        damaged, copies = dict[bytes, CorruptFrameError](), iter(self.copies())
        for note in self.notes:
            for item, was in zip(note.unit.items(note.group), note.seen(), strict=True):
                if (seen := digest(next(copies))) != was:
                    text = (
                        f"{item} was altered in the pool: it is {seen:x}, was {was:x}"
                    )
                    damaged.setdefault(note.key, CorruptFrameError(text))
        return damaged


class PrefixCache:
    """The kept units of a decode worker, and the records of prompts that may `share` them."""

    def __init__(self, pool: Pool, share: bool = True):
        self._pool = pool
        self._share = share
        self._to_scrub: list[bytes] = []

    def check(self, plan: Plan, tokens: int) -> None:
        """PromptTooLongError for a prompt whose records do not fit an empty pool.

        Slabs count, as a slab holds records of one shape; what others hold now does not.
        """
        size, counts = self._pool.slab_bytes, plan.records(tokens)
        fits = all(
            shape.nbytes <= size for shape in counts
        ) and self._pool.num_slabs >= sum(
            -(-count // (size // shape.nbytes)) for shape, count in counts.items()
        )
        if not fits:
            raise PromptTooLongError(
                f"a prompt of {tokens} tokens is {sum(counts.values())} records; "
                f"a pool of {self._pool.num_slabs} slabs of {size} bytes cannot hold them"
            )

    def hold(
        self, model: str, plan: Plan, job: Job, spare_bytes: int
    ) -> PendingHandoff:
        """Records for a prompt, shared where that is possible; CapacityError and nothing taken.

        Those of a sequence that moves are its own: what is sealed while decoding is no prompt's.
        spare_bytes: what stays free, unless nobody holds anything
        """
        none = ((),) * len(plan.groups)
        shares = self._share and not job.moved
        keys = content_keys(model, plan, job.prompt) if shares else none
        if self._pool.referenced_pages:
            return self._hold(plan, job, keys, keys, spare_bytes)
        try:
            return self._hold(plan, job, keys, keys, 0)
        except CapacityError:  # what it would share lies scattered over too many slabs
            return self._hold(plan, job, keys, none, 0)

    def release(self, groups: Iterable[GroupState]) -> None:
        """Give up all records of a prompt."""
        for state in groups:
            self._pool.release(state.ids())

    def keep(self, holding: PendingHandoff, digests: Sequence[int]) -> frozenset[int]:
        """Keep the verified units of a prompt, the first longest; the page ids of all units."""
        plan, tokens = holding.arrivals.manifest.plan, holding.job.tokens
        manifest, packed = (
            Manifest(plan, tokens),
            array("Q", digests),
        )  # no list of items stays
        units, found = units_of(plan, tokens) if any(holding.keys) else (), set[int]()
        for some, keys, state in zip(
            units, holding.keys, holding.groups, strict=bool(units)
        ):
            ids = state.ids_by_kind()
            for unit, key in zip(reversed(some), reversed(keys), strict=True):
                pages = tuple(ids[kind][record] for kind, record in unit.records())
                self._pool.keep(
                    key, pages, CachedBlock(key, pages, unit, manifest, packed)
                )
                found.update(pages)
        return frozenset(found)

    def begin_scrub(self, max_bytes: int) -> Scrub:
        """The next kept units, at least one, up to `max_bytes`; every scrub is ended."""
        self._to_scrub = self._to_scrub or self._pool.kept_keys(CachedBlock)
        notes, spans = list[CachedBlock](), list[Span]()
        while self._to_scrub and sum(nbytes for _, nbytes in spans) < max_bytes:
            for note in self._take([self._to_scrub.pop()]):
                notes.append(note)
                spans += note.spans()
        return Scrub(notes, self._pool.arena.stage(spans))

    def end_scrub(self, scrub: Scrub, damaged: Iterable[bytes]) -> None:
        """Keep the damaged no longer, and own none of them any more."""
        for key in damaged:
            self._pool.drop(key)
        for note in scrub.notes:
            self._pool.release(note.pages)

    def _take(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """What the leading keys keep; the caller owns it too. An engine has keys of its own."""
        return [
            kept.note
            for kept in self._pool.take(keys)
            if isinstance(kept.note, CachedBlock)
        ]

    def _hold(
        self, plan: Plan, job: Job, keys: Keys, wanted: Keys, spare_bytes: int
    ) -> PendingHandoff:
        """With what the `wanted` ones of its keys keep. What else it has comes as it is: a prompt
        is admitted when all its bytes have arrived.
        """
        tokens, found = job.tokens, [self._take(some) for some in wanted]
        shared = [page for notes in found for note in notes for page in note.pages]
        owned, records = [*shared], [_by_kind(notes) for notes in found]
        try:
            lacks = [
                (
                    pages := ids[kind],
                    group.record(group.layout(kind)),
                    count - len(pages),
                )
                for group, ids in zip(plan.groups, records, strict=True)
                for kind, count in group.inventory(tokens).items()
            ]
            self._leave(
                spare_bytes, tokens, sum(shape.nbytes * n for _, shape, n in lacks)
            )
            for pages, shape, count in lacks:
                fresh = self._pool.claim(shape, count)
                owned += fresh
                pages += fresh
            given = zip(plan.groups, records, strict=True)
            groups = tuple(lay_out(group, tokens, ids) for group, ids in given)
            addresses = Addresses(manifest := Manifest(plan, tokens), groups)
            self._pool.arena.zero([*addresses.unsent()])
            for notes in found:
                self._pool.used([note.key for note in notes])
        except BaseException:
            self._pool.release(owned)
            raise
        here, cached = dict[int, int](), tokens
        for group, units, notes in zip(
            plan.groups, units_of(plan, tokens), found, strict=True
        ):
            end = group.dropped(tokens)
            for unit, note in zip(
                units, notes, strict=False
            ):  # by this prompt's record numbers
                places, end = chain.from_iterable(manifest.indices_of(unit)), unit.end
                here.update(zip(places, note.seen(), strict=True))
            cached = min(cached, end)
        arrivals = ReceivedItems(manifest, addresses, here)
        return PendingHandoff(job, keys, groups, arrivals, frozenset(shared), cached)

    def _leave(self, spare_bytes: int, tokens: int, wanted: int) -> None:
        """CapacityError unless so many wanted bytes leave the others free; nothing was evicted."""
        free = self._pool.arena.nbytes - self._pool.used_bytes
        if spare_bytes and wanted + spare_bytes > free:
            raise CapacityError(
                f"{wanted} bytes wanted for {tokens} tokens; of {free} free ones "
                f"{spare_bytes} stay free for sequences that grow"
            )


def _by_kind(notes: Iterable[CachedBlock]) -> defaultdict[Kind, list[int]]:
    """The pages of kept units, in their order."""
    found = defaultdict[Kind, list[int]](list)
    for note in notes:
        for (kind, _), page in zip(note.unit.records(), note.pages, strict=True):
            found[kind].append(page)
    return found
