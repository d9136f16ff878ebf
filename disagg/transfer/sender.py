"""Sends prompts to decode workers while they are computed. Lives on the io loop.

    engine ── offer, finish ──► Sender ── attach, commit: calls of its own ─────────► receiver
                                  │ frames, by need           credit for them │
                                  └──► Channel ── one stream for all of them ─┘

A `Sender` is one hand-off: it survives broken streams (attach again, send what is missing) and ends
in figures or in one typed error. A `Channel` is one pair of workers: it chooses whose frame is next
(earliest deadline, then lowest layer), keeps leases alive, and when it breaks all that are attached
on it attach anew. Credit is per hand-off, so no hand-off holds up another; one that is cancelled
only stops sending. Nothing is reserved or released here: that is the router's.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from collections.abc import Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import grpc

from disagg.config import TransferConfig
from disagg.errors import (
    ConfigError,
    CorruptFrameError,
    DeadlineError,
    DisaggError,
    LayoutError,
    PeerLostError,
    ReservationError,
    VersionError,
)
from disagg.metrics import HandoffStats
from disagg.page import Kind
from disagg.plan import Plan
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.control import PUSH, KvClient
from disagg.transfer.link import LinkReport, Pace, measure
from disagg.transfer.messages import Ack, Attach, Attached, Credit, Nack, State, parse
from disagg.transfer.records import Checklist, items_in_frame, units_of
from disagg.transfer.rpc import Link, connect, error_of
from disagg.transfer.security import Security
from disagg.wire import (
    FRAME_BYTES,
    MAX_FRAME_BYTES,
    Buffer,
    Commit,
    CommitFrame,
    Item,
    PageFrame,
    PlainValue,
    Ticket,
    digest,
    frame_message,
    pack,
)

log = logging.getLogger(__name__)

RETRY_S = 0.1
RENEWALS_PER_LEASE = 3
MAX_REFUSALS = 3  # attachments in a row that the receiver ended before it stored anything
Result = TypeVar("Result")


class Source(Protocol):
    """Where the bytes of items are."""

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items of one kind, layer group and size that were offered."""


