"""Triton on bit planes: the bytes of the reference, its choice of bits, and its attention."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import encode_aligned, paged_aligned, reduce, reference_aligned
from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.places import Places
from disagg.kernels.reference_pages import store_blocks
from tests.kernels.cases import BASE, Case, exact_attention, place, random_kv, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 64


def make_format(head_dim: int) -> AlignedFormat:
    whole, half = T * head_dim, T * head_dim // 2
    sizes = (whole, half, half, whole, half, half, head_dim, head_dim)
    offsets = [sum(sizes[:i]) for i in range(8)]
    return AlignedFormat(T, head_dim, sum(sizes), *offsets)


def make_case(fmt: AlignedFormat, lengths: list[int], heads: int, width: int, m: int = 1) -> Case:
    k, v = random_kv(lengths, heads, fmt.head_dim, T)
    blocks = [reference_aligned.encode_aligned(a, b, fmt) for a, b in zip(k, v, strict=True)]
    arena, pages = place(torch.stack(blocks))
    hi = torch.tensor([[max(0, n - m + 1 + j) for j in range(m)] for n in lengths]).int()
    generator = torch.Generator().manual_seed(width)
    q = torch.randn(len(lengths), m, heads * width, fmt.head_dim, generator=generator)
    return Case(q, arena, pages, torch.zeros_like(hi), hi, k.half(), v.half())


def check(fmt: AlignedFormat, case: Case, heads: int):
    """Against the reference, and against attention on all 16 bits."""
    inputs = case.q, case.arena, case.pages, case.lo, case.hi
    tensors = [x.to(DEVICE) for x in inputs]
    part, bits = paged_aligned.attend_aligned(*tensors, fmt, BASE, heads, 0.2)
    o, lse = reduce.join([part])
    (expected, expected_lse), counted = reference_aligned.attend_aligned(
        *inputs, fmt, BASE, heads, 0.2
    )
    seen = expected_lse > -torch.inf
    assert torch.equal(lse.cpu() > -torch.inf, seen)
    assert torch.allclose(lse.cpu()[seen], expected_lse[seen], rtol=1e-3, atol=2e-3)
    assert relative_error(o.cpu(), expected.double()) <= 1e-3
    assert not o.cpu()[~seen].any()
    assert torch.equal(bits.k.cpu()[seen], counted.k[seen])
    assert torch.allclose(bits.v.cpu(), counted.v, atol=0.05)
    assert relative_error(o.cpu(), exact_attention(case, 0.2)[0]) <= 2**-8
    return bits


@pytest.mark.parametrize("at_once", [1, 2 * 4 * T * 48])
def test_sequences_and_heads_attend_alone_as_they_do_together(at_once, monkeypatch):
    fmt = make_format(48)
    case = make_case(fmt, [250, 3, 130], heads=3, width=2, m=2)
    inputs = case.q, case.arena, case.pages, case.lo, case.hi, fmt, BASE, 3, 0.2
    (o, lse), bits = reference_aligned.attend_aligned(*inputs)
    monkeypatch.setattr(reference_aligned, "CHUNK_ELEMENTS", at_once)
    (o_alone, lse_alone), bits_alone = reference_aligned.attend_aligned(*inputs)
    assert torch.allclose(o_alone, o, atol=1e-5)
    assert torch.allclose(lse_alone, lse, atol=1e-5)
    assert torch.equal(bits_alone.k, bits.k)
    assert torch.allclose(bits_alone.v, bits.v, atol=0.01)


@pytest.mark.parametrize("head_dim", [48, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_planes_are_those_of_the_reference(head_dim, dtype):
    fmt = make_format(head_dim)
    k, v = (x[0].to(dtype) * 1e-2 for x in random_kv([192], 2, head_dim, T))
    k[0, 70, 3], k[1, 5, 7], v[0, 9, 9], v[1, 100, 0] = torch.inf, -1e30, torch.nan, 1e-7
    expected = reference_aligned.encode_aligned(k, v, fmt)
    assert torch.equal(
        encode_aligned.encode_aligned(k.to(DEVICE), v.to(DEVICE), fmt).cpu(), expected
    )
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE) for x in (k, v)]
    assert torch.equal(encode_aligned.encode_aligned(*turned, fmt).cpu(), expected)


def test_planes_go_to_their_pages():
    fmt = make_format(64)
    k, v = (x[0].half() for x in random_kv([128], 3, 64, T))
    pages = torch.tensor([700, 2], dtype=torch.int32)
    expected = torch.zeros(1400 * 128, dtype=torch.uint8)
    arena = expected.to(DEVICE, copy=True)
    store_blocks(expected, reference_aligned.encode_aligned(k, v, fmt), pages, BASE)
    places = Places(arena, pages.to(DEVICE), BASE)
    encode_aligned.seal_aligned(k.to(DEVICE), v.to(DEVICE), places, fmt)
    assert torch.equal(arena.cpu(), expected)


@pytest.mark.parametrize(
    ("head_dim", "lengths", "heads", "width", "m"),
    [(64, [140, 1], 2, 3, 1), (80, [390], 1, 5, 1), (128, [200, 70, 0], 1, 2, 2)],
)
def test_attention_reads_the_bits_that_the_reference_reads(head_dim, lengths, heads, width, m):
    fmt = make_format(head_dim)
    check(fmt, make_case(fmt, lengths, heads, width, m), heads)


def test_a_window_sees_its_own_pages_and_no_others():
    fmt = make_format(64)
    case = make_case(fmt, [390, 330], 1, 4)
    check(fmt, replace(case, lo=torch.tensor([[200], [329]]).int()), 1)


def test_units_of_work_far_below_the_others_add_nothing():
    fmt = make_format(64)
    k, v = random_kv([450], 1, 64, T)
    k[0, 0, 5] = 8.0
    arena, pages = place(reference_aligned.encode_aligned(k[0], v[0], fmt)[None])
    hi = torch.tensor([[450]]).int()
    case = Case(torch.full((1, 1, 2, 64), 4.0), arena, pages, 0 * hi, hi, k.half(), v.half())
    check(fmt, case, 1)


def test_no_more_bits_are_read_than_are_counted():
    """Whatever lies in planes that no query asks for changes nothing."""
    fmt = make_format(64)
    case = make_case(fmt, [128], 1, 1)
    o, bits = attend(fmt, case)
    assert bits.k.mean() < 16
    levels = reference_levels(fmt, case)
    block = case.arena[int(case.pages[0, 0]) * 128 + BASE :][: fmt.block_bytes]
    low = block[fmt.k_low : fmt.k_low + T // 2 * 64].view(64, T // 2)
    low[levels > 0] ^= 0xFF
    middle = block[fmt.k_middle : fmt.k_middle + T // 2 * 64].view(64, T // 2)
    middle[levels > 1] ^= 0xFF
    assert (levels > 0).any()
    assert torch.equal(attend(fmt, case)[0], o)
    low[levels == 0] ^= 0xFF
    assert not torch.equal(attend(fmt, case)[0], o)


def attend(fmt: AlignedFormat, case: Case):
    tensors = [x.to(DEVICE) for x in (case.q, case.arena, case.pages, case.lo, case.hi)]
    part, bits = paged_aligned.attend_aligned(*tensors, fmt, BASE, 1, 0.2)
    o = reduce.merge([part])
    return o.cpu(), bits


def reference_levels(fmt: AlignedFormat, case: Case) -> torch.Tensor:
    """How many planes of each channel of K are left out: [D], for one query of one head."""
    top = case.k[0, 0].abs().amax(0).view(torch.int16).int() >> 10
    columns = case.q[0, 0, 0, :, None][None, None] * 0.2
    drop = reference_aligned.k_drops(columns, top[None, None, :, None])[0, 0, :, 0]
    return (drop >= 4).int() + (drop >= 8).int()
