"""Bytes that change while they are kept: found, forgotten, told; and nobody gets them."""

import asyncio

import pytest
from tests.transfer.wires import House, hand_over, open_house

from disagg.errors import CorruptFrameError
from disagg.page import ARENA_UNIT
from disagg.transfer.items import Records, ids_by_kind
from disagg.transfer.messages import Admission
from disagg.wire import Item, digest
from tests.transfer.prompts import Prompt, make_related
from tests.transfer.test_sharing import BY_PROMPT, assert_equal, give, shared_bytes

EVERYTHING = 1 << 30


def flip(house: House, prompt: Prompt, admission: Admission, item: Item, place: int = 0) -> None:
    """One bit of one byte of an item in the pool."""
    start = Records(prompt.plan, admission.groups).start(item) + place
    (byte,) = house.pool.arena.read(start, 1)
    house.pool.arena.write([(start, bytes([byte ^ 4]))])


def unit_items(prompt: Prompt) -> list[Item]:
    return [x for x in prompt.checklist.items if x.kind in ("page", "segment")]


def test_pages_that_are_as_they_were_pass():
    prompt = make_related(700, 1, 700)

    async def scene():
        async with open_house() as house:
            await give(house, prompt, "one")
            assert house.receiver.scrub(EVERYTHING) == []
            house.free()
            assert house.receiver.scrub(EVERYTHING) == []
            house.assert_nothing_held()

    asyncio.run(scene())


@pytest.mark.parametrize("which", [0, 7, 13, -1])
@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_bit_in_a_cached_page_is_found_by_name_and_the_page_forgotten(which, place):
    prompt = make_related(700, 1, 700)
    item = unit_items(prompt)[which]

    async def scene():
        async with open_house() as house:
            await give(house, prompt, "one")
            (admission,) = house.admitted
            house.free()
            cached = house.pool.cached_pages
            flip(house, prompt, admission, item, place % prompt.checklist.nbytes(item))
            (damage,) = house.receiver.scrub(EVERYTHING)
            assert isinstance(damage.error, CorruptFrameError)
            assert str(item) in str(damage.error)
            assert damage.requests == []
            assert house.pool.cached_pages < cached
            assert house.receiver.ledger.counts["damaged"] == 1
            assert house.receiver.scrub(EVERYTHING) == []
            receipt = await give(house, prompt, "two")
            assert 0 < receipt.skipped_bytes < shared_bytes(prompt, 700)
            assert_equal(house, prompt, house.admitted[0])

    asyncio.run(scene())


def test_requests_that_decode_from_a_damaged_page_are_dropped_and_told():
    first, second = make_related(500, 1, 400), make_related(450, 2, 400)
    other = make_related(300, 3, 0)

    async def scene():
        async with open_house() as house:
            told: list[tuple[str, int, str]] = []
            house.receiver._on_damage = lambda rid, attempt, error: told.append(
                (rid, attempt, error.reason)
            )
            for rid, prompt in (("one", first), ("two", second), ("other", other)):
                await give(house, prompt, rid)
            flip(house, first, house.admitted[0], Item("page", 1, 1, 2))
            (damage,) = house.receiver.scrub(EVERYTHING)
            assert sorted(damage.requests) == [("one", 0), ("two", 0)]
            assert sorted(told) == [("one", 0, "corrupt_frame"), ("two", 0, "corrupt_frame")]
            assert sorted(rid for rid, _, _ in house.dropped) == ["one", "two"]
            assert house.receiver.gauges()["running"] == 1
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


@pytest.mark.parametrize("noise", [None, 3], ids=["same bytes", "other bytes"])
def test_a_reservation_that_was_offered_a_damaged_page_gets_it_from_its_sender(noise):
    first, second = make_related(500, 1, 400), make_related(450, 2, 400, noise=noise)

    async def scene():
        async with open_house() as house:
            await give(house, first, "one")
            sender = house.sender(second, rid="two")
            await sender.reserve()
            flip(house, first, house.admitted[0], Item("page", 1, 1, 2))
            assert len(house.receiver.scrub(EVERYTHING)) == 1
            await hand_over(sender, second)
            admission = house.admitted[1]
            for item, seen in zip(second.checklist.items, admission.commit.digests, strict=True):
                assert seen == digest_at(house, second, admission, item)
            page = ids_by_kind(admission.groups[1])["page"][2]
            assert page not in ids_by_kind(house.admitted[0].groups[1])["page"]
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def digest_at(house: House, prompt: Prompt, admission: Admission, item: Item) -> int:
    start = Records(prompt.plan, admission.groups).start(item)
    return digest(house.pool.arena.read(start, prompt.checklist.nbytes(item)))


def test_a_unit_that_hangs_together_is_forgotten_together():
    prompt = make_related(400, 1, 400, BY_PROMPT)

    async def scene():
        async with open_house(plan=BY_PROMPT) as house:
            await give(house, prompt, "one")
            (admission,) = house.admitted
            house.free()
            flip(house, prompt, admission, unit_items(prompt)[3])
            assert len(house.receiver.scrub(EVERYTHING)) == 1
            assert house.pool.cached_pages == 0
            assert (await give(house, prompt, "two")).skipped_bytes == 0

    asyncio.run(scene())


def test_a_scrub_goes_on_where_the_last_one_stopped():
    prompt = make_related(1500, 1, 1500)

    async def scene():
        async with open_house() as house:
            await give(house, prompt, "one")
            (admission,) = house.admitted
            flip(house, prompt, admission, Item("page", 1, 1, 11))
            units = len(house.pool.kept_keys)
            found = [house.receiver.scrub(1) for _ in range(units)]
            assert sum(map(len, found)) == 1

    asyncio.run(scene())


def test_scrubbing_does_not_change_what_goes_first_when_room_is_needed():
    prompt = make_related(900, 1, 900)

    async def scene():
        async with open_house() as house:
            await give(house, prompt, "one")
            before = house.pool.kept_keys
            house.receiver.scrub(EVERYTHING)
            assert house.pool.kept_keys == before

    asyncio.run(scene())


def test_tail_pages_can_be_written_to_while_the_rest_is_scrubbed():
    prompt = make_related(700, 1, 700)

    async def scene():
        async with open_house() as house:
            await give(house, prompt, "one")
            (admission,) = house.admitted
            for state in admission.groups:
                for page in (*state.tail, *([] if state.side is None else [state.side])):
                    house.pool.arena.write([(page * ARENA_UNIT, b"decode was here")])
            assert house.receiver.scrub(EVERYTHING) == []

    asyncio.run(scene())
