"""The list of items that both sides derive alone."""

import itertools

import pytest

from disagg.errors import LayoutError
from disagg.page import Kind
from disagg.transfer.items import Checklist
from disagg.wire import Item, Ticket
from tests.transfer.prompts import OTHER_PLAN, PLAN, make_prompt

LENGTHS = (1, 63, 64, 123, 124, 187, 1500, 2107, 2108, 4200)
TICKET = Ticket(1, 2, 3)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_items_are_the_inventory_of_every_layer(tokens):
    items = Checklist(PLAN, tokens).items
    assert len(set(items)) == len(items)
    for layer, index in enumerate(PLAN.group_of):
        inventory = PLAN.groups[index].inventory(tokens)
        for kind in Kind:
            found = [x.record for x in items if x[:3] == (kind, index, layer)]
            assert found == list(range(inventory.count(kind)))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_no_two_items_share_a_byte(tokens):
    prompt = make_prompt(tokens)
    starts = sorted(
        (prompt.read._records.start(item), prompt.checklist.nbytes(item))
        for item in prompt.checklist.items
    )
    for (start, nbytes), (following, _) in itertools.pairwise(starts):
        assert start + nbytes <= following


def test_segments_come_before_the_pages_that_need_them():
    kinds = [item.kind for item in Checklist(PLAN, 500).layer(2)]
    assert kinds.index(Kind.SEGMENT) < kinds.index(Kind.PAGE) < kinds.index(Kind.RAW)


def test_select_names_records_of_one_layer():
    assert Checklist(PLAN, 500).select(2, Kind.PAGE, 3, 2) == [
        Item(Kind.PAGE, 0, 2, 3),
        Item(Kind.PAGE, 0, 2, 4),
    ]


WRONG_FRAMES = {
    "an unknown group": {"group": 2},
    "a kind that the group has not": {"group": 1, "kind": Kind.SIDE},
    "a foreign layout": {"layout": "0" * 16},
    "a layer of another group": {"layers": (1,)},
    "a record beyond the last": {"records": (6,)},
    "a size of another layout": {"payload": (b"\0" * 7,)},
}


@pytest.mark.parametrize("change", WRONG_FRAMES.values(), ids=WRONG_FRAMES)
def test_frames_out_of_bounds_are_layout_errors(change):
    prompt = make_prompt(500)
    frame = prompt.frame(TICKET, [Item(Kind.PAGE, 0, 2, 5)])
    prompt.checklist.check(frame)
    wrong = type(frame)(**{**vars(frame), **change})
    with pytest.raises(LayoutError):
        prompt.checklist.check(wrong)


def test_a_frame_of_another_plan_is_a_layout_error():
    other = make_prompt(500, plan=OTHER_PLAN)
    frame = other.frame(TICKET, [Item(Kind.PAGE, 0, 0, 0)])
    with pytest.raises(LayoutError):
        make_prompt(500).checklist.check(frame)
