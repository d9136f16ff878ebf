from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import CapacityError
from disagg.kv.page import Kind
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.state import allocate_group
from tests.transfer.prompts import make_group, make_pool

HEADS = 3
LAYERS = (1, 4)


def group(residual: int = 64, segments: bool = False) -> LayerGroup:
    return replace(make_group(LAYERS, HEADS, segments, False), residual=residual)


@given(
    n=st.integers(0, 3000),
    sink=st.sampled_from([0, 64]),
    residual=st.sampled_from([0, 16, 64]),
)
def test_a_tail_holds_r_to_r_plus_t_minus_1_tokens(n, sink, residual):
    plan = replace(group(residual), sink=sink)
    sealed = plan.sealed(n)
    assert sealed % 64 == 0
    assert plan.inventory(n)[Kind.RAW] == -(-(n - sealed) // 16)

    exact = sink + residual
    if n >= exact:
        assert 0 <= n - sealed - exact < 64
    else:
        assert sealed == 0


def test_a_record_holds_a_block_of_every_head_layer_after_layer():
    page = group().page
    block = page.block_bytes
    assert group().layer_offset(page, layer=4) == 1 * HEADS * block

    nbytes = group().record(page).nbytes
    assert nbytes % 128 == 0
    assert nbytes >= len(LAYERS) * HEADS * block


def test_an_allocated_prompt_has_a_run_for_every_segment():
    n = 2048 + 100
    state = allocate_group(group(residual=0, segments=True), n, make_pool())

    first, second = state.runs
    assert (first.first, len(first.pages)) == (0, 32)
    assert (second.first, len(second.pages)) == (2048, 1)
    assert first.segment != second.segment
    assert len(state.tail) == 3  # 36 tokens
    ids = state.ids()
    assert len(set(ids)) == len(ids) == 33 + 2 + 3


def test_an_allocation_that_fails_takes_nothing():
    pool = make_pool(1 << 14)
    with pytest.raises(CapacityError):
        allocate_group(group(residual=0, segments=True), 2048, pool)
    assert pool.referenced_pages == 0


def test_plan_fingerprint_and_size_follow_its_groups():
    plan = Plan((group(),), (0, 0))
    assert plan.fingerprint == Plan((group(),), (0, 0)).fingerprint

    page = group().record(group().page).nbytes
    raw = group().record(group().raw).nbytes
    assert plan.nbytes(128) == page + 4 * raw
    without_tail = Plan((group(residual=0),), (0, 0))
    assert without_tail.nbytes(128) == 2 * page


@pytest.mark.parametrize("window", [16, 128, 1000])
def test_behind_a_window_all_pages_are_dropped(window):
    without = replace(group(64, segments=False), window=window)
    for n in range(5000):
        unseen = max(0, n + 1 - window)
        assert without.dropped(n) == min(without.sealed(n), unseen // 64 * 64)


@pytest.mark.parametrize("window", [16, 128, 1000])
def test_before_a_window_a_segment_stays_for_the_next_page(window):
    """A new one would be made from tokens that a sequence that moved no longer has."""
    segmented = replace(group(64, segments=True), window=window)
    for n in range(5000):
        unseen = max(0, n + 1 - window)
        dropped = segmented.dropped(n)
        sealed = segmented.sealed(n)
        assert dropped % segmented.segment_tokens == 0
        assert dropped <= unseen
        assert dropped < sealed or not sealed
        assert unseen - dropped < 2 * segmented.segment_tokens


def test_pages_before_a_chunk_are_dropped_when_it_begins():
    chunked = replace(group(residual=0), window=64, chunked=True)

    dropped = [chunked.dropped(n) for n in (63, 64, 100, 127, 128)]
    visible = [chunked.numbers(n) // chunked.numbers(1) for n in (64, 65, 100)]

    assert dropped == [0, 64, 64, 64, 128]
    assert visible == [64, 1, 36]


def test_chunks_are_another_group_than_a_sliding_window():
    sliding = replace(group(), window=64)

    assert sliding.fingerprint != replace(sliding, chunked=True).fingerprint
