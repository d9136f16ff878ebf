"""The list of items that both sides derive alone, where they lie, and what may be shared."""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.codecs.registry import codec_names
from disagg.errors import LayoutError, TransferError
from disagg.kv.page import Item, Kind
from disagg.kv.plan import Plan
from disagg.kv.prefix_keys import content_keys, prefix_blocks
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
BY_SEGMENT = Plan(
    groups=(make_group((0,), heads=1, segments=True, side=False),),
    group_of=(0,),
)
TOKENS = [(7 * i) % 101 for i in range(5000)]


# -- items
@pytest.mark.parametrize("tokens", LENGTHS)
def test_items_have_the_indices_of_their_order(tokens):
    manifest = Manifest(PLAN, tokens)
    items = manifest.items

    indices = range(manifest.num_items)
    assert len(set(items)) == len(items) == len(indices)
    assert list(map(manifest.index_of, items)) == list(indices)
    assert tuple(map(manifest.item, indices)) == items


@pytest.mark.parametrize("tokens", LENGTHS)
def test_items_are_the_records_that_hold_tokens_in_every_layer(tokens):
    items = Manifest(PLAN, tokens).items

    for layer, index in enumerate(PLAN.group_of):
        inventory = PLAN.groups[index].inventory(tokens)
        for kind in Kind:
            name = (kind, index, layer)
            records = [x.record for x in items if x[:3] == name]
            count = inventory[kind]
            if kind is Kind.SIDE and not inventory[Kind.PAGE]:
                count = 0
            assert records == list(range(count))


@pytest.mark.parametrize("tokens", range(1, 60, 7))
def test_exact_tokens_are_sent_as_their_fp16_and_nothing_more(tokens):
    for plan in (PLAN, OTHER_PLAN, BY_PROMPT):
        fp16_bytes = 0
        for index in plan.group_of:
            group = plan.groups[index]
            numbers = 2 * group.heads * group.head_dim * tokens
            fp16_bytes += 2 * numbers
        assert Manifest(plan, tokens).total_bytes == fp16_bytes


LOSSY = sorted(set(codec_names()) - {"raw", "alignedkv"})


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_codec_never_sends_more_than_fp16(name):
    """AlignedKV is not lossy: its pages are fp16 and 0.8 % more. While a prompt of banded has no
    page, sums of its queries are sent that weigh one token.
    """
    shape = KVShape.uniform(2, 2, 64, "float32")
    plan = parse_plan(name, shape)
    long_prompts = (2047, 2048, 2049, 2112, 2240, 4200)
    for tokens in (*range(1, 520), *long_prompts):
        sends_sums = name == "banded" and not plan.groups[0].sealed(tokens)
        sent_tokens = tokens + 1 if sends_sums else tokens
        fp16_bytes = 2 * sent_tokens * 2 * 2 * 64 * 2
        assert Manifest(plan, tokens).total_bytes <= fp16_bytes


def test_pages_of_another_segment_do_not_match_a_prompt():
    prompt = make_prompt(4200)
    prompt.manifest.match(prompt.states)
    state = next(x for x in prompt.states if len(x.runs) > 1)
    first, last = state.runs[0], state.runs[-1]
    moved_page = array("i", [last.pages.pop()])
    state.runs.append(Run(last.layout, first.segment, 4096, moved_page))

    with pytest.raises(TransferError, match="sealed while decoding"):
        prompt.manifest.match(prompt.states)


