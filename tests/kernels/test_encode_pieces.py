"""The Triton encoder of pages made of pieces against the torch reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.kernels import encode, ops_paged, reference_encode_paged
from disagg.kernels.formats_paged import PagedFormat, is_encodable
from disagg.kernels.places import Places
from disagg.kernels.reference_lowrank import low_rank
from disagg.kernels.reference_paged import decode_paged
from disagg.kernels.reference_pages import store_blocks
from tests.kernels.cases import BASE, random_kv, relative_error
from tests.kernels.test_paged_pieces import FORMATS, make_format

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T = 64
EXACT = ("kivi", "pertoken", "pertoken-2bit", "kcvt", "int8", "fp8", "decoquant", "ott")
MORE = {
    "8bit-column": {"bits": 8, "group": 32},
    "symmetric-column": {"zero": False, "bits": 2},
    "narrow": {"head_dim": 48, "bits": 2, "group": 16},
    "narrow-fp8": FORMATS["fp8"] | {"head_dim": 48},
}


def encode_both(fmt: PagedFormat, k: Tensor, v: Tensor, seeds: list[int], tokens: int):
    found = encode.encode_segments(k.to(DEVICE), v.to(DEVICE), fmt, seeds, tokens)
    found = [None if x is None else x.cpu() for x in found]
    return found, reference_encode_paged.encode_segments(k, v, fmt, seeds, tokens)


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """All sums of these are exact in fp32, and no two of a column or row are equal."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randperm(shape[1], generator=generator)[:, None] * 7
    return ((rows + torch.arange(shape[2]) * 11) % 509 - 254).expand(shape).to(dtype) / 64


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float16) for name in (*EXACT, *MORE)]
    + [(name, torch.bfloat16) for name in ("kcvt", "fp8")],
)
def test_codes_and_scales_are_those_of_the_reference(name, dtype):
    fmt = make_format(**(MORE | FORMATS)[name])
    k, v = (x[0].to(dtype) for x in random_kv([128], 2, fmt.head_dim, T))
    found, expected = encode_both(fmt, k, v, [4, 5], 64)
    assert torch.equal(found[0], expected[0])
    assert found[1] is None or torch.equal(found[1], expected[1])
    assert found[0].any()