class FrameStream(Protocol):
    """Frames out and answers in, on one connection: gRPC's Push, or a direct one."""

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Hand one frame over; waits while the stream is full. The bytes of the message.

        0: the stream is over, and `answers` knows why.
        """

    def answers(self) -> AsyncGenerator[bytes, None]:
        """PushResponses, until the stream ends or raises what ended it."""

    def close(self) -> None:
        """End it from our side."""


# -- what a hand-off still has to send


@dataclass(frozen=True)
class Parcel:
    """One page frame of `size` bytes, in parts: the pages lie where they were.

    queued_since: when its first item was offered
    """

    parts: Sequence[Buffer]
    size: int
    payload_bytes: int
    queued_since: float


class Outbox:
    """The items of one hand-off on their way out. No sockets, no clock.

        offer ──► queue ──► frame ──► in flight ──► confirmed
                    ▲                     │ stream broke, or the receiver misses it
                    └─────────────────────┘

    Frames are filled with items of one kind, group and size, oldest first. A frame that is not full
    leaves when nothing is on its way, so that the link never waits for more, and when nothing more
    will come. What is in flight never exceeds two frames, nor what the receiver granted. What the
    receiver has is skipped: with the same digest, or found by its content key; then the commit
    names the receiver's digest.
    """

    def __init__(self, checklist: Checklist, source: Source, frame_bytes: int = FRAME_BYTES):
        self.checklist = checklist
        self.frame_bytes = frame_bytes
        self.credit = 0
        self.bytes_in_flight = 0
        self._source = source
        self._order = checklist.items  # asked for now, while there is time
        self._given: dict[Item, float] = {}  # every item offered so far, in order, and when
        self._queues: dict[tuple[Kind, int, int], deque[Item]] = {}  # by kind, group, size: to send
        self._ready: Parcel | None = None  # packed, waiting for credit
        self._flight: deque[Parcel] = deque()
        self._digests: dict[Item, int] = {}
        self._there: dict[Item, int] = {}  # what the receiver said it has
        self._cached: frozenset[Item] = frozenset()  # of it, what it found by content keys
        self._skipped: dict[Item, int] = {}  # never sent, because it is there

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

    @property
    def next_layer(self) -> int:
        """The layer that the next frame begins with; any number if there is none."""
        queue = self._next_queue()
        return queue[0].layer if queue else 0

    @property
    def cached_bytes(self) -> int:
        """Bytes that need not be sent, because the receiver has them."""
        return sum(map(self.checklist.nbytes, self._skipped))

    def manifest(self) -> tuple[int, ...]:
        """The digest of every item, in the order of the checklist; only once drained."""
        digests = self._digests | self._skipped
        return tuple(map(digests.__getitem__, self._order))

    def attached(
        self, items: Mapping[Item, int], cached: Iterable[Item] = (), credit: int = 0
    ) -> None:
        """Start over with a receiver that has these items, some found by their content keys."""
        self._there, self._cached = dict(items), frozenset(cached)
        self._skipped = {x: seen for x, seen in self._skipped.items() if items.get(x) == seen}
        self._flight.clear()
        self._ready = None
        self.credit, self.bytes_in_flight = credit, 0
        self._queues.clear()
        here = {item for item in items if self._is_there(item)}
        self._enqueue([x for x in self._given if x not in here] if here else self._given)

    def grant(self, credit: int, frames: int) -> None:
        """More credit, and `frames` more that arrived and were verified."""
        self.credit += credit
        for _ in range(frames):
            if not self._flight:
                raise CorruptFrameError(f"credit for {frames} frames that were not sent")
            self.bytes_in_flight -= self._flight.popleft().size

    def missing(self, items: Sequence[Item]) -> None:
        """The receiver does not have these: they go out again."""
        if not items:
            raise CorruptFrameError("the receiver misses items but names none")
        for item in items:
            if item not in self._given:
                raise CorruptFrameError(f"the receiver misses {item}, which this prompt has not")
            self._there.pop(item, None)
            self._skipped.pop(item, None)
        self._enqueue(items)

    def next_parcel(self, ticket: Ticket) -> Parcel | None:
        """The next frame, if there is one and credit for it; it counts as in flight."""
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
        nbytes = self.checklist.nbytes
        for (kind, group), run in groupby(items, itemgetter(0, 1)):
            some = list(run)
            parts = groupby(some, nbytes) if kind is Kind.RAW else [(nbytes(some[0]), some)]
            for size, part in parts:  # only the last raw record of a layer is smaller than others
                self._queues.setdefault((kind, group, size), deque()).extend(part)

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
        parts = pack(frame)
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
        clock: Callable[[], float] = time.monotonic,
    ):
        checklist = Checklist(plan, attach.tokens)
        _check_sizes(checklist)
        self.ticket = attach.ticket
        self.deadline = clock() + deadline_s
        self.outbox = Outbox(checklist, source, channel.options.frame_bytes)
        self.wire_bytes = self.payload_bytes = self.frames = 0
        self._channel = channel
        self._terms = attach
        self._deadline_s = deadline_s
        self._clock = clock
        self._ending: tuple[int, Mapping[str, float], Mapping[str, PlainValue]] | None = None
        self._drained = asyncio.Event()  # everything has left: the commit may
        self._over: asyncio.Future[Exception] = asyncio.Future()  # what ended the attachment
        self._advanced_at = 0.0  # when the receiver last stored a frame or answered the commit
        self._first_sent = self._last_offer = math.inf
        self._longest_wait = 0.0

    # -- the engine's side, by call_soon_threadsafe

    def offer(self, items: Iterable[Item]) -> None:
        """The bytes of these items are final; they leave in this order, each offered once."""
        self._last_offer = self._clock()
        self.outbox.offer(items, self._last_offer)
        self._channel.wake()

    def finish(
        self,
        first_token: int,
        timings: Mapping[str, float] | None = None,
        extras: Mapping[str, PlainValue] | None = None,
    ) -> None:
        """All items were offered; what only prefill knows goes with the commit."""
        self._ending = (first_token, timings or {}, extras or {})
        self._note_drained()

    @property
    def nbytes(self) -> int:
        """Bytes of all records of the prompt."""
        return self.outbox.checklist.total_bytes

    # -- the io loop's side

    async def run(self) -> HandoffStats:
        """Push until the receiver acknowledges. Cancel the task to give the hand-off up.

        The figures are those of the wire; what the codec did is for the caller to fill in.
        Raises DeadlineError, PeerLostError after `silence_s` without progress, ReservationError
        once the reservation is over, and whatever else the receiver refused.
        """
        with self._channel.used():
            try:
                async with asyncio.timeout(self.deadline - self._clock()):
                    return self._stats(await self._until_acknowledged())
            except TimeoutError as error:
                raise DeadlineError(f"{self} took longer than {self._deadline_s:g} s") from error

    async def _until_acknowledged(self) -> Ack:
        silence_s, broken_at, refusals = self._channel.options.silence_s, -math.inf, 0
        while True:
            attached_at = math.inf
            try:
                attached, attached_at = await self._attach(), self._clock()
                return await self._push(attached)
            except _Dropped as dropped:
                refusals = 1 if self._advanced_at >= attached_at else refusals + 1
                if refusals == MAX_REFUSALS:
                    raise dropped.error from dropped
            except PeerLostError:
                now = self._clock()
                if self._advanced_at >= broken_at or now - attached_at > silence_s:
                    broken_at = now  # it went well until now
                elif now - broken_at > silence_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _attach(self) -> Attached:
        self.ticket = replace(self.ticket, gen=self.ticket.gen + 1)
        try:
            attached, nbytes = await self._channel.attach(replace(self._terms, ticket=self.ticket))
        except DeadlineError as error:
            raise PeerLostError(str(error)) from error
        self.wire_bytes += nbytes
        if attached.state is State.EXPIRED:
            raise ReservationError(f"the lease of {self} ended; its router has to reserve again")
        return attached

    async def _push(self, attached: Attached) -> Ack:
        """Send what is not there, and commit, on one attachment."""
        if attached.state is State.ADMITTED:
            return await self._commit_again()
        self.outbox.attached(attached.have, self._cached_items(attached), attached.credit)
        self._note_drained()
        self._over = asyncio.Future()
        with self._channel.carries(self, attached):
            while True:
                await self._unless_over(self._drained.wait())
                answer = await self._unless_over(self._commit())
                if isinstance(answer, Ack):
                    return answer
                self._advanced_at = self._clock()
                self.outbox.missing(answer.missing)
                self._note_drained()
                self._channel.wake()

    async def _commit(self) -> Ack | Nack:
        assert self._ending is not None
        first_token, timings, extras = self._ending
        checklist, digests = self.outbox.checklist, self.outbox.manifest()
        plan = checklist.plan.fingerprint
        commit = Commit(checklist.tokens, plan, digests, first_token, extras, timings)
        frame = CommitFrame(self.ticket, commit)
        answer, nbytes = await self._channel.commit(frame, self.deadline - self._clock())
        self.wire_bytes += nbytes
        return answer

    async def _commit_again(self) -> Ack:
        """The answer to a commit whose acknowledgement was lost."""
        if not self._drained.is_set():
            raise ReservationError(f"{self} was admitted before it was committed")
        answer = await self._commit()
        if isinstance(answer, Nack):
            raise ReservationError(f"{self} is admitted but lacks {len(answer.missing)} items")
        return answer

    async def _unless_over(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` brings, unless the attachment ends before."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._over], return_when=asyncio.FIRST_COMPLETED)
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

    def _cached_items(self, attached: Attached) -> Iterator[Item]:
        """Items as good as ours: those of units with our keys."""
        plan = self.outbox.checklist.plan
        if any(attached.cached):
            units = units_of(plan, self._terms.tokens)
            for group, some, count in zip(plan.groups, units, attached.cached, strict=False):
                for unit in some[:count]:
                    yield from unit.items(group)

    def _stats(self, ack: Ack) -> HandoffStats:
        now = self._clock()
        return HandoffStats(
            codec="",
            tokens=self._terms.tokens,
            fp16_bytes=0,
            fp8_bytes=0,
            wire_bytes=self.wire_bytes,
            payload_bytes=self.payload_bytes,
            cached_bytes=self.outbox.cached_bytes,
            queue_ms=1000 * self._longest_wait,
            wire_ms=1000 * max(0.0, now - self._first_sent),
            verify_ms=ack.verify_ms,
            admit_ms=ack.admit_ms,
            exposed_ms=1000 * max(0.0, now - self._last_offer),
            attaches=self.ticket.gen,
        )

    def __str__(self) -> str:
        return f"hand-off {self.ticket.nonce:016x}"

    # -- the channel's side

    def need(self) -> tuple[float, int]:
        """Who is served first: the earliest deadline, then the lowest layer."""
        return self.deadline, self.outbox.next_layer

    def next_parcel(self) -> Parcel | None:
        """The next frame, if there is credit for it; it leaves now."""
        parcel = self.outbox.next_parcel(self.ticket)
        if parcel is not None:
            now = self._clock()
            self._first_sent = min(self._first_sent, now)
            self._longest_wait = max(self._longest_wait, now - parcel.queued_since)
            self.payload_bytes += parcel.payload_bytes
            self.frames += 1
        self._note_drained()
        return parcel

    def credited(self, credit: Credit, nbytes: int) -> None:
        """What became of frames, in an answer of `nbytes`; of older attachments it is ignored."""
        self.wire_bytes += nbytes
        if credit.gen != self.ticket.gen:
            return
        if credit.error is not None:
            self.end(_Dropped(credit.error))
            return
        self._advanced_at = self._clock()
        try:
            self.outbox.grant(credit.nbytes, credit.frames)
        except CorruptFrameError as error:
            self.end(_Dropped(error))

    def end(self, error: Exception) -> None:
        """The attachment is over: PeerLostError tries another, _Dropped a few, all else is final."""
        if not self._over.done():
            self._over.set_result(error)


class _Dropped(Exception):
    """The receiver dropped frames; attaching again tells whether that is final."""

    def __init__(self, error: DisaggError):
        super().__init__(str(error))
        self.error = error


def _check_sizes(checklist: Checklist) -> None:
    """LayoutError for a prompt whose items or commit no message can carry."""
    commit_bytes = 8 * checklist.num_items
    for what, nbytes in (("an item", checklist.frame_bytes), ("the commit", commit_bytes)):
        if nbytes > MAX_FRAME_BYTES:
            raise LayoutError(
                f"{what} of a prompt of {checklist.tokens} tokens takes {nbytes} bytes; a frame "
                f"carries {MAX_FRAME_BYTES}"
            )


# -- one pair of workers


@dataclass(frozen=True)
class ChannelOptions:
    """How hand-offs to one worker are sent.

    frame_bytes: where frames are cut; smaller ones for slow links
    silence_s:   a peer that cannot be reached, or breaks every stream, for this long is lost
    stall_s:     frames or a commit that are not answered this long mean a broken stream
    call_s:      every single call but the commit
    idle_s:      a link without hand-offs is closed after this
    pace:        a slower link than there is, for benchmarks
    """

    frame_bytes: int = FRAME_BYTES
    silence_s: float = 5.0
    stall_s: float = 10.0
    call_s: float = 5.0
    idle_s: float = 60.0
    pace: Pace | None = None


class Channel:
    """All hand-offs from this worker to one other: their stream, their leases, their calls."""

    def __init__(
        self,
        address: str,
        security: Security | None = None,
        options: ChannelOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.address = address
        self.options = options or ChannelOptions()
        self._security = security
        self._clock = clock
        self._link: Link | None = None
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None
        self._attached: dict[int, Sender] = {}
        self._serving: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._owed = 0  # frames and commits out and not answered
        self._heard_at = 0.0  # when something was answered, or began to be owed
        self._lease_s = math.inf

    @property
    def link(self) -> Link:
        """The link, opened when first used and after it was closed."""
        if self._link is None:
            self._link = connect(self.address, self._security)
        return self._link

    async def close(self) -> None:
        """Break what is carried and close the link; who still needs it opens another."""
        link, self._link = self._link, None
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        if link is not None:
            await link.close()

    # -- for senders

    @contextmanager
    def used(self) -> Iterator[None]:
        """While somebody is here, the link stays."""
        self._users += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                loop = asyncio.get_running_loop()
                self._idle = loop.call_later(self.options.idle_s, self._retire)

    @contextmanager
    def carries(self, sender: Sender, attached: Attached) -> Iterator[None]:
        """Send the frames of an attached hand-off and renew it, meanwhile."""
        self._attached[sender.ticket.nonce] = sender
        self._lease_s = attached.lease_s
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        self._wake.set()
        try:
            yield
        finally:
            self._attached.pop(sender.ticket.nonce, None)

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()

    async def attach(self, attach: Attach) -> tuple[Attached, int]:
        """Take a reservation over; the bytes of both messages."""
        return await KvClient(self.link).attach(attach, self.options.call_s)

    async def commit(self, frame: CommitFrame, timeout_s: float) -> tuple[Ack | Nack, int]:
        """The answer to a commit, when there is one; the bytes of both messages."""
        self._owe()
        try:
            return await KvClient(self.link).commit(frame, timeout_s)
        finally:
            self._answered(1)

    # -- the stream

    async def _serve(self) -> None:
        """One stream, until it ends in any way, which all that is attached on it is told."""
        error: DisaggError = PeerLostError(f"the channel to {self.address} was closed")
        try:
            stream = PushStream(self.link)
            try:
                async with asyncio.TaskGroup() as group:
                    for run in (self._feed(stream), self._listen(stream)):
                        group.create_task(run)
                    group.create_task(self._renew())
                    group.create_task(self._watch())
            finally:
                stream.close()
        except Exception as failure:
            error = self._why(failure)
        finally:
            self._serving, self._owed = None, 0
            for sender in self._attached.values():
                sender.end(error)
            self._attached.clear()

    async def _feed(self, stream: FrameStream) -> None:
        """Send while there is something; returns when the stream takes no more."""
        size, pace = 1, self.options.pace
        while size:
            self._wake.clear()
            if (chosen := self._next()) is None:
                await self._wake.wait()
                continue
            sender, parcel = chosen
            if pace is not None and (delay := pace.delay(parcel.size, self._clock())) > 0:
                await asyncio.sleep(delay)
            self._owe()
            size = await stream.send(parcel.parts)
            sender.wire_bytes += size

    def _next(self) -> tuple[Sender, Parcel] | None:
        """Whose frame is needed most, of those that have one and credit for it."""
        for sender in sorted(self._attached.values(), key=Sender.need):
            try:
                if parcel := sender.next_parcel():
                    return sender, parcel
            except Exception as error:  # of one hand-off, so it ends that one
                log.exception("%s cannot be sent", sender)
                del self._attached[sender.ticket.nonce]
                sender.end(error)
        return None

    async def _listen(self, stream: FrameStream) -> None:
        """Take in credit."""
        async with aclosing(stream.answers()) as answers:
            async for data in answers:
                credit = Credit.from_message(parse(kv.PushResponse, data))
                self._answered(credit.frames)
                if sender := self._attached.get(credit.nonce):
                    sender.credited(credit, len(data))
                self._wake.set()
        raise PeerLostError(f"{self.address} ended the stream")

    async def _renew(self) -> None:
        """Keep all leases alive; a call that fails is repeated while they last."""
        while True:
            pause_s = self._lease_s / RENEWALS_PER_LEASE
            await asyncio.sleep(pause_s)
            if not self._attached:
                continue
            tickets = [sender.ticket for sender in self._attached.values()]
            client, timeout_s = KvClient(self.link), min(self.options.call_s, pause_s)
            try:
                over, nbytes = await client.renew(tickets, timeout_s)
            except (PeerLostError, DeadlineError) as error:
                log.warning("the leases at %s were not renewed: %s", self.address, error)
                continue
            for ticket in tickets:
                if sender := self._attached.get(ticket.nonce):
                    sender.wire_bytes += nbytes // len(tickets)
                    if ticket.nonce in over and ticket.gen == sender.ticket.gen:
                        sender.end(ReservationError(f"{sender} is over at {self.address}"))

    async def _watch(self) -> None:
        """PeerLostError once nothing is answered any more."""
        while True:
            await asyncio.sleep(self.options.stall_s / 4)
            quiet_s = self._clock() - self._heard_at
            if self._owed > 0 and quiet_s > self.options.stall_s:
                raise PeerLostError(f"{self.address} answered nothing for {quiet_s:.1f} s")

    def _owe(self) -> None:
        if self._owed <= 0:
            self._owed, self._heard_at = 0, self._clock()
        self._owed += 1

    def _answered(self, count: int) -> None:
        self._owed -= count
        self._heard_at = self._clock()

    def _why(self, failure: Exception) -> DisaggError:
        """What hand-offs are told: an error that attaching again cannot mend, or PeerLostError."""
        while isinstance(failure, ExceptionGroup):
            failure = failure.exceptions[0]
        if not isinstance(failure, DisaggError):
            log.error("the channel to %s failed", self.address, exc_info=failure)
        else:
            log.warning("the channel to %s broke: %s", self.address, failure)
        if isinstance(failure, ConfigError | VersionError | PeerLostError):
            return failure
        return PeerLostError(f"the channel to {self.address} broke: {failure}")

    def _retire(self) -> None:
        if not self._users:
            self._closing = asyncio.ensure_future(self.close())


class PushStream:
    """A `FrameStream` over gRPC."""

    def __init__(self, link: Link):
        self._address = link.address
        self._call = link.channel.stream_stream(PUSH)(metadata=link.metadata)

    async def send(self, parts: Sequence[Buffer]) -> int:
        """See `FrameStream`. The one copy of what is sent is made here."""
        message = frame_message(parts)
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return 0
        return len(message)

    async def answers(self) -> AsyncGenerator[bytes, None]:
        """See `FrameStream`."""
        try:
            async for reply in self._call:
                yield reply
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self._address) from failure

    def close(self) -> None:
        """See `FrameStream`."""
        self._call.cancel()


class Peers:
    """The channels of a worker by address, and what their links can do."""

    def __init__(self, security: Security | None, config: TransferConfig):
        pace = None
        frame_bytes = config.frame_bytes
        if config.link_mbps is not None:
            pace = Pace(config.link_mbps * 1e6 / 8, config.burst_bytes)
            frame_bytes = min(frame_bytes, config.burst_bytes)
        self.options = ChannelOptions(frame_bytes=frame_bytes, pace=pace)
        self.reports: dict[str, LinkReport] = {}
        self._security = security
        self._channels: dict[str, Channel] = {}

    def get(self, address: str) -> Channel:
        """The channel to "host:port"; it connects when it is used."""
        if address not in self._channels:
            self._channels[address] = Channel(address, self._security, self.options)
        return self._channels[address]

    async def meet(self, addresses: Iterable[str]) -> list[str]:
        """Measure links before they are needed; what each can do, in words."""
        for address in addresses:
            channel = self.get(address)
            with channel.used():
                try:
                    self.reports[address] = await measure(channel.link)
                    log.info("%s", self.reports[address])
                except DisaggError as error:
                    log.warning("the link to %s cannot be measured: %s", address, error)
        return [str(self.reports[address]) for address in addresses if address in self.reports]

    def as_info(self) -> list[dict[str, Any]]:
        """What was measured, as plain values."""
        return [asdict(report) for report in self.reports.values()]

    async def close(self, address: str) -> None:
        """That worker is gone: end what is left of its channel."""
        self.reports.pop(address, None)
        if channel := self._channels.pop(address, None):
            await channel.close()

    async def close_all(self) -> None:
        """End everything."""
        for address in list(self._channels):
            await self.close(address)
