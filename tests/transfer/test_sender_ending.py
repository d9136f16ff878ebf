"""Hand-offs that end early: nothing stays reserved, and the error says what it was."""

import asyncio
from dataclasses import replace

import pytest

from disagg.errors import (
    CapacityError,
    DeadlineError,
    PeerLostError,
    ReservationError,
)
from disagg.transfer.channel import connect
from disagg.transfer.client import PUSH
from disagg.transfer.push_server import PushServer
from disagg.transfer.sender import Sender
from tests.transfer.prompts import Prompt, make_prompt
from tests.transfer.wires import QUICK, Proxy, hand_over, open_house, until


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(1500)


def test_cancelling_a_sender_frees_its_reservation(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt)
            await sender.reserve()
            running = asyncio.create_task(sender.run())
            sender.offer(prompt.checklist.layer(0))
            await until(lambda: house.receiver.gauges()["streams"] == 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            house.assert_nothing_held()

    asyncio.run(scene())


def test_a_sender_that_never_runs_gives_its_reservation_back(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt)
            await sender.reserve()
            await sender.release()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_the_deadline_ends_a_hand_off_and_frees_it(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt, replace(QUICK, deadline_s=0.2))
            await sender.reserve()
            sender.offer(prompt.checklist.layer(0))
            with pytest.raises(DeadlineError, match="longer than"):
                await sender.run()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_nobody_at_the_address_is_a_lost_peer(prompt):
    async def scene():
        link = connect("127.0.0.1:1")
        sender = Sender(link, prompt.request(), prompt.plan, prompt.read, QUICK)
        with pytest.raises(PeerLostError):
            await sender.reserve()
        await link.close()

    asyncio.run(scene())


def test_a_receiver_that_dies_is_a_lost_peer_after_a_while(prompt):
    async def scene():
        async with open_house() as house, Proxy(house) as proxy:
            link = connect(proxy.address)
            options = replace(QUICK, silence_s=0.4)
            sender = Sender(link, prompt.request(), prompt.plan, prompt.read, options)
            await sender.reserve()
            running = asyncio.create_task(sender.run())
            await until(lambda: house.receiver.gauges()["streams"] == 1)
            await proxy.__aexit__()
            with pytest.raises(PeerLostError):
                await running
            await link.close()

    asyncio.run(scene())


def test_a_receiver_that_breaks_every_stream_is_a_lost_peer(prompt):
    """Control works, and every stream begins well: without a frame that arrives it is hopeless."""

    async def scene():
        async with open_house() as house:

            async def brittle(messages):
                async for reply in house.receiver.push(messages):
                    yield reply
                    return

            streams = PushServer({PUSH: brittle})
            streams.start("127.0.0.1")
            house.receiver.streams.port = streams.port
            sender = house.sender(prompt, replace(QUICK, silence_s=0.5))
            await sender.reserve()
            async with asyncio.timeout(10.0):
                with pytest.raises(PeerLostError, match="ended the stream"):
                    await hand_over(sender, prompt)
            await streams.stop()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_a_frozen_receiver_is_noticed_in_seconds(prompt):
    async def scene():
        async with open_house() as house, Proxy(house, 20_000, "freeze") as proxy:
            link = connect(proxy.address)
            options = replace(QUICK, silence_s=10.0)
            sender = Sender(link, prompt.request(), prompt.plan, prompt.read, options)
            await sender.reserve()
            async with asyncio.timeout(10.0):
                receipt = await hand_over(sender, prompt)
            assert proxy.struck == 1
            assert receipt.streams == 2
            await link.close()

    asyncio.run(scene())


def test_a_worker_without_room_refuses_with_a_capacity_error(prompt):
    async def scene():
        async with open_house(7 << 14) as house:
            await house.sender(prompt).reserve()
            with pytest.raises(CapacityError):
                await house.sender(prompt, rid="other").reserve()

    asyncio.run(scene())


def test_a_waiting_sender_gets_room_when_the_engine_frees_some(prompt):
    async def scene():
        async with open_house(7 << 14) as house:
            first = house.sender(prompt)
            await first.reserve()
            await hand_over(first, prompt)
            second = house.sender(prompt, rid="other", wait_s=20.0)
            waiting = asyncio.create_task(second.reserve())
            await until(lambda: house.receiver.gauges()["waiting"] == 1)
            house.free()
            await waiting
            await hand_over(second, prompt)
            (admission,) = house.admitted
            assert prompt.equals(house.pool.arena, admission.groups)

    asyncio.run(scene())


def test_a_sender_that_stops_waiting_leaves_the_queue(prompt):
    async def scene():
        async with open_house(7 << 14) as house:
            await house.sender(prompt).reserve()
            waiting = asyncio.create_task(house.sender(prompt, rid="other", wait_s=20.0).reserve())
            await until(lambda: house.receiver.gauges()["waiting"] == 1)
            waiting.cancel()
            await until(lambda: house.receiver.gauges()["waiting"] == 0)

    asyncio.run(scene())


def test_an_abort_of_the_router_ends_the_hand_off_on_both_sides(prompt):
    async def scene():
        async with open_house(lease_s=0.3) as house:
            sender = house.sender(prompt)
            await sender.reserve()
            running = asyncio.create_task(sender.run())
            sender.offer(prompt.checklist.layer(0))
            await until(lambda: house.receiver.gauges()["streams"] == 1)
            house.receiver.abort("r", 0, "client gone")
            with pytest.raises(ReservationError, match="client gone"):
                await running
            house.assert_nothing_held()

    asyncio.run(scene())


def test_what_the_engine_refuses_is_refused_to_the_sender(prompt):
    async def scene():
        async with open_house() as house:

            def refuse(admission):
                for state in admission.groups:
                    house.pool.release(list(state.ids()))
                raise CapacityError("the engine is stopping")

            house.refuse = refuse
            sender = house.sender(prompt)
            await sender.reserve()
            with pytest.raises(CapacityError, match="the engine is stopping"):
                await hand_over(sender, prompt)
            house.assert_nothing_held()

    asyncio.run(scene())
