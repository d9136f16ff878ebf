"""Hand-offs over a real loopback server: whole, broken, resumed, refused; nothing left behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from disagg.errors import (
    CorruptFrameError,
    LayoutError,
    ReservationError,
)
from disagg.transfer.pace import Pace
from disagg.transfer.sender import Sender
from disagg.wire import Item
from tests.transfer.prompts import OTHER_PLAN, Prompt, make_prompt
from tests.transfer.wires import QUICK, hand_over, open_house, until


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

            class Changing:
                reads = 0

                def read(self, items: Sequence[Item]) -> list[memoryview]:
                    self.reads += 1
                    found = prompt.read.read(items)
                    if unstable in items:
                        place = items.index(unstable)
                        found[place] = memoryview(bytes([self.reads]) * len(found[place]))
                    return found

            sender = Sender(house.link, prompt.request(), prompt.plan, Changing(), QUICK)
            await sender.reserve()
            sender.offer(prompt.checklist.items)
            outbox = sender._sending.outbox
            outbox.grant(1 << 20, 0)
            assert outbox.next_parcel(sender._ticket(sender.grant))
            outbox.there({})
            sender.finish(1)
            with pytest.raises(CorruptFrameError):
                await sender.run()
            assert not house.admitted
            house.assert_nothing_held()

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
