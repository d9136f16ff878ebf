"""Who has no token costs little: many connections with large messages, beside honest ones."""

import asyncio
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import pytest

from disagg.transfer.messages import KV_SERVICE
from disagg.transfer.rpc import connect, tune_malloc
from disagg.transfer.security import Security
from disagg.wire import FRAME_BYTES, MAX_FRAME_BYTES, frame_message
from tests.transfer.peer import open_peer, process

SECRET = Security(token="a secret")
CONNECTIONS, SECONDS = 200, 4.0


def serve(answer: Connection) -> None:
    """A receiver, until it is killed."""

    async def scene() -> None:
        tune_malloc()
        async with open_peer(security=SECRET) as (peer, _):
            answer.send(peer.address)
            await asyncio.Event().wait()

    asyncio.run(scene())


def attack(address: str, answer: Connection) -> None:
    """Connections without a token, each with a call of the largest message five times a second."""

    async def scene() -> None:
        message, refused = bytes(MAX_FRAME_BYTES), 0

        async def stranger() -> None:
            nonlocal refused
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(address, options) as channel:
                while True:
                    call = channel.stream_stream("/disagg.v1.KvTransferService/Push")()
                    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        await call.write(message)
                        await call.read()
                    call.cancel()
                    refused += 1
                    if refused == CONNECTIONS:
                        answer.send(refused)
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(stranger() for _ in range(CONNECTIONS)))

    asyncio.run(scene())


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


async def bytes_per_s(address: str) -> float:
    """Messages as large as frames, two at a time, for a while."""
    link, message, sent = (
        connect(address, SECRET),
        frame_message([bytes(FRAME_BYTES)]),
        0,
    )
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < SECONDS:
        both = (link.call(f"/{KV_SERVICE}/Probe", message, 5.0) for _ in range(2))
        await asyncio.gather(*both)
        sent += 2 * len(message)
    await link.close()
    return sent / seconds


@pytest.mark.slow
def test_connections_without_a_token_cost_little():
    with process(serve) as (child, answer):
        address = answer.recv()
        alone = asyncio.run(bytes_per_s(address))
        before = peak_bytes(child.pid)
        with process(attack, address) as (_, strangers):
            strangers.recv()  # all of them are there
            beside = asyncio.run(bytes_per_s(address))
        assert peak_bytes(child.pid) - before < 256 << 20
        assert beside > alone / 2
