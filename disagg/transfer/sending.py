"""The state of one hand-off at its prefill worker: what was offered, when, and what it cost.

The engine's calls end here and the streams take from here; knows no peer and no socket.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from disagg.transfer.messages import Ack
from disagg.transfer.outbox import Outbox, Parcel
from disagg.transfer.pace import Pace
from disagg.wire import FRAME_BYTES, Commit, Item, PlainValue


@dataclass(frozen=True)
class Options:
    """How patient a sender is.

    deadline_s:  the whole hand-off, from `run` on
    silence_s:   a peer that cannot be reached, or breaks every stream, for this long is lost
    stall_s:     bytes in flight that are not answered this long mean a broken stream
    call_s:      every single call but `reserve`, which waits its own time more
    frame_bytes: where frames are cut; smaller ones for slow links
    pace:        a slower link than there is, for benchmarks
    """

    deadline_s: float = 120.0
    silence_s: float = 5.0
    stall_s: float = 10.0
    call_s: float = 5.0
    frame_bytes: int = FRAME_BYTES
    pace: Pace | None = None


@dataclass(frozen=True)
class Receipt:
    """What a completed hand-off cost.

    wire_bytes:    every message of it, both ways, control included
    payload_bytes: bytes of records in those messages
    skipped_bytes: bytes that the receiver had already
    streams:       how often a stream attached; 1 if nothing broke
    queue_ms:      the longest that an item waited for its frame to leave
    wire_ms:       from the first frame to the acknowledgement
    verify_ms:     the receiver's digests and copies
    admit_ms:      from the commit's arrival to the engine
    exposed_ms:    from the last item offered to the acknowledgement
    """

    wire_bytes: int
    payload_bytes: int
    skipped_bytes: int
    frames: int
    streams: int
    queue_ms: float
    wire_ms: float
    verify_ms: float
    admit_ms: float
    exposed_ms: float


@dataclass
class Sending:
    """What streams of one hand-off share: the outbox, the end, and a journal of times."""

    outbox: Outbox
    options: Options
    clock: Callable[[], float]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ending: tuple[int, Mapping[str, PlainValue], Mapping[str, float]] | None = None
    heard: float = 0.0  # when the peer last said something
    advanced_at: float = 0.0  # when it last had a frame, or an answer to the commit
    first_sent: float | None = None
    last_offer: float = 0.0
    longest_wait: float = 0.0
    payload_bytes: int = 0
    frames: int = 0
    streams: int = 0

    def offer(self, items: Iterable[Item]) -> None:
        """The bytes of these items are final."""
        self.last_offer = self.clock()
        self.outbox.offer(items, self.last_offer)
        self.wake.set()

    def finish(
        self, first_token: int, extras: Mapping[str, PlainValue], timings: Mapping[str, float]
    ) -> None:
        """Nothing more is offered; this goes with the commit."""
        self.ending = (first_token, extras, timings)
        self.wake.set()

    def commit(self) -> Commit | None:
        """The commit, once everything was offered and sent."""
        if self.ending is None or not self.outbox.drained:
            return None
        checklist = self.outbox.checklist
        first_token, extras, timings = self.ending
        return Commit(
            tokens=checklist.tokens,
            plan=checklist.plan.fingerprint,
            digests=self.outbox.manifest(),
            first_token=first_token,
            extras=extras,
            timings=timings,
        )

    def hear(self, advances: bool) -> None:
        """The peer said something; `advances`: it has a frame more, or answers the commit."""
        self.heard = self.clock()
        if advances:
            self.advanced_at = self.heard

    def note_sent(self, parcel: Parcel) -> None:
        """A parcel goes to the transport now."""
        now = self.clock()
        if self.first_sent is None:
            self.first_sent = now
        self.longest_wait = max(self.longest_wait, now - parcel.queued_since)
        self.payload_bytes += parcel.payload_bytes
        self.frames += 1

    def receipt(self, ack: Ack, wire_bytes: int) -> Receipt:
        """What it cost, now that it is acknowledged."""
        now = self.clock()
        first_sent = now if self.first_sent is None else self.first_sent
        return Receipt(
            wire_bytes=wire_bytes,
            payload_bytes=self.payload_bytes,
            skipped_bytes=self.outbox.skipped_bytes,
            frames=self.frames,
            streams=self.streams,
            queue_ms=1000 * self.longest_wait,
            wire_ms=1000 * (now - first_sent),
            verify_ms=ack.verify_ms,
            admit_ms=ack.admit_ms,
            exposed_ms=1000 * (now - self.last_offer),
        )
