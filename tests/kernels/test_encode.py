"""The Triton encoders against the torch reference: the same bytes, written where they belong."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from disagg.kernels import ops
from disagg.kernels.formats import PageFormat
from disagg.kernels.gpu.encode import encode, in_order
from disagg.kernels.gpu.lowrank import encode_low_rank
from disagg.kernels.reference import encode as reference
from disagg.kernels.reference.codes import decode
from disagg.kernels.reference.lowrank import low_rank, rotation, unrotate
from disagg.kernels.reference.pages import DenseBlocks, store_blocks
from disagg.kernels.sealing import HEAD_STRIDE, Segmentation, Target
from tests.kernels.cases import (
    BASE,
    DEVICE,
    FORMATS,
    T,
    aligned_format,
    banded_format,
    make_format,
    quant_format,
    random_kv,
    random_segment,
)
from tests.synthetic import relative_error

HURT = ("int8", "fp8", "kcvt", "pertoken")  # by numbers that fp16 cannot hold
EXACT = ("kivi", "pertoken", "pertoken-2bit", "kcvt", "int8", "fp8", "decoquant", "ott")
MORE = {
    "8bit-column": {"bits": 8, "group": 32},
    "symmetric-column": {"zero": False, "bits": 2},
    "narrow": {"head_dim": 48, "bits": 2, "group": 16},
    "narrow-fp8": FORMATS["fp8"] | {"head_dim": 48},
}
GROUPS = {
    "2bit-g64": {},
    "4bit-g32": {"bits": 4, "group": 32},
    "D128-g64": {"head_dim": 128},
    "D80-g64-g40": {"bits": 4, "head_dim": 80, "v_group": 40},
    "D96-g32": {"head_dim": 96, "group": 32},
    "D256-of-two-programs": {"head_dim": 256},
}
BANDS = {
    f"banded-{b}-D{dim}": banded_format(b, dim)
    for b, dim in ((2, 64), (3, 128), (2, 256))
}


def encode_both(
    fmt: PageFormat, k: Tensor, v: Tensor, seed: int = 0, tokens: int = 2048
):
    frozen = random_segment(fmt, k.shape[0], 0) if fmt.hadamard else None
    cut = Segmentation(tokens, seed, frozen)
    on_device = replace(cut, frozen=None if frozen is None else frozen.to(DEVICE))
    blocks, segments = encode(k.to(DEVICE), v.to(DEVICE), fmt, on_device)
    encoded = (blocks.cpu(), None if segments is None else segments.cpu())
    return encoded, reference.encode(k, v, fmt, cut)


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """All sums of these are exact in fp32, and no two of a column or row are equal."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randperm(shape[1], generator=generator)[:, None] * 7
    numbers = (rows + torch.arange(shape[2]) * 11) % 509 - 254
    return numbers.expand(shape).to(dtype) / 64


CODES_AND_SCALES = [
    *product((*EXACT, *MORE, *GROUPS, *BANDS), [torch.float16]),
    *product(("kcvt", "fp8"), [torch.bfloat16]),
    *product((*GROUPS, *HURT), [torch.float32]),
]


@pytest.mark.parametrize(("name", "dtype"), CODES_AND_SCALES)
def test_codes_and_scales_are_those_of_the_reference(name, dtype):
    fmt = BANDS.get(name) or make_format(**(MORE | GROUPS | FORMATS)[name])
    k, v = (x[0].to(dtype) for x in random_kv([128], 2, fmt.head_dim, T))
    if fmt.hadamard or name in HURT:
        hurtful = (torch.inf, -torch.inf, 1e30, -7e4, torch.nan, 1e-9)
        for place, value in enumerate(hurtful):
            k[0, place, place] = value
            v[-1, 9 + place, place] = value
        k[0, 20] = 0.0
        v[0, 30] = -3.25
        k[-1, 64:, 2] = 0.25
    # views, as of models
    k = k.transpose(0, 1).contiguous().transpose(0, 1)
    v = v.transpose(0, 1).contiguous().transpose(0, 1)

    (blocks, segments), expected = encode_both(fmt, k, v, 4, 64)

    assert torch.equal(blocks, expected[0])
    assert segments is None or torch.equal(segments, expected[1])
    assert blocks.any()


