"""Frames over a socket: whole, by key only, TLS or not; bytes of nobody end the connection."""

import asyncio
import errno
import random
import socket
import struct
from contextlib import suppress
from dataclasses import replace

import pytest

from disagg.errors import PeerLostError, VersionError
from disagg.transfer import direct
from disagg.transfer.direct import DirectStream, dial
from disagg.transfer.receiver import Receiver
from disagg.transfer.security import Security
from disagg.wire import Buffer, PageFrame, Ticket, pack
from tests.transfer.desk import bend
from tests.transfer.peer import HOST, QUICK, Peer, hand_over, open_peer, until

KEY = b"k" * direct.KEY_BYTES
DIRECT = replace(QUICK, direct=True)
TOKENS = 1500


def tls_of(papers: dict[str, bytes]) -> Security:
    return Security("a secret", papers["ca"], papers["peer"], papers["peer.key"])


@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
async def test_prompts_arrive_whole_over_one_connection_not_over_grpc(
    prompt, papers, tls
):
    async with open_peer(DIRECT, tls_of(papers) if tls else None) as (peer, channel):
        senders = [peer.sender(prompt, channel, rid) for rid in "abc"]
        for stats in await asyncio.gather(*(hand_over(x, prompt) for x in senders)):
            assert stats.payload_bytes == prompt.manifest.total_bytes
            assert stats.attaches == 1
        (socket,) = peer.channels
        assert isinstance(socket, direct.AsyncSocket)
        peer.assert_admitted(a=prompt, b=prompt, c=prompt)
        peer.close()


async def test_a_peer_without_a_direct_door_is_served_over_grpc(prompt):
    async with open_peer(DIRECT) as (peer, channel):
        peer.receiver.direct = Receiver(peer.ledger).direct
        await hand_over(peer.sender(prompt, channel), prompt)
        assert peer.attaches[0].direct
        assert peer.opened == 1


# -- where it is blocked
def closed_port() -> int:
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


def offer_port(peer: Peer, port: int) -> list[int]:
    """Let Attach answer this port; the ports that were answered."""
    answered: list[int] = []

    def direct_port() -> tuple[int, bytes]:
        answered.append(port)
        return port, peer.door.make_key()

    peer.receiver.direct = direct_port
    return answered


async def test_a_hand_off_goes_over_grpc_where_direct_is_blocked(prompt, caplog):
    async with open_peer(DIRECT) as (peer, channel):
        offer_port(peer, closed_port())

        stats = await hand_over(peer.sender(prompt, channel), prompt)

        assert stats.attaches == 2
        assert stats.payload_bytes == prompt.manifest.total_bytes
        assert peer.opened == 1
        peer.assert_admitted(r=prompt)
    blocked = [x for x in caplog.messages if x.startswith("direct connections to")]
    assert len(blocked) == 1
    assert "no direct connection to" in channel.host.as_info()["direct_failed"]


async def test_where_direct_is_blocked_no_port_is_asked_for_again(prompt):
    async with open_peer(DIRECT) as (peer, channel):
        answered = offer_port(peer, closed_port())
        await hand_over(peer.sender(prompt, channel, "first"), prompt)

        stats = await hand_over(peer.sender(prompt, channel, "second"), prompt)

        assert stats.attaches == 1
        assert len(answered) == 2
        assert [attach.direct for attach in peer.attaches] == [True, True, False]


async def test_direct_is_tried_again_after_a_while(prompt):
    async with open_peer(replace(DIRECT, idle_s=0.0, stall_s=0.1)) as (peer, channel):
        for _ in range(2):
            channel.host.dial_failed(PeerLostError("blocked"), -1e9)

        await hand_over(peer.sender(prompt, channel), prompt)

        assert peer.opened == 0
        assert channel.host.as_info()["direct_failed"] == ""


async def test_a_hand_off_goes_on_over_grpc_if_direct_is_cut_midway(prompt):
    """A firewall that lets a connection begin, then drops it and every other one."""
    async with open_peer(DIRECT) as (peer, channel):

        def cut(frame: PageFrame) -> None:
            if len(peer.frames) == 4:
                offer_port(peer, closed_port())
                raise ConnectionError("cut")

        peer.on_frame = cut

        stats = await hand_over(peer.sender(prompt, channel), prompt)

        sent_twice = stats.payload_bytes - prompt.manifest.total_bytes
        assert stats.attaches == 3
        assert peer.opened == 1
        assert sent_twice <= 3 * DIRECT.frame_bytes
        peer.assert_admitted(r=prompt)


async def test_a_direct_connection_that_carries_nothing_is_given_up(prompt):
    """The port takes connections and bytes, and answers nothing."""
    async with open_peer(replace(DIRECT, stall_s=0.3)) as (peer, channel):
        silent = socket.create_server((HOST, 0))
        offer_port(peer, silent.getsockname()[1])

        stats = await hand_over(peer.sender(prompt, channel), prompt)

        silent.close()
        assert stats.attaches == 2
        assert peer.opened == 1
        peer.assert_admitted(r=prompt)


