"""Who has no token costs little: many connections with large messages, beside a hand-off."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import pytest

from disagg.page import Kind, make_layout
from disagg.transfer.channel import Channel, ChannelOptions
from disagg.transfer.rpc import tune_malloc
from disagg.transfer.security import Security
from disagg.wire import MAX_FRAME_BYTES
from tests.transfer.house import process
from tests.transfer.peer import Peer, hand_over, open_peer
from tests.transfer.prompts import OTHER_PLAN, make_prompt

PAGE = make_layout("toy", Kind.PAGE, 64, [("k", "uint8", (64 << 10,))])
PLAN = replace(OTHER_PLAN, groups=(replace(OTHER_PLAN.groups[0], page=PAGE),))
SECRET = Security(token="a secret")
CONNECTIONS, SECONDS = 200, 4.0


def serve(answer: Connection) -> None:
    """A receiver, until it is killed."""

    async def scene() -> None:
        tune_malloc()
        async with open_peer(security=SECRET, credit=8 << 20) as (peer, _):
            answer.send(peer.address)
            while True:
                peer.frames.clear()  # their payloads with them
                await asyncio.sleep(0.01)

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
    """The most memory that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


async def bytes_per_s(address: str) -> float:
    """Hand-offs one after another for a while."""
    prompt, sent, began = make_prompt(1024, plan=PLAN), 0, time.monotonic()
    channel = Channel(address, SECRET, ChannelOptions())
    nonce = int(1e6 * began)
    while (seconds := time.monotonic() - began) < SECONDS:
        nonce += 1
        sender = Peer().sender(prompt, channel, nonce)
        sent += (await hand_over(sender, prompt)).payload_bytes
    await channel.close()
    return sent / seconds


@pytest.mark.slow
def test_connections_without_a_token_take_little_memory_and_leave_half_of_the_rate():
    with process(serve) as (child, answer):
        address = answer.recv()
        alone = asyncio.run(bytes_per_s(address))
        before = peak_bytes(child.pid)
        with process(attack, address) as (_, strangers):
            strangers.recv()  # all of them are there
            beside = asyncio.run(bytes_per_s(address))
        assert peak_bytes(child.pid) - before < 256 << 20
        assert beside > alone / 2
