"""What Triton's attention does at the ends of fp16, and how it spells codes and float8."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from disagg.kernels import ops
from disagg.kernels.formats import PageFormat
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
    exact = cases.exact_attention(case, 0.2)

    answer = attend(case, TRITON)

    cases.assert_alike(
        answer,
        exact,
        tolerance=5e-3,
        near=2e-3,
        rtol=1e-3,
    )


def one_sequence(fmt: PageFormat, n: int, width: int, **options) -> cases.Case:
    """A sequence of n tokens and one KV head."""
    return cases.make_case(
        fmt,
        lengths=[n],
        heads=1,
        width=width,
        **options,
    )


def holding(case: cases.Case, k: torch.Tensor, v: torch.Tensor) -> cases.Case:
    """The same pages of one sequence with other k, v [H, n, D] in them."""
    view = case.view
    target = Target(view.arena, view.pages[0], view.base)
    blocks, _ = ops.encode(k, v, view.fmt)
    ops.store_blocks(target, blocks)
    exact_k, exact_v = (
        x.transpose(0, 1).flatten(1, 2)[None]
        for x in codes.decode(blocks, None, view.fmt)
    )
    return replace(case, k=exact_k, v=exact_v)


@pytest.mark.parametrize("rank", [0, 2])
def test_queries_that_overflow_fp16_once_scaled_lose_nothing(rank):
    fmt = cases.make_format(rank=rank)
    case = one_sequence(fmt, 200, width=2)
    loud = replace(case, q=case.q * 300)

    check(loud)


def test_a_flat_tail_under_a_sink_is_not_lost():
    """One token takes nearly all weight and adds nothing."""
    fmt = cases.quant_format(2, 64, 64, 64)
    case = one_sequence(fmt, 640, width=1)
    k = torch.full((1, 640, 64), 0.01)
    v = 1 + 0.1 * case.v[0]
    k[:, 0] = 4.0
    v[:, 0] = 0.0
    case = holding(case, k, v)
    q = torch.full((1, 1, 1, 64), 0.28)

    check(replace(case, q=q))


def test_values_at_the_end_of_fp16_stay_finite():
    fmt = cases.quant_format(2, 64, 64, 64)
    k = torch.randn(1, 64, 64)
    v = torch.randn(1, 64, 64) * 1e5
    case = holding(one_sequence(fmt, 64, width=1), k, v)

    o, lse = attend(case, TRITON)

    assert torch.isfinite(o).all()
    assert torch.isfinite(lse).all()


def test_outliers_that_fp16_holds_only_alone_are_not_lost():
    fmt = cases.make_format(slots=2)
    case = one_sequence(fmt, 130, width=2, loud=5e3)
    exact, _ = cases.exact_attention(case, 0.02)

    o, _ = attend(case, TRITON, scale=0.02)

    assert relative_error(o, exact) <= 1e-3


def move_range(case: cases.Case, factor: float) -> torch.Tensor:
    """Multiply B of K and divide A: the product stays. Returns B [D, rank] of the segment."""
    view = case.view
    low = view.fmt.k.low_rank
    head_dim = view.fmt.head_dim
    start = int(view.segments[0, 0]) * 128 + cases.SEGMENT_BASE + low.b
    size = 2 * head_dim * low.rank
    b = view.arena[start : start + size].view(torch.float16)
    b *= factor
    for page in set(view.pages[0].tolist()):
        start = page * 128 + view.base + low.a
        size = 2 * cases.T * low.rank
        a = view.arena[start : start + size].view(torch.float16)
        a /= factor
    return b.view(head_dim, low.rank).float()


def test_a_basis_whose_product_overflows_fp16_loses_nothing():
    fmt = cases.make_format(rank=2, head_dim=128)
    case = one_sequence(fmt, 200, width=2, run=4)
    b = move_range(case, factor=2.0**14)
    first = b[:, 0]
    signs = first.sign()
    case = replace(case, q=signs.expand_as(case.q).contiguous())
    exact, _ = cases.exact_attention(case, 0.05)
    assert b.isfinite().all()
    assert signs @ first > 65504

    o, _ = attend(case, TRITON, scale=0.05)

    assert relative_error(o, exact) <= 5e-3


@pytest.mark.parametrize(
    "options",
    [
        {"v_by": "row"},
        {"block": 64},
        {"block": 16, "rank": 2},
        {"rank": 32},
    ],
)
def test_formats_beyond_its_tiles_are_left_to_the_reference(options):
    fmt = cases.make_format(**options)

    assert not is_supported(fmt)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_magic_number_form_equals_exact_attention(bits, monkeypatch):
    fmt = cases.quant_format(bits, 64, 64, 64)
    case = one_sequence(fmt, 130, width=4)

    spell(monkeypatch, MAGIC)

    test_attention.check(case, TRITON)


@pytest.mark.skipif(cases.DEVICE == "cuda", reason="a GPU executes it itself")
@pytest.mark.parametrize(
    "fmt",
    [
        cases.quant_format(2, 64, 64, 64),
        cases.quant_format(4, 64, 64, 64),
        cases.named_format("gear"),
        cases.named_format("int8"),
    ],
    ids=["2", "4", "sparse", "8"],
)
def test_inline_assembly_computes_what_is_spelt_plainly(fmt, monkeypatch):
    case = one_sequence(fmt, 130, width=4)
    q, view = case.on(cases.DEVICE)
    spell(monkeypatch, PLAIN)
    plain = merge(gpu.attend(q, [view], 0.2))
    spell(monkeypatch, PTX)
    with pytest.raises(interpreter.InterpreterError):
        gpu.attend(q, [view], 0.2)

    assemble(monkeypatch)
    repeated = merge(gpu.attend(q, [view], 0.2))

    assert takes_subnormals(torch.device(cases.DEVICE), PTX)
    assert cases.are_equal(repeated, plain)


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
    expected = codes.view(torch.float8_e4m3fn).float()
    signed = codes.view(torch.int8)
    decoded = torch.empty(256, device=cases.DEVICE)

    float8_kernel[(1,)](
        signed.to(cases.DEVICE),
        decoded,
        PLAIN,
        num_warps=1,
    )

    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(decoded.cpu()[is_number], expected[is_number])
