"""The list of items that both sides derive alone, where they lie, and what may be shared."""

import itertools
from array import array
from dataclasses import replace

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.codecs.registry import codec_names
from disagg.errors import LayoutError, TransferError
from disagg.kv.page import Item, Kind
from disagg.kv.plan import Plan
from disagg.kv.prefix_keys import content_keys, units_of
from disagg.kv.state import Run
from disagg.transfer.records import Addresses, ArenaSource, Manifest, ReceivedItems
from disagg.wire import Ticket
from tests.transfer.prompts import (
    BY_PAGE,
    BY_PROMPT,
    MODEL,
    OTHER_PLAN,
    PLAN,
    SlowArena,
    make_group,
    make_prompt,
)

LENGTHS = (1, 63, 64, 123, 124, 187, 1500, 2107, 2108, 4200)
TICKET = Ticket(1, 2, 3)
BY_SEGMENT = Plan((make_group((0,), 1, True, False),), (0,))
TOKENS = [(7 * i) % 101 for i in range(5000)]


# -- items
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_items_are_the_records_that_hold_tokens_in_every_layer(tokens):
    manifest = Manifest(PLAN, tokens)
    items = manifest.items
    assert len(set(items)) == len(items) == manifest.num_items
    assert [manifest.index_of(item) for item in items] == list(range(len(items)))
    assert tuple(map(manifest.item, range(len(items)))) == items
    for layer, index in enumerate(PLAN.group_of):
        inventory = PLAN.groups[index].inventory(tokens)
        for kind in Kind:
            found = [x.record for x in items if x[:3] == (kind, index, layer)]
            untouched = kind is Kind.SIDE and not inventory[Kind.PAGE]
            assert found == ([] if untouched else list(range(inventory[kind])))


@pytest.mark.parametrize("tokens", range(1, 60, 7))
def test_what_is_sent_of_exact_tokens_is_their_fp16_and_nothing_more(tokens):
    for plan in (PLAN, OTHER_PLAN, BY_PROMPT):
        groups = [plan.groups[index] for index in plan.group_of]
        fp16 = sum(2 * 2 * group.heads * group.head_dim * tokens for group in groups)
        assert Manifest(plan, tokens).total_bytes == fp16


@pytest.mark.parametrize("name", sorted({*codec_names()} - {"raw", "alignedkv"}))
def test_nothing_larger_than_its_fp16_is_ever_sent_by_a_lossy_codec(name):
    """AlignedKV is no lossy one: its pages are fp16 and 0.8 % more. While a prompt of banded has no
    page, sums of its queries travel that weigh a token."""
    plan = parse_plan(name, KVShape(2, 2, 64, "float32", (None, None)))
    for tokens in (*range(1, 520), 2047, 2048, 2049, 2112, 2240, 4200):
        sums = name == "banded" and not plan.groups[0].sealed(tokens)
        assert (
            Manifest(plan, tokens).total_bytes <= 2 * (tokens + sums) * 2 * 2 * 64 * 2
        )


def test_pages_that_joined_the_first_segment_do_not_pass_for_those_of_the_last():
    prompt = make_prompt(4200)
    prompt.manifest.match(prompt.states)
    (state, *_) = [x for x in prompt.states if len(x.runs) > 1]
    first, last = state.runs[0], state.runs[-1]
    state.runs.append(
        Run(last.layout, first.segment, 4096, array("i", [last.pages.pop()]))
    )
    with pytest.raises(TransferError, match="sealed while decoding"):
        prompt.manifest.match(prompt.states)


