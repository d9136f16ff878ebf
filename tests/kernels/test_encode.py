"""The Triton encoder writes the very bytes of the reference."""

import pytest
import torch

from disagg.kernels import encode, reference_encode
from tests.kernels.cases import quant_format, random_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("bits", "head_dim", "k_group", "v_group"),
    [(2, 64, 64, 64), (4, 64, 32, 32), (2, 128, 64, 64), (4, 80, 64, 40), (2, 96, 32, 32)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bytes_equal_those_of_the_reference(bits, head_dim, k_group, v_group, dtype):
    fmt = quant_format(bits, head_dim, k_group, v_group)
    k, v = (x[0].to(dtype) for x in random_kv([128], 3, head_dim, 64))
    blocks = encode.encode_quantized(k.to(DEVICE), v.to(DEVICE), fmt).cpu()
    assert torch.equal(blocks, reference_encode.encode_quantized(k, v, fmt))


def test_views_and_values_that_hurt_encode_alike():
    fmt = quant_format(2, 64, 32, 32)
    k, v = (x[0].transpose(0, 1).contiguous().transpose(0, 1) for x in random_kv([192], 2, 64, 64))
    for place, value in enumerate((torch.inf, -torch.inf, 1e30, -7e4, torch.nan)):
        k[0, 64 + place, place], v[1, 70 + place, place] = value, value
    k[1, :, 7], v[0, 100] = 3.25, 0.0
    k, v = k[:, 64:], v[:, 64:]
    blocks = encode.encode_quantized(k.to(DEVICE), v.to(DEVICE), fmt).cpu()
    assert torch.equal(blocks, reference_encode.encode_quantized(k, v, fmt))


def test_no_tokens_are_no_blocks():
    fmt = quant_format(4, 64, 32, 32)
    x = torch.zeros(2, 0, 64, device=DEVICE)
    assert encode.encode_quantized(x, x, fmt).shape == (0, 2, fmt.block_bytes)
