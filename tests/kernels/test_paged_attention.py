"""The Triton attention kernels against exact attention on what the pages hold."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import paged_attention, paged_exact, reduce
from disagg.kernels.bits import MAGIC, PLAIN, PTX
from disagg.kernels.reference_encode import decode_quantized, encode_quantized
from disagg.kernels.selftest import spelling_for, takes_subnormals
from tests.kernels.cases import (
    BASE,
    Case,
    exact_attention,
    place,
    quant_case,
    quant_format,
    raw_case,
    raw_format,
    relative_error,
)

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(case: Case, fmt, heads: int, tolerance: float = 1e-3) -> None:
    raw = hasattr(fmt, "dtype")
    attend = paged_exact.attend_raw if raw else paged_attention.attend_quantized
    tensors = [x.to(DEVICE) for x in (case.q, case.arena, case.pages, case.lo, case.hi)]
    o, lse = (x.cpu() for x in reduce.join([attend(*tensors, fmt, BASE, heads, 0.2)]))
    exact, exact_lse = exact_attention(case, 0.2)
    seen = exact_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert torch.allclose(lse[seen].double(), exact_lse[seen], rtol=1e-3, atol=2e-3)
    assert relative_error(o, exact) <= tolerance
    assert not o[~seen].any()


@pytest.mark.parametrize(
    ("bits", "head_dim", "k_group", "v_group", "heads"),
    [
        (2, 64, 64, 64, 1),
        (2, 64, 32, 32, 2),
        (2, 128, 64, 64, 1),
        (4, 128, 64, 64, 1),
        (4, 128, 32, 32, 1),
        (4, 80, 64, 40, 2),
        (2, 96, 32, 32, 1),
        (4, 256, 64, 32, 1),
    ],
)
def test_attention_on_codes_equals_exact_attention(bits, head_dim, k_group, v_group, heads):
    fmt = quant_format(bits, head_dim, k_group, v_group)
    check(quant_case(fmt, [140, 1], heads=heads, width=4), fmt, heads=heads)


@pytest.mark.parametrize(
    ("bits", "width"), [(2, 1), (4, 3), (2, 4), (4, 5), (2, 7), (4, 8), (2, 16), (4, 16)]
)
def test_any_number_of_query_heads_reads_one_kv_head(bits, width):
    fmt = quant_format(bits, 64, 64, 32)
    check(quant_case(fmt, [70], heads=1, width=width), fmt, heads=1)


@pytest.mark.parametrize("fmt", [quant_format(2, 64, 32, 32), raw_format("float16", 64)])
def test_several_queries_of_a_sequence_see_different_tokens(fmt):
    make = raw_case if hasattr(fmt, "dtype") else quant_case
    case = make(fmt, [75, 63, 3], heads=1, width=3, m=3)
    check(case, fmt, heads=1)
    check(replace(case, lo=torch.maximum(case.hi - 40, case.lo)), fmt, heads=1)


@pytest.mark.parametrize("fmt", [quant_format(4, 64, 32, 32), raw_format("float16", 64)])
def test_a_window_hides_tokens_on_both_sides(fmt):
    make = raw_case if hasattr(fmt, "dtype") else quant_case
    case = make(fmt, [300, 170, 90, 0], heads=1, width=4)
    lo = torch.tensor([[131], [64], [89], [0]], dtype=torch.int32)
    check(replace(case, lo=lo), fmt, heads=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_raw_pages_are_attended_in_their_own_dtype(dtype, head_dim):
    fmt = raw_format(dtype, head_dim)
    tolerance = 1e-5 if dtype == "float32" else 1e-3
    check(raw_case(fmt, [1, 150, 0], heads=1, width=7), fmt, heads=1, tolerance=tolerance)


def test_long_and_short_sequences_share_the_units_of_work():
    fmt = quant_format(2, 64, 64, 64)
    lengths = [450, 5, 64, 130, 0]
    check(quant_case(fmt, lengths, heads=1, width=4), fmt, heads=1)


def test_queries_and_scales_that_overflow_fp16_together_do_not():
    fmt = quant_format(2, 64, 64, 64)
    case = quant_case(fmt, [200], heads=1, width=2)
    check(replace(case, q=case.q * 300), fmt, heads=1, tolerance=5e-3)


def test_a_flat_tail_under_a_sink_is_not_lost():
    fmt = quant_format(2, 64, 64, 64)
    case = quant_case(fmt, [640], heads=1, width=1)
    k, v = torch.full((1, 640, 64), 0.01), 1 + 0.1 * case.v[:, :, :640]
    k[:, 0], v[..., 0, :] = 4.0, 0.0  # one token takes nearly all weight and gives nothing
    blocks = encode_quantized(k, v[0], fmt)
    arena, pages = place(blocks.unsqueeze(0))
    exact = [x.transpose(0, 1).flatten(1, 2)[None] for x in decode_quantized(blocks, fmt)]
    query = torch.full((1, 1, 1, 64), 0.28)
    case = replace(case, q=query, arena=arena, pages=pages, k=exact[0], v=exact[1])
    check(case, fmt, heads=1, tolerance=5e-3)  # q is the same in all channels, so is its rounding


def test_values_at_the_end_of_fp16_stay_finite():
    fmt = quant_format(2, 64, 64, 64)
    case = quant_case(fmt, [64], heads=1, width=1)
    k, v = torch.randn(1, 64, 64), torch.randn(1, 64, 64) * 1e5
    arena, pages = place(encode_quantized(k, v, fmt).unsqueeze(0))
    tensors = [x.to(DEVICE) for x in (case.q, arena, pages, case.lo, case.hi)]
    o, lse = reduce.join([paged_attention.attend_quantized(*tensors, fmt, BASE, 1, 0.2)])
    assert torch.isfinite(o).all()
    assert torch.isfinite(lse).all()


def test_the_magic_number_form_equals_exact_attention(monkeypatch):
    monkeypatch.setattr(paged_attention, "spelling_for", lambda device: MAGIC)
    for bits in (2, 4):
        fmt = quant_format(bits, 64, 64, 64)
        check(quant_case(fmt, [130], heads=1, width=4), fmt, heads=1)


def test_the_start_up_test_tells_right_from_wrong_spellings():
    device = torch.device(DEVICE)
    assert takes_subnormals(device, PLAIN)
    assert takes_subnormals(device, MAGIC)
    assert spelling_for(device) in (PLAIN, PTX)