def test_staged_items_are_read_at_once_as_they_were_and_the_rest_on_the_spot():
    prompt = make_prompt(300)
    arena = SlowArena(prompt.pool.arena.read(0, prompt.pool.arena.nbytes))
    source, items = (
        ArenaSource(arena, prompt.manifest, prompt.states),
        prompt.manifest.items,
    )
    expected = [bytes(prompt.bytes_of(item)) for item in items]
    wait = source.stage(items[:-2])
    arena.zero([(0, arena.nbytes // 2)])
    wait()
    assert list(map(bytes, source.read(items[:5]))) == expected[:5]
    assert len(arena.waited) == 2  # the staging; and nothing, at once
    now = [bytes(prompt.bytes_of(item)) for item in items[-2:]]
    assert list(map(bytes, source.read(items[5:]))) == [*expected[5:-2], *now]
    assert len(arena.waited) == 3


def test_frames_of_items_that_are_none_or_have_other_sizes_are_layout_errors():
    """Of the tail of 116 tokens 7 records come whole, then 4 rows of one."""
    prompt = make_prompt(500)
    addresses = Addresses(prompt.manifest, prompt.states)
    received, index_of = (
        ReceivedItems(prompt.manifest, addresses, {}),
        prompt.manifest.index_of,
    )
    whole, rows = (Item(Kind.RAW, 0, 2, record) for record in (6, 7))
    frame = prompt.frame(TICKET, [whole, rows])
    assert len(received.verify(frame)[0]) == 2
    for wrong in (
        replace(frame, indices=(prompt.manifest.num_items, index_of(rows))),
        replace(frame, indices=(index_of(rows), index_of(whole))),
        replace(frame, payload=frame.payload[:1] * 2),
    ):
        with pytest.raises(LayoutError):
            received.verify(wrong)


# -- units
@pytest.mark.parametrize("plan", [PLAN, BY_PAGE, BY_SEGMENT])
@pytest.mark.parametrize("tokens", [1, 123, 124, 2107, 2108, 2300, 4999])
def test_the_units_of_a_prompt_are_its_pages_and_segments_each_once(plan, tokens):
    units = itertools.chain.from_iterable(units_of(plan, tokens))
    items = [item for unit in units for item in unit.items(plan.groups[unit.group])]
    wanted = {
        x for x in Manifest(plan, tokens).items if x.kind in (Kind.PAGE, Kind.SEGMENT)
    }
    assert len(items) == len(wanted)
    assert set(items) == wanted


@pytest.mark.parametrize(
    ("plan", "ends"),
    [
        (BY_PAGE, [64 * i for i in range(1, 36)]),
        (BY_SEGMENT, [2048, 2240]),
        (BY_PROMPT, []),
    ],
)
def test_a_unit_ends_where_its_bytes_are_final_and_what_hangs_on_a_whole_prompt_is_none(
    plan, ends
):
    (units,) = units_of(plan, 2300)
    assert [unit.end for unit in units] == ends


@pytest.mark.parametrize(("plan", "common"), [(BY_PAGE, 15), (BY_SEGMENT, 0)])
def test_prompts_with_a_common_beginning_have_the_keys_of_what_is_final_in_it(
    plan, common
):
    (first,) = content_keys(MODEL, plan, TOKENS[:2500])
    (second,) = content_keys(MODEL, plan, TOKENS[:1000] + [5] * 1200)
    assert first[:common] == second[:common]
    assert not set(first[common:]) & set(second[common:])


def test_segments_are_named_alike_only_where_both_prompts_fill_them():
    (long,), (short,) = (
        content_keys(MODEL, BY_SEGMENT, TOKENS[:n]) for n in (4500, 2300)
    )
    assert long[0] == short[0]
    assert long[1] != short[1]


def test_a_key_stands_for_model_layout_and_every_token_before():
    (keys,) = content_keys(MODEL, BY_PAGE, TOKENS[:300])
    assert len(set(keys)) == len(keys) == 3
    wider = Plan((replace(BY_PAGE.groups[0], heads=2),), (0,))
    for other in (
        content_keys("another", BY_PAGE, TOKENS[:300]),
        content_keys(MODEL, wider, TOKENS[:300]),
        content_keys(MODEL, BY_PAGE, [TOKENS[0] + 1, *TOKENS[1:300]]),
    ):
        assert not set(keys) & set(other[0])


def test_a_sink_is_a_unit_of_its_own():
    plan = parse_plan("kivi:sink=64", KVShape(1, 1, 64, "float16", (None,)))
    (units,) = units_of(plan, 400)
    assert [unit.end for unit in units] == [64, 128, 192, 256]
    assert units[0].records() == [(Kind.RAW, i) for i in range(4)]
    assert not units_of(plan, 63)[0]
    (first,), (second,) = (
        content_keys(MODEL, plan, TOKENS[:70] + x) for x in ([1] * 300, [2] * 9)
    )
    assert first[0] == second[0]


@pytest.mark.parametrize("sink", [0, 64])
def test_pages_are_named_alike_only_where_all_that_they_depend_on_is_alike(sink):
    plan = parse_plan(f"banded:sink={sink}", KVShape(1, 1, 64, "float16", (None,)))

    def keys(n: int, changed: int | None = None) -> tuple[bytes, ...]:
        prompt = [-1 if i == changed else token for i, token in enumerate(TOKENS[:n])]
        return content_keys(MODEL, plan, prompt)[0][bool(sink) :]

    assert keys(2000)[:3] == keys(2500)[:3] == keys(2500, 2400)[:3]
    assert not {*keys(2000)} & {
        *keys(2000, 570)
    }  # a token that helps to order the channels
    assert keys(600) == keys(601)
    assert not {*keys(500)} & {*keys(501)}  # the last token does too
    assert (keys(600)[0] == keys(2000)[0]) == (
        sink == 0
    )  # else its first unit has fewer pages
    assert all(len({*keys(n)}) == len(keys(n)) for n in (500, 650, 700, 2000))


def test_groups_are_named_each_by_its_own_layout_whatever_the_rest_of_the_plan():
    both = content_keys(MODEL, PLAN, TOKENS[:300])
    assert content_keys(MODEL, Plan((PLAN.groups[1],), (0,)), TOKENS[:300]) == (
        both[1],
    )


def test_keys_are_the_same_everywhere():
    ((key, _),) = content_keys(MODEL, BY_PAGE, TOKENS[:190])
    assert key.hex() == "9c0e9b74b33e22b16376625c6b297ce2"
