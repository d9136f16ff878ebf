"""States are handed off, shared and refused as other records are."""

from dataclasses import replace

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import CorruptFrameError, TransferError
from disagg.kv.page import Kind, make_state_layout
from disagg.kv.plan import Plan, state_group
from disagg.transfer.records import Manifest, least_worth_sending
from tests.transfer.desk import Desk
from tests.transfer.prompts import GROUPS, PLAN, make_prompt, make_related

STATE = make_state_layout([("conv0", "float16", (3, 5)), ("recurrent0", "int32", (9,))])
HYBRID = Plan(
    groups=(*GROUPS, state_group(3, STATE), state_group(4, STATE)),
    group_of=(*PLAN.group_of, 2, 3),
)


@pytest.mark.parametrize("tokens", [1, 64, 300, 2300])
def test_the_items_of_states_follow_all_others_and_are_whole_records(tokens):
    manifest = Manifest(HYBRID, tokens)
    *others, first, second = manifest.items

    assert tuple(others) == Manifest(PLAN, tokens).items
    assert (first.layer, second.layer) == (3, 4)
    assert {first.kind, second.kind} == {Kind.SIDE}
    assert manifest.nbytes(first) == STATE.block_bytes


def test_a_hand_off_brings_states_to_the_records_of_the_receiver():
    prompt = make_prompt(300, plan=HYBRID)
    desk = Desk(1 << 21, plan=HYBRID)

    assert desk.give(prompt) == prompt.manifest.total_bytes

    assert prompt.equals(desk.pool.arena, desk.admitted().groups)
    desk.free()
    desk.assert_nothing_held()


def test_pages_of_a_known_prefix_are_not_sent_again_and_states_are():
    first = make_related(2337, 1, 2110, HYBRID)
    second = make_related(2300, 2, 2110, HYBRID)
    desk = Desk(1 << 21, plan=HYBRID)
    desk.give(first, "one")

    ticket = desk.begin(second, rid="two")

    received = set(desk.received(ticket))
    manifest = second.manifest
    states = {manifest.index_of(item) for item in manifest.items[-2:]}
    assert received
    assert not received & states
    assert 0 < desk.cached_tokens("two") <= 2110


def test_a_damaged_state_is_refused():
    prompt = make_prompt(300, plan=HYBRID)
    desk = Desk(1 << 21, plan=HYBRID)
    ticket = desk.begin(prompt)
    frame = prompt.frame(ticket, prompt.manifest.items[-1:])
    damaged = bytearray(frame.payload[0])
    damaged[-1] ^= 1

    with pytest.raises(CorruptFrameError, match="side 0 of layer 4"):
        desk.store(replace(frame, payload=(memoryview(damaged),)))

    assert not set(frame.indices) & set(desk.received(ticket))


def test_a_prompt_without_its_state_never_starts():
    prompt = make_prompt(300, plan=HYBRID)
    desk = Desk(1 << 21, plan=HYBRID)
    ticket = desk.begin(prompt)
    for item in prompt.manifest.items[:-1]:
        desk.store(prompt.frame(ticket, [item]))

    with pytest.raises(TransferError, match="the first is side 0 of layer 4"):
        desk.at(0.0).commit(prompt.commit(ticket))


@pytest.mark.parametrize("codec", ["kivi", "raw"])
def test_prompts_are_worth_sending_by_their_kv_alone(codec):
    """A state has the same bytes at any length: no length of a prompt would be worth it."""
    kv = KVShape.uniform(4, 2, 128, "float16")
    large = make_state_layout([("recurrent0", "float32", (64, 128, 128))])
    hybrid = replace(kv, states=(large,))

    length = least_worth_sending(parse_plan(codec, hybrid))

    plain_length = least_worth_sending(parse_plan(codec, kv))
    # the item of the state has a header
    assert abs(length - plain_length) <= 16