@pytest.mark.parametrize("rank", [0, 2])
def test_tokens_that_leave_their_page_are_masked_and_a_mean_stands_for_them(rank):
    fmt = make_format(group=32, valid=True, bits=4, rank=rank)
    k, v = (whole_numbers((2, 128, 64), torch.float16), whole_numbers((2, 128, 64), torch.float16))
    absent = torch.zeros(2, 128, dtype=torch.bool)
    absent[0, [0, 9, 33, 34, 127]] = True
    absent[1, 64:96] = True  # a group of which nobody is left
    k[absent] = 500.0
    arguments = fmt, [0], 128, None
    found, segments = encode.encode_segments(
        k.to(DEVICE), v.to(DEVICE), *arguments, absent.to(DEVICE)
    )
    expected, wanted = reference_encode_paged.encode_segments(k, v, *arguments, absent)
    mask = found[..., fmt.valid : fmt.valid + T // 8].cpu()
    bits = (mask.unsqueeze(3) >> torch.arange(8)) & 1
    assert torch.equal(bits.flatten(2).transpose(0, 1).flatten(1), (~absent).to(torch.uint8))
    owner = torch.tensor([0, 0])
    pairs = [(found.cpu(), segments), (expected, wanted)]
    decoded = [decode_paged(x, s if s is None else s.cpu()[owner], fmt) for x, s in pairs]
    for x, y in zip(*decoded, strict=True):
        assert relative_error(x, y.double()) <= 1e-3
    assert decoded[0][0].abs().max() < 10  # nothing of the 500s widens a range


def test_a_mask_is_whole_where_nobody_leaves():
    fmt = make_format(**FORMATS["ott"])
    k, v = (x[0].half() for x in random_kv([T], 1, fmt.head_dim, T))
    for blocks in encode_both(fmt, k, v, [0], T):
        assert (blocks[0][..., fmt.valid : fmt.valid + T // 8] == 255).all()


def test_tokens_leave_only_pages_that_can_say_so():
    for name in ("kcvt", "int8"):
        fmt = make_format(**FORMATS[name])
        k = torch.zeros(1, T, fmt.head_dim)
        absent = torch.zeros(1, T, dtype=torch.bool)
        with pytest.raises(ValueError, match="mask"):
            ops_paged.encode_segments(k, k, fmt, [0], T, None, absent)
    fmt = make_format(**FORMATS["ott"])
    k = torch.zeros(1, T, fmt.head_dim)
    with pytest.raises(ValueError, match="each token"):
        ops_paged.encode_segments(k, k, fmt, [0], T, None, absent[:, 1:])


def test_numbers_that_hurt_encode_alike():
    for name in ("int8", "fp8", "kcvt", "pertoken"):
        fmt = make_format(**FORMATS[name])
        k, v = (x[0] for x in random_kv([T], 1, fmt.head_dim, T))
        for place, value in enumerate((torch.inf, -torch.inf, 1e30, -7e4, torch.nan, 1e-9)):
            k[0, place, place], v[0, 9 + place, place] = value, value
        k[0, 20], v[0, 30] = 0.0, -3.25
        found, expected = encode_both(fmt, k, v, [0], T)
        assert torch.equal(found[0], expected[0]), name


def test_every_float8_is_rounded_as_torch_rounds_it():
    fmt = make_format(**FORMATS["fp8"])
    steps = torch.arange(2 * T * 64).float() / (2 * T * 64)
    x = (448 * 2.0 ** (-20 * steps) * (1 - 2 * (torch.arange(2 * T * 64) % 2))).view(1, 2 * T, 64)
    x[:, ::T, 0] = 448.0  # so that the scale is 1
    found, expected = encode_both(fmt, x, x.roll(1, 2), [0], 2 * T)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("shared", "slots"), [(False, 2), (True, 4)])
def test_outliers_are_those_of_the_reference(ends, shared, slots):
    fmt = make_format(slots=slots, k_shared=shared, head_dim=80, group=80, bits=4)
    pick = {"sparse": replace(fmt.k.sparse, ends=ends)}
    fmt = replace(fmt, k=replace(fmt.k, **pick))
    k = whole_numbers((2, 128, 80), torch.float16)
    found, expected = encode_both(fmt, k, k.flip(1), [0], 128)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", ["gear-l", "gear-l-shared", "gear", "gear-4bit"])
def test_what_low_rank_pieces_add_is_what_the_reference_adds(name):
    fmt = make_format(**FORMATS[name])
    k, v = (x[0] for x in random_kv([192], 1, fmt.head_dim, T))  # fp32: no outliers are equal
    found, expected = encode_both(fmt, k, v, [4, 5], 128)
    owner = torch.tensor([0, 0, 1])
    for x, y in zip(*(decode_paged(b, s[owner], fmt) for b, s in (found, expected)), strict=True):
        assert relative_error(x, y.double()) <= 1e-3


@pytest.mark.parametrize("inner", [0, 1, 3])
def test_a_residual_of_less_than_the_rank_is_found_whole(inner):
    fmt = make_format(rank=4)
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(2, 2, 128, inner, generator=generator)
    missing = (x @ torch.randn(2, 2, inner, 64, generator=generator)).half()
    a, b = fit(missing, fmt)
    product = a.float() @ b.float().transpose(2, 3)
    assert (product - missing.float()).norm() <= 2**-9 * missing.float().norm()
    assert torch.isfinite(product).all()


def test_the_factors_of_a_residual_with_one_loud_direction_are_a_projection():
    fmt = make_format(rank=4)
    missing = torch.randn(2, 2, 128, 64, generator=torch.Generator().manual_seed(1))
    missing += 100 * missing[:, :, :, :1] * missing[:, :, :1]
    a, b = fit(missing.half(), fmt)
    product = a.float() @ b.float().transpose(2, 3)
    seeds = torch.arange(4).view(2, 2) % 2 * 2 + torch.arange(4).view(2, 2) // 2
    expected = [low_rank(x.half().float(), 4, s) for x, s in zip(missing, seeds, strict=True)]
    expected = torch.stack([x @ y.transpose(1, 2) for x, y in expected])
    left = (missing - product).norm()  # in the faint directions the reference sees rounding only
    assert left <= (missing - expected).norm() + 2**-10 * missing.norm()
    lengths = a.float().norm(dim=2) / 128**0.5
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=2e-3)


def fit(missing: Tensor, fmt: PagedFormat) -> tuple[Tensor, Tensor]:
    """A [2, H, n, rank] and B [2, H, D, rank] fp16 of residuals [2, H, n, D], with seed 0."""
    _, heads, n, _ = missing.shape
    blocks = torch.zeros(n // T, heads, fmt.block_bytes, dtype=torch.uint8, device=DEVICE)
    segments = torch.zeros(1, heads, fmt.segment_bytes, dtype=torch.uint8, device=DEVICE)
    places = encode.in_order(blocks)
    encode.encode_low_rank(missing.to(DEVICE), places, segments, fmt, [0], n)
    factors = []
    for side in (fmt.k, fmt.v):
        part = slice(side.low_rank.a, side.low_rank.a + 2 * T * side.low_rank.rank)
        a = blocks[..., part].view(torch.float16).unflatten(2, (T, -1))
        part = slice(side.low_rank.b, side.low_rank.b + 2 * fmt.head_dim * side.low_rank.rank)
        b = segments[0, :, part].view(torch.float16).unflatten(1, (fmt.head_dim, -1))
        factors.append((a.transpose(0, 1).flatten(1, 2).cpu(), b.cpu()))
    return torch.stack([a for a, _ in factors]), torch.stack([b for _, b in factors])


@pytest.mark.parametrize("name", ["int8", "fp8", "gear"])
def test_pages_are_written_where_they_belong_and_nowhere_else(name):
    fmt = make_format(**FORMATS[name])
    k, v = (x[0].half().to(DEVICE) for x in random_kv([192], 2, fmt.head_dim, T))
    blocks, segments = encode.encode_segments(k, v, fmt, [7], 192)
    stride = -(-(BASE + blocks[0].numel()) // 128)
    pages = (torch.tensor([4, 1, 2]) * stride + 1).int().to(DEVICE)
    arena = torch.full((6 * stride * 128,), 0xA5, dtype=torch.uint8, device=DEVICE)
    expected = arena.clone()
    found = encode.seal_segments(k, v, Places(arena, pages, BASE), fmt, [7], 192)
    store_blocks(expected, blocks, pages, BASE)
    assert torch.equal(arena, expected)
    assert segments is None or torch.equal(found, segments)


def test_a_frozen_rotation_is_kept():
    fmt = make_format(**FORMATS["decoquant"])
    k, v = (x[0].half() for x in random_kv([128], 2, fmt.head_dim, T))
    _, segment = reference_encode_paged.encode_paged(k[:, :T], v[:, :T], fmt)
    expected = reference_encode_paged.encode_paged(k[:, T:], v[:, T:], fmt, 0, segment)
    inputs = [x.to(DEVICE) for x in (k[:, T:], v[:, T:])]
    found = encode.encode_segments(*inputs, fmt, [0], T, segment.to(DEVICE))
    assert torch.equal(found[0].cpu(), expected[0])
    assert torch.equal(found[1][0].cpu(), segment)


def test_formats_whose_sides_have_different_ranks_are_left_to_the_reference():
    fmt = make_format(rank=2)
    odd = replace(fmt, v=replace(fmt.v, low_rank=replace(fmt.v.low_rank, rank=1)))
    assert is_encodable(fmt)
    assert is_encodable(make_format(**FORMATS["fp8"]))
    assert not is_encodable(odd)
    assert not is_encodable(replace(fmt, k=replace(fmt.k, low_rank=None)))


def test_segments_and_seeds_must_agree():
    fmt = make_format(rank=2)
    x = torch.zeros(1, 3 * T, 64)
    with pytest.raises(ValueError, match="seeds"):
        ops_paged.encode_segments(x, x, fmt, [0], 2 * T)
    blocks, segments = ops_paged.encode_segments(x, x, fmt, [0, 1], 2 * T)
    assert blocks.shape[0] == 3
    assert segments.shape[0] == 2


def test_power_iteration_starts_where_the_reference_starts():
    """A flat spectrum keeps the mark of its start, so another seed gives another answer."""
    fmt = make_format(**FORMATS["gear-l"])
    k, v = (x[0] for x in random_kv([T], 2, fmt.head_dim, T))
    seed = (1 << 33) + 77
    found, expected = encode_both(fmt, k, v, [seed], T)
    other = encode_both(fmt, k, v, [seed + 1], T)[0]
    exact = decode_paged(expected[0], expected[1], fmt)[0].double()
    assert relative_error(decode_paged(found[0], found[1], fmt)[0], exact) <= 1e-3
    assert relative_error(decode_paged(other[0], other[1], fmt)[0], exact) > 1e-2
