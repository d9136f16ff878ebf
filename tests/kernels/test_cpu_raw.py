"""The fast path of a CPU over raw pages, against the spec in fp64."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import cpu_raw
from disagg.kernels.cpu_raw import _groups, attend_raw
from disagg.kernels.reference import attend_raw as spec
from tests.kernels.cases import BASE, raw_case, raw_format


def check(fmt, case, heads):
    tables = case.arena, case.pages, case.lo, case.hi, fmt, BASE, heads, 0.2
    found, exact = attend_raw(case.q, *tables), spec(case.q.double(), *tables)
    assert (found[0] - exact[0]).norm() <= 1e-6 * exact[0].norm()
    seen = exact[1] > -torch.inf
    assert torch.equal(found[1] > -torch.inf, seen)
    assert torch.allclose(found[1][seen].double(), exact[1][seen], rtol=1e-6, atol=1e-5)
    assert not found[0][~seen].any()


@pytest.mark.parametrize("tile", [1, 5000, 1 << 18])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_ragged_batches_are_attended_as_the_spec_says(dtype, head_dim, tile, monkeypatch):
    monkeypatch.setattr(cpu_raw, "TILE_ELEMENTS", tile)
    fmt = raw_format(dtype, head_dim)
    check(fmt, raw_case(fmt, [100, 1, 37, 0, 90, 700], heads=2, width=7, m=3), 2)


def test_a_window_may_begin_anywhere():
    fmt = raw_format("float16", 64)
    case = raw_case(fmt, [300, 170, 90, 40], heads=2, width=4, m=2)
    lo = torch.tensor([[131, 132], [64, 65], [3, 90], [50, 60]], dtype=torch.int32)
    check(fmt, replace(case, lo=lo), 2)


def test_a_batch_that_sees_nothing_gets_zero_and_minus_infinity():
    fmt = raw_format("float32", 64)
    case = raw_case(fmt, [70, 64], heads=2, width=3)
    check(fmt, replace(case, hi=torch.zeros_like(case.hi)), 2)


def test_rows_are_computed_with_rows_of_about_their_length():
    counts = [4, 100, 0, 80, 70, 3, 99]
    assert list(_groups(counts, 2)) == [([1, 6], 100), ([3, 4], 80), ([0, 5], 4)]
    assert list(_groups(counts, 9)) == [([1, 3, 6], 100), ([4], 70), ([0, 5], 4)]
    assert list(_groups([0, 0], 9)) == []
