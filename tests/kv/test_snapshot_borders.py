"""Where a prompt has snapshots of its states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.kv.page import RAW_TOKENS
from disagg.kv.snapshot_borders import (
    CLOSING_TOKENS,
    SPACING_TOKENS,
    snapshot_borders,
)


@pytest.mark.parametrize(
    ("tokens", "shared", "resumed", "borders"),
    [
        pytest.param(60, 0, 0, (), id="short"),
        pytest.param(300, 0, 0, (288,), id="first"),
        pytest.param(1090, 1024, 0, (1024,), id="second, with a short question"),
        pytest.param(1300, 1024, 0, (1024, 1280), id="second, with a long question"),
        pytest.param(1300, 1024, 1024, (1280,), id="third"),
        pytest.param(300, 288, 240, (), id="a short turn"),
        pytest.param(9000, 0, 0, (4096, 8192, 8992), id="long"),
        pytest.param(9000, 4096, 4096, (8192, 8992), id="long, second half"),
        pytest.param(304, 288, 0, (288,), id="the same prompt, without a snapshot"),
    ],
)
def test_borders_of_a_prompt(tokens, shared, resumed, borders):
    assert snapshot_borders(tokens, shared, resumed) == borders


def test_codecs_that_compute_the_last_tokens_move_the_end():
    assert snapshot_borders(300, 0, 0, least_computed=32) == (256,)


@given(
    tokens=st.integers(1, 20_000),
    shared=st.integers(0, 20_000),
    resumed_units=st.integers(0, 1250),
)
def test_the_next_turn_and_the_same_prompt_reach_every_border(
    tokens, shared, resumed_units
):
    resumed = resumed_units * RAW_TOKENS

    borders = snapshot_borders(tokens, shared, resumed)

    distances = [b - a for a, b in zip([resumed, *borders], borders, strict=False)]
    assert all(distance >= SPACING_TOKENS for distance in distances)
    assert all(border % RAW_TOKENS == 0 for border in borders)
    assert all(border <= tokens - CLOSING_TOKENS for border in borders)
