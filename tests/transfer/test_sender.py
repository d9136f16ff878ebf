"""Hand-offs over a real loopback server: whole, broken, resumed, refused; nothing left behind."""

import asyncio
from dataclasses import replace

import pytest

from disagg.errors import (
    CapacityError,
    CorruptFrameError,
    DeadlineError,
    LayoutError,
    PeerLostError,
    ReservationError,
)
from disagg.transfer.channel import connect, start_server
from disagg.transfer.pace import Pace
from disagg.transfer.sender import Sender
from disagg.wire import Item
from tests.transfer.prompts import OTHER_PLAN, Prompt, make_prompt
from tests.transfer.wires import QUICK, Clock, Proxy, hand_over, open_house, until


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(1500)


def test_a_prompt_arrives_whole_with_what_only_prefill_knows(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt)
            await sender.reserve()
            receipt = await hand_over(sender, prompt)
            (admission,) = house.admitted
            assert prompt.equals(house.pool.arena, admission.groups)
            assert admission.commit.first_token == 42
            assert admission.commit.extras == {"ids": [1, 2]}
            assert admission.commit.timings == {"encode": 1.5}
            assert receipt.payload_bytes == prompt.checklist.total_bytes
            assert receipt.streams == 1
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_both_sides_count_the_same_bytes_control_included(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt)
            await sender.reserve()
            receipt = await hand_over(sender, prompt)
            (admission,) = house.admitted
            assert admission.wire_bytes == receipt.wire_bytes
            overhead = receipt.wire_bytes - receipt.payload_bytes
            assert 0 < overhead < 200 * receipt.frames + 40 * len(prompt.checklist.items)

    asyncio.run(scene())


def test_times_of_a_receipt_fit_into_each_other(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt)
            await sender.reserve()
            receipt = await hand_over(sender, prompt, pause=0.01)
            assert 0 < receipt.exposed_ms < receipt.wire_ms
            assert 0 < receipt.verify_ms < receipt.wire_ms
            assert 0 < receipt.admit_ms < receipt.exposed_ms

    asyncio.run(scene())


def test_a_layer_is_there_before_the_next_is_offered(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt)
            await sender.reserve()
            running = asyncio.create_task(sender.run())
            handoff = house.receiver.ledger.handoff(sender.grant.nonce)
            for layer in range(3):
                items = set(prompt.checklist.layer(layer))
                sender.offer(prompt.checklist.layer(layer))
                await until(lambda items=items: items <= set(handoff.marks))
            assert not house.admitted
            sender.finish(1)
            await running

    asyncio.run(scene())


def test_bytes_in_flight_stay_within_two_frames(prompt):
    async def scene():
        async with open_house() as house:
            sender = house.sender(prompt)
            seen = []
            grant = sender._sending.outbox.grant

            def watch(credit, frames):
                seen.append(sender.bytes_in_flight)
                grant(credit, frames)

            sender._sending.outbox.grant = watch
            await sender.reserve()
            await hand_over(sender, prompt)
            assert max(seen) <= 2 * QUICK.frame_bytes
            assert sender.bytes_in_flight == 0

    asyncio.run(scene())


def test_many_hand_offs_at_once_do_not_mix(prompt):
    prompts = [make_prompt(tokens, seed) for seed, tokens in enumerate((1, 63, 64, 300, 1100, 70))]

    async def scene():
        async with open_house(1 << 22) as house:
            senders = [house.sender(x, rid=f"r{i}") for i, x in enumerate(prompts)]
            await asyncio.gather(*(sender.reserve() for sender in senders))
            await asyncio.gather(*map(hand_over, senders, prompts))
            for admission in house.admitted:
                origin = prompts[int(admission.rid[1:])]
                assert origin.equals(house.pool.arena, admission.groups)
            assert len(house.admitted) == len(prompts)
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


@pytest.mark.parametrize("budget", [0, 200, 700, 3000, 12_000, 20_000, 28_000])
def test_a_cut_connection_is_resumed_and_sends_only_the_rest(prompt, budget):
    async def scene():
        async with open_house() as house, Proxy(house.address, budget) as proxy:
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

            house.receiver.push = deaf
            server, address = await start_server([house.receiver.handler()], "127.0.0.1")
            link = connect(address)
            sender = Sender(link, prompt.request(), prompt.plan, prompt.read, QUICK)
            await sender.reserve()
            receipt = await hand_over(sender, prompt)
            await link.close()
            await server.stop(None)
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
        async with open_house() as house, Proxy(house.address) as proxy:
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


def test_a_frozen_receiver_is_noticed_in_seconds(prompt):
    async def scene():
        async with open_house() as house, Proxy(house.address, 20_000, "freeze") as proxy:
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


WRONG = {
    "a foreign plan": ({"plan": OTHER_PLAN.fingerprint}, LayoutError),
    "a foreign model": ({"model": "b-model"}, LayoutError),
    "an old epoch": ({"epoch": 6}, ReservationError),
}


@pytest.mark.parametrize(("change", "error"), WRONG.values(), ids=WRONG)
def test_refusals_keep_their_type_and_message_on_the_way(prompt, change, error):
    async def scene():
        async with open_house() as house:
            with pytest.raises(error) as caught:
                await house.sender(prompt, **change).reserve()
            assert str(next(iter(change.values()))) in str(caught.value)
            house.assert_nothing_held()

    asyncio.run(scene())


def test_records_that_change_while_they_are_sent_are_never_admitted(prompt):
    """The digest of the first packing is the promise; other bytes later break it."""

    async def scene():
        async with open_house() as house:
            unstable = Item(prompt.checklist.items[0].kind, 0, 0, 0)
            reads = []

            def read(item: Item) -> memoryview:
                reads.append(item)
                data = prompt.read(item)
                return data if item != unstable else memoryview(bytes([len(reads)]) * len(data))

            sender = Sender(house.link, prompt.request(), prompt.plan, read, QUICK)
            await sender.reserve()
            sender.offer(prompt.checklist.items)
            sender._sending.outbox._pack(ticket := sender._ticket(sender.grant))
            sender._sending.outbox.there({})
            assert ticket
            sender.finish(1)
            with pytest.raises(CorruptFrameError):
                await sender.run()
            assert not house.admitted
            house.assert_nothing_held()

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


def test_a_paced_sender_takes_the_time_of_the_link(prompt):
    async def scene():
        async with open_house() as house:
            options = replace(QUICK, pace=Pace(400_000.0, burst_bytes=4000))
            sender = house.sender(prompt, options)
            await sender.reserve()
            receipt = await hand_over(sender, prompt)
            assert receipt.wire_ms >= 1000 * (receipt.payload_bytes - 8000) / 400_000.0

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
