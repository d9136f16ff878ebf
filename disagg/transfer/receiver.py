"""KvTransferService of a decode worker: the rules of `reservations.py` around channels.

    Attach, Renew, Commit ──► Receiver ──► Reservations ──► on_admit, on_drop: the engine
    Push, or a direct one ──► take    ──►      │
                                               └──► arena: verified, then copied

Frames are verified and copied inline, at most 2 MiB at a time, so that nothing runs between a
check and the copy. Every refusal reaches the sender with its name. Lives on the io loop; knows no
model and no engine.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import grpc

from disagg.errors import CorruptFrameError, DisaggError
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.link import absorb
from disagg.transfer.messages import (
    KV_SERVICE,
    Attach,
    FrameAnswer,
    parse,
    ticket_from_proto,
)
from disagg.transfer.reservations import Reservations
from disagg.transfer.rpc import rpc_handlers
from disagg.wire import Buffer, Commit, PageFrame, message_frame, unpack

TURN_S = 0.25  # between two checks of leases and of cached blocks
SCRUB_BYTES = 512 << 10  # verified in one check
log = logging.getLogger(__name__)


class Receiver:
    """Takes prompts in and hands them to the engine.

    on_damage: called with (rid, attempt, error) of a prompt that ended as its pages were damaged
    direct:    returns (port, key) of a direct channel for one attachment; (0, b""): there is none
    failures:  refusals by reason
    """

    def __init__(
        self,
        reservations: Reservations,
        on_damage: Callable[
            [str, int, DisaggError], None
        ] = lambda rid, attempt, error: None,
    ):
        self.reservations = reservations
        self.direct: Callable[[], tuple[int, bytes]] = lambda: (0, b"")
        self.failures: Counter[str] = Counter()
        self._on_damage = on_damage

    # -- for the worker

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service, for `rpc.start_server`."""
        calls = {
            "Attach": self.attach,
            "Renew": self.renew,
            "Commit": self.commit,
            "Probe": absorb,
        }
        return rpc_handlers(KV_SERVICE, calls, {"Push": self.push}, self._count_failure)

    async def run(self) -> None:
        """End leases when they are over and verify cached blocks, until it is cancelled.

        Raises any failure, as no lease would end without it.
        """
        while True:
            await asyncio.sleep(TURN_S)
            self.reservations.expire()
            await self.scrub()

    def take(self, data: Buffer, channel: object) -> FrameAnswer:
        """Store a frame, or drop it and answer with an error; the stream goes on either way.

        channel: identifies the stream that the frame came over

        Raises CorruptFrameError or VersionError for anything but a page frame: it ends the stream.
        """
        frame = unpack(data)
        if not isinstance(frame, PageFrame):
            raise CorruptFrameError(
                f"a {type(frame).__name__} where pages were expected"
            )
        error: DisaggError | None = None
        try:
            self.reservations.store(frame, channel)
        except DisaggError as failure:
            error = failure
            self._count_failure(failure)
        return FrameAnswer(frame.ticket.nonce, frame.ticket.gen, error)

    def channel_ended(self, channel: object) -> None:
        """A channel ended, for any reason: its attachments are broken."""
        self.reservations.channel_ended(channel)

    async def scrub(self, max_bytes: int = SCRUB_BYTES) -> None:
        """Verify the next cached blocks, up to `max_bytes`; drop and report damaged ones.

        In a thread, as a device copies the bytes only after the kernels that run now.
        """
        scrub = self.reservations.cache.begin_scrub(max_bytes)
        damaged: dict[bytes, CorruptFrameError] = {}
        try:
            damaged = await asyncio.to_thread(scrub.verify)
        finally:
            ended = self.reservations.end_scrub(scrub, damaged)
        for error, requests in ended.items():
            log.error("%s; %d requests used it", error, len(requests))
            for rid, attempt in requests:
                self._on_damage(rid, attempt, error)

    def _count_failure(self, error: DisaggError) -> None:
        self.failures[error.reason] += 1

    # -- the service: bytes of messages in and out

    async def attach(self, data: bytes) -> bytes:
        """An AttachResponse."""
        attach = Attach.from_proto(parse(kv.AttachRequest, data))
        attached = self.reservations.attach(attach)
        if attach.direct and not attached.admitted:
            port, key = self.direct()
            attached = replace(attached, port=port, key=key)
        return attached.to_proto().SerializeToString()

    async def push(
        self, messages: AsyncIterator[Buffer]
    ) -> AsyncGenerator[bytes, None]:
        """PushResponses to the frames of one channel."""
        channel = object()
        try:
            async for message in messages:
                answer = self.take(message_frame(message), channel)
                yield answer.to_proto().SerializeToString()
        finally:
            self.channel_ended(channel)

    async def renew(self, data: bytes) -> bytes:
        """A RenewResponse."""
        request = parse(kv.RenewRequest, data)
        over = self.reservations.renew(map(ticket_from_proto, request.tickets))
        return kv.RenewResponse(over=over).SerializeToString()

    async def commit(self, data: bytes) -> bytes:
        """A CommitResponse. The engine has the prompt then."""
        commit = unpack(message_frame(data))
        if not isinstance(commit, Commit):
            raise CorruptFrameError(
                f"a {type(commit).__name__} where a commit was expected"
            )
        return self.reservations.commit(commit).to_proto().SerializeToString()
