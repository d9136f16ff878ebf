"""All hand-offs from one worker to another: one stream of frames, one renewal of their leases.

The channel sends the frame of the most urgent hand-off that has credit: the earliest deadline, then
the lowest layer. Credit is per hand-off, so none holds up another. The rate of the link bounds the
bytes in flight of all of them. Anything that ends the stream, failures of our own included, breaks
it for all attached hand-offs, which attach again; an error of one hand-off ends only that one. An
idle stream ends after a while, and then gRPC closes the link. Lives on the io loop.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import grpc

from disagg.config import TransferConfig
from disagg.errors import (
    ConfigError,
    DeadlineError,
    DisaggError,
    PeerLostError,
    ReservationError,
    VersionError,
)
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.direct import dial
from disagg.transfer.hosts import HostLink, HostLinks
from disagg.transfer.link import (
    LinkReport,
    RateLimiter,
    RateMeter,
    measure,
    reach,
)
from disagg.transfer.messages import (
    KV_SERVICE,
    Ack,
    Attach,
    Attached,
    FrameAnswer,
    parse,
    ticket_to_proto,
)
from disagg.transfer.rpc import Link, connect, failures_of
from disagg.transfer.security import Security
from disagg.transfer.sender import OutgoingFrame, Sender
from disagg.wire import FRAME_BYTES, Buffer, Commit, frame_message, pack

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3
LEAST_PAUSE_S = 0.01  # between two renewals
PROBED_BYTES = 64 << 10  # to send over an unknown link, before it is probed
SAMPLE_FRAMES = 8  # answered, before the rate of a link is updated


@dataclass(frozen=True)
class ChannelOptions:
    """How hand-offs to one worker are sent.

    frame_bytes: frames are cut at this size, or at a smaller one for slow links
    silence_s:   a peer that cannot be reached, or breaks every stream, for this long is lost
    stall_s:     a stream is broken if it answers no frame for this long; a commit that is not
                 answered is sent again, on another attachment
    call_s:      time limit of every call but the commit
    idle_s:      a stream without hand-offs ends after this
    pace:        makes the link slower, for benchmarks
    direct:      send frames over a socket of their own, if the peer listens on one
    """

    frame_bytes: int = FRAME_BYTES
    silence_s: float = 5.0
    stall_s: float = 10.0
    call_s: float = 5.0
    idle_s: float = 60.0
    pace: RateLimiter | None = None
    direct: bool = False


class FrameStream(Protocol):
    """Frames out and answers in, on one connection: gRPC's Push, or a direct one."""

    is_direct: bool

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send one frame; waits while the stream is full. Returns the bytes of the message.

        0: the stream has ended, and `answers` raises why.
        """

    def answers(self) -> AsyncGenerator[bytes, None]:
        """PushResponses, until the stream ends or raises what ended it."""

    def close(self) -> None:
        """End the stream from our side."""


class PushStream:
    """A `FrameStream` over gRPC. It copies each frame once, into one message."""

    is_direct = False

    def __init__(self, link: Link):
        self._address = link.address
        self._call = link.channel.stream_stream(f"/{KV_SERVICE}/Push")(
            metadata=link.metadata
        )

    async def send(self, parts: Sequence[Buffer]) -> int:
        message = frame_message(parts)
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return 0
        return len(message)

    async def answers(self) -> AsyncGenerator[bytes, None]:
        with failures_of(self._address):
            async for reply in self._call:
                yield reply

    def close(self) -> None:
        self._call.cancel()


class Channel:
    """All hand-offs from this rank to one of another worker: their stream, leases and calls.

    address: of the rank that takes the frames
    control: of its rank 0, which takes the calls; empty: the same
    host:  the link to the peer's host, shared by all channels to it
    meter: of the current stream
    """

    def __init__(
        self,
        address: str,
        security: Security | None = None,
        options: ChannelOptions | None = None,
        host: HostLink | None = None,
        control: str = "",
    ):
        self.address = address
        self.host = host or HostLink(address)
        self.options = options or ChannelOptions()
        self.link = connect(address, security)  # it connects when first used
        self.control = self.link
        if control not in ("", address):
            self.control = connect(control, security)
        self._security = security
        self._attached: dict[int, Sender] = {}
        self._serving: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.meter = RateMeter()
        self._needed_at = 0.0  # when the last hand-off ended
        self._fastest_call_s = math.inf
        self._has_answers = False  # of the current stream
        # how the last direct stream ended, if none of its frames was answered
        self._unanswered: DisaggError | None = None
        self._lease_s = math.inf

    @property
    def report(self) -> LinkReport | None:
        """Latency and rate of the link; None: unknown."""
        return self.host.report

    @property
    def frame_bytes(self) -> int:
        """Where frames are cut: small enough for the link to answer in time."""
        return self.host.frame_bytes(self.options.frame_bytes)

    @property
    def wants_direct(self) -> bool:
        """Whether the next stream should be a direct connection."""
        return self.options.direct and self.host.may_dial(time.monotonic())

    async def meet(self, is_short: bool = False) -> bool:
        """Measure the link, unless its rate is known; whether the peer answered."""
        try:
            await self._measure(is_short)
        except DisaggError as error:
            log.warning("the link to %s cannot be measured: %s", self.address, error)
            return False
        return True

    async def _measure(self, is_short: bool) -> None:
        async with self.host.probing:
            if self.host.report is not None:
                await reach(self.link)
                return
            self.host.report = await measure(self.link, is_short=is_short)
            log.info("%s", self.host.report)

    async def close(self) -> None:
        """Break all attachments and close the link."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        await self.link.close()
        if self.control is not self.link:
            await self.control.close()

    # -- called by senders

    @contextmanager
    def carry(self, sender: Sender, attached: Attached) -> Iterator[None]:
        """Send the frames of an attached hand-off and renew its lease, until the block ends."""
        self._attached[sender.ticket.nonce] = sender
        self._lease_s = attached.lease_s
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(attached))
        self._wake.set()
        try:
            yield
        finally:
            self._attached.pop(sender.ticket.nonce, None)
            self._needed_at = time.monotonic()

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()

    async def attach(self, sender: Sender, attach: Attach) -> Attached:
        """Take a reservation over; answers what the receiver has."""
        data = attach.to_proto().SerializeToString()
        reply = await self._call("Attach", data, self.options.call_s, sender)
        return Attached.from_proto(parse(kv.AttachResponse, reply))

    async def commit(self, sender: Sender, commit: Commit) -> Ack:
        """Commit a hand-off."""
        data = frame_message(pack(commit))
        reply = await self._call("Commit", data, self.options.stall_s, sender)
        return Ack.from_proto(parse(kv.CommitResponse, reply))

    async def _call(
        self, name: str, data: bytes, timeout_s: float, *senders: Sender
    ) -> bytes:
        """The answer to a call, or PeerLostError. Its bytes, both ways, count for `senders`."""
        began = time.monotonic()
        try:
            reply = await self.control.call(f"/{KV_SERVICE}/{name}", data, timeout_s)
        except DeadlineError as error:
            raise PeerLostError(str(error)) from error
        call_s = time.monotonic() - began
        self._fastest_call_s = min(self._fastest_call_s, call_s)
        for sender in senders:
            sender.wire_bytes += (len(data) + len(reply)) // len(senders)
        return reply

    # -- the stream

    async def _serve(self, attached: Attached) -> None:
        """Run one stream until it ends in any way; then end all attachments on it."""
        error: DisaggError = PeerLostError(f"the channel to {self.address} was closed")
        self.meter = RateMeter()
        self._has_answers = False
        is_direct = False
        try:
            with closing(await self._open(attached)) as stream:
                is_direct = stream.is_direct
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_frames(stream))
                    group.create_task(self._receive_answers(stream))
                    group.create_task(self._renew_leases())
                    group.create_task(self._watch_stalls())
        except Exception as failure:
            error = self._reason(failure)
        finally:
            self._serving = None
            quiet_s = self.meter.quiet_s(time.monotonic())
            self.host.broke(quiet_s)
            if is_direct and quiet_s and not self._has_answers:
                self._note_unanswered(error, quiet_s)
            for sender in self._attached.values():
                sender.end(error)
            self._attached.clear()

    async def _open(self, attached: Attached) -> FrameStream:
        """A direct connection where both ends want one; gRPC where it fails and fails again."""
        if self._unanswered is not None:  # the peer has just attached: it is not dead
            self.host.dial_failed(self._unanswered, time.monotonic())
            self._unanswered = None
        if not attached.port or not self.wants_direct:
            return PushStream(self.link)
        try:
            return await dial(self.address, attached.port, attached.key, self._security)
        except PeerLostError as error:
            self.host.dial_failed(error, time.monotonic())
            if self.wants_direct:
                raise  # attaching again gets another key
            return PushStream(self.link)

    def _note_unanswered(self, error: DisaggError, quiet_s: float) -> None:
        """A direct stream ended without an answer. One that waited for long is not tried twice:
        hand-offs would be given up before the second one ends."""
        if quiet_s > self.options.stall_s:
            self.host.dial_failed(error, time.monotonic(), for_good=True)
        else:
            self._unanswered = error

    async def _send_frames(self, stream: FrameStream) -> None:
        """Send frames as they become ready; returns when the stream has ended."""
        if self.report is None and self._bytes_to_come() > PROBED_BYTES:
            await self.meet(is_short=True)
        pace = self.options.pace
        is_open = True
        while is_open:
            self._wake.clear()
            window = self.host.window_bytes(self.options.frame_bytes)
            is_full = self.meter.bytes_in_flight >= window
            most_urgent = None if is_full else self._next_frame()
            if most_urgent is None:
                await self._wake.wait()
                continue
            sender, frame = most_urgent
            self.meter.leaves(frame.size, time.monotonic())
            if pace is not None:
                delay_s = pace.delay(frame.size, time.monotonic())
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
            nbytes = await stream.send(frame.parts)
            sender.wire_bytes += nbytes
            is_open = nbytes > 0

    def _bytes_to_come(self) -> int:
        """Bytes of all attached hand-offs, except the items that the peer has."""
        return sum(sender.queue.bytes_to_come for sender in self._attached.values())

    def _next_frame(self) -> tuple[Sender, OutgoingFrame] | None:
        """The frame of the most urgent hand-off that has one and credit for it."""
        for sender in sorted(self._attached.values(), key=Sender.urgency):
            try:
                if frame := sender.next_frame():
                    return sender, frame
            except Exception as error:  # ends this hand-off and no other
                log.exception("%s cannot be sent", sender)
                del self._attached[sender.ticket.nonce]
                sender.end(error)
        return None

    async def _receive_answers(self, stream: FrameStream) -> None:
        """Pass answers on to their senders; raises when the stream ends."""
        async with aclosing(stream.answers()) as answers:
            async for data in answers:
                answer = FrameAnswer.from_proto(parse(kv.PushResponse, data))
                if answer.error and not answer.gen:  # the stream itself failed
                    raise answer.error
                self._on_answer(stream)
                sender = self._attached.get(answer.nonce)
                if sender is not None:
                    sender.on_frame_answer(answer, len(data))
                self._wake.set()
        raise PeerLostError(f"{self.address} ended the stream")

    def _on_answer(self, stream: FrameStream) -> None:
        """Update what is known of the link: its rate, once a few frames were answered."""
        self.meter.arrived(time.monotonic())
        if stream.is_direct and not self._has_answers:
            self.host.dial_worked()
        self._has_answers = True
        if self.report is not None and self.meter.sample.frames < SAMPLE_FRAMES:
            return
        sample = self.meter.take_sample()
        measured = LinkReport(
            peer=self.address,
            transport=self.link.transport,
            round_trip_ms=1e3 * self._fastest_call_s,
            gbytes_per_s=sample.bytes_per_s / 1e9,
        )
        self.host.learn(measured, sample)

    async def _renew_leases(self) -> None:
        """Keep all leases alive. A call that fails is repeated with the next renewal."""
        while True:
            pause_s = max(LEAST_PAUSE_S, self._lease_s / RENEWALS_PER_LEASE)
            await asyncio.sleep(pause_s)
            if not self._attached:
                continue
            renewed = {sender: sender.ticket for sender in self._attached.values()}
            tickets = [ticket_to_proto(ticket) for ticket in renewed.values()]
            data = kv.RenewRequest(tickets=tickets).SerializeToString()
            try:
                timeout_s = min(self.options.call_s, pause_s)
                reply = await self._call("Renew", data, timeout_s, *renewed)
            except PeerLostError as error:
                log.warning(
                    "the leases at %s were not renewed: %s", self.address, error
                )
                continue
            over = set(parse(kv.RenewResponse, reply).over)
            for sender, ticket in renewed.items():
                if ticket.nonce in over and ticket is sender.ticket:
                    sender.end(ReservationError(f"{sender} is over at {self.address}"))

    async def _watch_stalls(self) -> None:
        """Raise PeerLostError if frames are not answered, or the stream is idle for long."""
        while True:
            await asyncio.sleep(self.options.stall_s / 4)
            idle_s = time.monotonic() - self._needed_at
            if not self._attached and idle_s > self.options.idle_s:
                raise PeerLostError(f"no hand-off for {self.options.idle_s:g} s")
            quiet_s = self.meter.quiet_s(time.monotonic())
            if quiet_s > self.options.stall_s:
                raise PeerLostError(
                    f"{self.address} answered nothing for {quiet_s:.1f} s"
                )

    def _reason(self, failure: Exception) -> DisaggError:
        """The error for all hand-offs: PeerLostError, or one that attaching again cannot mend."""
        while isinstance(failure, ExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, DisaggError):
            level = logging.WARNING if self._attached else logging.INFO
            log.log(level, "the channel to %s broke: %s", self.address, failure)
        else:
            log.error("the channel to %s failed", self.address, exc_info=failure)
        if isinstance(failure, ConfigError | VersionError | PeerLostError):
            return failure
        return PeerLostError(f"the channel to {self.address} broke: {failure}")


