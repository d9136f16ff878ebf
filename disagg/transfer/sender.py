"""The sending side of one hand-off: a queue of items and the task that sends them, on the io loop.

    owns:   OutgoingHandoff ──► Sender ──► SendQueue ──► Source: an arena and its addresses
    items:  offer ────────────► offer ───► offer                 pushed, as they become final
    bytes:             Channel ► next_frame ► next_frame ► read  pulled, as credit allows
    answer: receiver ► Channel ► on_frame_answer ─► on_answer

Nothing owned refers back to its owner, so a hand-off is freed as soon as its task drops it. The
Channel carries all hand-offs between two workers and holds a sender only while it is attached.

The engine's side never waits. The io loop's side survives broken channels: it attaches again and
sends what the receiver lacks. It ends with statistics or with one typed error. The
router reserves and releases at the receiver: a sender that is cancelled only stops.
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
    TransferError,
)
from disagg.kv.page import Item
from disagg.kv.plan import Plan
from disagg.transfer.messages import Ack, Attach, Attached, FrameAnswer
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
MAX_CORRUPT = 3  # frames of a hand-off that arrive damaged, until it is given up
Result = TypeVar("Result")


class Source(Protocol):
    """Reads the bytes of items."""

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of each item."""


# -- the queue of a hand-off


@dataclass(frozen=True)
class OutgoingFrame:
    """One page frame of `size` bytes, as buffers to be joined; pages are not copied."""

    items: Sequence[Item]
    parts: Sequence[Buffer]
    size: int
    payload_bytes: int


