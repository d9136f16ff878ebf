"""Sockets on the loop: who waits, who is told, and what is closed."""

import asyncio
import fcntl
import resource
import socket
from collections.abc import Awaitable, Callable

import pytest

from disagg.transfer.sockets import MAX_READS, AsyncSocket, address_of, dial


def run(scene: Callable[[AsyncSocket, socket.socket], Awaitable[None]]) -> None:
    async def whole() -> None:
        raw, theirs = socket.socketpair()
        with theirs:
            ours = AsyncSocket(raw)
            try:
                async with asyncio.timeout(20.0):
                    await scene(ours, theirs)
            finally:
                ours.close()

    asyncio.run(whole())


def test_a_write_that_is_cut_short_ends_the_connection():
    async def scene(ours: AsyncSocket, theirs: socket.socket) -> None:
        writing = asyncio.create_task(ours.write([bytes(8 << 20)]))
        reading = asyncio.create_task(ours.read_into(memoryview(bytearray(1))))
        await asyncio.to_thread(theirs.recv, 1000)
        writing.cancel()
        with pytest.raises(ConnectionError, match="cut short"):
            await reading
        with pytest.raises(ConnectionError, match="cut short"):
            await ours.write([b"the next frame"])

    run(scene)


def test_a_read_gives_way_though_there_is_always_more():
    async def scene(ours: AsyncSocket, theirs: socket.socket) -> None:
        theirs.sendall(bytes(3 * MAX_READS))
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(other())
        for _ in range(3 * MAX_READS):
            await ours.read_into(memoryview(bytearray(1)))
        assert turns >= 2
        working.cancel()

    run(scene)


def test_whoever_waits_or_comes_later_is_told_why_it_was_closed():
    async def scene(ours: AsyncSocket, theirs: socket.socket) -> None:
        memory = memoryview(bytearray(1))
        reading = asyncio.create_task(ours.read_into(memory))
        await asyncio.sleep(0)
        ours.close("it was too slow")
        for work in (reading, ours.read_into(memory), ours.write([b"a"]), ours.write([])):
            with pytest.raises(ConnectionAbortedError, match="it was too slow"):
                await work

    run(scene)


def test_news_are_seen_however_many_files_are_open():
    async def scene(ours: AsyncSocket, theirs: socket.socket) -> None:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
        try:
            raw = socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 2000))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        high = AsyncSocket(raw)
        assert not high.has_news
        await ours.write([b"a"])
        assert high.has_news
        high.close()
        assert high.has_news

    run(scene)


def test_options_that_a_system_does_not_have_are_left_out(monkeypatch):
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")

    async def scene() -> None:
        sock = socket.socket()
        ours = AsyncSocket(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
        ours.close()

    asyncio.run(scene())


def test_every_address_of_a_name_is_tried(monkeypatch):
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            found = [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", sock.getsockname())
                for sock in (deaf, listening)
            ]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
            sock = await dial("two.addresses", port, None)
            listening.accept()[0].close()
            sock.close()
        with pytest.raises(ConnectionRefusedError):
            await dial("two.addresses", port, None)

    asyncio.run(scene())


def test_an_ipv6_address_stands_in_brackets():
    assert address_of("::1", 5) == address_of("[::1]", 5) == "[::1]:5"
    assert address_of("localhost", 5) == "localhost:5"
