"""Sealing pages: the bytes of the code word, the stated error bound, and inputs that hurt."""

import pytest
import torch

from disagg.kernels import reference_encode
from disagg.kernels.reference_encode import decode_quantized, encode_quantized, quantize
from disagg.kernels.reference_words import pack_words, unpack_words
from tests.kernels.cases import quant_format, random_kv

FORMATS = [
    pytest.param(
        quant_format(bits, head_dim, k_group, v_group), id=f"b{bits}-D{head_dim}-g{k_group}"
    )
    for bits in (2, 4)
    for head_dim, k_group, v_group in ((64, 32, 32), (80, 64, 40), (128, 64, 64), (256, 32, 64))
]


def decoded(k, v, fmt):
    found = decode_quantized(encode_quantized(k, v, fmt), fmt)
    return [x.transpose(0, 1).flatten(1, 2) for x in found]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_element_is_within_the_stated_bound(fmt, dtype):
    k, v = (x[0].to(dtype) for x in random_kv([192], 3, fmt.head_dim, fmt.tokens))
    sides = zip((k, v), decoded(k, v, fmt), (1, 2), (fmt.k_group, fmt.v_group), strict=True)
    for x, y, axis, group in sides:
        x = x.float()
        groups = x.unflatten(axis, (-1, group))
        low, high = groups.aminmax(dim=axis + 1, keepdim=True)
        levels = 2**fmt.bits - 1
        largest = torch.maximum(low.abs(), high.abs())
        scale = torch.maximum((high - low) / levels, largest / 1024).clamp_min(2**-24)
        scale = scale.half().float().expand_as(groups).flatten(axis, axis + 1)
        bound = scale / 2 + 2**-11 * (x.abs() + scale * 2**fmt.bits)
        assert ((x - y).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_a_code_word_holds_four_planes_and_its_halves(bits):
    codes = torch.randint(0, 2**bits, (16, 8)).float()
    words = pack_words(codes, bits).int() & 0xFFFF
    halves = 4 // bits
    assert words.shape == (4, 8 // halves)
    for row in range(16):
        for column in range(8):
            word = words[row % 4, column % (8 // halves)]
            bit = row // 4 * bits + column // (8 // halves) * 8
            assert (word >> bit) & (2**bits - 1) == codes[row, column]
    assert torch.equal(unpack_words(pack_words(codes, bits), bits, torch.float32), codes)


def test_planes_lie_where_the_format_says():
    fmt = quant_format(2, 64, 32, 16)
    k, v = (x[0] for x in random_kv([64], 1, 64, 64))
    block = encode_quantized(k, v, fmt)[0, 0]
    for x, group, offsets in (
        (k[0], 32, (fmt.k_codes, fmt.k_scale, fmt.k_zero)),
        (v[0].t(), 16, (fmt.v_codes, fmt.v_scale, fmt.v_zero)),
    ):
        codes, scale, zero = quantize(x, group, 2)
        for plane, offset in zip((pack_words(codes, 2), scale, zero), offsets, strict=True):
            data = plane.contiguous().view(torch.uint8).flatten()
            assert torch.equal(block[offset : offset + data.numel()], data)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 0.1, 65504.0, -65504.0, 2.0**-24, 6.1e-5])
def test_constant_groups_are_exact(bits, value):
    fmt = quant_format(bits, 64, 64, 64)
    x = torch.full((2, 128, 64), value).half()
    for y in decoded(x, x, fmt):
        assert torch.equal(y.half(), x)


@pytest.mark.parametrize("bits", [2, 4])
def test_what_fp16_cannot_hold_saturates(bits):
    fmt = quant_format(bits, 64, 32, 32)
    k, v = (x[0] for x in random_kv([128], 2, 64, 64))
    for place, value in enumerate((torch.inf, -torch.inf, 1e30, -7e4)):
        k[0, place, place], v[1, 70 + place, place] = value, value
    for x, y in zip((k, v), decoded(k, v, fmt), strict=True):
        assert torch.isfinite(y).all()
        huge = x.abs() > 65504
        assert torch.allclose(y[huge], x[huge].clamp(-65504, 65504), rtol=2e-3)


def test_not_a_number_becomes_a_number():
    fmt = quant_format(4, 64, 32, 32)
    k, v = (x[0] for x in random_kv([64], 1, 64, 64))
    k[0, 3, 5], v[0, 9, 1] = torch.nan, torch.nan
    for y in decoded(k, v, fmt):
        assert torch.isfinite(y).all()


def test_bytes_do_not_depend_on_how_pages_are_cut_into_chunks(monkeypatch):
    fmt = quant_format(2, 64, 32, 32)
    k, v = (x[0].half() for x in random_kv([448], 3, 64, 64))
    whole = encode_quantized(k, v, fmt)
    single = [encode_quantized(k[:, i : i + 64], v[:, i : i + 64], fmt) for i in range(0, 448, 64)]
    assert torch.equal(whole, torch.cat(single))
    monkeypatch.setattr(reference_encode, "CHUNK_ELEMENTS", 1)
    assert torch.equal(whole, encode_quantized(k, v, fmt))


def test_views_of_a_larger_tensor_encode_like_copies():
    fmt = quant_format(4, 64, 32, 32)
    k, v = (x[0] for x in random_kv([256], 2, 64, 64))
    assert torch.equal(
        encode_quantized(k[:, 64:192], v[:, 64:192], fmt),
        encode_quantized(k[:, 64:192].clone(), v[:, 64:192].clone(), fmt),
    )
