"""The bytes of the torch reference and its steps; what it attends to is in test_attention.py."""

import pytest
import torch

from disagg.kernels.reference import codes, encode
from disagg.kernels.reference.pages import (
    gather_raw,
    load_blocks,
    pack_words,
    store_blocks,
    unpack_words,
)
from disagg.kernels.reference.quantize import quantize, quantize_fitted
from disagg.kernels.reference.softmax import merge
from disagg.kernels.reference.turn import turn, turn_back
from disagg.kernels.sealing import NewRows, Segmentation, Target
from tests.kernels.cases import (
    BANDED,
    BASE,
    banded_format,
    exact_attention,
    make_case,
    quant_format,
    random_kv,
    random_segment,
    raw_format,
)
from tests.synthetic import relative_error


def test_merge_of_disjoint_tokens_is_attention_over_all():
    fmt = quant_format(4, 64, 32, 32)
    case = make_case(fmt, [300, 64], 2, 3)
    cut = torch.tensor([[190], [64]], dtype=torch.int32)
    both = case.seeing(hi=torch.minimum(case.view.hi, cut)), case.seeing(lo=cut)
    halves = [codes.attend(half.q, half.view, 0.2) for half in both]
    assert relative_error(merge(halves), exact_attention(case, 0.2)[0]) <= 1e-5
    unseen = [(torch.zeros(1, 1, 2, 64), torch.full((1, 1, 2), -torch.inf))] * 2
    assert not merge(unseen).any()


def blocks_of(k, v, fmt):
    return encode.encode(k, v, fmt, Segmentation())[0]


def decoded(k, v, fmt):
    found = codes.decode(blocks_of(k, v, fmt), None, fmt)
    return [x.transpose(0, 1).flatten(1, 2) for x in found]


@pytest.mark.parametrize("bits", [2, 4])
def test_a_code_word_holds_four_fields_and_its_halves(bits):
    numbers = torch.randint(0, 2**bits, (16, 8)).float()
    words = pack_words(numbers, bits).int() & 0xFFFF
    halves = 4 // bits
    assert words.shape == (4, 8 // halves)
    for row in range(16):
        for column in range(8):
            word = words[row % 4, column % (8 // halves)]
            bit = row // 4 * bits + column // (8 // halves) * 8
            assert (word >> bit) & (2**bits - 1) == numbers[row, column]
    assert torch.equal(unpack_words(pack_words(numbers, bits), bits, torch.float32), numbers)


def test_planes_lie_where_the_format_says():
    fmt = quant_format(2, 64, 32, 16)
    k, v = (x[0] for x in random_kv([64], 1, 64, 64))
    block = blocks_of(k, v, fmt)[0, 0]
    for x, group, side in ((k[0], 32, fmt.k), (v[0].t(), 16, fmt.v)):
        found, scale, zero = quantize(x, group, 2)
        offsets = side.codes, side.scale.scale, side.scale.zero
        for plane, offset in zip((pack_words(found, 2), scale, zero), offsets, strict=True):
            data = plane.contiguous().view(torch.uint8).flatten()
            assert torch.equal(block[offset : offset + data.numel()], data)


@pytest.mark.parametrize("bits", [2, 4])
def test_what_fp16_cannot_hold_saturates_and_what_is_no_number_becomes_one(bits):
    fmt = quant_format(bits, 64, 32, 32)
    k, v = (x[0] for x in random_kv([128], 2, 64, 64))
    for place, value in enumerate((torch.inf, -torch.inf, 1e30, -7e4)):
        k[0, place, place], v[1, 70 + place, place] = value, value
    k[0, 3, 50], v[0, 9, 1] = torch.nan, torch.nan
    for x, y in zip((k, v), decoded(k, v, fmt), strict=True):
        assert torch.isfinite(y).all()
        huge = x.abs() > 65504
        assert torch.allclose(y[huge], x[huge].clamp(-65504, 65504), rtol=2e-3)


def test_bytes_do_not_depend_on_how_pages_are_cut_into_chunks(monkeypatch):
    fmt = quant_format(2, 64, 32, 32)
    k, v = (x[0].half() for x in random_kv([448], 3, 64, 64))
    whole = blocks_of(k, v, fmt)
    single = [blocks_of(k[:, i : i + 64], v[:, i : i + 64], fmt) for i in range(0, 448, 64)]
    assert torch.equal(whole, torch.cat(single))
    monkeypatch.setattr(encode, "CHUNK_ELEMENTS", 1)
    assert torch.equal(whole, blocks_of(k, v, fmt))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_appended_tokens_are_gathered_in_order(dtype):
    fmt = raw_format(dtype, 80)
    heads, n, stride = 3, 37, 1024
    k = torch.randn(n, heads, 80).to(getattr(torch, dtype))
    v = torch.randn(n, heads, 80).to(getattr(torch, dtype))
    arena = torch.zeros(8 * stride * 128, dtype=torch.uint8)
    table = torch.tensor([[5, 0, 3]], dtype=torch.int32) * stride
    for i in range(n):
        page, slot = table[0, i // 16 : i // 16 + 1], torch.tensor([i % 16], dtype=torch.int32)
        encode.append(arena, k[i : i + 1], v[i : i + 1], NewRows(page, slot, fmt, BASE))
    gathered_k, gathered_v = gather_raw(arena, table, fmt, BASE, heads)
    assert torch.equal(gathered_k[0, :, :n], k.transpose(0, 1))
    assert torch.equal(gathered_v[0, :, :n], v.transpose(0, 1))
    assert not gathered_k[0, :, n:].any()
    assert int((arena != 0).nonzero().max()) < 6 * stride * 128


def test_stored_blocks_are_loaded_from_where_their_ids_say():
    blocks = torch.randint(0, 256, (3, 2, 48), dtype=torch.uint8)
    arena = torch.zeros(4096, dtype=torch.uint8)
    pages = torch.tensor([9, 2, 30], dtype=torch.int32)
    store_blocks(Target(arena, pages, 16), blocks)
    assert torch.equal(load_blocks(arena, pages, 16, 2, 48), blocks)
    assert torch.equal(arena[2 * 128 + 16 : 2 * 128 + 112], blocks[1].flatten())
    assert int((arena != 0).sum()) == int((blocks != 0).sum())


@pytest.mark.parametrize(("bits", "head_dim"), BANDED)
def test_bands_are_all_columns(bits, head_dim):
    fmt = banded_format(bits, head_dim)
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
    found, scale, zero = quantize_fitted(x, 64, bits)
    seen = (found + zero.float()) * scale.float()
    mean = x.mean(1)
    d, e = x - mean.unsqueeze(1), seen - seen.mean(1, keepdim=True)
    assert ((seen.mean(1) - mean).abs() <= 2**-10 * (mean.abs() + x.abs().amax(1))).all()
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
    fmt = banded_format(2, 64)
    k, v = (1e5 * x[0] for x in random_kv([128], 2, 64, 64))
    with pytest.raises(ValueError, match="frozen segment"):
        encode.encode(k, v, fmt, Segmentation(128))
    cut = Segmentation(128, 0, random_segment(fmt, 2, 0))
    blocks, segments = encode.encode(k, v, fmt, cut)
    found = codes.decode(blocks, segments.expand(2, -1, -1), fmt)
    assert all(torch.isfinite(x).all() for x in found)
