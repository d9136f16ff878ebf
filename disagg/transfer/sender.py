"""Sends one prompt to a decode worker while it is computed. Lives on the io loop.

    engine ── offer, finish ──► Sender ── attach, commit: calls of its own ─────────► receiver
                                  │ frames, as credit allows                          ▲ │
                                  └──► Channel, which carries all hand-offs of a pair ┘ ▼ credit

The engine's side never waits. The io loop's side survives broken channels (attach again, send what
is missing) and ends in figures or in one typed error. Nothing is reserved or released here, that is
the router's: a sender that is cancelled only stops.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from disagg.errors import (
    CorruptFrameError,
    DeadlineError,
    DisaggError,
    LayoutError,
    PeerLostError,
    ReservationError,
)
from disagg.kv.page import Item
from disagg.kv.plan import Plan
from disagg.transfer.messages import Ack, Attach, Attached, Credit
from disagg.transfer.records import (
    HEADER_BYTES,
    ITEM_HEADER_BYTES,
    Manifest,
    message_bytes,
)
from disagg.transfer.stats import HandoffStats
from disagg.wire import (
    FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    Buffer,
    Commit,
    PageFrame,
    PlainValue,
    Ticket,
    digest,
    pack,
)

if TYPE_CHECKING:
    from disagg.transfer.channel import Channel

RETRY_S = 0.1
MAX_CORRUPT = 3  # frames of a hand-off that did not arrive as they were sent
Result = TypeVar("Result")


class Source(Protocol):
    """Where the bytes of items are."""

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items that were offered."""


# -- what a hand-off still has to send


@dataclass(frozen=True)
class OutgoingFrame:
    """One page frame of `size` bytes with `items`, in parts: the pages lie where they were."""

    items: Sequence[Item]
    parts: Sequence[Buffer]
    size: int
    payload_bytes: int


