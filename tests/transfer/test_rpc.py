"""Servers, links and errors of the grpc package, as this plane uses it."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest

from disagg.errors import (
    CapacityError,
    ConfigError,
    DisaggError,
    PeerLostError,
    WireError,
)
from disagg.transfer import rpc
from disagg.transfer.direct import DirectServer
from disagg.transfer.security import Security
from disagg.wire import MAX_FRAME_BYTES
from tests.transfer.peer import until


class Service:
    """Methods of each kind that do what the message says."""

    def __init__(self) -> None:
        self.seen: list[int] = []  # sizes of messages
        self.left = 0  # streams that ended, however
        self.refusals: list[DisaggError] = []

    def handlers(self) -> grpc.GenericRpcHandler:
        streams = {"Many": self.many, "Both": self.both}
        return rpc.rpc_handlers("a.B", {"One": self.one}, streams, self.refusals.append)

    async def one(self, data: bytes) -> bytes:
        self.seen.append(len(data))
        if data == b"named":
            raise CapacityError("no rööm")
        if data == b"bug":
            raise KeyError("oops")
        if data == b"slow":
            await asyncio.Event().wait()
        return data

    async def many(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            yield await self.one(b"x")
            yield await self.one(await anext(messages))
            await asyncio.Event().wait()
        finally:
            self.left += 1

    async def both(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            async for message in messages:
                yield await self.one(message)
        finally:
            self.left += 1


@asynccontextmanager
async def open_service(
    server: Security | None = None, client: Security | None = None
) -> AsyncIterator[tuple[Service, rpc.Link]]:
    service = Service()
    serving, address = await rpc.start_server([service.handlers()], "127.0.0.1", server)
    link = rpc.connect(address, client)
    try:
        yield service, link
    finally:
        await link.close()
        await serving.stop(None)


async def ask(link: rpc.Link, method: str, data: bytes) -> bytes:
    """The answer to `data`, by a call of any kind."""
    if method == "One":
        return await link.call("/a.B/One", data, 20.0)
    if method == "Many":
        call = link.channel.unary_stream("/a.B/Many")(data, metadata=link.metadata)
    else:
        call = link.channel.stream_stream("/a.B/Both")(metadata=link.metadata)
    try:
        if method == "Both":
            await call.write(data)
        else:
            assert await call.read() == b"x"
        return await call.read()
    except grpc.aio.AioRpcError as failure:
        raise rpc.error_of(failure, link.address) from failure
    finally:
        call.cancel()


# -- errors
def failure(
    code: grpc.StatusCode, *trailing: tuple[str, object]
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailing)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details="because")


def test_a_reason_of_the_future_is_still_an_error_of_ours():
    trailing = (rpc.REASON_KEY, "new"), (rpc.MESSAGE_KEY, b"x")
    error = rpc.error_of(failure(grpc.StatusCode.ABORTED, *trailing), "")
    assert (type(error), str(error)) == (DisaggError, "x")


@pytest.mark.parametrize("code", grpc.StatusCode, ids=lambda code: code.name)
def test_every_nameless_failure_is_an_error_that_names_the_peer(code):
    error = rpc.error_of(failure(code), "1.2.3.4:5")
    assert isinstance(error, DisaggError)
    assert code.name in str(error)
    assert "1.2.3.4:5" in str(error)


@pytest.mark.parametrize("method", ["One", "Many", "Both"])
async def test_a_refusal_keeps_its_type_and_message_on_the_way(method):
    async with open_service() as (service, link):
        with pytest.raises(CapacityError, match="no rööm"):
            await ask(link, method, b"named")
        assert [error.reason for error in service.refusals] == ["capacity"]


@pytest.mark.parametrize("method", ["One", "Many", "Both"])
async def test_a_bug_is_logged_and_never_answered_with_ok(method, caplog):
    async with open_service() as (service, link):
        with pytest.raises(DisaggError, match="logged why") as caught:
            await ask(link, method, b"bug")
        assert caught.value.__cause__.code() is grpc.StatusCode.INTERNAL
        assert len(service.refusals) == 1
        assert "Traceback" in caplog.text
        assert "oops" in caplog.text
        assert await ask(link, method, b"y") == b"y"


# -- calls
@pytest.mark.parametrize("method", ["Many", "Both"])
async def test_a_stream_whose_caller_leaves_is_over_at_once(method):
    async with open_service() as (service, link):
        await ask(link, method, b"y")
        await until(lambda: service.left == 1)


async def test_one_message_is_received_while_another_is_looked_at():
    """Over 10 Gb/s the plane would stand still between an answer and the next message."""
    num_sent = 0
    handled = []

    async def messages() -> AsyncGenerator[bytes, None]:
        nonlocal num_sent
        while num_sent < 6:
            num_sent += 1
            yield b""

    async def both(coming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for message in coming:
            for _ in range(5):
                await asyncio.sleep(0)
            handled.append(num_sent)
            yield message

    service = rpc.rpc_handlers("a", {}, {"B": both})
    handler = service.service(SimpleNamespace(method="/a/B", invocation_metadata=()))
    await handler.stream_stream(messages(), AsyncMock())
    assert handled == [2, 3, 4, 5, 6, 6]


async def test_a_too_large_message_is_refused_and_the_link_goes_on():
    async with open_service() as (service, link):
        with pytest.raises(WireError):
            await ask(link, "One", bytes(MAX_FRAME_BYTES + 100))
        assert await ask(link, "One", bytes(MAX_FRAME_BYTES)) == bytes(MAX_FRAME_BYTES)
        assert service.seen == [MAX_FRAME_BYTES]


# -- who may speak


SECRET = Security(token="a secret")


@pytest.mark.parametrize("method", ["One", "Many", "Both"])
@pytest.mark.parametrize(
    "client", [None, Security(token="a guess")], ids=["none", "wrong"]
)
async def test_without_the_shared_token_no_message_of_any_call_is_read(method, client):
    async with open_service(SECRET, client) as (service, link):
        with pytest.raises(ConfigError, match="token"):
            await ask(link, method, b"y")
        assert not service.seen


async def test_a_shared_token_tls_and_both_open_the_plane(papers):
    tls = Security(None, papers["ca"], papers["peer"], papers["peer.key"])
    for both in (SECRET, tls, replace(tls, token="s")):
        async with open_service(both, both) as (_, link):
            assert await ask(link, "One", b"y") == b"y"
            assert link.transport == f"gRPC over {'TCP' if both is SECRET else 'TLS'}"


async def test_strangers_are_lost_peers(papers):
    tls = Security(None, papers["ca"], papers["peer"], papers["peer.key"])
    for client in (
        None,  # speaks plain text to a server with TLS
        replace(tls, ca=papers["foreign"]),  # trusts another authority
        Security(ca=papers["ca"]),  # has no certificate
    ):
        async with open_service(tls, client) as (_, link):
            with pytest.raises(PeerLostError):
                await ask(link, "One", b"y")


async def test_servers_take_ports_of_a_range_until_none_is_free():
    ports = two_free_ports()
    server, address = await rpc.start_server([], "127.0.0.1", ports=ports)
    assert address == f"127.0.0.1:{ports[0]}"
    with socket.create_server(("127.0.0.1", ports[1])):
        message = rf"cluster.ports \[{ports[0]}, {ports[1]}\]: none is free"
        with pytest.raises(ConfigError, match=message):
            await rpc.start_server([], "127.0.0.1", ports=ports)
        with pytest.raises(ConfigError, match=message):
            DirectServer(lambda: None).listen("127.0.0.1", ports)  # type: ignore[arg-type,return-value]
    await server.stop(None)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_ipv6_host_is_an_address_like_any_other(host):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    server, address = await rpc.start_server([], host)
    assert address.startswith("[::1]:")
    link = rpc.connect(address)
    await asyncio.wait_for(link.channel.channel_ready(), 20.0)
    await link.close()
    await server.stop(None)


def two_free_ports() -> list[int]:
    """Neighbours, a moment ago."""
    for port in range(20000, 60000, 2):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            socket.create_server(("127.0.0.1", port + 1)).close()
            return [port, port + 1]
    raise AssertionError("no ports are free")


async def test_a_call_on_a_closed_link_is_a_lost_peer():
    """A status of all workers must not end with the link of one that leaves meanwhile."""
    async with open_service() as (service, link):
        slow_call = asyncio.create_task(link.call("/a.B/One", b"slow", 10.0))
        await until(lambda: service.seen)
        await link.close()
        for call in slow_call, link.call("/a.B/One", b"x", 10.0):
            with pytest.raises(PeerLostError, match="closed"):
                await call


async def test_who_asks_and_is_cancelled_stays_cancelled():
    async with open_service() as (service, link):
        slow_call = asyncio.create_task(link.call("/a.B/One", b"slow", 10.0))
        await until(lambda: service.seen)
        slow_call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow_call