class SendQueue:
    """The items of one hand-off on their way out. No sockets, no clock.

        offer ──► queue ──► frame ──► in flight ──► confirmed
                    ▲                     │ arrived corrupt, or the stream broke
                    └─────────────────────┘

    Frames are filled with items in the order of offering. A frame that is not full leaves only when
    nothing is in flight, so that the link is never idle, or when no more items will come. At most
    two frames are in flight, and at most as many bytes as the receiver gave credit for. Items that
    the receiver has are not queued; the commit names its digests for those we never sent.

    peer_has: by item index, digests of the items that the receiver has, except those that it has
              with another digest than we sent
    credit:   bytes that may be in flight
    payload_bytes: sent so far
    """

    def __init__(self, manifest: Manifest, frame_bytes: int = FRAME_BYTES):
        self.manifest = manifest
        self.frame_bytes = frame_bytes
        self.credit = 0
        self.payload_bytes = 0
        self.peer_has: dict[int, int] = {}
        self._source: Source | None = None
        self._offered_at: dict[Item, float] = {}  # in the order of offering
        self._not_encoded = set[Item]()
        self._queue = deque[Item]()
        self._ready: OutgoingFrame | None = None  # packed, waiting for credit
        self._in_flight: deque[OutgoingFrame] = deque()
        self._sent_digests: dict[int, int] = {}  # by item index, as first packed
        self._first_sent_at = math.inf
        self._last_offered_at = math.inf
        self._longest_wait_s = 0.0  # from the offer of an item until its frame left

    def read_from(self, source: Source) -> None:
        """Read items from this source from now on. It may be called from any thread."""
        self._source = source

    def offer(self, items: Iterable[Item], now: float) -> None:
        """The bytes of these items are final. Each item of the manifest is offered once."""
        offered_at = dict.fromkeys(items, now)
        assert self._offered_at.keys().isdisjoint(offered_at)
        self._offered_at.update(offered_at)
        self._last_offered_at = now
        self._enqueue(offered_at)

    def mark_unencoded(self, items: Iterable[Item]) -> None:
        """These items have no bytes: the receiver had them, so they were not encoded.

        They are offered like all others. `next_frame` raises TransferError if the receiver lost one
        in the meantime, so that it would have to be sent.
        """
        self._not_encoded.update(items)

    @property
    def drained(self) -> bool:
        """Every item of the manifest was offered, and sent and answered unless the peer has it."""
        return self._all_offered and not (self._queue or self._ready or self._in_flight)

    @property
    def next_layer(self) -> int:
        """The layer that the next frame begins with; any number if there is none."""
        return self._queue[0].layer if self._queue else 0

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the frames that are not answered yet."""
        return sum(frame.size for frame in self._in_flight)

    @property
    def bytes_to_come(self) -> int:
        """About how many bytes the receiver lacks, sent or not."""
        lacks = self.manifest.num_items - len(self.peer_has)
        return self.manifest.total_bytes * lacks // self.manifest.num_items

    def restart(self, peer_has: Mapping[int, int], credit: int) -> None:
        """Start over on a new attachment, whose receiver has these items already.

        peer_has: digests by item index; CorruptFrameError for an index beyond the manifest
        """
        last = max(peer_has, default=0)
        if last >= self.manifest.num_items:
            raise CorruptFrameError(
                f"the receiver has item {last} of a prompt with {self.manifest.num_items} items"
            )
        altered = [
            index
            for index, own_digest in self._sent_digests.items()
            if peer_has.get(index, own_digest) != own_digest
        ]
        self.peer_has = dict(peer_has)
        for index in altered:
            del self.peer_has[index]
        self._in_flight.clear()
        self._queue.clear()
        self._ready = None
        self.credit = credit
        self._enqueue(self._offered_at)

    def next_frame(self, ticket: Ticket, now: float) -> OutgoingFrame | None:
        """The next frame, if there is one and credit for it. It counts as in flight."""
        if self._ready is None and self._queue:
            items, is_full = self._next_items()
            if is_full or self._all_offered or not self._in_flight:
                self._ready = self._pack(ticket, items)
        frame = self._ready
        if frame is None:
            return None
        window = min(self.credit, 2 * max(self.frame_bytes, frame.size))
        if self.bytes_in_flight + frame.size > window:
            return None
        self._ready = None
        self._in_flight.append(frame)
        self.payload_bytes += frame.payload_bytes
        self._first_sent_at = min(self._first_sent_at, now)
        waited_s = now - self._offered_at[frame.items[0]]
        self._longest_wait_s = max(self._longest_wait_s, waited_s)
        return frame

    def on_answer(self, stored: bool = True) -> None:
        """The receiver answered the oldest frame in flight; unless it stored it, send it again."""
        if not self._in_flight:
            raise CorruptFrameError("an answer to a frame that was never sent")
        frame = self._in_flight.popleft()
        if not stored:
            self._enqueue(frame.items)

    def commit(
        self, ticket: Ticket, first_token: int, extras: Mapping[str, PlainValue]
    ) -> Commit:
        """The commit, with the digest of every item in the manifest's order; only once drained."""
        digests = {**self.peer_has, **self._sent_digests}
        return Commit(
            ticket=ticket,
            tokens=self.manifest.tokens,
            plan=self.manifest.plan.fingerprint,
            digests=tuple(map(digests.__getitem__, range(self.manifest.num_items))),
            first_token=first_token,
            extras=extras,
        )

    def stats(self, before: HandoffStats, ack: Ack, now: float) -> HandoffStats:
        """Add what was sent until the acknowledgement to the statistics before the hand-off."""
        never_sent = self.peer_has.keys() - self._sent_digests.keys()
        cached_items = map(self.manifest.item, never_sent)
        return replace(
            before,
            payload_bytes=self.payload_bytes,
            cached_bytes=sum(map(self.manifest.nbytes, cached_items)),
            queue_ms=1000 * self._longest_wait_s,
            wire_ms=1000 * max(0.0, now - self._first_sent_at),
            verify_ms=ack.verify_ms,
            admit_ms=ack.admit_ms,
            exposed_ms=1000 * max(0.0, now - self._last_offered_at),
        )

    @property
    def _all_offered(self) -> bool:
        return len(self._offered_at) == self.manifest.num_items

    def _enqueue(self, items: Iterable[Item]) -> None:
        if not self.peer_has:
            self._queue.extend(items)
            return
        self._queue += [
            item for item in items if self.manifest.index_of(item) not in self.peer_has
        ]

    def _next_items(self) -> tuple[list[Item], bool]:
        """The items of the next frame, and whether it is full.

        An item that is larger than a frame travels alone.
        """
        items = list[Item]()
        size = HEADER_BYTES
        for item in self._queue:
            size += ITEM_HEADER_BYTES + self.manifest.nbytes(item)
            if items and (size > self.frame_bytes or len(items) == MAX_ITEMS):
                return items, True
            items.append(item)
        return items, size >= self.frame_bytes

    def _pack(self, ticket: Ticket, items: Sequence[Item]) -> OutgoingFrame:
        """Take these first items off the queue, into a frame."""
        for _ in items:
            self._queue.popleft()
        payload = self._read(items)
        indices = tuple(map(self.manifest.index_of, items))
        for index, data in zip(indices, payload, strict=True):
            if index not in self._sent_digests:
                self._sent_digests[index] = digest(data)
        digests = tuple(map(self._sent_digests.__getitem__, indices))
        parts = pack(PageFrame(ticket, indices, digests, tuple(payload)))
        return OutgoingFrame(
            items=items,
            parts=parts,
            size=sum(map(len, parts)),
            payload_bytes=sum(map(len, payload)),
        )

    def _read(self, items: Sequence[Item]) -> list[memoryview]:
        assert self._source is not None
        missing = self._not_encoded.intersection(items)
        if missing:
            raise TransferError(
                f"the receiver had {min(missing)}, so it was not encoded; now the receiver lacks it"
            )
        return self._source.read(items)


