"""The torch reference against exact attention in fp64 on what the pages hold."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels.reference import attend_quantized, attend_raw, merge
from tests.kernels.cases import (
    BASE,
    Case,
    exact_attention,
    quant_case,
    quant_format,
    raw_case,
    raw_format,
    relative_error,
)

FORMATS = {
    "b2-D64-g32": quant_format(2, 64, 32, 32),
    "b2-D128-g64": quant_format(2, 128, 64, 64),
    "b2-D80-g16": quant_format(2, 80, 64, 16),
    "b4-D80-g80": quant_format(4, 80, 32, 80),
    "b4-D96-g32": quant_format(4, 96, 32, 32),
    "b4-D128-g64": quant_format(4, 128, 64, 64),
    "b4-D256-g64": quant_format(4, 256, 64, 64),
    "b2-D128-T128": quant_format(2, 128, 128, 128, tokens=128),
}


def attend(case: Case, fmt, heads: int, scale: float = 0.2):
    function = attend_raw if hasattr(fmt, "dtype") else attend_quantized
    return function(case.q, case.arena, case.pages, case.lo, case.hi, fmt, BASE, heads, scale)


def check(case: Case, fmt, heads: int, tolerance: float = 1e-5) -> None:
    o, lse = attend(case, fmt, heads)
    exact, exact_lse = exact_attention(case, 0.2)
    assert relative_error(o, exact) <= tolerance
    seen = exact_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert torch.allclose(lse[seen].double(), exact_lse[seen], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_attention_on_codes_equals_exact_attention_on_what_they_decode_to(name):
    fmt = FORMATS[name]
    check(quant_case(fmt, [500, 1, 129], heads=2, width=3), fmt, heads=2)


@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("bits", [2, 4])
def test_any_number_of_query_heads_reads_one_kv_head(bits, width):
    fmt = quant_format(bits, 64, 64, 32)
    check(quant_case(fmt, [130], heads=2, width=width, m=3), fmt, heads=2)


@pytest.mark.parametrize("n", [1, 63, 64, 500, 1300])
def test_lengths_need_not_fill_a_page(n):
    fmt = quant_format(2, 64, 32, 32)
    check(quant_case(fmt, [n], heads=1, width=4), fmt, heads=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_raw_pages_are_attended_exactly(dtype, head_dim):
    fmt = raw_format(dtype, head_dim)
    check(raw_case(fmt, [100, 1, 37], heads=2, width=7, m=3), fmt, heads=2)


@pytest.mark.parametrize("fmt", [quant_format(2, 64, 32, 32), raw_format("float16", 64)])
def test_a_window_hides_tokens_on_both_sides(fmt):
    make = raw_case if hasattr(fmt, "dtype") else quant_case
    case = make(fmt, [300, 170, 90], heads=2, width=4, m=2)
    lo = torch.tensor([[131, 132], [64, 65], [3, 90]], dtype=torch.int32)
    check(replace(case, lo=lo), fmt, heads=2)


@pytest.mark.parametrize("fmt", [quant_format(4, 64, 32, 32), raw_format("float32", 64)])
def test_a_query_that_sees_nothing_gets_zero_and_minus_infinity(fmt):
    make = raw_case if hasattr(fmt, "dtype") else quant_case
    case = make(fmt, [70, 0], heads=2, width=2)
    o, lse = attend(case, fmt, heads=2)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert torch.isneginf(lse[1]).all()
    check(case, fmt, heads=2)
    nothing = replace(case, hi=torch.zeros_like(case.hi))
    assert not attend(nothing, fmt, heads=2)[0].any()


def test_merge_of_disjoint_parts_is_attention_over_all():
    fmt = quant_format(4, 64, 32, 32)
    case = quant_case(fmt, [300, 64], heads=2, width=3)
    cut = torch.tensor([[190], [64]], dtype=torch.int32)
    parts = [
        attend(replace(case, hi=torch.minimum(case.hi, cut)), fmt, 2),
        attend(replace(case, lo=cut), fmt, 2),
    ]
    assert relative_error(merge(parts), exact_attention(case, 0.2)[0]) <= 1e-5
    unseen = [(torch.zeros(1, 1, 2, 64), torch.full((1, 1, 2), -torch.inf))] * 2
    assert not merge(unseen).any()