class SendQueue:
    """The items of one hand-off on their way out. No sockets, no clock.

        offer ──► queue ──► frame ──► in flight ──► confirmed
                    ▲                     │ corrupt there, or the stream broke
                    └─────────────────────┘

    Frames are filled with items in the order of offering. A frame that is not full leaves when
    nothing is on its way, so that the link never waits for more, and when nothing more will come.
    What is in flight never exceeds two frames, nor the credit that the receiver gives. What the
    receiver has is not queued; the commit names its digest for what we never sent.
    """

    def __init__(
        self, checklist: Manifest, source: Source, frame_bytes: int = FRAME_BYTES
    ):
        self.checklist = checklist
        self.frame_bytes = frame_bytes
        self.credit = 0  # bytes that may be in flight
        self.payload_bytes = 0  # that left
        self._source = source
        self._given: dict[
            Item, float
        ] = {}  # every item offered so far, in order, and when
        self._queue = deque[Item]()  # to send
        self._ready: OutgoingFrame | None = None  # packed, waiting for credit
        self._flight: deque[OutgoingFrame] = deque()
        self._sent: dict[
            int, int
        ] = {}  # by place, digests as they were first packed: the promise
        self.there: dict[
            int, int
        ] = {}  # what the receiver said it has, unless we sent another
        self._first_sent = self._last_offer = math.inf
        self._longest_wait = 0.0  # of an item that was offered

    def offer(self, items: Iterable[Item], now: float) -> None:
        """The bytes of these items are final. Each item of the checklist is offered once."""
        given = dict.fromkeys(items, now)
        assert self._given.keys().isdisjoint(given)
        self._given |= given
        self._last_offer = now
        self._enqueue(given)

    @property
    def drained(self) -> bool:
        """Every item of the checklist was offered, sent and answered for."""
        return self._whole and not (self._queue or self._ready or self._flight)

    @property
    def next_layer(self) -> int:
        """The layer that the next frame begins with; any number if there is none."""
        return self._queue[0].layer if self._queue else 0

    @property
    def bytes_in_flight(self) -> int:
        """Of frames that are not answered."""
        return sum(parcel.size for parcel in self._flight)

    def commit(
        self, ticket: Ticket, first_token: int, extras: Mapping[str, PlainValue]
    ) -> Commit:
        """With the digest of every item, in the order of the checklist; only once drained."""
        checklist, known = self.checklist, self.there | self._sent
        digests = tuple(map(known.__getitem__, range(checklist.num_items)))
        plan = checklist.plan.fingerprint
        return Commit(ticket, checklist.tokens, plan, digests, first_token, extras)

    def figures(self, before: HandoffStats, ack: Ack, now: float) -> HandoffStats:
        """What is known before, and what was sent until the acknowledgement."""
        unsent = map(self.checklist.item, self.there.keys() - self._sent.keys())
        return replace(
            before,
            payload_bytes=self.payload_bytes,
            cached_bytes=sum(map(self.checklist.nbytes, unsent)),
            queue_ms=1000 * self._longest_wait,
            wire_ms=1000 * max(0.0, now - self._first_sent),
            verify_ms=ack.verify_ms,
            admit_ms=ack.admit_ms,
            exposed_ms=1000 * max(0.0, now - self._last_offer),
        )

    def attached(self, here: Mapping[int, int], credit: int) -> None:
        """Start over with a receiver that has these items, sent before or found by their keys.

        here: digests by place; CorruptFrameError for a place that no item has
        """
        if max(here, default=0) >= self.checklist.num_items:
            raise CorruptFrameError(
                f"item {max(here)} of {self.checklist.num_items} is there"
            )
        self.there = {
            x: seen for x, seen in here.items() if self._sent.get(x, seen) == seen
        }
        self._flight.clear()
        self._queue.clear()
        self._ready, self.credit = None, credit
        self._enqueue(self._given)

    def answered(self, stored: bool = True) -> None:
        """The oldest frame in flight arrived; if it was not stored, it is sent again."""
        if not self._flight:
            raise CorruptFrameError("an answer to a frame that was never sent")
        parcel = self._flight.popleft()
        if not stored:
            self._enqueue(parcel.items)

    def next_parcel(self, ticket: Ticket, now: float) -> OutgoingFrame | None:
        """The next frame, if there is one and credit for it; it counts as in flight."""
        if self._ready is None and self._queue:
            items, full = self._head()
            if full or self._whole or not self._flight:
                self._ready = self._pack(ticket, items)
        if (parcel := self._ready) is None:
            return None
        window = min(self.credit, 2 * max(self.frame_bytes, parcel.size))
        if self.bytes_in_flight + parcel.size > window:
            return None
        self._ready = None
        self._flight.append(parcel)
        self.payload_bytes += parcel.payload_bytes
        self._first_sent = min(self._first_sent, now)
        self._longest_wait = max(self._longest_wait, now - self._given[parcel.items[0]])
        return parcel

    @property
    def _whole(self) -> bool:
        return len(self._given) == self.checklist.num_items

    def _enqueue(self, items: Iterable[Item]) -> None:
        self._queue += [
            item for item in items if self.checklist.place(item) not in self.there
        ]

    def _head(self) -> tuple[list[Item], bool]:
        """The items of the next frame, and whether it is full; one that is larger goes alone."""
        items, size = list[Item](), HEADER_BYTES
        for item in self._queue:
            size += ITEM_HEADER_BYTES + self.checklist.nbytes(item)
            if items and (size > self.frame_bytes or len(items) == MAX_ITEMS):
                return items, True
            items.append(item)
        return items, size >= self.frame_bytes

    def _pack(self, ticket: Ticket, items: Sequence[Item]) -> OutgoingFrame:
        """A frame of the first items of the queue."""
        for _ in items:
            self._queue.popleft()
        payload = self._source.read(items)
        places = tuple(map(self.checklist.place, items))
        for place, data in zip(places, payload, strict=True):
            if place not in self._sent:
                self._sent[place] = digest(data)
        digests = tuple(map(self._sent.__getitem__, places))
        frame = PageFrame(ticket, places, digests, tuple(payload))
        parts = pack(frame)
        return OutgoingFrame(items, parts, sum(map(len, parts)), sum(map(len, payload)))


# -- one hand-off