# -- one hand-off


class Sender:
    """Carries the queue of one hand-off over a channel, until the receiver has all of it.

    attach: the router's reservation, with gen 0, and the fingerprints that must match

    ticket:     names the reservation and the attachment of now
    deadline:   on the monotonic clock
    wire_bytes: of every message of this hand-off, both ways
    prefill_stats: measured before the hand-off; `run` adds its own to them
    """

    def __init__(
        self,
        channel: "Channel",
        attach: Attach,
        plan: Plan,
        deadline_s: float = 120.0,
    ):
        manifest = Manifest(plan, attach.tokens)
        _check_sizes(manifest)
        self.ticket = attach.ticket
        self.deadline = time.monotonic() + deadline_s
        self.queue = SendQueue(manifest)
        self.wire_bytes = 0
        self.prefill_stats = HandoffStats("", attach.tokens, 0, 0)
        self._channel = channel
        self._attach_message = attach
        self._deadline_s = deadline_s
        self._commit_data: tuple[int, Mapping[str, PlainValue]] | None = None
        self._drained = asyncio.Event()  # nothing is left to send but the commit
        self._end_error: asyncio.Future[Exception] = (
            asyncio.Future()
        )  # of the attachment
        self._advanced_at = 0.0  # when the receiver last stored a frame
        self._corrupt_frames = 0

    # -- pushed by the owner, on the io loop

    def offer(self, items: Iterable[Item]) -> None:
        """The bytes of these items are final. They leave in this order; offer each once."""
        self.queue.offer(items, time.monotonic())
        self._channel.wake()

    def finish(
        self, first_token: int, extras: Mapping[str, PlainValue] | None = None
    ) -> None:
        """All items were offered. The commit takes along what only prefill knows."""
        self._commit_data = (first_token, extras or {})
        self._update_drained()

    def end(self, error: Exception) -> None:
        """The attachment is over. The sender attaches again after PeerLostError; any other error is
        final, and also counts if it comes between two attachments.
        """
        if self._end_error.done() and isinstance(
            self._end_error.result(), PeerLostError
        ):
            self._end_error = asyncio.Future()
        if not self._end_error.done():
            self._end_error.set_result(error)

    # -- the task of the hand-off

    async def run(self) -> HandoffStats:
        """Push until the receiver acknowledges. Cancel the task to give the hand-off up.

        Raises DeadlineError, PeerLostError after `silence_s` without progress, ReservationError
        once the reservation is over, and any other refusal of the receiver.
        """
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                ack = await self._until_acknowledged()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self} took longer than {self._deadline_s:g} s"
            ) from error
        return replace(
            self.queue.stats(self.prefill_stats, ack, time.monotonic()),
            wire_bytes=self.wire_bytes,
            attaches=self.ticket.gen,
            link_bytes_per_s=self._channel.meter.read(),
        )

    async def _until_acknowledged(self) -> Ack:
        """Attach and push, again while the peer is lost for no longer than `silence_s`."""
        options = self._channel.options
        broken_at = -math.inf
        while True:
            if self._end_error.done():
                error = self._end_error.result()
                if not isinstance(error, PeerLostError):
                    raise error
                self._end_error = asyncio.Future()
            attached_at = math.inf
            try:
                attached = await self._attach()
                attached_at = time.monotonic()
                return await self._push(attached)
            except PeerLostError:
                now = time.monotonic()
                has_advanced = self._advanced_at >= broken_at
                attached_s = now - attached_at
                if has_advanced or attached_s > options.silence_s + options.stall_s:
                    broken_at = now  # it worked until now: a stall shows sooner
                elif now - broken_at > options.silence_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _attach(self) -> Attached:
        self.ticket = replace(self.ticket, gen=self.ticket.gen + 1)
        attach = replace(
            self._attach_message,
            ticket=self.ticket,
            direct=self._channel.wants_direct,
        )
        return await self._channel.attach(self, attach)

    async def _push(self, attached: Attached) -> Ack:
        """Send the items that the receiver lacks, and commit, on one attachment."""
        if attached.admitted:  # the acknowledgement was lost
            if not self._drained.is_set():
                raise ReservationError(f"{self} was admitted before all of it was sent")
            return await self._commit()
        self.queue.restart(attached.received(), attached.credit)
        self._update_drained()
        with self._channel.carry(self, attached):
            await self._unless_ended(self._drained.wait())
            return await self._unless_ended(self._commit())

    async def _commit(self) -> Ack:
        assert self._commit_data is not None
        first_token, extras = self._commit_data
        commit = self.queue.commit(self.ticket, first_token, extras)
        return await self._channel.commit(self, commit)

    async def _unless_ended(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, unless the attachment ends first."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._end_error]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._end_error.result()
            return task.result()
        finally:
            task.cancel()

    def _update_drained(self) -> None:
        if self._commit_data is not None and self.queue.drained:
            self._drained.set()
        else:
            self._drained.clear()

    def __str__(self) -> str:
        return f"hand-off {self.ticket.nonce:016x}"

    # -- called by the channel

    def urgency(self) -> tuple[float, int]:
        """The hand-off with the lowest is served first: earliest deadline, then lowest layer."""
        return self.deadline, self.queue.next_layer

    def next_frame(self) -> OutgoingFrame | None:
        """The next frame, if there is credit, cut for the link as it was measured."""
        self.queue.frame_bytes = self._channel.frame_bytes
        return self.queue.next_frame(self.ticket, time.monotonic())

    def on_frame_answer(self, answer: FrameAnswer, nbytes: int) -> None:
        """The receiver answered a frame, in `nbytes`. Frames of older attachments are ignored."""
        self.wire_bytes += nbytes
        if answer.gen != self.ticket.gen:
            return
        try:
            if answer.error is None:
                self._advanced_at = time.monotonic()
            else:
                self._count_corrupt(answer.error)
            self.queue.on_answer(stored=answer.error is None)
            self._update_drained()
        except DisaggError as error:
            self.end(error)

    def _count_corrupt(self, error: DisaggError) -> None:
        """Raise the error if the frame was not damaged on the way, or too many were."""
        self._corrupt_frames += 1
        is_corrupt = isinstance(error, CorruptFrameError)
        if self._corrupt_frames == MAX_CORRUPT or not is_corrupt:
            raise error


def _check_sizes(manifest: Manifest) -> None:
    """LayoutError for a prompt with an item, or a commit, that is too large for a message."""
    sizes = {
        "an item": manifest.frame_bytes,
        "the commit": message_bytes(8 * manifest.num_items, 0),
    }
    for part, nbytes in sizes.items():
        if nbytes > MAX_FRAME_BYTES:
            raise LayoutError(
                f"{part} of a prompt of {manifest.tokens} tokens takes {nbytes} bytes; a frame "
                f"carries {MAX_FRAME_BYTES}"
            )
