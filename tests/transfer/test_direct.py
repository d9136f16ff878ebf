"""Frames over a socket: whole, by key only, TLS or not; bytes of nobody end the connection."""

import asyncio
import errno
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from disagg.errors import CorruptFrameError, PeerLostError
from disagg.transfer import direct
from disagg.transfer.channel import Channel
from disagg.transfer.direct import DirectServer, dial
from disagg.transfer.messages import Credit
from disagg.transfer.security import Security
from disagg.wire import Buffer, Commit, CommitFrame, PageFrame, Ticket, pack, unpack
from tests.transfer.desk import bend
from tests.transfer.peer import QUICK, Peer, hand_over, open_peer, until
from tests.transfer.prompts import Prompt, make_prompt

KEY = b"k" * direct.KEY_BYTES
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(1500)


class Shelf:
    """Takes frames into memory of its own, and tells a scripted peer."""

    def __init__(self, peer: Peer):
        self.peer = peer
        self.closed = False

    def take(self, data: Buffer, channel: object) -> Credit:
        frame = unpack(bytes(data))
        if not isinstance(frame, PageFrame):
            raise CorruptFrameError("no pages")
        return self.peer.store(frame)

    def channel_ended(self, channel: object) -> None:
        self.closed = True


class Door(DirectServer):
    """A shelf for each connection that says a valid hello."""

    def __init__(self, peer: Peer, security: Security | None = None):
        super().__init__(Shelf(peer), security)
        self.peer = peer
        self.shelves: list[Shelf] = []

    async def _frames(self, sock: direct.AsyncSocket) -> None:
        self._receiver = Shelf(self.peer)
        self.shelves.append(self._receiver)
        await super()._frames(sock)


@asynccontextmanager
async def open_door(
    peer: Peer | None = None, security: Security | None = None
) -> AsyncIterator[tuple[DirectServer, int, list[Shelf]]]:
    """A door, its port and who came in; at the end everybody is out."""
    server = Door(peer or Peer(), security)
    port = server.listen(HOST)
    serving = asyncio.create_task(server.run())
    try:
        yield server, port, server.shelves
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        assert all(shelf.closed for shelf in server.shelves)


@asynccontextmanager
async def open_direct(
    security: Security | None = None,
) -> AsyncIterator[tuple[Peer, Channel, list[Shelf]]]:
    """A scripted peer with a direct door."""
    async with (
        open_peer(replace(QUICK, direct=True), security) as (peer, channel),
        open_door(peer, security) as (server, port, shelves),
    ):
        peer.direct = lambda: (port, server.make_key())
        try:
            yield peer, channel, shelves
        finally:
            await channel.close()


@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
async def test_prompts_arrive_whole_over_one_connection_and_none_over_grpc(prompt, papers, tls):
    names = "ca", "peer", "peer.key"
    security = Security("a secret", *map(papers.get, names), mutual=True) if tls else None
    async with open_direct(security) as (peer, channel, shelves):
        senders = [peer.sender(prompt, channel, nonce) for nonce in (1, 2, 3)]
        for stats in await asyncio.gather(*(hand_over(x, prompt) for x in senders)):
            assert stats.payload_bytes == prompt.checklist.total_bytes
            assert stats.attaches == 1
        assert list(peer.have.values()) == 3 * [prompt.digests()]
        assert (len(shelves), peer.opened) == (1, 0)


async def test_a_direct_connection_that_breaks_is_resumed(prompt):
    async with open_direct() as (peer, channel, shelves):
        sender = peer.sender(prompt, channel)
        running = asyncio.create_task(sender.run())
        sender.offer(prompt.checklist.layer(0))
        await until(lambda: len(peer.have.get(7, ())) == len(list(prompt.checklist.layer(0))))
        shelves[0].take = None  # a bug at the receiver: the connection breaks, loudly
        sender.offer(prompt.checklist.layer(1))
        sender.offer(prompt.checklist.layer(2))
        sender.finish(1)
        stats = await running
        assert peer.have[7] == prompt.digests()
        assert (stats.attaches, len(shelves)) == (2, 2)