@pytest.mark.parametrize("rank", [0, 2])
def test_tokens_that_leave_their_page_are_masked_and_a_mean_stands_for_them(rank):
    fmt = make_format(group=32, valid=True, bits=4, rank=rank)
    k = whole_numbers((2, 128, 64), torch.float16)
    v = whole_numbers((2, 128, 64), torch.float16)
    absent = torch.zeros(2, 128, dtype=torch.bool)
    absent[0, [0, 9, 33, 34, 127]] = True
    absent[1, 64:96] = True  # a whole group
    k[absent] = 500.0
    cut = Segmentation()

    encoded = encode(k.to(DEVICE), v.to(DEVICE), fmt, cut, absent.to(DEVICE))

    mask = encoded[0][..., fmt.valid : fmt.valid + T // 8].cpu()
    bits = (mask.unsqueeze(3) >> torch.arange(8)) & 1
    present = bits.flatten(2).transpose(0, 1).flatten(1)

    assert torch.equal(present, (~absent).to(torch.uint8))

    owner = torch.tensor([0, 0])
    expected = reference.encode(k, v, fmt, cut, absent)
    pairs = [(encoded[0].cpu(), encoded[1]), expected]
    decoded = [decode(x, s if s is None else s.cpu()[owner], fmt) for x, s in pairs]

    for x, y in zip(*decoded, strict=True):
        assert relative_error(x, y.double()) <= 1e-3
    assert decoded[0][0].abs().max() < 10  # nothing of the 500s widens a range


def test_tokens_leave_only_pages_that_can_say_so():
    for name in ("kcvt", "int8"):
        fmt = make_format(**FORMATS[name])
        k = torch.zeros(1, T, fmt.head_dim)
        absent = torch.zeros(1, T, dtype=torch.bool)
        with pytest.raises(ValueError, match="mask"):
            ops.encode(k, k, fmt, None, absent)
    fmt = make_format(**FORMATS["ott"])
    k = torch.zeros(1, fmt.tokens, fmt.head_dim)

    with pytest.raises(ValueError, match="each token"):
        ops.encode(k, k, fmt, None, absent)


def test_every_float8_is_rounded_as_torch_rounds_it():
    fmt = make_format(**FORMATS["fp8"])
    index = torch.arange(2 * T * 64)
    magnitudes = 448 * 2.0 ** (-20 * index.float() / len(index))
    x = (magnitudes * (1 - 2 * (index % 2))).view(1, 2 * T, 64)
    x[:, ::T, 0] = 448.0  # so that the scale is 1

    (blocks, _), expected = encode_both(fmt, x, x.roll(1, 2))

    assert torch.equal(blocks, expected[0])


@pytest.mark.parametrize(("ends", "head_dim"), [(True, 80), (False, 80), (True, 256)])
def test_outliers_are_those_of_the_reference(ends, head_dim):
    fmt = make_format(slots=2, head_dim=head_dim, group=head_dim, bits=4)
    pick = {"sparse": replace(fmt.k.sparse, ends=ends)}
    fmt = replace(fmt, k=replace(fmt.k, **pick))
    k = whole_numbers((2, 128, head_dim), torch.float16)

    (blocks, _), expected = encode_both(fmt, k, k.flip(1))

    assert torch.equal(blocks, expected[0])


@pytest.mark.parametrize(
    "name", ["gear-l", "gear-l-shared", "gear", "gear-4bit", "gear-256"]
)
def test_what_low_rank_pieces_add_is_what_the_reference_adds(name):
    fmt = make_format(
        **(FORMATS | {"gear-256": FORMATS["gear"] | {"head_dim": 256}})[name]
    )
    # fp32: no outliers are equal
    k, v = (x[0] for x in random_kv([192], 1, fmt.head_dim, T))

    # another seed would be off by 1e-2 and more
    both = encode_both(fmt, k, v, seed=(1 << 33) + 77, tokens=128)

    owner = torch.tensor([0, 0, 1])
    decoded = [decode(blocks, segments[owner], fmt) for blocks, segments in both]

    for x, y in zip(*decoded, strict=True):
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
    factors = [
        low_rank(x.half().float(), 4, s) for x, s in zip(missing, seeds, strict=True)
    ]
    expected = torch.stack([x @ y.transpose(1, 2) for x, y in factors])
    # in the faint directions the reference sees rounding only
    error = (missing - product).norm()

    assert error <= (missing - expected).norm() + 2**-10 * missing.norm()

    lengths = a.float().norm(dim=2) / 128**0.5

    assert torch.allclose(lengths, torch.ones_like(lengths), atol=2e-3)


def fit(missing: Tensor, fmt: PageFormat) -> tuple[Tensor, Tensor]:
    """A [2, H, n, rank] and B [2, H, D, rank] fp16 of residuals [2, H, n, D], with seed 0."""
    _, heads, n, _ = missing.shape
    options = {"dtype": torch.uint8, "device": DEVICE}
    blocks = torch.zeros(n // T, heads, fmt.block_bytes, **options)
    segments = torch.zeros(1, heads, fmt.segment_bytes, **options)
    target = in_order(blocks)
    encode_low_rank(missing.to(DEVICE), target, segments, fmt, Segmentation(n))
    all_a = []
    all_b = []
    for side in (fmt.k, fmt.v):
        low = side.low_rank
        shape = (fmt.tokens, low.rank)
        a = DenseBlocks(blocks).plane(torch.float16, low.a, shape)
        b = DenseBlocks(segments[0]).plane(
            torch.float16, low.b, (fmt.head_dim, low.rank)
        )
        all_a.append(a.transpose(0, 1).flatten(1, 2).cpu())
        all_b.append(b.cpu())
    return torch.stack(all_a), torch.stack(all_b)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        *product(("int8", "fp8", "kcvt", "gear"), (encode, ops.encode)),
        ("planes", ops.encode),
    ],
)
def test_pages_are_written_where_they_belong_and_nowhere_else(name, run):
    fmt = aligned_format(64) if name == "planes" else make_format(**FORMATS[name])
    cut = Segmentation(128, 7)
    k, v = (x[0].half().to(DEVICE) for x in random_kv([192], 2, fmt.head_dim, T))
    blocks, segments = run(k, v, fmt, cut)
    target = arena_for(blocks)
    expected = target.arena.clone()
    no_blocks, same_segments = run(k, v, fmt, cut, target=target)
    store_blocks(replace(target, arena=expected), blocks)

    assert torch.equal(target.arena, expected)
    assert not no_blocks.numel()
    assert segments is None or torch.equal(same_segments, segments)


