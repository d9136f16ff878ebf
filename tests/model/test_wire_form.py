"""States as they are handed off: rounded to a wire record, and widened again."""

import pytest
import torch

from disagg.kv.page import (
    BF16,
    EXACT,
    INT8,
    Layout,
    make_state_layout,
    make_wire_layout,
)
from disagg.model.states.records import StateRecords, arena_until, record_pages
from disagg.model.states.wire_form import narrow, widen
from tests.synthetic import relative_error

SHAPE = (2, 24, 40)
LAYOUT = make_state_layout(
    [("conv0", "bfloat16", (6, 3)), ("recurrent0", "float32", SHAPE)]
)
ERROR = {BF16: 2**-9, INT8: 6e-3}  # relative, of a whole state


def wire_of(form: str, layout: Layout = LAYOUT) -> Layout:
    wire = make_wire_layout(layout, form)
    assert wire is not None
    return wire


def round_trip(state: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """A state through its wire record, into a record that held NaN before."""
    wire = wire_of(form)
    before, between, after, end = record_pages([LAYOUT, wire, LAYOUT])
    arena = arena_until(end, 0xFF)
    exact, sent = StateRecords(arena, LAYOUT), StateRecords(arena, wire)
    exact.views(before)["recurrent0"].copy_(state)
    exact.views(before)["conv0"].copy_(torch.arange(18).view(6, 3))

    narrow(exact, before, sent, between)
    widen(sent, between, exact, after)

    return exact.views(after)


def random_state() -> torch.Tensor:
    """With a few large rows and columns, as states have."""
    state = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    state[:, ::9] *= 6
    state[:, :, ::16] *= 6
    return state


@pytest.mark.parametrize("form", [BF16, INT8])
def test_a_state_comes_back_within_the_error_of_its_form(form):
    state = random_state()

    widened = round_trip(state, form)["recurrent0"][0]

    assert float((widened - state).norm() / state.norm()) < ERROR[form]


@pytest.mark.parametrize("form", [BF16, INT8])
def test_convolutions_come_back_as_they_were(form):
    conv = round_trip(random_state(), form)["conv0"]

    assert torch.equal(conv[0].float(), torch.arange(18.0).view(6, 3))


@pytest.mark.parametrize("axis", [1, 2], ids=["rows", "columns"])
def test_a_large_channel_costs_the_others_nothing(axis):
    """Whichever axis it is in: what a read sums up differs between kinds of layers."""
    state = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    state.select(axis, 3).mul_(1000)

    error = (round_trip(state, INT8)["recurrent0"][0] - state).abs()

    others = [i for i in range(SHAPE[axis]) if i != 3]
    assert error.index_select(axis, torch.tensor(others)).max() < 0.05


@pytest.mark.parametrize("axis", [1, 2], ids=["rows", "columns"])
@pytest.mark.parametrize("share", [1e-12, 1e-24, 1e-30])
def test_a_channel_of_next_to_nothing_costs_the_others_nothing(axis, share):
    """Where gates close, the squares of what they leave are smaller than any number."""
    state = random_state()
    state.select(axis, 3).mul_(share)

    widened = round_trip(state, INT8)["recurrent0"][0]

    assert relative_error(widened, state) < ERROR[INT8]


@pytest.mark.parametrize("form", [BF16, INT8])
def test_a_state_of_zeros_stays_zero(form):
    state = torch.zeros(SHAPE)

    assert not round_trip(state, form)["recurrent0"].any()


def test_a_state_with_nan_stays_one_in_int8():
    state = random_state()
    state[1, 2, 3] = torch.nan

    widened = round_trip(state, INT8)["recurrent0"]

    assert widened[0, 1].isnan().any()
    assert not widened[0, 0].isnan().any()


def test_widening_what_was_rounded_gives_the_same_again():
    once = round_trip(random_state(), BF16)["recurrent0"][0].clone()

    assert torch.equal(round_trip(once, BF16)["recurrent0"][0], once)


def test_bytes_of_a_wire_record_are_a_half_or_a_quarter():
    layout = make_state_layout([("recurrent0", "float32", (16, 128, 128))])

    shares = [
        wire_of(form, layout).block_bytes / layout.block_bytes for form in (BF16, INT8)
    ]

    assert shares == [0.5, 0.25 + 1 / 128]


@pytest.mark.parametrize(
    "plane",
    [("conv0", "bfloat16", (64, 3)), ("recurrent0", "float32", (64,))],
    ids=["convolution", "vector"],
)
def test_states_without_a_matrix_have_no_wire_record(plane):
    assert make_wire_layout(make_state_layout([plane]), INT8) is None


def test_exact_states_have_no_wire_record():
    assert make_wire_layout(LAYOUT, EXACT) is None
