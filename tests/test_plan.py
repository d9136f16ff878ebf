from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import CapacityError
from disagg.page import FinalAt, Kind, make_layout, make_raw_layout
from disagg.plan import LayerGroup, Plan, RecordShape
from disagg.state import allocate_group

PAGE = make_layout("x", Kind.PAGE, 64, [("codes", "uint8", (64, 10))])
SEGMENT = make_layout("x", Kind.SEGMENT, 2048, [("scale", "float16", (10,))])


def group(residual: int = 64, segment=None) -> LayerGroup:
    return LayerGroup(
        layers=(1, 4),
        codec="x",
        window=None,
        heads=3,
        head_dim=64,
        residual=residual,
        final_at=FinalAt.PAGE,
        page=PAGE,
        raw=make_raw_layout("float16", 64),
        segment=segment,
    )


class Counter:
    """Hands out ever new ids, up to a limit."""

    def __init__(self, limit: int = 1000):
        self.limit = limit
        self.owned: set[int] = set()
        self.next = 0

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        if len(self.owned) + count > self.limit:
            raise CapacityError("full")
        ids = list(range(self.next, self.next + count))
        self.next += count
        self.owned.update(ids)
        return ids

    def release(self, pages: Sequence[int]) -> None:
        self.owned.difference_update(pages)


@given(st.integers(0, 3000), st.sampled_from([0, 64]), st.sampled_from([0, 16, 64]))
def test_the_tail_behind_a_sink_holds_r_to_r_plus_t_minus_1_tokens(n, sink, residual):
    some = replace(group(residual), sink=sink)
    sealed, kept = some.sealed(n), sink + residual
    assert some.inventory(n).tail_len == n - sealed
    assert sealed % 64 == 0
    assert 0 <= n - sealed - kept < 64 if n >= kept else sealed == 0


def test_a_record_holds_a_block_of_every_head_layer_after_layer():
    block = PAGE.block_bytes
    assert group().layer_offset(PAGE, layer=4) == 1 * 3 * block
    assert group().record(PAGE).nbytes % 128 == 0
    assert group().record(PAGE).nbytes >= 2 * 3 * block


def test_an_allocated_prompt_has_a_run_for_every_segment():
    state = allocate_group(group(0, SEGMENT), 2048 + 100, Counter())
    assert [(run.first, len(run.pages)) for run in state.runs] == [(0, 32), (2048, 1)]
    assert len({run.segment for run in state.runs}) == 2
    assert len(state.tail) == 3  # 36 tokens
    assert len(set(state.ids())) == len(list(state.ids())) == 33 + 2 + 3


def test_an_allocation_that_fails_takes_nothing():
    counter = Counter(limit=20)
    with pytest.raises(CapacityError):
        allocate_group(group(0, SEGMENT), 2048, counter)
    assert not counter.owned


def test_plan_fingerprint_and_size_follow_its_groups():
    plan, other = Plan((group(),), (0, 0)), Plan((group(0),), (0, 0))
    assert plan.fingerprint == Plan((group(),), (0, 0)).fingerprint
    assert plan.nbytes(128) == group().record(PAGE).nbytes + 4 * group().record(group().raw).nbytes
    assert other.nbytes(128) == 2 * group().record(PAGE).nbytes
