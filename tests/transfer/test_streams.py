"""Streaming calls over real sockets: with each other, and with the gRPC that everybody has."""

import asyncio
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from disagg.errors import CapacityError, ConfigError, PeerLostError, VersionError
from disagg.transfer.push_server import PushServer
from disagg.transfer.security import TOKEN_KEY, Security
from disagg.transfer.status import error_of
from disagg.transfer.streams import StreamCall, Streams
from disagg.transfer.tls import client_context
from tests.papers import make_papers

HOST, PATH = "127.0.0.1", "/a.B/Echo"
SIZES = (0, 1, 5, 16_384, 65_537, 3_000_001, 7)


async def echo(messages: AsyncIterator[memoryview]) -> AsyncGenerator[bytes, None]:
    async for message in messages:
        yield bytes(message)


async def refuse(messages: AsyncIterator[memoryview]) -> AsyncGenerator[bytes, None]:
    async for message in messages:
        raise CapacityError(f"no rööm for {len(message)} bytes")
    yield b""


@asynccontextmanager
async def serving(security: Security | None = None) -> AsyncIterator[tuple[int, list[str]]]:
    refused: list[str] = []
    methods = {PATH: echo, "/a.B/Refuse": refuse}
    server = PushServer(methods, lambda error: refused.append(error.reason))
    server.start(HOST, security)
    try:
        yield server.port, refused
    finally:
        await server.stop()


@asynccontextmanager
async def calling(streams: Streams, port: int, path: str = PATH) -> AsyncIterator[StreamCall]:
    call = streams.call(port, path)
    try:
        yield call
    finally:
        call.cancel()


def messages_of(sizes: tuple[int, ...] = SIZES) -> list[bytes]:
    source = random.Random(3)
    return [source.randbytes(size) for size in sizes]


async def ask(call: StreamCall, sent: list[bytes]) -> list[bytes]:
    """Send everything in odd parts; the answers."""

    async def send() -> None:
        for message in sent:
            third = len(message) // 3
            parts = [message[:third], memoryview(message)[third:]]
            assert await call.send(parts, len(message))

    async def take() -> list[bytes]:
        found: list[bytes] = []
        async for answer in call.answers():
            found.append(bytes(answer))
            if len(found) == len(sent):
                break
        return found

    found, _ = await asyncio.gather(take(), send())
    return found


def test_messages_of_any_size_come_back_in_order():
    async def scene() -> None:
        async with serving() as (port, _):
            streams = Streams(HOST)
            async with calling(streams, port) as call:
                assert await ask(call, messages_of()) == messages_of()
            streams.close()

    asyncio.run(scene())


def test_a_finished_call_leaves_its_connection_to_the_next_and_a_cancelled_one_does_not():
    async def scene() -> None:
        async with serving() as (port, _):
            streams = Streams(HOST)
            for _ in range(3):
                async with calling(streams, port) as call:
                    assert await ask(call, [b"a", b"bc"]) == [b"a", b"bc"]
                    call.finish()
                await asyncio.wait(streams._finishing)
            assert len(streams._all) == 1
            async with calling(streams, port) as call:
                assert await ask(call, [b"a"]) == [b"a"]
            assert not streams._all
            async with calling(streams, port) as call:
                assert await ask(call, [b"d"]) == [b"d"]
            streams.close()

    asyncio.run(scene())


def test_a_connection_whose_server_is_gone_is_not_used_again():
    async def scene() -> None:
        streams = Streams(HOST)
        async with serving() as (port, _), calling(streams, port) as call:
            assert await ask(call, [b"a"]) == [b"a"]
            call.finish()
            await asyncio.wait(streams._finishing)
        async with calling(streams, port) as call:
            with pytest.raises(PeerLostError):
                await anext(call.answers())
            assert not await call.send([b"a"], 1)
        streams.close()

    asyncio.run(scene())


