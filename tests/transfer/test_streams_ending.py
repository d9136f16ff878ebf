"""Calls that fail, are given up or outlive their link: what is said, and that nothing is left."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from disagg.errors import ConfigError, DisaggError, PeerLostError
from disagg.transfer import streams as streams_module
from disagg.transfer.http2 import Connection
from disagg.transfer.push_server import PushServer
from disagg.transfer.security import Security
from disagg.transfer.sockets import AsyncSocket, dial
from disagg.transfer.streams import Streams
from disagg.transfer.tls import client_context
from tests.papers import make_papers

HOST, PATH = "127.0.0.1", "/a.B/Once"


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_papers(tmp_path_factory.mktemp("papers"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@asynccontextmanager
async def serving(security: Security | None = None) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A method that answers its first message and reads the next one when it is told to."""
    told = asyncio.Event()

    async def once(messages: AsyncIterator[memoryview]) -> AsyncGenerator[bytes, None]:
        async for message in messages:
            yield bytes(message)
            await told.wait()
            return

    server = PushServer({PATH: once})
    server.start(HOST, security)
    try:
        yield server.port, told
    finally:
        await server.stop()


@asynccontextmanager
async def listening(
    answer: bytes = b"", accepted: asyncio.Event | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Somebody who is no server of ours; and what came, of each who left."""
    left: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if accepted is not None:
            accepted.set()
        left.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1], left
    finally:
        server.close()


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20.0):
            await scene()

    asyncio.run(whole())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def failure(streams: Streams, port: int) -> DisaggError:
    """How a call ends that is bound to fail; it names where it went."""
    call = streams.call(port, PATH)
    try:
        await call.send([b"a"], 1)
        with pytest.raises(DisaggError, match=rf"{HOST}:{port}") as caught:
            await anext(call.answers())
        return caught.value
    finally:
        call.cancel()
        streams.close()


@pytest.mark.parametrize("port", [0, 65_536, (1 << 32) - 1])
def test_a_port_that_cannot_be_is_said(port):
    async def scene() -> None:
        error = await failure(Streams(HOST), port)
        assert isinstance(error, PeerLostError)
        assert "no such port" in str(error)

    run(scene)


def test_a_refused_connection_is_said():
    async def scene() -> None:
        with socket.socket() as unused:
            unused.bind((HOST, 0))
            error = await failure(Streams(HOST), unused.getsockname()[1])
        assert isinstance(error, PeerLostError)

    run(scene)


def test_a_host_without_an_address_is_said(monkeypatch):
    def find_none(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", find_none)

    async def scene() -> None:
        call = Streams("no-such-host.invalid").call(5, PATH)
        with pytest.raises(PeerLostError, match=r"no-such-host\.invalid:5"):
            await anext(call.answers())
        call.cancel()

    run(scene)


def test_a_wrong_token_is_said():
    async def scene() -> None:
        async with serving(Security(token="s")) as (port, _):
            error = await failure(Streams(HOST, [("authorization", "Bearer guess")]), port)
            assert isinstance(error, ConfigError)
            assert "token" in str(error)

    run(scene)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9\r\n"])
def test_who_does_not_speak_http2_is_said(answer):
    async def scene() -> None:
        async with listening(answer) as (port, _):
            error = await failure(Streams(HOST), port)
            assert isinstance(error, PeerLostError)
            assert "HTTP/2" in str(error)

    run(scene)


def test_who_does_not_answer_a_handshake_is_said(monkeypatch, papers):
    monkeypatch.setattr(streams_module, "DIAL_S", 0.05)

    async def scene() -> None:
        async with listening() as (port, left):
            tls = client_context(Security(ca=papers["ca"]))
            error = await failure(Streams(HOST, (), tls), port)
            assert isinstance(error, PeerLostError)
            assert "no connection in 0.05 s" in str(error)
            await until(lambda: left)

    run(scene)


def test_tls_where_there_is_none_is_said_and_the_other_way_round(papers):
    ours = Security(certificate=papers["peer"], key=papers["peer.key"])

    async def scene() -> None:
        async with serving() as (port, _):
            tls = client_context(Security(ca=papers["ca"]))
            error = await failure(Streams(HOST, (), tls), port)
            assert "no TLS" in str(error)
        async with serving(ours) as (port, _):
            assert isinstance(await failure(Streams(HOST), port), PeerLostError)
            tls = client_context(Security(ca=papers["foreign"]))
            assert "issuer certificate" in str(await failure(Streams(HOST, (), tls), port))

    run(scene)


def test_a_peer_without_a_sign_of_life_is_said(monkeypatch):
    monkeypatch.setattr(streams_module, "PING_S", 0.02)
    monkeypatch.setattr(streams_module, "ANSWER_S", 0.05)

    async def scene() -> None:
        async with listening() as (port, left):
            assert "no sign of life" in str(await failure(Streams(HOST), port))
            await until(lambda: left)

    run(scene)


def test_a_call_that_is_given_up_while_it_connects_leaves_nothing(papers):
    async def scene() -> None:
        accepted = asyncio.Event()
        async with listening(b"", accepted) as (port, left):
            streams = Streams(HOST, (), client_context(Security(ca=papers["ca"])))
            call = streams.call(port, PATH)
            sending = asyncio.create_task(call.send([b"a"], 1))
            answers = asyncio.create_task(anext(call.answers()))
            await accepted.wait()
            call.cancel()
            assert not await sending
            with pytest.raises(PeerLostError, match="given up"):
                await answers
            assert not streams._all
            await until(lambda: left)

    run(scene)


def test_a_call_that_is_given_up_while_it_says_hello_leaves_nothing(monkeypatch):
    async def hang(connection: Connection, client: bool) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        async with listening() as (port, left):
            streams = Streams(HOST)
            with monkeypatch.context() as patch:
                patch.setattr(Connection, "open", hang)
                call = streams.call(port, PATH)
                await until(lambda: streams._all)
                call.cancel()
            await until(lambda: left)
            assert not streams._all

    run(scene)


def test_a_link_that_is_closed_while_a_call_connects_is_not_open_again(monkeypatch):
    async def scene() -> None:
        connected = asyncio.Event()

        async def dial_slowly(*where: object) -> AsyncSocket:
            sock = await dial(*where)
            connected.set()
            await asyncio.sleep(0)
            return sock

        monkeypatch.setattr(streams_module, "dial", dial_slowly)
        async with listening() as (port, left):
            streams = Streams(HOST)
            call = streams.call(port, PATH)
            await connected.wait()
            streams.close()
            assert not await call.send([b"a"], 1)
            await until(lambda: left)
            call.cancel()

    run(scene)


def test_a_call_that_is_finished_in_the_middle_of_a_message_leaves_no_connection():
    """The acknowledgement may come while a sign of life is still on its way."""

    async def scene() -> None:
        async with serving() as (port, told):
            streams = Streams(HOST)
            call = streams.call(port, PATH)
            assert await call.send([b"a"], 1)
            assert bytes(await anext(call.answers())) == b"a"
            size = 32 << 20  # more than sockets hold
            sending = asyncio.create_task(call.send([bytes(size)], size))
            (connection,) = streams._all
            await until(lambda: connection.sock._waiting)
            call.finish()
            sending.cancel()
            told.set()
            await asyncio.wait(streams._finishing)
            assert not streams._all
            call = streams.call(port, PATH)
            assert await call.send([b"b"], 1)
            assert bytes(await anext(call.answers())) == b"b"
            call.cancel()
            streams.close()

    run(scene)