def arena_for(blocks: Tensor) -> Target:
    """Places for three pages, with something around and beneath them."""
    stride = -(-(BASE + blocks[0].numel()) // 128)
    pages = (torch.tensor([4, 1, 2]) * stride + 1).int().to(DEVICE)
    arena = torch.full((6 * stride * 128,), 0xA5, dtype=torch.uint8, device=DEVICE)
    return Target(arena, pages, BASE)


def test_what_would_be_written_elsewhere_is_refused():
    fmt = quant_format(2, 64, 32, 32)
    k, v = (x[0].half().to(DEVICE) for x in random_kv([192], 2, 64, T))
    target = arena_for(ops.encode(k, v, fmt)[0])
    for wrong, error in (
        (replace(target, pages=target.pages[:2]), ValueError),
        (replace(target, pages=target.pages.long()), TypeError),
        (replace(target, arena=target.arena.view(torch.int8)), TypeError),
    ):
        with pytest.raises(error):
            ops.encode(k, v, fmt, target=wrong)


def test_a_frozen_rotation_is_kept():
    fmt = make_format(**FORMATS["decoquant"])
    k, v = (x[0].half() for x in random_kv([128], 2, fmt.head_dim, T))
    _, segments = reference.encode(k[:, :T], v[:, :T], fmt, Segmentation())
    cut = Segmentation(frozen=segments[0])
    expected = reference.encode(k[:, T:], v[:, T:], fmt, cut)

    blocks, same_segments = encode(k[:, T:].to(DEVICE), v[:, T:].to(DEVICE), fmt, cut)

    assert torch.equal(blocks.cpu(), expected[0])
    assert torch.equal(same_segments.cpu(), segments)


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e-5])
def test_a_rotation_of_numbers_that_are_nearly_nothing_can_be_undone(size):
    x = size * torch.ones(2, 64, 1) * torch.arange(64)  # of rank one
    assert (unrotate(x, rotation(x, 16)).abs() <= 64 * size**0.5).all()


def test_formats_that_kernels_cannot_encode_are_left_to_the_reference():
    """Sides of different ranks, and outliers of a range that the segment shares."""
    fmt = make_format(rank=2)
    odd = replace(fmt, v=replace(fmt.v, low_rank=replace(fmt.v.low_rank, rank=1)))

    assert fmt.is_encodable
    assert make_format(**FORMATS["fp8"]).is_encodable
    assert not odd.is_encodable
    assert not replace(fmt, k=replace(fmt.k, low_rank=None)).is_encodable
    assert not make_format(
        slots=4, k_shared=True, head_dim=80, group=80, bits=4
    ).is_encodable


@pytest.mark.parametrize("run", [encode, reference.encode])
@pytest.mark.parametrize("name", ["gear-l", "gear"])
def test_a_head_has_the_bytes_that_it_has_without_the_others(name, run):
    """Seeds that went by how many heads a call has gave each split of the heads other pages."""
    fmt = make_format(**FORMATS[name])
    cut = Segmentation(64, seed=9)
    k, v = (x[0].half().to(DEVICE) for x in random_kv([128], 2, fmt.head_dim, T))
    blocks, segments = run(k, v, fmt, cut)
    head_blocks, head_segments = run(k[:1], v[:1], fmt, cut)

    assert torch.equal(head_blocks, blocks[:, :1])
    assert torch.equal(head_segments, segments[:, :1])
    assert HEAD_STRIDE > 128  # or seeds of heads and segments would meet


@pytest.mark.parametrize("name", ["kivi", "gear"])
def test_no_tokens_are_no_blocks(name):
    fmt = make_format(**FORMATS[name])
    x = torch.zeros(2, 0, fmt.head_dim, device=DEVICE)
    for run in (encode, reference.encode):
        blocks, segments = run(x, x, fmt, Segmentation())
        assert blocks.shape == (0, 2, fmt.block_bytes)
        assert (segments is None) == (not fmt.segment_bytes)