def test_an_error_of_the_method_keeps_its_name():
    async def scene() -> None:
        async with serving() as (port, refused):
            streams = Streams(HOST)
            async with calling(streams, port, "/a.B/Refuse") as call:
                await call.send([b"abc"], 3)
                with pytest.raises(CapacityError, match="no rööm for 3 bytes"):
                    await anext(call.answers())
            assert refused == ["capacity"]
            streams.close()

    asyncio.run(scene())


@pytest.mark.parametrize("given", [(), ((TOKEN_KEY, "Bearer guess"),)], ids=["none", "wrong"])
def test_without_the_shared_token_no_method_is_called(given):
    async def scene() -> None:
        async with serving(Security(token="s")) as (port, _):
            streams = Streams(HOST, given)
            async with calling(streams, port) as call:
                with pytest.raises(ConfigError, match="token"):
                    await anext(call.answers())
            streams.close()

    asyncio.run(scene())


def test_a_method_that_is_not_there_is_a_version_error():
    async def scene() -> None:
        async with serving() as (port, _):
            streams = Streams(HOST)
            async with calling(streams, port, "/a.B/Other") as call:
                with pytest.raises(VersionError):
                    await anext(call.answers())
            streams.close()

    asyncio.run(scene())


def test_any_grpc_client_can_call():
    async def scene() -> None:
        async with serving(Security(token="s")) as (port, _):
            options = [("grpc.max_receive_message_length", -1)]
            async with grpc.aio.insecure_channel(f"{HOST}:{port}", options) as channel:
                metadata = ((TOKEN_KEY, "Bearer s"),)
                for _ in range(2):
                    sent = messages_of()
                    call = channel.stream_stream(PATH)(iter(sent), metadata=metadata)
                    assert [bytes(answer) async for answer in call] == sent
                refused = channel.stream_stream("/a.B/Refuse")(iter([b"ab"]), metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(refused))
                assert isinstance(error_of(caught.value), CapacityError)
                stranger = channel.stream_stream(PATH)(iter([]))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(stranger))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scene())


def test_any_grpc_server_can_be_called():
    """One with small windows and frames of 16 KiB, so that messages are cut."""

    async def answer(messages: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    async def scene() -> None:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.http2.max_frame_size", 16_384),
                ("grpc.http2.bdp_probe", 0),
            ]
        )
        method = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("a.B", {"Echo": method}),)
        )
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        streams = Streams(HOST)
        sent = messages_of((100, 900_001, 0))
        async with calling(streams, port) as call:
            assert await ask(call, sent) == sent
        streams.close()
        await server.stop(None)

    asyncio.run(scene())


def test_bytes_that_are_no_http2_end_their_connection_and_nothing_else():
    async def scene() -> None:
        source = random.Random(5)
        async with serving() as (port, _):
            streams = Streams(HOST)
            hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
            for number in range(40):
                with socket.create_connection((HOST, port)) as raw:
                    raw.sendall((hello if number % 2 else b"") + source.randbytes(300))
                    raw.shutdown(socket.SHUT_WR)
                    raw.settimeout(10.0)
                    with suppress(ConnectionResetError):
                        while await asyncio.to_thread(raw.recv, 4096):
                            pass
            async with calling(streams, port) as call:
                assert await ask(call, [b"still here"]) == [b"still here"]
            streams.close()

    asyncio.run(scene())


def test_tls_is_for_those_who_have_papers(tmp_path):
    folder = make_papers(tmp_path)
    papers = {path.name: path.read_bytes() for path in folder.iterdir()}
    server = Security(None, papers["ca"], papers["peer"], papers["peer.key"], mutual=True)

    async def said(client: Security) -> list[bytes]:
        streams = Streams(HOST, (), client_context(client))
        try:
            async with serving(server) as (port, _), calling(streams, port) as call:
                sent = messages_of()
                return [] if await ask(call, sent) != sent else sent
        finally:
            streams.close()

    assert asyncio.run(said(server))
    for stranger in (
        Security(),
        Security(ca=papers["ca"]),
        Security(ca=papers["foreign"], certificate=papers["peer"], key=papers["peer.key"]),
    ):
        with pytest.raises((PeerLostError, AssertionError)):
            asyncio.run(said(stranger))
