"""K in bands of columns and in another order, V turned: the reference, and who refuses it."""

import pytest
import torch

from disagg.kernels.reference import codes
from disagg.kernels.reference.encode import encode
from disagg.kernels.reference.quantize import quantize, quantize_fitted
from disagg.kernels.reference.turn import turn, turn_back
from disagg.kernels.sealing import Segmentation
from tests.kernels.cases import BANDED, banded_format, make_case, random_kv, random_segment
from tests.kernels.test_reference import check


@pytest.mark.parametrize(("bits", "head_dim"), BANDED)
@pytest.mark.parametrize("m", [1, 2])
def test_bands_are_attended_as_what_they_decode_to(bits, head_dim, m):
    check(make_case(banded_format(bits, head_dim), [390, 70, 0], 2, 3, m=m, run=3))


@pytest.mark.parametrize(("bits", "head_dim"), BANDED)
def test_planes_fill_a_block_and_no_two_bands_share_a_byte(bits, head_dim):
    fmt = banded_format(bits, head_dim)
    assert fmt.written_bytes == fmt.block_bytes
    assert sum(side.columns for side in fmt.k_sides) == head_dim


def test_a_turn_is_undone_and_keeps_lengths():
    x = torch.randn(3, 5, 128)
    signs = torch.randint(0, 2, (128,)) * 2.0 - 1
    y = turn(x, signs)
    assert torch.allclose(turn_back(y, signs), x, atol=1e-5)
    for a, b in zip(y.split(64, 2), x.split(64, 2), strict=True):  # blocks do not mix
        assert torch.allclose(a.norm(dim=2), b.norm(dim=2), rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_stretched_scale_keeps_mean_and_energy_of_a_group(bits):
    x = torch.randn(7, 64, 40) + 3 * torch.randn(7, 1, 40)
    codes, scale, zero = quantize_fitted(x, 64, bits)
    seen = (codes + zero.float()) * scale.float()
    mean = x.mean(1)
    d, e = x - mean.unsqueeze(1), seen - seen.mean(1, keepdim=True)
    assert ((seen.mean(1) - mean).abs() <= 2**-10 * (mean.abs() + x.abs().amax(1))).all()
    assert torch.allclose((d * d).sum(1), (d * e).sum(1), rtol=2e-3)
    plain, old_scale, old_zero = quantize(x, 64, bits)
    old = (plain + old_zero.float()) * old_scale.float()
    assert (seen - x).norm() < (1 if bits == 2 else 1.02) * (old - x).norm()


@pytest.mark.parametrize("value", [0.0, 7.0, -0.1, 65504.0, 2.0**-24])
@pytest.mark.parametrize("bits", [2, 4])
def test_a_constant_group_is_as_exact_as_without_the_fit(bits, value):
    x = torch.full((1, 64, 16), value).half().float()
    for way in (quantize, quantize_fitted):
        codes, scale, zero = way(x, 64, bits)
        assert not codes.any()
        assert torch.equal((scale.float() * zero.float())[:, 0], x[:, 0]) or value == -0.1


def test_pages_want_an_order_and_hold_what_fp16_cannot():
    fmt = banded_format(2, 64)
    k, v = (1e5 * x[0] for x in random_kv([128], 2, 64, 64))
    with pytest.raises(ValueError, match="frozen segment"):
        encode(k, v, fmt, Segmentation(128))
    blocks, segments = encode(k, v, fmt, Segmentation(128, 0, random_segment(fmt, 2, 0)))
    found = codes.decode(blocks, segments.expand(2, -1, -1), fmt)
    assert all(torch.isfinite(x).all() for x in found)