async def test_a_direct_connection_that_is_hung_up_is_given_up(prompt):
    """As a proxy does that does not know the protocol; gRPC works."""
    async with open_peer(DIRECT) as (peer, channel):

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
            await reader.readexactly(24)
            writer.close()

        server = await asyncio.start_server(hang_up, HOST, 0)
        offer_port(peer, server.sockets[0].getsockname()[1])

        stats = await hand_over(peer.sender(prompt, channel), prompt)

        server.close()
        assert stats.attaches == 3
        assert peer.opened == 1
        peer.assert_admitted(r=prompt)


# -- who may come in
async def enter(peer: Peer, key: bytes | None = None) -> DirectStream:
    """A connection that is let in; PeerLostError if it is not."""
    stream = await dial(f"{HOST}:1", peer.direct_port, key or peer.door.make_key())
    await stream.send(pack(PageFrame(Ticket(1, 2, 3), (0,), (0,), (b"x",))))
    await anext(stream.answers())
    return stream


async def test_a_key_opens_one_connection_and_not_for_long(monkeypatch):
    async with open_peer() as (peer, _):
        key = peer.door.make_key()
        stream = await enter(peer, key)
        with pytest.raises(PeerLostError):
            await enter(peer, key)
        monkeypatch.setattr(direct, "KEY_S", -1.0)
        with pytest.raises(PeerLostError):
            await enter(peer)
        assert not peer.ended
        stream.close()
        await until(lambda: peer.ended == 1)


HELLOS = {
    "another key": struct.pack("<4sI16s", b"dgKD", 1, b"x" * 16),
    "another version": struct.pack("<4sI16s", b"dgKD", 2, KEY),
    "another protocol": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
async def test_who_says_no_valid_hello_is_hung_up_on(hello):
    async with open_peer() as (peer, _):
        peer.door._keys[KEY] = float("inf")
        reader, writer = await asyncio.open_connection(HOST, peer.direct_port)
        writer.write(hello)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20.0) == b""
        writer.close()
        assert not peer.ended


async def test_silent_connections_are_closed_the_oldest_first(
    monkeypatch,
):
    monkeypatch.setattr(direct, "MAX_STRANGERS", 3)

    async with open_peer() as (peer, _):
        silent = [
            await asyncio.open_connection(HOST, peer.direct_port) for _ in range(5)
        ]
        for reader, _ in silent[:2]:  # long before their time
            assert await asyncio.wait_for(reader.read(), 20.0) == b""
        await until(lambda: len(peer.door._strangers) == 3)
        stream = await enter(peer)
        monkeypatch.setattr(direct, "HELLO_S", 0.05)
        late, writer = await asyncio.open_connection(HOST, peer.direct_port)
        assert await asyncio.wait_for(late.read(), 20.0) == b""
        stream.close()
        for _, each in [*silent, (late, writer)]:
            each.close()


async def test_nobody_at_the_port_is_a_lost_peer():
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerLostError, match="no direct connection"):
        await dial(f"{HOST}:1", port, KEY)


async def test_a_connection_that_cannot_be_taken_stops_no_other(monkeypatch):
    """Too many open files: an error of accept once ended the worker."""
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")]

    async def fail_once(sock: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", fail_once)
    async with open_peer() as (peer, _):
        (await enter(peer)).close()
        assert not failures


# -- what may come
@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
async def test_a_worker_of_another_version_hears_it_and_gives_up(
    prompt, papers, tls, monkeypatch
):
    def other(frame: PageFrame) -> list[Buffer]:
        first, *rest = pack(frame)
        return [first[:4] + b"\x09" + first[5:], *rest]

    monkeypatch.setattr("disagg.transfer.sender.pack", other)
    async with open_peer(DIRECT, tls_of(papers) if tls else None) as (peer, channel):
        with pytest.raises(VersionError, match="version 9"):
            await hand_over(peer.sender(prompt, channel), prompt)
        assert len(peer.attaches) == 1


async def test_bytes_of_nobody_end_the_connection_and_nothing_else(prompt):
    """Bent frames behind a valid hello: stored whole, or the connection ends; the door stays."""
    source = random.Random(3)
    async with open_peer() as (peer, _):
        rules, attach = peer.ledger, peer.promise(prompt)
        for round_ in range(120):
            ticket = replace(attach.ticket, gen=round_ + 1)
            rules.attach(replace(attach, ticket=ticket))
            data = b"".join(pack(prompt.frames(ticket)[round_ % 5]))
            if round_ == 0:
                data = b"".join(pack(prompt.commit(ticket)))
            peer.door._keys[KEY] = float("inf")
            _, writer = await asyncio.open_connection(HOST, peer.direct_port)
            writer.write(struct.pack("<4sI16s", b"dgKD", 1, KEY))
            writer.write(bend(source, data))
            writer.write_eof()
            await until(lambda n=round_: peer.ended == n + 1)
            writer.close()
        assert peer.received(attach.ticket).items() <= prompt.digests().items()
        assert peer.arrived()
        rules.abort("r", 0, "over")
        peer.close()