class Sender:
    """One hand-off, from its prefill worker.

    attach: the reservation that the router made (its gen: of the attachments before, 0), and what
            both sides must agree on
    """

    def __init__(
        self,
        channel: "Channel",
        attach: Attach,
        plan: Plan,
        source: Source,
        deadline_s: float = 120.0,
    ):
        checklist = Manifest(plan, attach.tokens)
        _check_sizes(checklist)
        self.ticket = attach.ticket
        self.deadline = time.monotonic() + deadline_s
        self.outbox = SendQueue(checklist, source)
        self.wire_bytes = 0
        self.figures = HandoffStats(
            "", attach.tokens, 0, 0
        )  # of the codec; those of the wire join
        self._channel = channel
        self._terms = attach
        self._deadline_s = deadline_s
        self._ending: tuple[int, Mapping[str, PlainValue]] | None = None
        self._drained = asyncio.Event()  # everything is there: the commit may go
        self._over: asyncio.Future[Exception] = (
            asyncio.Future()
        )  # what ended the attachment
        self._advanced_at = 0.0  # when the receiver last stored a frame
        self._corrupt = 0  # frames that it could not

    # -- the engine's side, by call_soon_threadsafe

    def offer(self, items: Iterable[Item]) -> None:
        """The bytes of these items are final; they leave in this order, each offered once."""
        self.outbox.offer(items, time.monotonic())
        self._channel.wake()

    def finish(
        self, first_token: int, extras: Mapping[str, PlainValue] | None = None
    ) -> None:
        """All items were offered; what only prefill knows goes with the commit."""
        self._ending = (first_token, extras or {})
        self._note_drained()

    # -- the io loop's side

    async def run(self) -> HandoffStats:
        """Push until the receiver acknowledges. Cancel the task to give the hand-off up.

        Raises DeadlineError, PeerLostError after `silence_s` without progress, ReservationError
        once the reservation is over, and whatever else the receiver refused.
        """
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                return self._stats(await self._until_acknowledged())
        except TimeoutError as error:
            raise DeadlineError(
                f"{self} took longer than {self._deadline_s:g} s"
            ) from error

    async def _until_acknowledged(self) -> Ack:
        options, broken_at = self._channel.options, -math.inf
        silence_s, stall_s = options.silence_s, options.stall_s
        while True:
            if self._over.done():
                if not isinstance(error := self._over.result(), PeerLostError):
                    raise error
                self._over = asyncio.Future()
            attached_at = math.inf
            try:
                attached, attached_at = await self._attach(), time.monotonic()
                return await self._push(attached)
            except PeerLostError:
                now = time.monotonic()
                if (
                    self._advanced_at >= broken_at
                    or now - attached_at > silence_s + stall_s
                ):
                    broken_at = now  # it went well until now: a stall shows sooner
                elif now - broken_at > silence_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _attach(self) -> Attached:
        self.ticket = replace(self.ticket, gen=self.ticket.gen + 1)
        direct = self._channel.options.direct
        terms = replace(self._terms, ticket=self.ticket, direct=direct)
        return await self._channel.attach(self, terms)

    async def _push(self, attached: Attached) -> Ack:
        """Send what is not there, and commit, on one attachment."""
        if attached.admitted:  # the acknowledgement was lost
            if not self._drained.is_set():
                raise ReservationError(f"{self} was admitted before all of it was sent")
            return await self._commit()
        self.outbox.attached(attached.received(), attached.credit)
        self._note_drained()
        with self._channel.carries(self, attached):
            await self._unless_over(self._drained.wait())
            return await self._unless_over(self._commit())

    async def _commit(self) -> Ack:
        assert self._ending is not None
        return await self._channel.commit(
            self, self.outbox.commit(self.ticket, *self._ending)
        )

    async def _unless_over(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` brings, unless the attachment ends before."""
        task = asyncio.ensure_future(work)
        ends: list[asyncio.Future[Any]] = [task, self._over]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._over.result()
            return task.result()
        finally:
            task.cancel()

    def _note_drained(self) -> None:
        if self._ending is not None and self.outbox.drained:
            self._drained.set()
        else:
            self._drained.clear()

    def _stats(self, ack: Ack) -> HandoffStats:
        return replace(
            self.outbox.figures(self.figures, ack, time.monotonic()),
            wire_bytes=self.wire_bytes,
            attaches=self.ticket.gen,
            link_bytes_per_s=self._channel.meter.read(),
        )

    def __str__(self) -> str:
        return f"hand-off {self.ticket.nonce:016x}"

    # -- the channel's side

    def need(self) -> tuple[float, int]:
        """Who is served first: the earliest deadline, then the lowest layer."""
        return self.deadline, self.outbox.next_layer

    def next_parcel(self) -> OutgoingFrame | None:
        """The next frame, cut for the link as it is known now, if there is credit; it leaves."""
        self.outbox.frame_bytes = self._channel.frame_bytes
        return self.outbox.next_parcel(self.ticket, time.monotonic())

    def credited(self, credit: Credit, nbytes: int) -> None:
        """What became of frames, in an answer of `nbytes`; of older attachments it is ignored."""
        self.wire_bytes += nbytes
        if credit.gen != self.ticket.gen:
            return
        try:
            if credit.error is None:
                self._advanced_at = time.monotonic()
            else:
                self._corrupt += 1
                if self._corrupt == MAX_CORRUPT or not isinstance(
                    credit.error, CorruptFrameError
                ):
                    raise credit.error
            self.outbox.answered(stored=credit.error is None)
            self._note_drained()
        except DisaggError as error:
            self.end(error)

    def end(self, error: Exception) -> None:
        """The attachment is over. After PeerLostError another is tried; all else is final, whenever
        it comes: between two attachments too.
        """
        if self._over.done() and isinstance(self._over.result(), PeerLostError):
            self._over = asyncio.Future()
        if not self._over.done():
            self._over.set_result(error)


def _check_sizes(checklist: Manifest) -> None:
    """LayoutError for a prompt whose items or commit no message can carry."""
    commit_bytes = message_bytes(8 * checklist.num_items, 0)
    for what, nbytes in (
        ("an item", checklist.frame_bytes),
        ("the commit", commit_bytes),
    ):
        if nbytes > MAX_FRAME_BYTES:
            raise LayoutError(
                f"{what} of a prompt of {checklist.tokens} tokens takes {nbytes} bytes; a frame "
                f"carries {MAX_FRAME_BYTES}"
            )
