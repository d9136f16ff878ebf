"""The torch reference against exact attention in fp64 on what the pages hold; and its bytes."""

import pytest
import torch

from disagg.kernels.formats import ExactFormat
from disagg.kernels.reference import codes, encode, exact
from disagg.kernels.reference.pages import (
    gather_raw,
    load_blocks,
    pack_words,
    store_blocks,
    unpack_words,
)
from disagg.kernels.reference.quantize import quantize
from disagg.kernels.reference.softmax import merge
from disagg.kernels.sealing import NewRows, Segmentation, Target
from tests.kernels.cases import (
    BASE,
    FORMATS,
    SIZES,
    Case,
    assert_alike,
    exact_attention,
    make_case,
    make_format,
    quant_format,
    random_kv,
    raw_format,
)
from tests.synthetic import relative_error


def attend(case: Case):
    room = exact if isinstance(case.view.fmt, ExactFormat) else codes
    return room.attend(case.q, case.view, 0.2)


def check(case: Case) -> None:
    assert_alike(attend(case), exact_attention(case, 0.2), 1e-5)


@pytest.mark.parametrize("name", [name for name in FORMATS if "valid" not in FORMATS[name]])
def test_every_kind_of_page_is_attended_as_what_it_decodes_to(name):
    check(make_case(make_format(**FORMATS[name]), [390, 70, 0], 2, 3, m=2, run=3))


@pytest.mark.parametrize("name", SIZES)
def test_attention_on_codes_equals_exact_attention_on_what_they_decode_to(name):
    fmt = SIZES[name]
    check(make_case(fmt, [500, 1, 129], 2, 3))


@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("bits", [2, 4])
def test_any_number_of_query_heads_reads_one_kv_head(bits, width):
    fmt = quant_format(bits, 64, 64, 32)
    check(make_case(fmt, [130], 2, width, m=3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_raw_pages_are_attended_exactly(dtype, head_dim):
    fmt = raw_format(dtype, head_dim)
    check(make_case(fmt, [100, 1, 37], 2, 7, m=3))


@pytest.mark.parametrize("fmt", [quant_format(2, 64, 32, 32), raw_format("float16", 64)])
def test_a_window_hides_tokens_on_both_sides(fmt):
    case = make_case(fmt, [300, 170, 90], 2, 4, m=2)
    lo = torch.tensor([[131, 132], [64, 65], [3, 90]], dtype=torch.int32)
    check(case.seeing(lo=lo))


@pytest.mark.parametrize("fmt", [quant_format(4, 64, 32, 32), raw_format("float32", 64)])
def test_a_query_that_sees_nothing_gets_zero_and_minus_infinity(fmt):
    case = make_case(fmt, [70, 0], 2, 2)
    o, lse = attend(case)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert torch.isneginf(lse[1]).all()
    check(case)
    nothing = case.seeing(hi=torch.zeros_like(case.view.hi))
    assert not attend(nothing)[0].any()


def test_merge_of_disjoint_tokens_is_attention_over_all():
    fmt = quant_format(4, 64, 32, 32)
    case = make_case(fmt, [300, 64], 2, 3)
    cut = torch.tensor([[190], [64]], dtype=torch.int32)
    halves = [attend(case.seeing(hi=torch.minimum(case.view.hi, cut))), attend(case.seeing(lo=cut))]
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