async def test_a_peer_without_a_direct_door_is_served_over_grpc(prompt):
    async with open_peer(replace(QUICK, direct=True)) as (peer, channel):
        await hand_over(peer.sender(prompt, channel), prompt)
        assert peer.attaches[0].direct
        assert peer.opened == 1


# -- who may come in


async def test_a_key_opens_one_connection_and_not_for_long(monkeypatch):
    async with open_door() as (server, port, shelves):
        key = server.make_key()
        first = await dial(f"{HOST}:1", port, key)
        await until(lambda: len(shelves) == 1)
        second = await dial(f"{HOST}:1", port, key)
        with pytest.raises(PeerLostError):
            await anext(second.answers())
        monkeypatch.setattr(direct, "KEY_S", -1.0)
        third = await dial(f"{HOST}:1", port, server.make_key())
        with pytest.raises(PeerLostError):
            await anext(third.answers())
        for stream in (first, second, third):
            stream.close()
        assert len(shelves) == 1


HELLOS = {
    "another key": struct.pack("<4sI16s", b"dgKD", 1, b"x" * 16),
    "another version": struct.pack("<4sI16s", b"dgKD", 2, KEY),
    "another protocol": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
async def test_who_says_no_valid_hello_is_hung_up_on(hello):
    async with open_door() as (server, port, shelves):
        server._keys[KEY] = float("inf")
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(hello)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20.0) == b""
        writer.close()
        assert not shelves


async def test_who_says_nothing_is_hung_up_on_and_when_many_wait_the_oldest_is(monkeypatch):
    monkeypatch.setattr(direct, "MAX_STRANGERS", 3)

    async with open_door() as (server, port, shelves):
        silent = [await asyncio.open_connection(HOST, port) for _ in range(5)]
        for reader, _ in silent[:2]:  # long before their time
            assert await asyncio.wait_for(reader.read(), 20.0) == b""
        await until(lambda: len(server._strangers) == 3)
        stream = await dial(f"{HOST}:1", port, server.make_key())
        await until(lambda: len(shelves) == 1)
        monkeypatch.setattr(direct, "HELLO_S", 0.05)
        late, writer = await asyncio.open_connection(HOST, port)
        assert await asyncio.wait_for(late.read(), 20.0) == b""
        stream.close()
        for _, each in [*silent, (late, writer)]:
            each.close()


async def test_nobody_at_the_port_is_a_lost_peer():
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerLostError, match="no direct connection"):
        await dial(f"{HOST}:1", port, KEY)


async def test_a_connection_that_cannot_be_taken_does_not_close_the_door(monkeypatch):
    """Too many open files: an error of accept once ended the worker."""
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")]

    async def fail_once(sock: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", fail_once)
    async with open_door() as (server, port, shelves):
        stream = await dial(f"{HOST}:1", port, server.make_key())
        await until(lambda: len(shelves) == 1)
        stream.close()


# -- what may come


async def test_bytes_of_nobody_end_the_connection_and_nothing_else(prompt):
    """Bent frames behind a valid hello: stored whole, or the connection ends; the door stays."""
    source, first = random.Random(3), prompt.frames(Ticket(7, 7, 1))[0]
    honest = b"".join(pack(first))
    whole = dict(zip(first.places, first.digests, strict=True))
    commit = b"".join(pack(CommitFrame(Ticket(1, 2, 3), Commit(1, "p", (), 1))))
    async with open_door() as (server, port, shelves):
        for round_ in range(120):
            data = commit if round_ == 0 else bend(source, honest)
            server._keys[KEY] = float("inf")
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(struct.pack("<4sI16s", b"dgKD", 1, KEY))
            writer.write(data)
            writer.write_eof()
            await until(lambda n=round_: len(shelves) == n + 1 and shelves[-1].closed)
            writer.close()
            assert all(items == whole for items in shelves[-1].peer.have.values())