def test_staged_items_are_read_as_staged_and_others_as_they_are():
    prompt = make_prompt(300)
    host = prompt.pool.arena
    arena = SlowArena(host.read(0, host.nbytes))
    source = ArenaSource(arena, prompt.manifest, prompt.states)
    items = prompt.manifest.items
    before = [bytes(prompt.bytes_of(item)) for item in items]

    wait = source.stage(items[:-2])
    arena.zero([(0, arena.nbytes // 2)])
    wait()

    first = source.read(items[:5])
    assert list(map(bytes, first)) == before[:5]
    assert len(arena.waited) == 2  # for the staging, and for nothing else
    rest = source.read(items[5:])
    unstaged = [bytes(prompt.bytes_of(item)) for item in items[-2:]]
    assert list(map(bytes, rest)) == [*before[5:-2], *unstaged]
    assert len(arena.waited) == 3


def test_frames_of_other_items_or_sizes_are_layout_errors():
    """Of the tail of 116 tokens 7 records come whole, then 4 rows of one."""
    prompt = make_prompt(500)
    addresses = Addresses(prompt.manifest, prompt.states)
    received = ReceivedItems(prompt.manifest, addresses, {})
    index_of = prompt.manifest.index_of
    whole = Item(Kind.RAW, group=0, layer=2, record=6)
    rows = Item(Kind.RAW, group=0, layer=2, record=7)
    frame = prompt.frame(TICKET, [whole, rows])

    new_digests, _ = received.verify(frame)

    assert len(new_digests) == 2
    beyond = prompt.manifest.num_items
    swapped = (index_of(rows), index_of(whole))
    for wrong_frame in (
        replace(frame, indices=(beyond, index_of(rows))),
        replace(frame, indices=swapped),
        replace(frame, payload=frame.payload[:1] * 2),
    ):
        with pytest.raises(LayoutError):
            received.verify(wrong_frame)


# -- prefix blocks and their keys


def keys_of(plan: Plan, prompt: Sequence[int]) -> tuple[bytes, ...]:
    """The keys of a prompt under a plan of one layer group."""
    (keys,) = content_keys(MODEL, plan, prompt)
    return keys


@pytest.mark.parametrize("plan", [PLAN, BY_PAGE, BY_SEGMENT])
@pytest.mark.parametrize("tokens", [1, 123, 124, 2107, 2108, 2300, 4999])
def test_the_blocks_of_a_prompt_have_each_final_record_once(plan, tokens):
    items = []
    for block in itertools.chain.from_iterable(prefix_blocks(plan, tokens)):
        items += block.items(plan.groups[block.group])

    manifest = Manifest(plan, tokens)
    shareable = (Kind.PAGE, Kind.SEGMENT)
    expected = {item for item in manifest.items if item.kind in shareable}
    assert len(items) == len(expected)
    assert set(items) == expected


@pytest.mark.parametrize(
    ("plan", "ends"),
    [
        (BY_PAGE, [64 * i for i in range(1, 36)]),
        (BY_SEGMENT, [2048, 2240]),
        (BY_PROMPT, []),
    ],
)
def test_a_block_ends_where_its_bytes_are_final(plan, ends):
    (blocks,) = prefix_blocks(plan, 2300)
    assert [block.end for block in blocks] == ends


@pytest.mark.parametrize(
    ("plan", "common"),
    [
        (BY_PAGE, 15),
        (BY_SEGMENT, 0),
    ],
)
def test_prompts_share_the_keys_of_blocks_of_a_common_prefix(plan, common):
    first = keys_of(plan, TOKENS[:2500])
    second = keys_of(plan, TOKENS[:1000] + [5] * 1200)

    assert first[:common] == second[:common]
    assert not set(first[common:]) & set(second[common:])


def test_segments_share_a_key_only_where_both_prompts_fill_them():
    long = keys_of(BY_SEGMENT, TOKENS[:4500])
    short = keys_of(BY_SEGMENT, TOKENS[:2300])

    assert long[0] == short[0]
    assert long[1] != short[1]


def test_a_key_stands_for_model_layout_and_every_token_before():
    prompt = TOKENS[:300]
    keys = keys_of(BY_PAGE, prompt)
    (group,) = BY_PAGE.groups
    wider_plan = Plan((replace(group, heads=2),), (0,))
    other_prompt = [prompt[0] + 1, *prompt[1:]]

    assert len(set(keys)) == len(keys) == 3
    (other_model_keys,) = content_keys("another", BY_PAGE, prompt)
    assert set(keys).isdisjoint(other_model_keys)
    assert set(keys).isdisjoint(keys_of(wider_plan, prompt))
    assert set(keys).isdisjoint(keys_of(BY_PAGE, other_prompt))


def test_a_sink_is_a_block_of_its_own():
    shape = KVShape.uniform(1, 1, 64, "float16")
    plan = parse_plan("kivi:sink=64", shape)
    (blocks,) = prefix_blocks(plan, 400)
    assert [block.end for block in blocks] == [64, 128, 192, 256]
    assert blocks[0].records() == [(Kind.RAW, i) for i in range(4)]
    assert not prefix_blocks(plan, 63)[0]

    first = keys_of(plan, TOKENS[:70] + [1] * 300)
    second = keys_of(plan, TOKENS[:70] + [2] * 9)
    assert first[0] == second[0]


@pytest.mark.parametrize("sink", [0, 64])
def test_keys_of_pages_are_equal_if_all_they_depend_on_is_equal(sink):
    shape = KVShape.uniform(1, 1, 64, "float16")
    plan = parse_plan(f"banded:sink={sink}", shape)

    def page_keys(n: int, changed: int | None = None) -> tuple[bytes, ...]:
        prompt = TOKENS[:n]
        if changed is not None:
            prompt[changed] = -1
        keys = keys_of(plan, prompt)
        return keys[1:] if sink else keys

    long = page_keys(2000)
    assert long[:3] == page_keys(2500)[:3]
    assert long[:3] == page_keys(2500, changed=2400)[:3]
    # a token that helps to order the channels
    assert set(long).isdisjoint(page_keys(2000, changed=570))
    short = page_keys(600)
    assert short == page_keys(601)
    # the last token helps too
    assert set(page_keys(500)).isdisjoint(page_keys(501))
    # behind a sink the first block has fewer pages
    assert (short[0] == long[0]) == (sink == 0)
    for n in (500, 650, 700, 2000):
        keys = page_keys(n)
        assert len(set(keys)) == len(keys)


def test_keys_of_a_group_do_not_depend_on_the_rest_of_the_plan():
    _, second = content_keys(MODEL, PLAN, TOKENS[:300])
    alone = Plan((PLAN.groups[1],), (0,))
    assert content_keys(MODEL, alone, TOKENS[:300]) == (second,)


def test_keys_are_the_same_everywhere():
    key, _ = keys_of(BY_PAGE, TOKENS[:190])
    assert key.hex() == "9c0e9b74b33e22b16376625c6b297ce2"
