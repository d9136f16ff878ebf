"""What a sender still has to send: items in, messages out as credit allows. No sockets, no clock.

    offer ──► queue ──► frame ──► in flight ──► confirmed
                ▲                     │ stream broke, or the receiver misses it
                └─────────────────────┘

Frames are filled kind by kind, oldest items first. A frame that is not full leaves when nothing is
on its way, so that the link never waits for more, and when nothing more will come. The bytes of
items stay where they are, in the arena of the prefill worker, until the hand-off ends; a frame is
views of them. What is in flight never exceeds two frames, nor what the receiver granted. What the
receiver has is skipped: with the same digest, or found by its content key; then the commit names
the receiver's digest.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from disagg.errors import CorruptFrameError
from disagg.page import Kind
from disagg.transfer.convert import frame_parts
from disagg.transfer.items import Checklist, items_in_frame
from disagg.wire import FRAME_BYTES, Buffer, Item, PageFrame, Ticket, digest, pack


@dataclass(frozen=True)
class Parcel:
    """One page frame as a message of `size` bytes, in parts: the pages lie where they were.

    queued_since: when its first item was offered
    """

    parts: Sequence[Buffer]
    size: int
    payload_bytes: int
    queued_since: float


class Source(Protocol):
    """Where the bytes of items are."""

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items of one kind and layer group that were offered."""


