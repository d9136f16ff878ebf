"""The bytes of the torch reference and its steps; what it attends to is in test_attention.py."""

import pytest
import torch

from disagg.kernels.reference import codes, encode
from disagg.kernels.reference.hadamard import rotate, unrotate
from disagg.kernels.reference.quantize import quantize, quantize_fitted
from disagg.kernels.reference.softmax import merge
from disagg.kernels.sealing import Segmentation
from tests.kernels import cases
from tests.synthetic import relative_error


def test_merge_of_disjoint_tokens_is_attention_over_all():
    fmt = cases.quant_format(4, 64, 32, 32)
    case = cases.make_case(fmt, [300, 64], 2, 3)
    cut = torch.tensor([[190], [64]], dtype=torch.int32)
    both = case.seeing(hi=torch.minimum(case.view.hi, cut)), case.seeing(lo=cut)
    halves = [codes.attend(half.q, half.view, 0.2) for half in both]
    assert relative_error(merge(halves), cases.exact_attention(case, 0.2)[0]) <= 1e-5
    unseen = [(torch.zeros(1, 1, 2, 64), torch.full((1, 1, 2), -torch.inf))] * 2
    assert not merge(unseen).any()


def blocks_of(k, v, fmt):
    return encode.encode(k, v, fmt, Segmentation())[0]


def decoded(k, v, fmt):
    found = codes.decode(blocks_of(k, v, fmt), None, fmt)
    return [x.transpose(0, 1).flatten(1, 2) for x in found]


@pytest.mark.parametrize("bits", [2, 4])
def test_what_fp16_cannot_hold_saturates_and_what_is_no_number_becomes_one(bits):
    fmt = cases.quant_format(bits, 64, 32, 32)
    k, v = (x[0] for x in cases.random_kv([128], 2, 64, 64))
    for place, value in enumerate((torch.inf, -torch.inf, 1e30, -7e4)):
        k[0, place, place], v[1, 70 + place, place] = value, value
    k[0, 3, 50], v[0, 9, 1] = torch.nan, torch.nan
    for x, y in zip((k, v), decoded(k, v, fmt), strict=True):
        assert torch.isfinite(y).all()
        huge = x.abs() > 65504
        assert torch.allclose(y[huge], x[huge].clamp(-65504, 65504), rtol=2e-3)


def test_bytes_do_not_depend_on_how_pages_are_cut_into_chunks(monkeypatch):
    fmt = cases.quant_format(2, 64, 32, 32)
    k, v = (x[0].half() for x in cases.random_kv([448], 3, 64, 64))
    whole = blocks_of(k, v, fmt)
    single = [
        blocks_of(k[:, i : i + 64], v[:, i : i + 64], fmt) for i in range(0, 448, 64)
    ]
    assert torch.equal(whole, torch.cat(single))
    monkeypatch.setattr(encode, "CHUNK_ELEMENTS", 1)
    assert torch.equal(whole, blocks_of(k, v, fmt))


def test_a_turn_is_undone_and_keeps_lengths():
    x = torch.randn(3, 5, 128)
    signs = torch.randint(0, 2, (128,)) * 2.0 - 1
    y = rotate(x, signs)
    assert torch.allclose(unrotate(y, signs), x, atol=1e-5)
    for a, b in zip(y.split(64, 2), x.split(64, 2), strict=True):  # blocks do not mix
        assert torch.allclose(a.norm(dim=2), b.norm(dim=2), rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_stretched_scale_keeps_mean_and_energy_of_a_group(bits):
    x = torch.randn(7, 64, 40) + 3 * torch.randn(7, 1, 40)
    found, scale, zero = quantize_fitted(x, 64, bits)
    seen = (found + zero.float()) * scale.float()
    mean = x.mean(1)
    d, e = x - mean.unsqueeze(1), seen - seen.mean(1, keepdim=True)
    assert (
        (seen.mean(1) - mean).abs() <= 2**-10 * (mean.abs() + x.abs().amax(1))
    ).all()
    assert torch.allclose((d * d).sum(1), (d * e).sum(1), rtol=2e-3)
    plain, old_scale, old_zero = quantize(x, 64, bits)
    old = (plain + old_zero.float()) * old_scale.float()
    assert (seen - x).norm() < (1 if bits == 2 else 1.02) * (old - x).norm()


@pytest.mark.parametrize("way", [quantize, quantize_fitted])
@pytest.mark.parametrize("value", [0.0, 7.0, -0.1, 65504.0, -65504.0, 2.0**-24, 6.1e-5])
@pytest.mark.parametrize("bits", [2, 4])
def test_constant_groups_are_exact(bits, value, way):
    x = torch.full((1, 64, 16), value).half().float()
    found, scale, zero = way(x, 64, bits)
    assert not found.any()
    seen = (scale.float() * zero.float()).half().float()[:, 0]
    assert torch.equal(seen, x[:, 0]) or (value, way) == (-0.1, quantize_fitted)


def test_pages_want_an_order_and_hold_what_fp16_cannot():
    fmt = cases.banded_format(2, 64)
    k, v = (1e5 * x[0] for x in cases.random_kv([128], 2, 64, 64))
    with pytest.raises(ValueError, match="frozen segment"):
        encode.encode(k, v, fmt, Segmentation(128))
    cut = Segmentation(128, 0, cases.random_segment(fmt, 2, 0))
    blocks, segments = encode.encode(k, v, fmt, cut)
    found = codes.decode(blocks, segments.expand(2, -1, -1), fmt)
    assert all(torch.isfinite(x).all() for x in found)
