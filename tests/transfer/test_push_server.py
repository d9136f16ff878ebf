"""A server of streaming calls among strangers, with methods that fail, and out of open files."""

import asyncio
import errno
import gc
import logging
import socket
import struct
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import grpc
import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame

from disagg.errors import ConfigError, PeerLostError
from disagg.transfer import push_server
from disagg.transfer.http2_frames import PREFACE
from disagg.transfer.push_server import PushServer
from disagg.transfer.security import Security
from disagg.transfer.streams import Streams
from tests.papers import make_papers

HOST = "127.0.0.1"
HELLO = [SettingsFrame(0)]


async def echo(messages: AsyncIterator[memoryview]) -> AsyncGenerator[bytes, None]:
    async for message in messages:
        yield bytes(message)


async def fail(messages: AsyncIterator[memoryview]) -> AsyncGenerator[bytes, None]:
    async for _ in messages:
        raise OSError("a bug, or a disk that is full")
    yield b""


def run(
    scene: Callable[[PushServer], Awaitable[None]],
    security: Security | None = None,
    host: str = HOST,
) -> None:
    async def whole() -> None:
        server = PushServer({"/a.B/Echo": echo, "/a.B/Fail": fail})
        server.start(host, security)
        try:
            async with asyncio.timeout(20.0):
                await scene(server)
        finally:
            await server.stop()

    asyncio.run(whole())


async def ask(streams: Streams, port: int, message: bytes) -> bytes:
    call = streams.call(port, "/a.B/Echo")
    try:
        assert await call.send([message], len(message))
        answer = bytes(await anext(call.answers()))
        call.finish()
        return answer
    finally:
        call.cancel()


async def hear_all(port: int, *frames: Frame, hello: bytes = PREFACE) -> bytes:
    """Say this, and nothing more; what comes until the server hangs up."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(hello + b"".join(frame.serialize() for frame in frames))
    heard = await reader.read()
    writer.close()
    return heard


def request(path: str, *flags: str) -> HeadersFrame:
    block = Encoder().encode([(":method", "POST"), (":path", path)])
    return HeadersFrame(1, block, flags=["END_HEADERS", *flags])


def test_a_method_that_fails_ends_its_call_alone_and_is_logged(caplog):
    async def scene(server: PushServer) -> None:
        streams = Streams(HOST)
        call = streams.call(server.port, "/a.B/Fail")
        await call.send([b"a"], 1)
        with pytest.raises(PeerLostError, match=f"{HOST}:{server.port}.*failed"):
            await anext(call.answers())
        call.cancel()
        assert await ask(streams, server.port, b"still here") == b"still here"
        streams.close()

    run(scene)
    assert "/a.B/Fail failed" in caplog.text
    assert "a disk that is full" in caplog.text


def test_a_server_that_has_no_files_left_takes_connections_when_it_has(monkeypatch, caplog):
    monkeypatch.setattr(push_server, "RETRY_S", 0.0)

    async def scene(server: PushServer) -> None:
        streams = Streams(HOST)
        assert await ask(streams, server.port, b"a") == b"a"
        assert await ask(Streams(HOST), server.port, b"b") == b"b"
        streams.close()

    accept, failures = asyncio.SelectorEventLoop.sock_accept, iter([errno.EMFILE] * 3)

    async def accept_later(loop: asyncio.SelectorEventLoop, sock: socket.socket) -> object:
        for code in failures:
            raise OSError(code, "too many open files")
        return await accept(loop, sock)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", accept_later)
    run(scene)
    assert "too many open files" in caplog.text


def test_who_does_not_call_with_the_token_in_time_is_hung_up_on_and_who_did_may_rest(monkeypatch):
    monkeypatch.setattr(push_server, "HELLO_S", 0.05)

    async def scene(server: PushServer) -> None:
        streams = Streams(HOST, [("authorization", "Bearer s")])
        assert await ask(streams, server.port, b"a") == b"a"
        await asyncio.wait(streams._finishing)
        for frames in ([], HELLO, [*HELLO, request("/a.B/Echo")]):
            await hear_all(server.port, *frames)
        await hear_all(server.port, hello=b"")
        (connection,) = streams._all
        assert await ask(streams, server.port, b"b") == b"b"
        assert streams._all == {connection}
        streams.close()

    run(scene, Security(token="s"))


def test_a_client_that_takes_no_answers_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(push_server, "ANSWER_S", 0.05)

    async def scene(server: PushServer) -> None:
        closed = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
        message = DataFrame(1, struct.pack(">BI", 0, 3) + b"abc")
        assert await hear_all(server.port, closed, request("/a.B/Echo"), message)

    run(scene)


def test_a_call_may_have_no_messages():
    async def scene(server: PushServer) -> None:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        frames = [*HELLO, request("/a.B/Echo", "END_STREAM")]
        writer.write(PREFACE + b"".join(frame.serialize() for frame in frames))
        frame = None
        while not (isinstance(frame, HeadersFrame) and "END_STREAM" in frame.flags):
            head = memoryview(await reader.readexactly(9))
            frame, length = Frame.parse_frame_header(head)
            frame.parse_body(memoryview(await reader.readexactly(length)))
        writer.close()

    run(scene)


def test_any_grpc_client_can_call_over_tls(tmp_path):
    folder = make_papers(tmp_path)
    papers = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def scene(server: PushServer) -> None:
        credentials = grpc.ssl_channel_credentials(papers["ca"])
        async with grpc.aio.secure_channel(f"{HOST}:{server.port}", credentials) as channel:
            call = channel.stream_stream("/a.B/Echo")(iter([b"a", b"b"]))
            assert [bytes(answer) async for answer in call] == [b"a", b"b"]

    run(scene, Security(certificate=papers["peer"], key=papers["peer.key"]))


def test_who_leaves_before_tls_begins_is_no_error(tmp_path, caplog):
    folder = make_papers(tmp_path)
    papers = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def scene(server: PushServer) -> None:
        for _ in range(5):
            with socket.create_connection((HOST, server.port)) as raw:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.sleep(0)
        while len(server._tasks) > 1:
            await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        run(scene, Security(certificate=papers["peer"], key=papers["peer.key"]))
    assert not caplog.text


def test_a_connection_that_came_just_before_the_end_is_closed():
    async def scene(server: PushServer) -> None:
        with socket.create_connection((HOST, server.port)):
            while len(server._tasks) < 2:
                await asyncio.sleep(0)
            await server.stop()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(scene)
        gc.collect()
    assert not [str(warning.message) for warning in seen]


def test_a_host_that_is_not_here_is_a_config_error():
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        run(lambda server: asyncio.sleep(0), host="203.0.113.1")


@pytest.mark.parametrize(("host", "peers"), [("::1", ["::1"]), ("[::]", ["::1", HOST])])
def test_ipv6_hosts_are_served(host, peers):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    async def scene(server: PushServer) -> None:
        for peer in peers:
            streams = Streams(peer)
            assert await ask(streams, server.port, b"a") == b"a"
            streams.close()

    run(scene, host=host)
