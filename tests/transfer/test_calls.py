"""The messages of a call, between two connections."""

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from disagg.transfer.calls import EAGER_BYTES, Call
from disagg.transfer.http2 import Connection
from disagg.transfer.sockets import AsyncSocket
from disagg.wire import MAX_FRAME_BYTES


def run(scene: Callable[[Connection, Call], Awaitable[None]]) -> None:
    """With the connection of a client, and a server's end of its first call."""

    async def whole() -> None:
        ends = [Connection(AsyncSocket(raw)) for raw in socket.socketpair()]
        try:
            async with asyncio.timeout(20.0):
                client, server = ends
                await client.open(client=True)
                await server.open(client=False)
                await client.send_headers(1, [(":path", "/a")])
                await scene(client, Call(server, 1, MAX_FRAME_BYTES))
        finally:
            for end in ends:
                end.close()

    asyncio.run(whole())


def test_a_long_message_gets_memory_as_it_comes():
    async def scene(client: Connection, call: Call) -> None:
        sending = asyncio.create_task(
            client.send_data(1, [struct.pack(">BI", 0, MAX_FRAME_BYTES), bytes(1000)], ends=True)
        )
        with pytest.raises(ConnectionError, match="middle of a message"):
            await anext(call.messages())
        assert len(call._memory) <= EAGER_BYTES
        await sending

    run(scene)


def test_a_message_that_outgrows_its_memory_is_whole():
    async def scene(client: Connection, call: Call) -> None:
        sent = random.Random(1).randbytes(2 * EAGER_BYTES + 77)
        listening = asyncio.create_task(client.next_event())  # makes room for what is sent
        parts = [struct.pack(">BI", 0, len(sent)), sent]
        sending = asyncio.create_task(client.send_data(1, parts))
        assert bytes(await anext(call.messages())) == sent
        await sending
        listening.cancel()

    run(scene)
