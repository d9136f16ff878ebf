"""Two processes, one of which dies or freezes in the middle of a hand-off; and links that break."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from disagg.errors import PeerLostError, ReservationError
from disagg.transfer.channel import Channel, ChannelOptions
from disagg.transfer.link import RateLimiter
from disagg.transfer.messages import Attach
from disagg.transfer.sender import Sender
from disagg.transfer.stats import HandoffStats
from tests.transfer.peer import HOST, QUICK, hand_over, open_peer, process, until
from tests.transfer.prompts import Prompt, make_prompt

TOKENS = 1500
POINTS = 6  # moments of a hand-off at which somebody is killed
DOWN_S = 0.3  # several retries


@pytest.fixture(params=["grpc", "direct"])
def slow(request: pytest.FixtureRequest) -> ChannelOptions:
    """A hand-off takes a second or two."""
    pace = RateLimiter(60_000.0, burst_bytes=1000)
    return replace(QUICK, frame_bytes=1500, pace=pace, direct=request.param == "direct")


def serve(answer: Connection) -> None:
    """A decode worker that lives until it is killed, with a reservation."""

    async def scene() -> None:
        async with open_peer() as (peer, _):
            answer.send((peer.address, peer.promise(make_prompt(TOKENS))))
            await asyncio.Event().wait()

    asyncio.run(scene())


def send(
    address: str, attach: Attach, options: ChannelOptions, answer: Connection
) -> None:
    """A prefill worker, if it lives that long; what came of it."""

    async def scene() -> None:
        prompt = make_prompt(TOKENS)
        sender = Sender(Channel(address, None, options), attach, prompt.plan)
        sender.queue.read_from(prompt.source)
        try:
            await hand_over(sender, prompt)
        except ReservationError as error:
            answer.send(str(error))

    asyncio.run(scene())


async def push_until(
    prompt: Prompt,
    address: str,
    attach: Attach,
    options: ChannelOptions,
    nbytes: int,
    strike: Callable[[], None],
) -> HandoffStats:
    """Hand over, and strike once so much of the records is out; the commit follows the strike."""
    channel = Channel(address, None, options)
    sender = Sender(channel, attach, prompt.plan, deadline_s=30.0)
    sender.queue.read_from(prompt.source)
    running = asyncio.create_task(sender.run())
    for layer in range(len(prompt.plan.group_of)):
        sender.offer(prompt.manifest.layer(layer))
    await until(lambda: sender.queue.payload_bytes >= nbytes or running.done())
    strike()
    sender.finish(42)
    try:
        return await running
    finally:
        await channel.close()


def test_a_receiver_killed_at_any_point_is_soon_a_lost_peer(prompt, slow):
    source, options = random.Random(1), replace(slow, silence_s=0.15)
    for _ in range(POINTS):
        with process(serve) as (child, answer):
            scene = push_until(
                prompt, *answer.recv(), options, source.randrange(9000), child.kill
            )
            with pytest.raises(PeerLostError):
                asyncio.run(asyncio.wait_for(scene, 15.0))


async def test_a_sender_killed_at_any_point_leaves_nothing_behind(prompt, slow):
    source = random.Random(2)

    async with open_peer(lease_s=0.4) as (peer, _):
        for point in range(POINTS):
            attach = peer.promise(prompt, f"r{point}")
            with process(send, peer.address, attach, slow) as (child, _):
                num_items = source.randrange(1, len(prompt.manifest.items) - 15)
                await until(lambda n=num_items: peer.arrived() >= n or not peer.held)
                child.kill()
            await until(lambda: not peer.held)
            assert not peer.engine
            peer.close()


def test_a_hand_off_to_a_frozen_receiver_goes_on_when_it_thaws(prompt, slow):
    with process(serve) as (child, answer):

        def freeze() -> None:
            os.kill(child.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(
                3.0, os.kill, child.pid, signal.SIGCONT
            )

        options = replace(slow, silence_s=10.0, stall_s=1.5)
        scene = push_until(prompt, *answer.recv(), options, 4000, freeze)
        assert asyncio.run(asyncio.wait_for(scene, 30.0)).attaches >= 2


def test_a_receiver_that_stays_frozen_is_a_lost_peer(prompt, slow):
    with process(serve) as (child, answer):
        options = replace(slow, silence_s=2.0, call_s=1.0, stall_s=1.0)
        strike = lambda: os.kill(child.pid, signal.SIGSTOP)  # noqa: E731
        scene = push_until(prompt, *answer.recv(), options, 4000, strike)
        with pytest.raises(PeerLostError):
            asyncio.run(asyncio.wait_for(scene, 30.0))


async def test_a_sender_frozen_longer_than_its_lease_is_over(prompt, slow):
    async with open_peer(lease_s=3.0) as (peer, _):
        attach = peer.promise(prompt)
        with process(send, peer.address, attach, slow) as (child, answer):
            await until(lambda: peer.arrived() > 5)
            os.kill(child.pid, signal.SIGSTOP)
            await until(lambda: not peer.held)
            peer.close()
            os.kill(child.pid, signal.SIGCONT)
            message = await asyncio.wait_for(asyncio.to_thread(answer.recv), 30.0)
            assert "over" in message or "lease" in message
        assert not peer.engine


# -- links
class Proxy:
    """In front of a port: cut when `budget` bytes came from clients, and closed for a while."""

    def __init__(self, port: int, budget: float):
        self.port, self.struck = 0, False
        self._target, self._budget = port, budget
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, back: asyncio.StreamWriter
    ) -> None:
        target_reader, onward = await asyncio.open_connection(HOST, self._target)
        self._writers += [back, onward]
        await asyncio.gather(
            self._pump(reader, onward, True), self._pump(target_reader, back, False)
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                self._budget -= len(data) if counted else 0
                if self._budget < 0 and not self.struck:
                    self.struck = True
                    self.close()
                    await asyncio.sleep(DOWN_S)
                    await self.open()
                    break
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.mark.parametrize("direct", [False, True], ids=["grpc", "direct"])
@pytest.mark.parametrize("budget", [0, 200, 3000, 12_000, 28_000])
async def test_a_link_that_was_down_is_resumed_and_sends_only_the_rest(
    prompt, budget, direct
):
    options = replace(QUICK, silence_s=10.0, direct=direct)
    async with open_peer(options) as (peer, channel):
        proxy = Proxy(
            peer.direct_port if direct else int(peer.address.split(":")[1]), budget
        )
        await proxy.open()
        if direct:
            peer.direct_port = proxy.port
        else:
            channel = Channel(f"{HOST}:{proxy.port}", None, options)
        stats = await hand_over(peer.sender(prompt, channel), prompt)
        await channel.close()
        proxy.close()
        assert proxy.struck
        assert stats.payload_bytes < prompt.manifest.total_bytes + 4 * QUICK.frame_bytes
        peer.assert_admitted(r=prompt)
        peer.close()
