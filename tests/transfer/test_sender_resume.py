"""A sender whose stream breaks or whose lease ends goes on, and sends what is missing."""

import asyncio
from dataclasses import replace

import pytest

from disagg.errors import (
    PeerLostError,
    ReservationError,
)
from disagg.transfer.channel import connect
from disagg.transfer.client import PUSH
from disagg.transfer.push_server import PushServer
from disagg.transfer.sender import Sender
from tests.transfer.prompts import Prompt, make_prompt
from tests.transfer.wires import QUICK, Clock, Proxy, hand_over, open_house, until


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(1500)


@pytest.mark.parametrize("budget", [0, 200, 700, 3000, 12_000, 20_000, 28_000])
def test_a_cut_connection_is_resumed_and_sends_only_the_rest(prompt, budget):
    async def scene():
        async with open_house() as house, Proxy(house, budget) as proxy:
            link = connect(proxy.address)
            options = replace(QUICK, silence_s=10.0)
            sender = Sender(link, prompt.request(), prompt.plan, prompt.read, options)
            try:
                receipt = None
                while receipt is None:
                    try:
                        await sender.reserve()
                        receipt = await hand_over(sender, prompt)
                    except PeerLostError:
                        assert budget < 1000  # cut before there was a reservation
            finally:
                await link.close()
            (admission,) = house.admitted
            assert prompt.equals(house.pool.arena, admission.groups)
            assert proxy.struck == 1
            assert receipt.payload_bytes < prompt.checklist.total_bytes + 4 * QUICK.frame_bytes
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_a_lost_acknowledgement_is_asked_for_again(prompt):
    async def scene():
        async with open_house() as house:
            push = house.receiver.push

            async def deaf(messages):
                async for reply in push(messages):
                    if house.admitted:
                        return
                    yield reply

            streams = PushServer({PUSH: deaf})
            streams.start("127.0.0.1")
            house.receiver.streams.port = streams.port
            sender = house.sender(prompt)
            await sender.reserve()
            receipt = await hand_over(sender, prompt)
            await streams.stop()
            assert receipt.streams == 1
            assert receipt.admit_ms > 0
            assert len(house.admitted) == 1

    asyncio.run(scene())


def test_an_expired_lease_is_reserved_again_and_everything_sent_again(prompt):
    async def scene():
        clock = Clock()
        async with open_house(clock=clock) as house:
            sender = house.sender(prompt)
            first = await sender.reserve()
            running = asyncio.create_task(sender.run())
            sender.offer(prompt.checklist.layer(0))
            handoff = house.receiver.ledger.handoff(first.nonce)
            await until(lambda: len(handoff.marks) == len(list(prompt.checklist.layer(0))))
            clock.now += 60.0
            house.receiver.tick()
            assert house.receiver.gauges()["reservations"] == 0
            sender.offer(prompt.checklist.layer(1))
            sender.offer(prompt.checklist.layer(2))
            sender.finish(1)
            receipt = await running
            (admission,) = house.admitted
            assert prompt.equals(house.pool.arena, admission.groups)
            assert receipt.streams == 2

    asyncio.run(scene())


def test_an_idle_sender_keeps_its_lease(prompt):
    async def scene():
        async with open_house(lease_s=0.3) as house:
            sender = house.sender(prompt)
            await sender.reserve()
            running = asyncio.create_task(sender.run())
            handoff = house.receiver.ledger.handoff(sender.grant.nonce)
            begin = handoff.lease_until
            await until(lambda: handoff.lease_until > begin + 0.6)
            for layer in range(3):
                sender.offer(prompt.checklist.layer(layer))
            sender.finish(1)
            assert (await running).streams == 1

    asyncio.run(scene())


def test_another_worker_sends_only_what_the_first_did_not(prompt):
    async def scene():
        async with open_house() as house:
            first = house.sender(prompt)
            await first.reserve()
            running = asyncio.create_task(first.run())
            handoff = house.receiver.ledger.handoff(first.grant.nonce)
            first.offer(prompt.checklist.layer(0))
            await until(lambda: len(handoff.marks) == len(list(prompt.checklist.layer(0))))
            second = house.sender(prompt, attempt=1)
            await second.reserve()
            receipt = await hand_over(second, prompt)
            assert receipt.skipped_bytes == sum(
                map(prompt.checklist.nbytes, prompt.checklist.layer(0))
            )
            assert receipt.payload_bytes == prompt.checklist.total_bytes - receipt.skipped_bytes
            first.offer(prompt.checklist.layer(1))
            with pytest.raises(ReservationError, match="superseded"):
                await running
            (admission,) = house.admitted
            assert prompt.equals(house.pool.arena, admission.groups)

    asyncio.run(scene())
