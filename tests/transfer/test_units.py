"""What may be shared, and under which names."""

from dataclasses import replace

import pytest

from disagg.page import FinalAt, Kind
from disagg.plan import Plan
from disagg.transfer.items import Checklist
from disagg.transfer.units import content_keys, units_of
from tests.transfer.prompts import MODEL, PLAN, make_group

BY_PAGE = Plan((make_group((0,), 1, False, False),), (0,))
BY_SEGMENT = Plan((make_group((0,), 1, True, False),), (0,))
BY_PROMPT = Plan(
    (replace(make_group((0,), 1, True, True), final_at=FinalAt.PROMPT),),
    (0,),
)
PROMPT = [(7 * i) % 101 for i in range(5000)]


@pytest.mark.parametrize("plan", [PLAN, BY_PAGE, BY_SEGMENT, BY_PROMPT])
@pytest.mark.parametrize("tokens", [1, 123, 124, 2107, 2108, 2300, 4999])
def test_the_units_of_a_prompt_are_its_pages_and_segments_each_once(plan, tokens):
    items = [
        item
        for units in units_of(plan, tokens)
        for unit in units
        for item in unit.items(plan.groups[unit.group])
    ]
    wanted = {x for x in Checklist(plan, tokens).items if x.kind in (Kind.PAGE, Kind.SEGMENT)}
    assert len(items) == len(wanted)
    assert set(items) == wanted


@pytest.mark.parametrize(
    ("plan", "ends"),
    [(BY_PAGE, [64 * i for i in range(1, 36)]), (BY_SEGMENT, [2048, 2240]), (BY_PROMPT, [2240])],
)
def test_a_unit_ends_where_its_bytes_are_final(plan, ends):
    (units,) = units_of(plan, 2300)
    assert [unit.end for unit in units] == ends


@pytest.mark.parametrize(("plan", "common"), [(BY_PAGE, 15), (BY_SEGMENT, 0), (BY_PROMPT, 0)])
def test_prompts_with_a_common_beginning_have_the_keys_of_what_is_final_in_it(plan, common):
    first = content_keys(MODEL, plan, PROMPT[:2500])
    second = content_keys(MODEL, plan, PROMPT[:1000] + [5] * 1200)
    assert first[:common] == second[:common]
    assert not set(first[common:]) & set(second[common:])


def test_segments_are_named_alike_only_where_both_prompts_fill_them():
    long, short = (content_keys(MODEL, BY_SEGMENT, PROMPT[:n]) for n in (4500, 2300))
    assert long[0] == short[0]
    assert long[1] != short[1]


def test_a_key_stands_for_model_layout_and_every_token_before():
    keys = content_keys(MODEL, BY_PAGE, PROMPT[:300])
    assert len(set(keys)) == len(keys) == 3
    assert keys != content_keys("another", BY_PAGE, PROMPT[:300])
    wider = Plan((make_group((0,), 2, False, False),), (0,))
    assert not set(keys) & set(content_keys(MODEL, wider, PROMPT[:300]))
    changed = [PROMPT[0] + 1, *PROMPT[1:300]]
    assert not set(keys) & set(content_keys(MODEL, BY_PAGE, changed))


def test_groups_are_named_each_by_its_own_layout_whatever_the_rest_of_the_plan():
    both = content_keys(MODEL, PLAN, PROMPT[:300])
    alone = Plan((PLAN.groups[1],), (0,))
    assert set(content_keys(MODEL, alone, PROMPT[:300])) < set(both)


def test_keys_are_the_same_everywhere():
    assert content_keys(MODEL, BY_PAGE, PROMPT[:130])[0].hex() == "9c0e9b74b33e22b16376625c6b297ce2"
