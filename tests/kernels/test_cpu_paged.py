"""The fast path of a CPU against the spec, on every kind of page that the spec knows."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import cpu_codes, cpu_paged
from disagg.kernels.formats_paged import as_paged
from disagg.kernels.reference_paged import attend_paged
from tests.kernels.cases import BASE, quant_case, quant_format
from tests.kernels.test_paged_pieces import FORMATS, SEGMENT_BASE, make_case, make_format

CPU = torch.device("cpu")
TOLERANCE = 1e-5
QUANTIZED = {
    "b2-D80-g16": quant_format(2, 80, 64, 16),
    "b4-D80-g80": quant_format(4, 80, 32, 80),
    "b2-D128-T128": quant_format(2, 128, 128, 128, tokens=128),
    "b4-D256-g64": quant_format(4, 256, 64, 64),
}


def check(fmt, case, heads, *more):
    assert cpu_paged.is_supported(fmt, CPU)
    tables = case.arena, case.pages, case.lo, case.hi, fmt, BASE, heads, 0.2, *more
    found = cpu_paged.attend_paged(case.q, *tables)
    exact = attend_paged(case.q.double(), *tables)
    assert (found[0] - exact[0]).norm() <= TOLERANCE * exact[0].norm()
    seen = exact[1] > -torch.inf
    assert torch.equal(found[1] > -torch.inf, seen)
    assert torch.allclose(found[1][seen].double(), exact[1][seen], rtol=1e-6, atol=1e-5)
    assert not found[0][~seen].any()


@pytest.fixture(params=[1, 1 << 18], ids=["one-page", "many"])
def tile_elements(request, monkeypatch):
    monkeypatch.setattr(cpu_codes, "TILE_ELEMENTS", request.param)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("lengths", "run"), [([390, 70, 0], 3), ([130, 63], 1)])
def test_pieces_are_attended_as_the_spec_says(name, lengths, run, tile_elements):
    torch.manual_seed(3)
    fmt = make_format(**FORMATS[name])
    case, segments, owner = make_case(fmt, lengths, 2, 3, run)
    check(fmt, case, 2, segments, owner, SEGMENT_BASE)


@pytest.mark.parametrize("name", QUANTIZED)
def test_groups_and_sizes_need_not_be_powers_of_two(name, tile_elements):
    fmt = QUANTIZED[name]
    check(as_paged(fmt), quant_case(fmt, [500, 1, 129], heads=3, width=5), 3)


def test_several_queries_see_what_their_windows_show():
    fmt = quant_format(2, 64, 32, 32)
    case = quant_case(fmt, [300, 170, 90, 40], heads=2, width=4, m=2)
    lo = torch.tensor([[131, 132], [64, 65], [3, 90], [50, 60]], dtype=torch.int32)
    check(as_paged(fmt), replace(case, lo=lo), 2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_that_sees_nothing_gets_zero_and_minus_infinity(name):
    fmt = make_format(**FORMATS[name])
    case, segments, owner = make_case(fmt, [70, 64], 2, 3, 2)
    nothing = replace(case, hi=torch.zeros_like(case.hi))
    check(fmt, nothing, 2, segments, owner, SEGMENT_BASE)


def test_weights_too_small_to_matter_are_zero_and_hurt_no_answer():
    fmt = quant_format(4, 64, 64, 64)
    case = quant_case(fmt, [200], heads=1, width=4)
    check(as_paged(fmt), replace(case, q=case.q * 40), 1)


def test_every_float_of_eight_bits_is_read_as_torch_reads_it():
    fmt = make_format(**FORMATS["fp8"])
    floats = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    finite = floats.isfinite()
    words = torch.arange(256).to(torch.uint8).view(torch.int8).view(1, 2, 128)
    codes = torch.empty(256)
    cpu_codes._convert(words, fmt.k, codes)
    assert torch.equal(codes[finite] * cpu_codes.FLOAT_WEIGHT, floats[finite])


def test_pages_with_scales_by_row_of_values_are_left_to_the_reference():
    assert not cpu_paged.is_supported(make_format(v_by="row"), CPU)
