"""Prompts with a common beginning: what is sent once, what is sent again, who owns it."""

import asyncio
from dataclasses import replace

import pytest
from disagg.transfer.sending import Receipt
from tests.transfer.wires import QUICK, House, Proxy, hand_over, open_house, until

from disagg.errors import CapacityError, RequestError
from disagg.page import FinalAt, Kind
from disagg.plan import Plan
from disagg.transfer.channel import connect
from disagg.transfer.items import ids_by_kind
from disagg.transfer.messages import Admission
from disagg.transfer.units import units_of
from disagg.wire import digest
from tests.transfer.prompts import PLAN, Prompt, make_group, make_prompt, make_related

BY_PAGE = Plan((make_group((0,), 1, False, False),), (0,))
BY_PROMPT = Plan((replace(make_group((0,), 2, True, True), final_at=FinalAt.PROMPT),), (0,))


async def give(house: House, prompt: Prompt, rid: str, **request: object) -> Receipt:
    sender = house.sender(prompt, rid=rid, **request)
    await sender.reserve()
    return await hand_over(sender, prompt)


def free(house: House, rid: str) -> None:
    """The engine is done with one prompt."""
    (admission,) = [x for x in house.admitted if x.rid == rid]
    house.admitted.remove(admission)
    for state in admission.groups:
        house.pool.release(list(state.ids()))
    house.receiver.finished(rid, admission.attempt)


def shared_bytes(prompt: Prompt, shared: int) -> int:
    """Bytes of the records that lie wholly in the shared part."""
    units = [unit for units in units_of(prompt.plan, prompt.tokens) for unit in units]
    return sum(
        prompt.checklist.nbytes(item)
        for unit in units
        if unit.end <= shared
        for item in unit.items(prompt.plan.groups[unit.group])
    )


def assert_equal(house: House, prompt: Prompt, admission: Admission) -> None:
    assert prompt.equals(house.pool.arena, admission.groups)


@pytest.mark.parametrize(("tokens", "shared"), [(1200, 1000), (2300, 2110), (190, 130)])
def test_of_a_second_prompt_nothing_in_the_shared_part_is_sent_again(tokens, shared):
    first, second = make_related(tokens + 37, 1, shared), make_related(tokens, 2, shared)
    known = shared_bytes(second, shared)
    assert known > 0

    async def scene():
        async with open_house(1 << 21) as house:
            one = await give(house, first, "one")
            two = await give(house, second, "two")
            assert one.skipped_bytes == 0
            assert two.skipped_bytes == known
            assert two.payload_bytes == second.checklist.total_bytes - known
            for prompt, admission in zip((first, second), house.admitted, strict=True):
                assert_equal(house, prompt, admission)
            pages = [x.groups[1].page_ids() for x in house.admitted]
            whole = shared // 64
            assert pages[0][:whole] == pages[1][:whole]
            assert not set(pages[0][whole:]) & set(pages[1][whole:])
            house.free()
            house.assert_nothing_held()
            assert house.pool.cached_pages > 0

    asyncio.run(scene())


def test_what_another_computed_a_little_differently_is_not_sent_again():
    shared = 2110
    first, second = make_related(2300, 1, shared), make_related(2250, 2, shared, noise=5)

    async def scene():
        async with open_house(1 << 21) as house:
            await give(house, first, "one")
            receipt = await give(house, second, "two")
            assert receipt.skipped_bytes == shared_bytes(second, shared)
            admission = house.admitted[1]
            for item, seen in zip(second.checklist.items, admission.commit.digests, strict=True):
                ids = ids_by_kind(admission.groups[item.group])[item.kind]
                shares = ids[item.record] in set(house.admitted[0].groups[item.group].ids())
                source = first if shares else second
                assert seen == digest(source.read(item))

    asyncio.run(scene())


def test_the_pages_of_a_prompt_stay_when_the_other_one_is_done():
    first, second = make_related(900, 1, 700), make_related(800, 2, 700)

    async def scene():
        async with open_house() as house:
            await give(house, first, "one")
            await give(house, second, "two")
            free(house, "one")
            await give(house, make_prompt(300, 9), "other")
            assert_equal(house, second, house.admitted[0])
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_what_was_not_committed_is_offered_to_nobody():
    first, second = make_related(500, 1, 400), make_related(450, 2, 400)

    async def scene():
        async with open_house() as house:
            sender = house.sender(first, rid="one")
            await sender.reserve()
            sending = asyncio.create_task(sender.run())
            sender.offer(first.checklist.items)
            handoff = house.receiver.ledger._book.live["one"]
            await until(lambda: len(handoff.marks) == len(first.checklist.items))
            assert (await give(house, second, "two")).skipped_bytes == 0
            sending.cancel()
            await asyncio.wait([sending])

    asyncio.run(scene())


@pytest.mark.parametrize("keys", [(), tuple(bytes([i]) * 16 for i in range(6))])
def test_without_the_same_keys_everything_is_sent(keys):
    first = make_related(400, 1, 384)

    async def scene():
        async with open_house() as house:
            await give(house, first, "one")
            receipt = await give(house, first, "two", keys=keys)
            assert receipt.skipped_bytes == 0
            assert receipt.payload_bytes == first.checklist.total_bytes

    asyncio.run(scene())


