"""KvTransferService of a decode worker: the rules of `reservations.py` around channels.

    Attach, Renew, Commit ──► Receiver ──► Reservations ──► on_admit, on_drop: the engine
    Push, or a direct one ──► take    ──►      │
                                               └──► arena: verified, then copied

In a group that is rank 0. Its followers have a PageReceiver around `incoming.FollowerParts`: frames
of their parts come straight to them, and rank 0 asks them what has arrived.

Frames are verified and copied inline, at most 2 MiB at a time, so that nothing runs between a
check and the copy. Every refusal reaches the sender with its name. Lives on the io loop; knows no
model and no engine.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

import grpc

from disagg.errors import CorruptFrameError, DisaggError
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.follower_calls import Followers
from disagg.transfer.link import absorb
from disagg.transfer.messages import (
    KV_SERVICE,
    Attach,
    Attached,
    FrameAnswer,
    Grant,
    Job,
    parse,
    parse_commit,
    ticket_from_proto,
)
from disagg.transfer.prefix_cache import Scrub
from disagg.transfer.reservations import Reservations
from disagg.transfer.rpc import rpc_handlers
from disagg.wire import Buffer, PageFrame, message_frame, unpack

TURN_S = 0.25  # between two checks of leases and of cached blocks
SCRUB_BYTES = 512 << 10  # verified in one check
log = logging.getLogger(__name__)


class PartStore(Protocol):
    """The rules for frames: `Reservations`, or the parts of a follower."""

    def store(self, frame: PageFrame, channel: object) -> None:
        """Verify a frame and copy its items to their addresses."""

    def channel_ended(self, channel: object) -> None:
        """A channel ended, for any reason."""


class PageReceiver:
    """Takes frames in, on any rank.

    direct:   returns (port, key) of a direct channel for one attachment; (0, b""): there is none
    failures: refusals by reason
    """

    def __init__(self, store: PartStore):
        self.direct: Callable[[], tuple[int, bytes]] = lambda: (0, b"")
        self.failures: Counter[str] = Counter()
        self._store = store

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service, for `rpc.start_server`."""
        calls = {"Probe": absorb}
        return rpc_handlers(KV_SERVICE, calls, {"Push": self.push}, self._count_failure)

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
            self._store.store(frame, channel)
        except DisaggError as failure:
            error = failure
            self._count_failure(failure)
        return FrameAnswer(frame.ticket.nonce, frame.ticket.gen, error)

    def channel_ended(self, channel: object) -> None:
        """A channel ended, for any reason: its attachments are broken."""
        self._store.channel_ended(channel)

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

    def offer_direct(self, attach: Attach, attached: Attached) -> Attached:
        """The answer to an attachment, with a direct connection if the sender wants one."""
        if not attach.direct:
            return attached
        port, key = self.direct()
        return replace(attached, port=port, key=key)

    def _count_failure(self, error: DisaggError) -> None:
        self.failures[error.reason] += 1


class Receiver(PageReceiver):
    """Takes prompts in and hands them to the engine: of a worker, or rank 0 of one.

    on_damage: called with (rid, attempt, error) of a prompt that ended as its pages were damaged
    followers: of the group
    """

    def __init__(
        self,
        reservations: Reservations,
        on_damage: Callable[
            [str, int, DisaggError], None
        ] = lambda rid, attempt, error: None,
        followers: Followers | None = None,
    ):
        super().__init__(reservations)
        self.reservations = reservations
        self.followers = followers or Followers()
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

    async def reserve(self, job: Job, epoch: int) -> Grant:
        """Reserve room for a job, at once, on all ranks; raises as `Reservations.reserve` does."""
        grant = self.reservations.reserve(job, epoch)
        if not self.followers.addresses:
            return grant
        try:
            await self.followers.open(self.reservations.opening(grant.nonce))
        except DisaggError as error:
            self.reservations.abort(job.rid, job.attempt, str(error))
            raise
        return replace(grant, followers=self.followers.addresses)

    async def run(self) -> None:
        """End leases when they are over and verify cached blocks, until it is cancelled.

        Raises any failure, as no lease would end without it.
        """
        while True:
            await asyncio.sleep(TURN_S)
            self.reservations.expire()
            await self.scrub()

    async def scrub(self, max_bytes: int = SCRUB_BYTES) -> None:
        """Verify the next cached blocks, up to `max_bytes`; drop and report damaged ones.

        In a thread, as a device copies the bytes only after the kernels that run now. Followers
        read the digests of their own heads.
        """
        scrub = self.reservations.cache.begin_scrub(max_bytes)
        damaged: dict[bytes, CorruptFrameError] = {}
        try:
            damaged = await asyncio.to_thread(scrub.verify)
            if scrub.blocks:
                damaged |= await self._scrub_followers(scrub)
        finally:
            ended = self.reservations.end_scrub(scrub, damaged)
        for error, requests in ended.items():
            log.error("%s; %d requests used it", error, len(requests))
            for rid, attempt in requests:
                self._on_damage(rid, attempt, error)

    async def _scrub_followers(self, scrub: Scrub) -> dict[bytes, CorruptFrameError]:
        """The damaged blocks of all followers that answer; the others have a later turn."""
        ranks = range(1, 1 + len(self.followers.handlers))
        calls = [self.followers.digests(rank, scrub.spans(rank)) for rank in ranks]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        damaged: dict[bytes, CorruptFrameError] = {}
        for rank, digests in zip(ranks, answers, strict=True):
            if isinstance(digests, DisaggError):
                log.debug("rank %d did not verify its cached pages: %s", rank, digests)
            elif isinstance(digests, BaseException):
                raise digests
            else:
                damaged |= scrub.compare(digests, rank)
        return damaged

    # -- the service: bytes of messages in and out

    async def attach(self, data: bytes) -> bytes:
        """An AttachResponse."""
        attach = Attach.from_proto(parse(kv.AttachRequest, data))
        attached = self.reservations.attach(attach)
        if rank := self.reservations.follower_of(attach.ticket):
            of_follower = await self.followers.attach(rank, attach)
            attached = replace(
                of_follower, lease_s=attached.lease_s, credit=attached.credit
            )
        elif not attached.admitted:
            attached = self.offer_direct(attach, attached)
        return attached.to_proto().SerializeToString()

    async def renew(self, data: bytes) -> bytes:
        """A RenewResponse."""
        request = parse(kv.RenewRequest, data)
        over = self.reservations.renew(map(ticket_from_proto, request.tickets))
        return kv.RenewResponse(over=over).SerializeToString()

    async def commit(self, data: bytes) -> bytes:
        """A CommitResponse. After the last part the engine has the prompt."""
        commit = parse_commit(message_frame(data))
        verify_ms = 0.0
        if rank := self.reservations.follower_of(commit.ticket):
            verify_ms = await self.followers.check(rank, commit)
        ack = self.reservations.commit(commit, verify_ms)
        return ack.to_proto().SerializeToString()
