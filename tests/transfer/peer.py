"""A receiver that does as a test tells it: the service of the .proto, without rules of its own."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from disagg.errors import TransferError
from disagg.metrics import HandoffStats
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.channel import Channel, ChannelOptions
from disagg.transfer.link import absorb
from disagg.transfer.messages import (
    KV_SERVICE,
    Ack,
    Attach,
    Attached,
    Credit,
    parse,
    read,
)
from disagg.transfer.rpc import rpc_handlers, start_server
from disagg.transfer.security import Security
from disagg.transfer.sender import Sender
from disagg.wire import Commit, PageFrame, Ticket, digest, message_frame, unpack
from tests.transfer.prompts import EPOCH, MODEL, Prompt

QUICK = ChannelOptions(frame_bytes=4000, silence_s=1.0, stall_s=5.0, call_s=2.0)


@dataclass
class Peer:
    """What came, and what to say to it.

    have:      digests of what is here by place, by nonce; without an entry a hand-off is unknown
    pause:     waited for before a frame is taken
    on_attach: the answer to an attachment, instead of the honest one
    on_frame:  called before a frame is stored; its answer goes out instead of the honest credit
    on_commit: the answer to a commit, instead of the honest one
    """

    credit: int = 8000
    lease_s: float = 10.0
    address: str = ""
    have: dict[int, dict[int, int]] = field(default_factory=dict)
    attaches: list[Attach] = field(default_factory=list)
    frames: list[PageFrame] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    renewals: list[list[Ticket]] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    streams: int = 0  # open now
    opened: int = 0
    pause: Callable[[PageFrame], Awaitable[object]] | None = None
    on_attach: Callable[[Attach], Attached | None] = lambda attach: None
    on_frame: Callable[[PageFrame], Credit | None] = lambda frame: None
    on_commit: Callable[[Commit], Ack | None] = lambda commit: None

    async def attach(self, data: bytes) -> bytes:
        attach = Attach.from_message(parse(kv.AttachRequest, data))
        self.attaches.append(attach)
        have = self.have.setdefault(attach.ticket.nonce, {})
        honest = Attached(False, [*have], [*have.values()], self.lease_s, self.credit)
        return (self.on_attach(attach) or honest).to_message().SerializeToString()

    async def push(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        self.streams += 1
        self.opened += 1
        try:
            async for message in messages:
                frame = unpack(message_frame(message))
                assert isinstance(frame, PageFrame)
                yield (await self.take(frame)).to_message().SerializeToString()
        finally:
            self.streams -= 1

    async def take(self, frame: PageFrame) -> Credit:
        if self.pause:
            await self.pause(frame)
        self.frames.append(frame)
        return self.on_frame(frame) or self.store(frame)

    def store(self, frame: PageFrame) -> Credit:
        assert tuple(map(digest, frame.payload)) == frame.digests
        here = self.have.setdefault(frame.ticket.nonce, {})
        here.update(zip(frame.places, frame.digests, strict=True))
        return Credit(frame.ticket.nonce, frame.ticket.gen)

    async def renew(self, data: bytes) -> bytes:
        tickets = list(read(parse(kv.RenewRequest, data))["tickets"])
        self.renewals.append(tickets)
        over = [ticket.nonce for ticket in tickets if ticket.nonce in self.over]
        return kv.RenewResponse(over=over).SerializeToString()

    async def commit(self, data: bytes) -> bytes:
        commit = unpack(message_frame(data))
        assert isinstance(commit, Commit)
        self.commits.append(commit)
        return (self.on_commit(commit) or self.judge(commit)).to_message().SerializeToString()

    def judge(self, commit: Commit) -> Ack:
        have = self.have[commit.ticket.nonce]
        if missing := [i for i, seen in enumerate(commit.digests) if have.get(i) != seen]:
            raise TransferError(f"item {missing[0]} never came")
        return Ack(verify_ms=1.0, admit_ms=2.0)

    def sender(
        self, prompt: Prompt, channel: Channel, nonce: int = 7, deadline_s: float = 20.0
    ) -> Sender:
        attach = Attach(Ticket(nonce, EPOCH, 0), MODEL, prompt.plan.fingerprint, prompt.tokens)
        return Sender(channel, attach, prompt.plan, prompt.read, deadline_s)


@asynccontextmanager
async def open_peer(
    options: ChannelOptions = QUICK,
    security: Security | None = None,
    client: Security | None = None,
    **script: object,
) -> AsyncIterator[tuple[Peer, Channel]]:
    """A peer on a free port and a channel to it."""
    peer = Peer(**script)
    calls = {"Attach": peer.attach, "Renew": peer.renew, "Commit": peer.commit, "Probe": absorb}
    handler = rpc_handlers(KV_SERVICE, calls, both_stream={"Push": peer.push})
    server, peer.address = await start_server([handler], "127.0.0.1", security)
    channel = Channel(peer.address, client or security, options)
    try:
        yield peer, channel
    finally:
        await channel.close()
        await server.stop(None)


def offer_all(sender: Sender, prompt: Prompt) -> None:
    """What an engine says of a prompt."""
    for layer in range(len(prompt.plan.group_of)):
        sender.offer(prompt.checklist.layer(layer))
    sender.finish(42, {"ids": [1, 2]})


async def hand_over(sender: Sender, prompt: Prompt) -> HandoffStats:
    """All of a prompt at once."""
    offer_all(sender, prompt)
    return await sender.run()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that will happen soon."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
