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


def blocks_of(k, v, fmt):
    blocks, _ = encode.encode(k, v, fmt, Segmentation())
    return blocks


def decoded(k, v, fmt):
    """k and v [H, n, D] as their pages stand for them."""
    by_page = codes.decode(blocks_of(k, v, fmt), None, fmt)
    return [x.transpose(0, 1).flatten(1, 2) for x in by_page]


def test_merge_of_disjoint_tokens_is_attention_over_all():
    fmt = cases.quant_format(4, 64, 32, 32)
    case = cases.make_case(fmt, [300, 64], 2, 3)
    cut = torch.tensor([[190], [64]], dtype=torch.int32)
    front = case.seeing(hi=torch.minimum(case.view.hi, cut))
    back = case.seeing(lo=cut)

    halves = [codes.attend(half.q, half.view, 0.2) for half in (front, back)]

    expected, _ = cases.exact_attention(case, 0.2)

    assert relative_error(merge(halves), expected) <= 1e-5


def test_merge_of_nothing_visible_is_0():
    empty = (torch.zeros(1, 1, 2, 64), torch.full((1, 1, 2), -torch.inf))

    assert not merge([empty, empty]).any()


@pytest.mark.parametrize("bits", [2, 4])
def test_what_fp16_cannot_hold_saturates_and_nan_becomes_a_number(bits):
    fmt = cases.quant_format(bits, 64, 32, 32)
    k, v = (x[0] for x in cases.random_kv([128], 2, 64, 64))
    for place, value in enumerate((torch.inf, -torch.inf, 1e30, -7e4)):
        k[0, place, place] = value
        v[1, 70 + place, place] = value
    k[0, 3, 50] = torch.nan
    v[0, 9, 1] = torch.nan

    for x, y in zip((k, v), decoded(k, v, fmt), strict=True):
        huge = x.abs() > 65504
        saturated = x[huge].clamp(-65504, 65504)
        assert torch.isfinite(y).all()
        assert torch.allclose(y[huge], saturated, rtol=2e-3)


def test_bytes_do_not_depend_on_how_pages_are_cut_into_chunks(monkeypatch):
    fmt = cases.quant_format(2, 64, 32, 32)
    k, v = (x[0].half() for x in cases.random_kv([448], 3, 64, 64))
    whole = blocks_of(k, v, fmt)

    pages = zip(k.split(64, 1), v.split(64, 1), strict=True)
    page_by_page = [blocks_of(page_k, page_v, fmt) for page_k, page_v in pages]

    assert torch.equal(whole, torch.cat(page_by_page))

    monkeypatch.setattr(encode, "CHUNK_ELEMENTS", 1)

    assert torch.equal(whole, blocks_of(k, v, fmt))


def test_a_rotation_is_undone_and_keeps_lengths():
    x = torch.randn(3, 5, 128)
    signs = torch.randint(0, 2, (128,)) * 2.0 - 1

    y = rotate(x, signs)

    assert torch.allclose(unrotate(y, signs), x, atol=1e-5)

    # blocks of 64 channels do not mix
    lengths = x.unflatten(2, (2, 64)).norm(dim=3)
    rotated_lengths = y.unflatten(2, (2, 64)).norm(dim=3)

    assert torch.allclose(rotated_lengths, lengths, rtol=1e-5)


def dequantize(quantized):
    numbers, scale, zero = quantized
    return (numbers + zero.float()) * scale.float()


@pytest.mark.parametrize("bits", [2, 4])
def test_a_stretched_scale_keeps_mean_and_energy_of_a_group(bits):
    x = torch.randn(7, 64, 40) + 3 * torch.randn(7, 1, 40)

    fitted = dequantize(quantize_fitted(x, 64, bits))

    mean = x.mean(1)
    fitted_mean = fitted.mean(1)
    tolerance = 2**-10 * (mean.abs() + x.abs().amax(1))

    assert ((fitted_mean - mean).abs() <= tolerance).all()

    d = x - mean.unsqueeze(1)
    e = fitted - fitted_mean.unsqueeze(1)

    assert torch.allclose((d * d).sum(1), (d * e).sum(1), rtol=2e-3)

    plain = dequantize(quantize(x, 64, bits))
    allowed = 1 if bits == 2 else 1.02

    assert (fitted - x).norm() < allowed * (plain - x).norm()


@pytest.mark.parametrize("way", [quantize, quantize_fitted])
@pytest.mark.parametrize(
    "value",
    [
        0.0,
        7.0,
        -0.1,
        65504.0,
        -65504.0,
        2.0**-24,
        6.1e-5,
    ],
)
@pytest.mark.parametrize("bits", [2, 4])
def test_constant_groups_are_exact(bits, value, way):
    x = torch.full((1, 64, 16), value).half().float()

    group_codes, scale, zero = way(x, 64, bits)

    assert not group_codes.any()

    product = scale.float() * zero.float()
    stored = product.half().float()[:, 0]

    assert torch.equal(stored, x[:, 0]) or (value, way) == (-0.1, quantize_fitted)


def test_pages_with_an_order_need_a_frozen_segment():
    fmt = cases.banded_format(2, 64)
    k, v = (x[0] for x in cases.random_kv([128], 2, 64, 64))

    with pytest.raises(ValueError, match="frozen segment"):
        encode.encode(k, v, fmt, Segmentation(128))


def test_pages_with_an_order_saturate_what_fp16_cannot_hold():
    fmt = cases.banded_format(2, 64)
    k, v = (1e5 * x[0] for x in cases.random_kv([128], 2, 64, 64))
    segment = cases.random_segment(fmt, heads=2, seed=0)
    cut = Segmentation(128, 0, segment)

    blocks, segments = encode.encode(k, v, fmt, cut)

    for x in codes.decode(blocks, segments.expand(2, -1, -1), fmt):
        assert torch.isfinite(x).all()
