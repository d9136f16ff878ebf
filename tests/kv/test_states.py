"""Layers that keep a state: a group of one side record, beside those with K and V."""

from dataclasses import replace

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import AUTO
from disagg.errors import CapacityError
from disagg.kv.arena import HostArena
from disagg.kv.page import ARENA_UNIT, BF16, EXACT, INT8, Kind, make_state_layout
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.state import allocate_group

CONV = ("conv0", "bfloat16", (6, 3))
RECURRENT = ("recurrent0", "float32", (2, 5, 7))
LAYOUT = make_state_layout([CONV, RECURRENT])
KV = KVShape.uniform(3, 2, 64, "float32", (None, 32, None))
SHAPE = replace(KV, states=(LAYOUT, LAYOUT))
LARGE = make_state_layout([CONV, ("recurrent0", "float32", (2, 16, 32))])
CONVOLUTIONS = make_state_layout([CONV])


def plan(spec: str = "kivi", form: str = EXACT) -> Plan:
    return parse_plan(spec, replace(SHAPE, state_form=form))


def large_plan(form: str, spec: str = "kivi") -> Plan:
    """Of states that are large enough to be rounded."""
    return parse_plan(spec, replace(KV, states=(LARGE, LARGE), state_form=form))


def test_planes_of_a_state_begin_at_units_of_the_arena():
    conv, recurrent = LAYOUT.planes

    assert (conv.offset, recurrent.offset) == (0, ARENA_UNIT)
    assert LAYOUT.block_bytes == 4 * ARENA_UNIT


def test_each_state_is_a_group_behind_those_with_k_and_v():
    groups = plan().groups
    layers = [group.layers for group in groups]

    assert layers == [(0, 2), (1,), (3,), (4,)]
    assert plan().group_of == (0, 1, 0, 2, 3)
    assert plan().paged == groups[:2]


@pytest.mark.parametrize("n", [1, 63, 500, 100_000])
def test_a_state_is_one_record_whatever_the_length(n):
    for group in plan().groups[2:]:
        assert group.inventory(n) == {Kind.SIDE: 1}
        assert group.is_side_sent(n)


def test_bytes_of_a_plan_are_those_of_its_kv_and_of_its_states():
    without = parse_plan("kivi", KV)

    assert plan().state_bytes == 2 * LAYOUT.block_bytes
    assert plan().nbytes(300) == without.nbytes(300) + plan().state_bytes
    assert plan().numbers(300) == without.numbers(300)


def test_codec_specs_name_layers_with_k_and_v_alone():
    mixed = plan("0:raw;1-:kivi")

    assert mixed.spec.startswith("0:raw")
    assert plan(mixed.spec) == mixed
    assert plan().reaches == parse_plan("kivi", KV).reaches


def test_plans_with_other_states_have_other_fingerprints():
    wider_layout = make_state_layout([CONV, ("recurrent0", "float32", (2, 5, 8))])
    wider = replace(KV, states=(LAYOUT, wider_layout))
    plans = [
        plan(),
        parse_plan("kivi", KV),
        parse_plan("kivi", wider),
    ]

    assert len({x.fingerprint for x in plans}) == 3


def test_the_record_of_a_state_is_handed_out_as_it_is():
    """The first chunk of a prompt writes all of it: megabytes need not be zeroed."""
    memory = bytearray(b"\xff" * 4096)
    pool = Pool(HostArena(memory), 1024)

    state = allocate_group(plan().groups[-1], 300, pool)

    assert state.side is not None
    assert state.ids() == [state.side]
    assert set(memory) == {0xFF}


def test_a_state_without_room_takes_nothing():
    pool = Pool(HostArena(bytearray(1024)), 1024)
    first, second = plan().groups[2:]
    allocate_group(first, 5, pool)
    allocate_group(second, 5, pool)

    with pytest.raises(CapacityError):
        allocate_group(first, 5, pool)

    assert pool.referenced_pages == 2


# -- states that are rounded for their hand-off


@pytest.mark.parametrize("form", [BF16, INT8])
def test_a_rounded_state_has_a_second_record_until_it_decodes(form):
    exact, rounded = large_plan(EXACT), large_plan(form)

    for group in rounded.states:
        assert group.inventory(300) == {Kind.SIDE: 1, Kind.WIRE: 1}
        assert not group.is_side_sent(300)
    assert rounded.nbytes(300) == exact.nbytes(300) + rounded.wire_state_bytes
    assert rounded.resident_bytes(300) == exact.resident_bytes(300)
    assert rounded.state_bytes == exact.state_bytes == exact.wire_state_bytes


def test_planes_of_a_wire_record_are_those_of_the_page_format():
    (group, _) = large_plan(INT8).states

    planes = [(x.name, x.dtype, x.shape, x.offset) for x in group.sent.planes]

    assert (group.sent.spec, group.sent.kind) == ("state:int8", Kind.WIRE)
    assert planes == [
        ("conv0", "bfloat16", (6, 3), 0),
        ("recurrent0", "int8", (2, 16, 32), 128),
        ("recurrent0_rows", "bfloat16", (2, 16, 1), 128 + 1024),
        ("recurrent0_columns", "bfloat16", (2, 1, 32), 128 + 1024 + 128),
    ]


def test_int8_has_fewer_bytes_than_bf16_and_bf16_than_exact():
    sizes = [large_plan(form).wire_state_bytes for form in (INT8, BF16, EXACT)]

    assert sizes == sorted(set(sizes))


def test_workers_with_other_forms_of_states_have_other_plans():
    fingerprints = {large_plan(form).fingerprint for form in (EXACT, BF16, INT8)}

    assert len(fingerprints) == 3


def test_the_plan_of_exact_states_is_that_of_earlier_releases():
    """Workers of both can hand over to each other."""
    assert large_plan(EXACT).fingerprint == "3889d84222b297b1"


def test_convolutions_alone_are_never_rounded():
    shape = replace(KV, states=(CONVOLUTIONS,))

    plans = [parse_plan("kivi", replace(shape, state_form=x)) for x in (EXACT, INT8)]

    assert plans[0] == plans[1]


def test_a_sequence_that_moves_sends_its_states_as_they_are():
    rounded = large_plan(INT8)

    moving = rounded.moving

    for group in moving.states:
        assert group.inventory(300) == {Kind.SIDE: 1}
        assert group.is_side_sent(300)
    assert moving.fingerprint == rounded.fingerprint
    assert moving.nbytes(300) == rounded.resident_bytes(300)


@pytest.mark.parametrize(
    ("codec", "form"),
    [("raw", EXACT), ("kivi", INT8), ("0:raw;1-:kivi", INT8)],
    ids=["raw", "compressed", "mixed"],
)
def test_by_default_states_are_exact_where_all_of_the_kv_is(codec, form):
    assert large_plan(AUTO, codec) == large_plan(form, codec)
