"""What Triton's attention does at the ends of fp16, and how it spells codes and float8."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from disagg.kernels import ops
from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu.bits import (
    MAGIC,
    PLAIN,
    PTX,
    float8,
    float8_weight,
    takes_subnormals,
    unpack_mode_for,
)
from disagg.kernels.gpu.combine import merge
from disagg.kernels.gpu.plan import is_supported
from disagg.kernels.reference import codes
from disagg.kernels.sealing import Target
from tests.kernels import cases, test_attention
from tests.kernels.assembly import assemble
from tests.kernels.test_attention import TRITON, attend
from tests.synthetic import relative_error


def spell(monkeypatch: pytest.MonkeyPatch, codes: str) -> None:
    """Codes are read in this way from now on."""
    chip = replace(gpu.chip_of(torch.device(cases.DEVICE)), codes=codes)
    monkeypatch.setattr(gpu, "chip_of", lambda device: chip)


def check(case: cases.Case) -> None:
    """Where 16 bits end, within 5e-3."""
    cases.assert_alike(
        attend(case, TRITON), cases.exact_attention(case, 0.2), 5e-3, 2e-3, 1e-3
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_queries_that_overflow_fp16_with_scales_or_factors_do_not(rank):
    case = cases.make_case(cases.make_format(rank=rank), [200], 1, 2)
    check(replace(case, q=case.q * 300))


def test_a_flat_tail_under_a_sink_is_not_lost():
    fmt = cases.quant_format(2, 64, 64, 64)
    case = cases.make_case(fmt, [640], 1, 1)
    k = torch.full((1, 640, 64), 0.01)
    v = 1 + 0.1 * case.v[0]
    k[:, 0], v[:, 0] = 4.0, 0.0  # one token takes nearly all weight and gives nothing
    check(replace(held(case, k, v), q=torch.full((1, 1, 1, 64), 0.28)))


def test_values_at_the_end_of_fp16_stay_finite():
    case = cases.make_case(cases.quant_format(2, 64, 64, 64), [64], 1, 1)
    case = held(case, torch.randn(1, 64, 64), torch.randn(1, 64, 64) * 1e5)
    assert all(torch.isfinite(x).all() for x in attend(case, TRITON))


def held(case: cases.Case, k: torch.Tensor, v: torch.Tensor) -> cases.Case:
    """The same pages of one sequence with other k, v [H, n, D] in them."""
    fmt = case.view.fmt
    view = case.view
    blocks, _ = ops.encode(k, v, fmt)
    ops.store_blocks(Target(view.arena, view.pages[0], view.base), blocks)
    exact = [
        x.transpose(0, 1).flatten(1, 2)[None] for x in codes.decode(blocks, None, fmt)
    ]
    return replace(case, k=exact[0], v=exact[1])


def test_outliers_that_fp16_holds_only_alone_are_not_lost():
    case = cases.make_case(cases.make_format(slots=2), [130], 1, 2, loud=5e3)
    o, _ = attend(case, TRITON, scale=0.02)
    assert relative_error(o, cases.exact_attention(case, 0.02)[0]) <= 1e-3


def test_a_basis_whose_product_with_q_overflows_fp16_loses_nothing():
    case = cases.make_case(cases.make_format(rank=2, head_dim=128), [200], 1, 2, run=4)
    view = case.view
    low = case.view.fmt.k.low_rank
    large = 2.0**14
    at = int(view.segments[0, 0]) * 128 + cases.SEGMENT_BASE + low.b
    b = view.arena[at : at + 4 * 128].view(torch.float16)
    b *= large
    for page in set(view.pages[0].tolist()):
        at = page * 128 + view.base + low.a
        view.arena[at : at + 4 * cases.T].view(torch.float16).mul_(1 / large)
    signs = b.view(128, 2)[:, 0].float().sign()

    assert b.isfinite().all()
    assert signs @ b.view(128, 2)[:, 0].float() > 65504

    case = replace(case, q=signs.expand_as(case.q).contiguous())
    o, _ = attend(case, TRITON, scale=0.05)

    assert relative_error(o, cases.exact_attention(case, 0.05)[0]) <= 5e-3


def test_formats_that_do_not_fit_its_tiles_are_left_to_the_reference():
    for odd in ({"v_by": "row"}, {"block": 64}, {"block": 16, "rank": 2}, {"rank": 32}):
        assert not is_supported(cases.make_format(**odd))


@pytest.mark.parametrize("bits", [2, 4])
def test_the_magic_number_form_equals_exact_attention(bits, monkeypatch):
    spell(monkeypatch, MAGIC)
    test_attention.check(
        cases.make_case(cases.quant_format(bits, 64, 64, 64), [130], 1, 4), TRITON
    )


@pytest.mark.skipif(cases.DEVICE == "cuda", reason="a GPU executes it itself")
@pytest.mark.parametrize(
    "fmt",
    [
        *(cases.quant_format(bits, 64, 64, 64) for bits in (2, 4)),
        *(cases.make_format(**cases.FORMATS[name]) for name in ("gear", "int8")),
    ],
    ids=["2", "4", "sparse", "8"],
)
def test_inline_assembly_computes_what_is_spelt_plainly(fmt, monkeypatch):
    q, view = cases.make_case(fmt, [130], 1, 4).on(cases.DEVICE)
    spell(monkeypatch, PLAIN)
    plain = merge(gpu.attend(q, [view], 0.2))
    spell(monkeypatch, PTX)

    with pytest.raises(interpreter.InterpreterError):
        gpu.attend(q, [view], 0.2)

    assemble(monkeypatch)

    assert takes_subnormals(torch.device(cases.DEVICE), PTX)

    repeated = merge(gpu.attend(q, [view], 0.2))

    assert all(torch.equal(a, b) for a, b in zip(repeated, plain, strict=True))


def test_the_start_up_test_tells_right_from_wrong_unpack_modes():
    device = torch.device(cases.DEVICE)

    assert takes_subnormals(device, PLAIN)
    assert takes_subnormals(device, MAGIC)
    assert unpack_mode_for(device) in (PLAIN, PTX)


@triton.jit
def float8_kernel(codes_ptr, o_ptr, SPELLING: tl.constexpr):
    o_256 = tl.arange(0, 256)
    codes = float8(tl.load(codes_ptr + o_256), SPELLING)
    tl.store(o_ptr + o_256, codes.to(tl.float32) * float8_weight(SPELLING))


def test_every_float8_is_read_by_bit_moves_as_torch_converts_it():
    codes = torch.arange(256).to(torch.uint8)
    decoded = torch.empty(256, device=cases.DEVICE)
    float8_kernel[(1,)](
        codes.view(torch.int8).to(cases.DEVICE), decoded, PLAIN, num_warps=1
    )
    numbers = codes & 127 != 127  # the rest are NaN

    assert torch.equal(
        decoded.cpu()[numbers], codes.view(torch.float8_e4m3fn).float()[numbers]
    )
