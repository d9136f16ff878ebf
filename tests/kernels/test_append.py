"""The Triton append writes the very bytes of the reference."""

import pytest
import torch

from disagg.kernels import append, reference_pages
from tests.kernels.cases import BASE, raw_format

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bytes_equal_those_of_the_reference(dtype):
    fmt, heads = raw_format(dtype, 80), 3
    rows = torch.randn(5, heads, 3 * 80).to(getattr(torch, dtype))
    k, v = rows[..., 80:160], rows[..., 160:]  # views, as a fused projection gives them
    pages = torch.tensor([600, 0, 300, 0, 300], dtype=torch.int32)
    slots = torch.tensor([15, 0, 7, 1, 8], dtype=torch.int32)
    expected = torch.zeros(1000 * 128, dtype=torch.uint8)
    arena = expected.to(DEVICE, copy=True)
    reference_pages.append_raw(expected, k, v, pages, slots, fmt, BASE)
    tensors = [x.to(DEVICE) for x in (k, v, pages, slots)]
    append.append_raw(arena, *tensors, fmt, BASE)
    assert torch.equal(arena.cpu(), expected)
    assert expected.any()


def test_scattered_channels_are_refused():
    fmt = raw_format("float32", 64)
    x = torch.zeros(1, 64, 2).transpose(1, 2)
    ids = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="adjacent"):
        append.append_raw(torch.zeros(65536, dtype=torch.uint8), x, x, ids, ids, fmt, 0)