def test_keys_that_do_not_fit_the_prompt_are_refused():
    prompt = make_related(400, 1, 384)

    async def scene():
        async with open_house() as house:
            with pytest.raises(RequestError, match="3 keys"):
                await house.sender(prompt, keys=prompt.keys[:3]).reserve()
            house.assert_nothing_held()

    asyncio.run(scene())


@pytest.mark.parametrize("running", [True, False], ids=["while the first decodes", "afterwards"])
@pytest.mark.parametrize("noise", [None, 5], ids=["same bytes", "other bytes"])
def test_what_hangs_on_a_whole_prompt_is_shared_only_byte_for_byte(running, noise):
    first = make_related(400, 1, 400, BY_PROMPT)
    second = make_related(400, 1, 400, BY_PROMPT, noise=noise)

    async def scene():
        async with open_house(plan=BY_PROMPT) as house:
            await give(house, first, "one")
            if not running:
                house.free()
            receipt = await give(house, second, "two")
            same = shared_bytes(second, 400) if noise is None else 0
            assert receipt.skipped_bytes == same
            assert_equal(house, second, house.admitted[-1])
            if running:
                assert_equal(house, first, house.admitted[0])
            third = await give(house, second, "three")
            assert third.skipped_bytes == shared_bytes(second, 400)
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_side_records_and_tails_are_never_shared():
    prompt = make_related(400, 1, 400, BY_PROMPT)

    async def scene():
        async with open_house(plan=BY_PROMPT) as house:
            await give(house, prompt, "one")
            await give(house, prompt, "two")
            one, two = (ids_by_kind(x.groups[0]) for x in house.admitted)
            for kind in (Kind.SIDE, Kind.RAW):
                assert not set(one[kind]) & set(two[kind])
            assert one[Kind.PAGE] == two[Kind.PAGE]

    asyncio.run(scene())


def test_cached_pages_make_room_for_new_prompts_but_not_while_reserved():
    """Five slabs: 127 cached pages fill one, the large prompt needs all of them."""
    first, second = (make_related(n, n, 8192, BY_PAGE) for n in (8250, 8300))
    large = make_prompt(26000, 9, BY_PAGE)

    async def scene():
        async with open_house(5 << 14, plan=BY_PAGE) as house:
            await give(house, first, "one")
            house.free()
            assert house.pool.cached_pages == 127
            sender = house.sender(second, rid="two")
            await sender.reserve()
            assert sender.grant.cached == (127,)
            with pytest.raises(CapacityError):
                await house.sender(large, rid="large").reserve()
            receipt = await hand_over(sender, second)
            assert receipt.skipped_bytes == shared_bytes(second, 127 * 64)
            house.free()
            await give(house, large, "large")
            assert not house.pool.kept_keys
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_after_a_broken_stream_what_is_cached_is_still_not_sent():
    first, second = make_related(1500, 1, 1000), make_related(1400, 2, 1000)

    async def scene():
        async with open_house(1 << 21) as house:
            await give(house, first, "one")
            async with Proxy(house, budget=9000) as proxy:
                link = house.link
                house.link = connect(proxy.address)
                receipt = await give(house, second, "two")
                await house.link.close()
                house.link = link
                assert proxy.struck == 1
            assert receipt.streams == 2
            assert receipt.skipped_bytes == shared_bytes(second, 1000)
            assert_equal(house, second, house.admitted[1])

    asyncio.run(scene())


def test_what_was_cached_at_the_first_reservation_is_sent_if_it_is_gone_at_the_second():
    first, second = make_related(500, 1, 400), make_related(450, 2, 400, noise=3)

    async def scene():
        async with open_house(lease_s=0.2) as house:
            await give(house, first, "one")
            house.free()
            sender = house.sender(second, replace(QUICK), rid="two")
            await sender.reserve()
            await until(lambda: not house.receiver.gauges()["reservations"])
            for key in house.pool.kept_keys:
                house.pool.drop(key)
            receipt = await hand_over(sender, second)
            assert receipt.skipped_bytes == 0
            assert_equal(house, second, house.admitted[0])

    asyncio.run(scene())


def test_a_higher_attempt_takes_over_what_a_lower_one_shares():
    first, second = make_related(500, 1, 400), make_related(450, 2, 400, noise=3)

    async def scene():
        async with open_house() as house:
            await give(house, first, "one")
            lower = house.sender(second, rid="two", attempt=0)
            await lower.reserve()
            receipt = await give(house, second, "two", attempt=1)
            assert receipt.skipped_bytes == shared_bytes(second, 400)
            house.free()
            house.assert_nothing_held()

    asyncio.run(scene())


def test_a_codec_of_its_own_shares_nothing_with_the_usual_one():
    other = Plan((make_group((0, 1, 2), 2, False, False),), (0, 0, 0))
    plans = {"": PLAN, "other": other}
    first, second = make_related(500, 1, 400), make_related(500, 1, 400, other)

    async def scene():
        async with open_house(plan_of=plans.__getitem__) as house:
            await give(house, first, "one")
            assert (await give(house, second, "two", spec="other")).skipped_bytes == 0
            again = await give(house, second, "three", spec="other")
            assert again.skipped_bytes == shared_bytes(second, 500)

    asyncio.run(scene())
