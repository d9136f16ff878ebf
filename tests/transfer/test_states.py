"""States are handed off, shared and refused as other records are."""

from dataclasses import replace

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import CorruptFrameError, LayoutError, TransferError
from disagg.kv.page import ARENA_UNIT, BF16, EXACT, INT8, Kind, make_state_layout
from disagg.kv.plan import Plan, state_group
from disagg.transfer.records import Manifest, least_worth_sending
from tests.transfer.desk import Desk, corrupt
from tests.transfer.prompts import GROUPS, PLAN, make_prompt, make_related

STATE = make_state_layout([("conv0", "float16", (3, 5)), ("recurrent0", "int32", (9,))])
HYBRID = Plan(
    groups=(*GROUPS, state_group(3, STATE), state_group(4, STATE)),
    group_of=(*PLAN.group_of, 2, 3),
)

LARGE = make_state_layout(
    [("conv0", "float16", (3, 5)), ("recurrent0", "float32", (2, 16, 32))]
)
ROUNDED = {
    form: Plan(
        groups=(*GROUPS, state_group(3, LARGE, form), state_group(4, LARGE, form)),
        group_of=(*PLAN.group_of, 2, 3),
    )
    for form in (EXACT, BF16, INT8)
}


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


# -- states that are rounded for their hand-off


def test_the_items_of_rounded_states_are_their_wire_records():
    plan = ROUNDED[INT8]
    manifest = Manifest(plan, 300)
    *_, first, second = manifest.items

    assert {first.kind, second.kind} == {Kind.WIRE}
    sent_bytes = manifest.nbytes(first) + manifest.nbytes(second)
    assert sent_bytes == plan.wire_state_bytes < plan.state_bytes


def test_a_hand_off_brings_wire_records_and_makes_room_for_exact_ones():
    prompt = make_prompt(300, plan=ROUNDED[INT8])
    desk = Desk(1 << 21, plan=ROUNDED[INT8])

    assert desk.give(prompt) == prompt.manifest.total_bytes

    groups = desk.admitted().groups
    assert prompt.equals(desk.pool.arena, groups)
    assert all(None not in (state.side, state.wire) for state in groups[-2:])
    desk.free()
    desk.assert_nothing_held()


def test_records_that_are_widened_into_are_not_filled_with_zeros_first():
    desk = Desk(1 << 21, plan=ROUNDED[INT8])
    for start in range(0, 1 << 21, 1 << 12):
        desk.pool.arena.write([(start, b"\xff" * (1 << 12))])

    desk.give(make_prompt(300, plan=ROUNDED[INT8]))

    side = desk.admitted().groups[-1].side
    exact = desk.pool.arena.read(side * ARENA_UNIT, LARGE.block_bytes)
    assert set(exact) == {0xFF}


def test_a_damaged_wire_record_is_refused():
    prompt = make_prompt(300, plan=ROUNDED[INT8])
    desk = Desk(1 << 21, plan=ROUNDED[INT8])
    ticket = desk.begin(prompt)
    frame = corrupt(prompt.frame(ticket, prompt.manifest.items[-1:]))

    with pytest.raises(CorruptFrameError, match="wire 0 of layer 4"):
        desk.store(frame)


@pytest.mark.parametrize("form", [EXACT, BF16])
def test_a_sender_with_another_form_of_states_is_refused(form):
    prompt = make_prompt(300, plan=ROUNDED[form])
    desk = Desk(1 << 21, plan=ROUNDED[INT8])

    with pytest.raises(LayoutError, match="reserved were"):
        desk.begin(prompt)


def test_a_sequence_that_moves_brings_exact_states_and_reserves_no_others():
    plan = ROUNDED[INT8]
    sequence = make_prompt(300, plan=plan.moving)
    desk = Desk(1 << 21, plan=plan)

    sent_bytes = desk.give(sequence, moved=300)

    assert sent_bytes == sequence.manifest.total_bytes
    groups = desk.admitted().groups
    assert sequence.equals(desk.pool.arena, groups)
    assert {state.wire for state in groups} == {None}
    desk.free()
    desk.assert_nothing_held()
