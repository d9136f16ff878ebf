"""Two processes, one of which dies or freezes in the middle of a hand-off."""

import asyncio
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from disagg.errors import PeerLostError
from disagg.transfer.channel import connect
from disagg.transfer.pace import Pace
from disagg.transfer.sender import Sender
from tests.transfer.prompts import Prompt, make_prompt
from tests.transfer.wires import QUICK, Proxy, hand_over, open_house, until

TOKENS = 1500
POINTS = 20  # moments of a hand-off at which somebody is killed
SLOW = replace(QUICK, frame_bytes=1500)  # many frames, so that there are many moments


def serve(answer: Connection) -> None:
    """A decode worker that lives until it is killed."""

    async def scene() -> None:
        async with open_house() as house:
            answer.send(house.address)
            await asyncio.Event().wait()

    asyncio.run(scene())


def send(address: str, rid: str, answer: Connection) -> None:
    """A prefill worker that takes a second or two for a hand-off, if it lives that long."""

    async def scene() -> None:
        prompt = make_prompt(TOKENS)
        options = replace(SLOW, pace=Pace(60_000.0, burst_bytes=1000))
        link = connect(address)
        sender = Sender(link, prompt.request(rid), prompt.plan, prompt.read, options)
        await sender.reserve()
        answer.send(rid)
        await hand_over(sender, prompt)

    asyncio.run(scene())


@contextmanager
def process(target: object, *arguments: object) -> Iterator[tuple[object, Connection]]:
    """Another process; killed at the end if it still lives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.transfer.test_faults"])
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(TOKENS)


async def push_until(prompt: Prompt, address: str, frames: int, strike: object, **options: float):
    """Hand over, and strike once so many frames are out; the commit follows the strike."""
    link = connect(address)
    sender = Sender(link, prompt.request(), prompt.plan, prompt.read, replace(SLOW, **options))
    await sender.reserve()
    running = asyncio.create_task(sender.run())
    for layer in range(len(prompt.plan.group_of)):
        sender.offer(prompt.checklist.layer(layer))
    await until(lambda: sender._sending.frames >= frames or running.done())
    strike()
    sender.finish(42, {"ids": [1, 2]}, {"encode": 1.5})
    try:
        return await running
    finally:
        await link.close()


def test_a_receiver_killed_at_any_point_is_a_lost_peer_within_its_silence(prompt):
    source = random.Random(1)
    for _ in range(POINTS):
        with process(serve) as (child, answer):
            address, frames = answer.recv(), source.randrange(12)
            scene = push_until(prompt, address, frames, child.kill, silence_s=0.15)
            with pytest.raises(PeerLostError):
                asyncio.run(asyncio.wait_for(scene, 15.0))


def test_a_sender_killed_at_any_point_leaves_nothing_and_is_never_taken_for_complete(prompt):
    source = random.Random(2)

    async def scene() -> None:
        async with open_house(lease_s=0.4) as house:
            for point in range(POINTS):
                rid = f"r{point}"
                with process(send, house.address, rid) as (child, answer):
                    assert await asyncio.to_thread(answer.recv) == rid
                    marks = source.randrange(len(prompt.checklist.items) - 15)
                    handoff = house.receiver.ledger._book.live[rid]
                    await until(lambda h=handoff, m=marks: len(h.marks) >= m or not h.state.live)
                    child.kill()
                await until(lambda: not house.receiver.gauges()["reservations"], 15.0)
                assert not house.admitted
                house.assert_nothing_held()

    asyncio.run(scene())


def test_a_frozen_receiver_is_noticed_and_the_hand_off_goes_on_when_it_thaws(prompt):
    with process(serve) as (child, answer):
        address = answer.recv()

        def freeze() -> None:
            os.kill(child.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(3.0, os.kill, child.pid, signal.SIGCONT)

        scene = push_until(prompt, address, 5, freeze, silence_s=10.0)
        receipt = asyncio.run(asyncio.wait_for(scene, 30.0))
        assert receipt.streams == 2


def test_a_frozen_sender_holds_nothing_for_longer_than_its_lease_and_ends_its_hand_off_later(
    prompt,
):
    """While it is frozen its pages are freed; what it sends when it thaws gets new ones."""

    async def scene() -> None:
        async with open_house(lease_s=0.4) as house:
            with process(send, house.address, "r") as (child, answer):
                assert await asyncio.to_thread(answer.recv) == "r"
                handoff = house.receiver.ledger._book.live["r"]
                await until(lambda: len(handoff.marks) > 5)
                os.kill(child.pid, signal.SIGSTOP)
                await until(lambda: not house.receiver.gauges()["reservations"], 15.0)
                house.assert_nothing_held()
                os.kill(child.pid, signal.SIGCONT)
                await until(lambda: bool(house.admitted), 30.0)
            assert prompt.equals(house.pool.arena, house.admitted[0].groups)
            assert house.receiver.ledger.counts["expired"] == 1
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_a_link_that_is_down_for_a_while_is_a_resumed_transfer(prompt):
    async def scene() -> None:
        async with open_house() as house, Proxy(house) as proxy:
            link = connect(proxy.address)
            options = replace(SLOW, silence_s=10.0, pace=Pace(60_000.0, burst_bytes=1000))
            sender = Sender(link, prompt.request(), prompt.plan, prompt.read, options)
            await sender.reserve()
            running = asyncio.create_task(hand_over(sender, prompt))
            await until(lambda: sender._sending.frames >= 5)
            await proxy.close_for(0.5)
            receipt = await asyncio.wait_for(running, 20.0)
            await link.close()
            assert receipt.streams >= 2
            assert receipt.payload_bytes < 1.5 * prompt.checklist.total_bytes
            assert prompt.equals(house.pool.arena, house.admitted[0].groups)
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_a_receiver_that_stays_frozen_is_a_lost_peer(prompt):
    with process(serve) as (child, answer):
        address = answer.recv()
        scene = push_until(
            prompt,
            address,
            5,
            lambda: os.kill(child.pid, signal.SIGSTOP),
            silence_s=2.0,
            call_s=1.0,
        )
        with pytest.raises(PeerLostError):
            asyncio.run(asyncio.wait_for(scene, 30.0))
