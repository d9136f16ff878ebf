"""The Triton kernels on K in bands of columns and V turned, against what the pages stand for."""

import pytest
import torch

from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu.plan import is_supported
from disagg.kernels.gpu.reduce import merge
from tests.kernels.cases import DEVICE, banded_format, exact_attention, make_case, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)


@pytest.mark.parametrize(
    ("bits", "head_dim", "width", "m"),
    [(2, 64, 3, 1), (3, 64, 8, 1), (2, 128, 4, 1), (3, 128, 5, 2), (2, 256, 1, 1)],
)
def test_bands_are_attended_as_what_they_stand_for(bits, head_dim, width, m):
    fmt = banded_format(bits, head_dim)
    assert is_supported(fmt)
    case = make_case(fmt, [200, 70, 0], 1, width, m=m, run=2)
    q, view = case.on(DEVICE)
    o, lse = (x.cpu() for x in merge(gpu.attend(q, [view], 0.2)))
    exact, exact_lse = exact_attention(case, 0.2)
    seen = exact_lse > -torch.inf
    assert torch.allclose(lse[seen].double(), exact_lse[seen], rtol=1e-3, atol=2e-3)
    assert relative_error(o, exact) <= 1e-3
    assert not o[~seen].any()
