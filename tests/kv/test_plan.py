from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import CapacityError
from disagg.kv.page import Kind
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.state import allocate_group
from tests.transfer.prompts import make_group, make_pool


def group(residual: int = 64, segments: bool = False) -> LayerGroup:
    return replace(make_group((1, 4), 3, segments, False), residual=residual)


@given(st.integers(0, 3000), st.sampled_from([0, 64]), st.sampled_from([0, 16, 64]))
def test_the_tail_behind_a_sink_holds_r_to_r_plus_t_minus_1_tokens(n, sink, residual):
    some = replace(group(residual), sink=sink)
    sealed, kept = some.sealed(n), sink + residual
    assert some.inventory(n)[Kind.RAW] == -(-(n - sealed) // 16)
    assert sealed % 64 == 0
    assert 0 <= n - sealed - kept < 64 if n >= kept else sealed == 0


def test_a_record_holds_a_block_of_every_head_layer_after_layer():
    page, block = group().page, group().page.block_bytes
    assert group().layer_offset(page, layer=4) == 1 * 3 * block
    assert group().record(page).nbytes % 128 == 0
    assert group().record(page).nbytes >= 2 * 3 * block


def test_an_allocated_prompt_has_a_run_for_every_segment():
    state = allocate_group(group(0, True), 2048 + 100, make_pool())
    assert [(run.first, len(run.pages)) for run in state.runs] == [(0, 32), (2048, 1)]
    assert len({run.segment for run in state.runs}) == 2
    assert len(state.tail) == 3  # 36 tokens
    assert len(set(state.ids())) == len(state.ids()) == 33 + 2 + 3


def test_an_allocation_that_fails_takes_nothing():
    pool = make_pool(1 << 14)
    with pytest.raises(CapacityError):
        allocate_group(group(0, True), 2048, pool)
    assert pool.referenced_pages == 0


def test_plan_fingerprint_and_size_follow_its_groups():
    plan, other = Plan((group(),), (0, 0)), Plan((group(0),), (0, 0))
    assert plan.fingerprint == Plan((group(),), (0, 0)).fingerprint
    page, raw = (
        group().record(layout).nbytes for layout in (group().page, group().raw)
    )
    assert (plan.nbytes(128), other.nbytes(128)) == (page + 4 * raw, 2 * page)


@pytest.mark.parametrize("window", [16, 128, 1000])
def test_behind_a_window_a_segment_is_left_that_the_next_page_joins(window):
    """A new one would be made of what a sequence that moved has no more."""
    some, without = (
        replace(group(64, segments), window=window) for segments in (True, False)
    )
    for n in range(5000):
        unseen = max(0, n + 1 - window)
        assert some.dropped(n) % some.segment_tokens == 0
        assert some.dropped(n) <= unseen
        assert some.dropped(n) < some.sealed(n) or not some.sealed(n)
        assert unseen - some.dropped(n) < 2 * some.segment_tokens
        assert without.dropped(n) == min(without.sealed(n), unseen // 64 * 64)
