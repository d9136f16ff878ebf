"""All hand-offs from one worker to another: one stream of frames, one renewal of their leases.

The channel sends the frame of the most urgent hand-off that has credit: the earliest deadline, then
the lowest layer. Credit is per hand-off, so none holds up another. Anything that ends the stream,
failures of our own included, breaks it for all attached hand-offs, which attach again; an error of
one hand-off ends only that one. An idle stream ends after a while, and then gRPC closes the link.
Lives on the io loop.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import asdict, dataclass
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
from disagg.transfer.link import LinkReport, RateLimiter, RateMeter, measure
from disagg.transfer.messages import (
    KV_SERVICE,
    Ack,
    Attach,
    Attached,
    Credit,
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

    async def send(self, parts: Sequence[Buffer]) -> int:
        """Send one frame; waits while the stream is full. Returns the bytes of the message.

        0: the stream has ended, and `answers` raises why.
        """

    def answers(self) -> AsyncGenerator[bytes, None]:
        """PushResponses, until the stream ends or raises what ended it."""

    def close(self) -> None:
        """End the stream from our side."""


class PushStream:
    """A `FrameStream` over gRPC. It copies what is sent once, into one message."""

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
    """All hand-offs from this worker to one other: their stream, their leases, their calls.

    report: what the link can do; None until it was measured
    meter:  of the current stream
    """

    def __init__(
        self,
        address: str,
        security: Security | None = None,
        options: ChannelOptions | None = None,
    ):
        self.address = address
        self.options = options or ChannelOptions()
        self.link = connect(address, security)  # it connects when first used
        self._security = security
        self._attached: dict[int, Sender] = {}
        self._serving: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.report: LinkReport | None = None
        self.meter = RateMeter()
        self._needed_at = 0.0  # when the last hand-off ended
        self._lease_s = math.inf

    @property
    def frame_bytes(self) -> int:
        """Where frames are cut: small enough for a measured link to answer in time."""
        most = self.options.frame_bytes
        return most if self.report is None else self.report.frame_bytes(most)

    async def meet(self) -> None:
        """Measure the link."""
        try:
            self.report = await measure(self.link)
        except DisaggError as error:
            log.warning("the link to %s cannot be measured: %s", self.address, error)
        else:
            log.info("%s", self.report)

    async def close(self) -> None:
        """Break all attachments and close the link."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        await self.link.close()

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
        try:
            reply = await self.link.call(f"/{KV_SERVICE}/{name}", data, timeout_s)
        except DeadlineError as error:
            raise PeerLostError(str(error)) from error
        for sender in senders:
            sender.wire_bytes += (len(data) + len(reply)) // len(senders)
        return reply

    # -- the stream

    async def _serve(self, attached: Attached) -> None:
        """Run one stream until it ends in any way; then end all attachments on it."""
        error: DisaggError = PeerLostError(f"the channel to {self.address} was closed")
        self.meter = RateMeter()
        try:
            with closing(await self._open(attached)) as stream:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_frames(stream))
                    group.create_task(self._receive_credit(stream))
                    group.create_task(self._renew_leases())
                    group.create_task(self._watch_stalls())
        except Exception as failure:
            error = self._reason(failure)
        finally:
            self._serving = None
            for sender in self._attached.values():
                sender.end(error)
            self._attached.clear()

    async def _open(self, attached: Attached) -> FrameStream:
        if self.options.direct and attached.port:
            return await dial(self.address, attached.port, attached.key, self._security)
        return PushStream(self.link)

    async def _send_frames(self, stream: FrameStream) -> None:
        """Send frames as they become ready; returns when the stream has ended."""
        if self.report is None:
            await self.meet()
        pace = self.options.pace
        is_open = True
        while is_open:
            self._wake.clear()
            most_urgent = self._next_frame()
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

    async def _receive_credit(self, stream: FrameStream) -> None:
        """Pass answers on to their senders; raises when the stream ends."""
        async with aclosing(stream.answers()) as answers:
            async for data in answers:
                credit = Credit.from_proto(parse(kv.PushResponse, data))
                if credit.error and not credit.gen:  # the stream itself failed
                    raise credit.error
                self.meter.arrived(time.monotonic())
                sender = self._attached.get(credit.nonce)
                if sender is not None:
                    sender.on_credit(credit, len(data))
                self._wake.set()
        raise PeerLostError(f"{self.address} ended the stream")

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
    """The channels of a worker by address, with the reports of their links.

    A channel without hand-offs and without a stream is closed, as workers come and go. Those that
    were measured in advance stay.
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
        self._channels = WeakValueDictionary[str, Channel]()
        self._measured = set[Channel]()

    def get(self, address: str) -> Channel:
        """The channel to "host:port"; it connects when it is used."""
        if (channel := self._channels.get(address)) is None:
            channel = self._channels[address] = Channel(
                address, self._security, self.options
            )
        return channel

    async def meet(self, addresses: Iterable[str]) -> list[str]:
        """Measure links before they are needed; describes each that could be measured."""
        channels = [self.get(address) for address in addresses]
        for channel in channels:
            await channel.meet()
        self._measured.update(x for x in channels if x.report)
        return [str(x.report) for x in channels if x.report]

    def as_info(self) -> list[dict[str, Any]]:
        """The measured links, as plain values."""
        return [asdict(x.report) for x in self._channels.values() if x.report]

    async def close(self) -> None:
        """Close all channels."""
        for channel in list(self._channels.values()):
            await channel.close()
