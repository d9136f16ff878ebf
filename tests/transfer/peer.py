"""A decode worker without an engine: the receiver and its ports, honest unless a test says else."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from disagg.errors import DisaggError
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.channel import Channel, ChannelOptions
from disagg.transfer.direct import DirectServer
from disagg.transfer.messages import (
    Attach,
    Attached,
    FrameAnswer,
    parse,
    ticket_from_proto,
)
from disagg.transfer.receiver import Receiver
from disagg.transfer.rpc import start_server
from disagg.transfer.security import Security
from disagg.transfer.sender import Sender
from disagg.transfer.stats import HandoffStats
from disagg.wire import Buffer, PageFrame, Ticket, message_frame, unpack
from tests.transfer.desk import Desk
from tests.transfer.prompts import MODEL, Prompt

HOST = "127.0.0.1"
QUICK = ChannelOptions(frame_bytes=4000, silence_s=1.0, stall_s=5.0, call_s=2.0)


class Peer(Desk):
    """A desk behind the service. What came, and what to say to it:

    pause:     waited for before a frame that came over gRPC is looked at
    on_attach: its answer goes out, and nothing is attached
    on_frame:  its answer goes out, and nothing is stored
    on_commit: waited for behind the commit, before the answer goes out
    """

    def __init__(
        self, clock: Callable[[], float] | None = time.monotonic, **desk: object
    ):
        super().__init__(clock=clock, **desk)
        self.receiver = Scripted(self)
        self.door: DirectServer | None = None
        self.address, self.direct_port = "", 0
        self.damaged: list[tuple[str, int, str]] = []
        self.attaches: list[Attach] = []
        self.frames: list[PageFrame] = []
        self.renewals: list[tuple[Ticket, ...]] = []
        self.commits = self.opened = self.ended = (
            0  # `opened` over gRPC, `ended` anywhere
        )
        self.nbytes = 0  # of all messages, both ways
        self.channels: set[object] = set()  # on which frames came
        self.pause: Callable[[], Awaitable[object]] | None = None
        self.on_attach: Callable[[Attach], Attached | None] = lambda attach: None
        self.on_frame: Callable[[PageFrame], FrameAnswer | None] = lambda frame: None
        self.on_commit: Callable[[], Awaitable[None]] | None = None

    def promise(self, prompt: Prompt, rid: str = "r") -> Attach:
        grant = self.reserve(prompt, rid=rid)
        ticket = Ticket(grant.nonce, grant.epoch, 0)
        return Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens)

    def sender(
        self, prompt: Prompt, channel: Channel, rid: str = "r", deadline_s: float = 20.0
    ) -> Sender:
        """A hand-off to it that is reserved."""
        attach = self.promise(prompt, rid)
        sender = Sender(channel, attach, prompt.plan, deadline_s)
        sender.queue.read_from(prompt.source)
        return sender

    def arrived(self) -> int:
        """Items of all prompts that are here."""
        return sum(len(x.live().parts[0].digests) for x in self.ledger._live.values())

    @property
    def held(self) -> int:
        """Reservations that wait for their pages."""
        return self.ledger.gauges()["reservations"]

    def assert_admitted(self, **prompts: Prompt) -> None:
        """The engine has these prompts by their rids, whole, and no others."""
        assert {*self.engine} == {*prompts}
        for rid, prompt in prompts.items():
            assert prompt.equals(self.pool.arena, self.engine[rid].groups)

    def close(self) -> None:
        """The engine finishes everything it has; then nothing is held."""
        self.free()
        self.assert_nothing_held()


class Scripted(Receiver):
    """Notes what comes, and says what its peer is told to say."""

    def __init__(self, peer: Peer):
        def note(rid: str, attempt: int, error: DisaggError) -> None:
            peer.damaged.append((rid, attempt, error.reason))

        super().__init__(peer.ledger, note)
        self._peer = peer

    async def attach(self, data: bytes) -> bytes:
        attach = Attach.from_proto(parse(kv.AttachRequest, data))
        self._peer.attaches.append(attach)
        scripted = self._peer.on_attach(attach)
        return self._count(
            data, _bytes_of(scripted) if scripted else await super().attach(data)
        )

    async def push(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async def noted() -> AsyncIterator[bytes]:
            async for message in messages:
                self._peer.nbytes += len(message) - len(message_frame(message))
                if self._peer.pause:
                    await self._peer.pause()
                yield message

        self._peer.opened += 1
        async for answer in super().push(noted()):
            yield answer

    def take(self, data: Buffer, channel: object) -> FrameAnswer:
        self._peer.channels.add(channel)
        scripted = None
        if isinstance(frame := unpack(bytes(data)), PageFrame):
            self._peer.frames.append(frame)
            scripted = self._peer.on_frame(frame)
        credit = scripted or super().take(data, channel)
        self._count(data, _bytes_of(credit))
        return credit

    def channel_ended(self, channel: object) -> None:
        super().channel_ended(channel)
        self._peer.ended += 1

    async def renew(self, data: bytes) -> bytes:
        request = parse(kv.RenewRequest, data)
        self._peer.renewals.append(tuple(map(ticket_from_proto, request.tickets)))
        return await super().renew(data)

    async def commit(self, data: bytes) -> bytes:
        answer = self._count(data, await super().commit(data))
        self._peer.commits += 1
        if self._peer.on_commit:
            await self._peer.on_commit()
        return answer

    def _count(self, data: Buffer, answer: bytes) -> bytes:
        self._peer.nbytes += len(data) + len(answer)
        return answer


def _bytes_of(message: Attached | FrameAnswer) -> bytes:
    data: bytes = message.to_proto().SerializeToString()
    return data


@asynccontextmanager
async def open_peer(
    options: ChannelOptions = QUICK,
    security: Security | None = None,
    client: Security | None = None,
    **desk: object,
) -> AsyncIterator[tuple[Peer, Channel]]:
    """A peer on free ports, and a channel to it."""
    peer = Peer(**desk)
    peer.door = DirectServer(peer.receiver, security)
    peer.direct_port = peer.door.listen(HOST)
    peer.receiver.direct = lambda: (peer.direct_port, peer.door.make_key())
    tasks = [asyncio.create_task(x.run()) for x in (peer.receiver, peer.door)]
    server, peer.address = await start_server(
        [peer.receiver.handlers()], HOST, security
    )
    channel = Channel(peer.address, client or security, options)
    try:
        yield peer, channel
    finally:
        await channel.close()
        await server.stop(None)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def offer_all(sender: Sender, prompt: Prompt) -> None:
    """What an engine says of a prompt."""
    for layer in range(len(prompt.plan.group_of)):
        sender.offer(prompt.manifest.layer(layer))
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


@contextmanager
def process(
    target: object, *arguments: object
) -> Iterator[tuple[BaseProcess, Connection]]:
    """Another process, and where it answers; killed at the end if it still lives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.transfer.peer"])
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()
