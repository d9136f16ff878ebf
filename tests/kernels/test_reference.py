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

LARGEST_FP16 = 65504.0


def blocks_of(k, v, fmt):
    blocks, _ = encode.encode(k, v, fmt, Segmentation())
    return blocks


def decoded(k, v, fmt):
    """k and v [H, n, D] as their pages stand for them."""
    blocks = blocks_of(k, v, fmt)
    by_page = codes.decode(blocks, None, fmt)
    return [x.transpose(0, 1).flatten(1, 2) for x in by_page]


def test_merge_of_disjoint_tokens_is_attention_over_all():
    fmt = cases.quant_format(4, 64, 32, 32)
    case = cases.make_case(
        fmt,
        lengths=[300, 64],
        heads=2,
        width=3,
    )
    expected, _ = cases.exact_attention(case, 0.2)
    cut = cases.int32([190], [64])
    front_end = torch.minimum(case.view.hi, cut)

    front = case.seeing(hi=front_end)
    back = case.seeing(lo=cut)
    front_answer = codes.attend(front.q, front.view, 0.2)
    back_answer = codes.attend(back.q, back.view, 0.2)
    merged = merge([front_answer, back_answer])

    assert relative_error(merged, expected) <= 1e-5


def test_merge_of_nothing_visible_is_0():
    o = torch.zeros(1, 1, 2, 64)
    lse = torch.full((1, 1, 2), -torch.inf)
    empty = (o, lse)

    merged = merge([empty, empty])

    assert not merged.any()


@pytest.mark.parametrize("bits", [2, 4])
def test_numbers_beyond_fp16_saturate_and_nan_becomes_finite(bits):
    fmt = cases.quant_format(bits, 64, 32, 32)
    k, v = cases.sequence_kv(128, heads=2, head_dim=64)
    too_large = (torch.inf, -torch.inf, 1e30, -7e4)
    for place, value in enumerate(too_large):
        k[0, place, place] = value
        v[1, 70 + place, place] = value
    k[0, 3, 50] = torch.nan
    v[0, 9, 1] = torch.nan

    decoded_k, decoded_v = decoded(k, v, fmt)

    for x, y in ((k, decoded_k), (v, decoded_v)):
        huge = x.abs() > LARGEST_FP16
        saturated = x[huge].clamp(-LARGEST_FP16, LARGEST_FP16)
        assert torch.isfinite(y).all()
        assert torch.allclose(y[huge], saturated, rtol=2e-3)


def test_bytes_do_not_depend_on_how_pages_are_cut(monkeypatch):
    fmt = cases.quant_format(2, 64, 32, 32)
    k, v = cases.sequence_kv(
        448,
        heads=3,
        head_dim=64,
        dtype=torch.float16,
    )
    whole = blocks_of(k, v, fmt)

    page_by_page = [
        blocks_of(page_k, page_v, fmt)
        for page_k, page_v in zip(
            k.split(64, 1),
            v.split(64, 1),
            strict=True,
        )
    ]

    assert torch.equal(whole, torch.cat(page_by_page))

    monkeypatch.setattr(encode, "CHUNK_ELEMENTS", 1)
    in_small_chunks = blocks_of(k, v, fmt)

    assert torch.equal(whole, in_small_chunks)


def block_lengths(x):
    """The norms of blocks of 64 channels."""
    return x.unflatten(2, (2, 64)).norm(dim=3)


def test_a_rotation_is_undone_and_keeps_lengths():
    x = torch.randn(3, 5, 128)
    signs = torch.randint(0, 2, (128,)) * 2.0 - 1

    y = rotate(x, signs)

    undone = unrotate(y, signs)
    lengths = block_lengths(x)
    rotated_lengths = block_lengths(y)
    assert torch.allclose(undone, x, atol=1e-5)
    assert torch.allclose(rotated_lengths, lengths, rtol=1e-5)


def dequantize(quantized):
    numbers, scale, zero = quantized
    return (numbers + zero.float()) * scale.float()


@pytest.mark.parametrize("bits", [2, 4])
def test_a_stretched_scale_keeps_mean_and_energy_of_a_group(bits):
    spread = torch.randn(7, 64, 40)
    offset = torch.randn(7, 1, 40) * 3
    x = spread + offset
    mean = x.mean(1, keepdim=True)
    largest = x.abs().amax(1, keepdim=True)
    energy = (x - mean).square().sum(1)
    plain = dequantize(quantize(x, 64, bits))

    fitted = dequantize(quantize_fitted(x, 64, bits))

    fitted_mean = fitted.mean(1, keepdim=True)
    mean_error = (fitted_mean - mean).abs()
    mean_bound = 2**-10 * (mean.abs() + largest)
    assert (mean_error <= mean_bound).all()

    projection = (x - mean) * (fitted - fitted_mean)
    assert torch.allclose(projection.sum(1), energy, rtol=2e-3)

    allowed = 1 if bits == 2 else 1.02
    error = (fitted - x).norm()
    plain_error = (plain - x).norm()
    assert error < allowed * plain_error


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

    product = scale.float() * zero.float()
    stored = product.half().float()
    is_rounded = value == -0.1 and way is quantize_fitted
    assert not group_codes.any()
    assert torch.equal(stored[:, 0], x[:, 0]) or is_rounded


def test_pages_with_an_order_need_a_frozen_segment():
    fmt = cases.banded_format(2, 64)
    k, v = cases.sequence_kv(128, heads=2, head_dim=64)

    with pytest.raises(ValueError, match="frozen segment"):
        encode.encode(k, v, fmt, Segmentation(128))


def test_pages_with_an_order_saturate_what_fp16_cannot_hold():
    fmt = cases.banded_format(2, 64)
    k, v = cases.sequence_kv(128, heads=2, head_dim=64)
    k *= 1e5
    v *= 1e5
    segment = cases.random_segment(fmt, heads=2, seed=0)
    cut = Segmentation(128, 0, segment)

    blocks, segments = encode.encode(k, v, fmt, cut)

    owned = segments.expand(2, -1, -1)
    decoded_k, decoded_v = codes.decode(blocks, owned, fmt)
    assert torch.isfinite(decoded_k).all()
    assert torch.isfinite(decoded_v).all()
