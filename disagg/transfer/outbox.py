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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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


class Outbox:
    """The items of one hand-off on their way out."""

    def __init__(
        self,
        checklist: Checklist,
        read: Callable[[Item], memoryview],
        frame_bytes: int = FRAME_BYTES,
    ):
        self.checklist = checklist
        self.frame_bytes = frame_bytes
        self.credit = 0
        self.bytes_in_flight = 0
        self._read = read
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
        for item in items:
            assert item not in self._given
            self._given[item] = now
            self._enqueue(item)

    @property
    def drained(self) -> bool:
        """Every item of the checklist was offered, and none waits to be sent."""
        return self._whole and not any(self._queues.values()) and self._ready is None

    def manifest(self) -> tuple[int, ...]:
        """The digest of every item, in the order of the checklist; only once drained."""
        digests = self._digests | self._skipped
        return tuple(digests[item] for item in self.checklist.items)

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
        for item in self._given:
            if not self._is_there(item):
                self._enqueue(item)

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
            self._enqueue(item)

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

    def _enqueue(self, item: Item) -> None:
        key = item[:2]
        if key not in self._queues:
            self._queues[key] = deque()
        self._queues[key].append(item)

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
        digests: list[int] = []
        payload: list[memoryview] = []
        while queue and len(items) < most:
            item = queue.popleft()
            seen = self._there.get(item)
            if seen is not None and item in self._cached:
                self._skipped[item] = seen
                continue
            data = self._read(item)
            if (expected := self._digests.get(item)) is None:
                expected = self._digests[item] = digest(data)
            if seen == expected:
                self._skipped[item] = seen
                continue
            items.append(item)
            digests.append(expected)
            payload.append(data)
        if not items:
            return None
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

    def _is_there(self, item: Item) -> bool:
        expected = self._skipped.get(item, self._digests.get(item))
        return expected is not None and self._there.get(item) == expected