class Outbox:
    """The items of one hand-off on their way out."""

    def __init__(
        self,
        checklist: Checklist,
        source: Source,
        frame_bytes: int = FRAME_BYTES,
    ):
        self.checklist = checklist
        self.frame_bytes = frame_bytes
        self.credit = 0
        self.bytes_in_flight = 0
        self._source = source
        self._order = checklist.items  # asked for now, while there is time
        self._given: dict[Item, float] = {}  # every item offered so far, in order, and when
        self._queues: dict[tuple[Kind, int], deque[Item]] = {}  # by kind and group, to be sent
        self._ready: Parcel | None = None  # packed, waiting for credit
        self._flight: deque[Parcel] = deque()
        self._digests: dict[Item, int] = {}
        self._there: dict[Item, int] = {}  # what the receiver said it has
        self._cached: frozenset[Item] = frozenset()  # of it, what it found by content keys
        self._skipped: dict[Item, int] = {}  # never sent, because it is there

    # -- what the engine says

    def offer(self, items: Iterable[Item], now: float) -> None:
        """The bytes of these items are final. Each item of the checklist is offered once."""
        given = dict.fromkeys(items, now)
        assert self._given.keys().isdisjoint(given)
        self._given |= given
        self._enqueue(given)

    @property
    def drained(self) -> bool:
        """Every item of the checklist was offered, and none waits to be sent."""
        return self._whole and not any(self._queues.values()) and self._ready is None

    def manifest(self) -> tuple[int, ...]:
        """The digest of every item, in the order of the checklist; only once drained."""
        digests = self._digests | self._skipped
        return tuple(map(digests.__getitem__, self._order))

    @property
    def skipped_bytes(self) -> int:
        """Bytes that need not be sent, because the receiver has them."""
        return sum(map(self.checklist.nbytes, self._skipped))

    # -- what the receiver says

    def reserved(self, items: Mapping[Item, int], cached: Iterable[Item] = ()) -> None:
        """Start over, with a new reservation; the receiver has these items, some of them cached."""
        self._cached = frozenset(cached)
        self._skipped = {}
        self.there(items)

    def there(self, items: Mapping[Item, int]) -> None:
        """Start over, on a new stream of the reservation, with a receiver that has these items."""
        self._there = dict(items)
        self._skipped = {x: seen for x, seen in self._skipped.items() if items.get(x) == seen}
        self._flight.clear()
        self._ready = None
        self.credit = self.bytes_in_flight = 0
        self._queues.clear()
        here = {item for item in items if self._is_there(item)}
        self._enqueue([x for x in self._given if x not in here] if here else self._given)

    def grant(self, credit: int, frames: int) -> None:
        """More credit, and `frames` more that arrived and were verified."""
        self.credit += credit
        for _ in range(frames):
            if not self._flight:
                raise CorruptFrameError(f"credit for {frames} frames that were not sent")
            parcel = self._flight.popleft()
            self.bytes_in_flight -= parcel.size

    def missing(self, items: Iterable[Item]) -> None:
        """The receiver does not have these: they go out again."""
        for item in items:
            if item not in self._given:
                raise CorruptFrameError(f"the receiver misses {item}, which this prompt has not")
            self._there.pop(item, None)
            self._skipped.pop(item, None)
            self._enqueue([item])

    # -- what goes out

    def next_parcel(self, ticket: Ticket) -> Parcel | None:
        """The next message, if there is one and credit for it; it counts as in flight."""
        while self._ready is None and (queue := self._next_queue()):
            self._ready = self._pack(queue, ticket)
        if self._ready is None:
            return None
        size = self._ready.size
        window = 2 * max(self.frame_bytes, size)
        if size > self.credit or self.bytes_in_flight + size > window:
            return None
        parcel, self._ready = self._ready, None
        self._flight.append(parcel)
        self.credit -= size
        self.bytes_in_flight += size
        return parcel

    @property
    def _whole(self) -> bool:
        return len(self._given) == self.checklist.num_items

    def _enqueue(self, items: Iterable[Item]) -> None:
        for key, some in groupby(items, itemgetter(0, 1)):
            if key not in self._queues:
                self._queues[key] = deque()
            self._queues[key].extend(some)

    def _most(self, item: Item) -> int:
        """How many items like this one make a full frame."""
        return items_in_frame(self.frame_bytes, self.checklist.nbytes(item))

    def _next_queue(self) -> deque[Item] | None:
        """Where the oldest items are that may leave now."""
        queues = [queue for queue in self._queues.values() if queue]
        if self._flight and not self._whole:
            queues = [queue for queue in queues if len(queue) >= self._most(queue[0])]
        return min(queues, key=lambda queue: self._given[queue[0]], default=None)

    def _pack(self, queue: deque[Item], ticket: Ticket) -> Parcel | None:
        """A frame of the items at the head of a queue; none if all of them are there."""
        kind, group = queue[0][:2]
        nbytes, most = self.checklist.nbytes(queue[0]), self._most(queue[0])
        items: list[Item] = []
        while queue and len(items) < most:
            some = [queue.popleft() for _ in range(min(len(queue), most - len(items)))]
            items += self._not_there(some) if self._there else some
        if not items:
            return None
        payload = self._source.read(items)
        digests = self._digests_of(items, payload)
        frame = PageFrame(
            ticket=ticket,
            kind=kind,
            group=group,
            layout=self.checklist.plan.groups[group].layout(kind).fingerprint,
            layers=tuple(item.layer for item in items),
            records=tuple(item.record for item in items),
            digests=tuple(digests),
            payload=tuple(payload),
        )
        parts = frame_parts(pack(frame))
        return Parcel(parts, sum(map(len, parts)), nbytes * len(items), self._given[items[0]])

    def _not_there(self, items: Sequence[Item]) -> list[Item]:
        """Those that the receiver does not have; the others are skipped."""
        left = []
        for item in items:
            seen = self._there.get(item)
            if seen is not None and (item in self._cached or self._has(item, seen)):
                self._skipped[item] = seen
            else:
                left.append(item)
        return left

    def _has(self, item: Item, seen: int) -> bool:
        return self._digests_of([item], self._source.read([item])) == [seen]

    def _digests_of(self, items: Sequence[Item], payload: Sequence[memoryview]) -> list[int]:
        """The digests of items; what was packed first is the promise."""
        known = self._digests
        for item, data in zip(items, payload, strict=True):
            if item not in known:
                known[item] = digest(data)
        return [known[item] for item in items]

    def _is_there(self, item: Item) -> bool:
        expected = self._skipped.get(item, self._digests.get(item))
        return expected is not None and self._there.get(item) == expected