class Peers:
    """The channels of a worker by address, and its links by host.

    A channel without hand-offs and without a stream is closed, as workers come and go. The report
    of its link is remembered for hours.
    """

    def __init__(self, security: Security | None, config: TransferConfig):
        frame_bytes = config.frame_bytes
        pace = None
        if config.link_mbps is not None:
            pace = RateLimiter(config.link_mbps * 1e6 / 8, config.burst_bytes)
            frame_bytes = min(frame_bytes, config.burst_bytes)
        self.options = ChannelOptions(
            frame_bytes=frame_bytes,
            pace=pace,
            direct=config.channel == "direct",
        )
        self._security = security
        # by the addresses of the rank and its rank 0
        self._channels = WeakValueDictionary[tuple[str, str], Channel]()
        self._hosts = HostLinks()

    def get(self, address: str, control: str = "") -> Channel:
        """The channel to "host:port"; it connects when it is used.

        control: address of rank 0 of a follower that has this address
        """
        key = address, control or address
        if (channel := self._channels.get(key)) is None:
            host = self._hosts.to(address, time.monotonic())
            channel = Channel(address, self._security, self.options, host, control)
            self._channels[key] = channel
        return channel

    async def meet(self, addresses: Iterable[str]) -> list[str]:
        """Measure unknown links before they are needed; describes each peer that answered."""
        lines = []
        for channel in [self.get(address) for address in addresses]:
            if await channel.meet() and channel.report is not None:
                lines.append(str(replace(channel.report, peer=channel.address)))
        return lines

    def as_info(self) -> list[dict[str, Any]]:
        """The links, as plain values: see `HostLink.as_info`."""
        return self._hosts.as_info()

    async def close(self) -> None:
        """Close all channels."""
        for channel in list(self._channels.values()):
            await channel.close()
