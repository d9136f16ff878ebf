"""The check that precedes every timing on a GPU finds right what is right."""

import pytest
import torch
import triton
import triton.language as tl

from disagg.bench.spellings import check_spelling
from disagg.kernels.gpu.bits import MAGIC, PLAIN, float8, float8_weight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)
@pytest.mark.parametrize(("spelling", "bits"), [(PLAIN, 2), (MAGIC, 4)])
def test_a_spelling_that_runs_here_is_exact_and_attends_rightly(spelling, bits):
    check = check_spelling(spelling, bits, DEVICE)
    assert check.exact_sums
    assert check.error < 1e-3


@triton.jit
def float8_kernel(codes_ptr, o_ptr, SPELLING: tl.constexpr):
    o_256 = tl.arange(0, 256)
    codes = float8(tl.load(codes_ptr + o_256), SPELLING)
    tl.store(o_ptr + o_256, codes.to(tl.float32) * float8_weight(SPELLING))


def test_every_float8_is_read_by_bit_moves_as_torch_converts_it():
    codes = torch.arange(256).to(torch.uint8)
    found = torch.empty(256, device=DEVICE)
    float8_kernel[(1,)](codes.view(torch.int8).to(DEVICE), found, PLAIN, num_warps=1)
    numbers = codes & 127 != 127  # the rest are NaN
    assert torch.equal(found.cpu()[numbers], codes.view(torch.float8_e4m3fn).float()[numbers])
