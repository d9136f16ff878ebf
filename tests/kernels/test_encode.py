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
    int32,
    make_format,
    named_format,
    quant_format,
    random_segment,
    sequence_kv,
)
from tests.synthetic import relative_error

HURTFUL = (torch.inf, -torch.inf, 1e30, -7e4, torch.nan, 1e-9)
HURT = ("int8", "fp8", "kcvt", "pertoken")  # by numbers that fp16 cannot hold
EXACT = (
    "kivi",
    "pertoken",
    "pertoken-2bit",
    "kcvt",
    "int8",
    "fp8",
    "decoquant",
    "ott",
)
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
    "banded-2-D64": banded_format(2, 64),
    "banded-3-D128": banded_format(3, 128),
    "banded-2-D256": banded_format(2, 256),
}


def on_device(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(DEVICE)


def on_cpu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.cpu()


def encode_both(
    fmt: PageFormat,
    k: Tensor,
    v: Tensor,
    seed: int = 0,
    tokens: int = 2048,
):
    """Blocks and segments of Triton, and of the reference."""
    frozen = None
    if fmt.hadamard:
        frozen = random_segment(fmt, heads=k.shape[0], seed=0)
    cut = Segmentation(tokens, seed, frozen)
    device_cut = replace(cut, frozen=on_device(frozen))

    blocks, segments = encode(
        k.to(DEVICE),
        v.to(DEVICE),
        fmt,
        device_cut,
    )

    encoded = (blocks.cpu(), on_cpu(segments))
    return encoded, reference.encode(k, v, fmt, cut)


def whole_numbers(heads: int, n: int, head_dim: int) -> Tensor:
    """[H, n, D] fp16: sums are exact in fp32, and no two of a column or row are equal."""
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(n, generator=generator)
    rows = order.unsqueeze(1) * 7
    columns = torch.arange(head_dim) * 11
    numbers = (rows + columns) % 509 - 254
    return numbers.expand(heads, n, head_dim).half() / 64


def as_of_a_model(x: Tensor) -> Tensor:
    """The same numbers, a view of tokens first in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


CODES_AND_SCALES = [
    *product((*EXACT, *MORE, *GROUPS, *BANDS), [torch.float16]),
    *product(("kcvt", "fp8"), [torch.bfloat16]),
    *product((*GROUPS, *HURT), [torch.float32]),
]


@pytest.mark.parametrize(("name", "dtype"), CODES_AND_SCALES)
def test_codes_and_scales_are_those_of_the_reference(name, dtype):
    fmt = BANDS.get(name) or make_format(**(MORE | GROUPS | FORMATS)[name])
    k, v = sequence_kv(
        128,
        heads=2,
        head_dim=fmt.head_dim,
        dtype=dtype,
    )
    if fmt.hadamard or name in HURT:
        for place, value in enumerate(HURTFUL):
            k[0, place, place] = value
            v[-1, 9 + place, place] = value
        k[0, 20] = 0.0
        v[0, 30] = -3.25
        k[-1, 64:, 2] = 0.25

    (blocks, segments), (expected_blocks, expected_segments) = encode_both(
        fmt,
        as_of_a_model(k),
        as_of_a_model(v),
        seed=4,
        tokens=64,
    )

    assert torch.equal(blocks, expected_blocks)
    assert segments is None or torch.equal(segments, expected_segments)
    assert blocks.any()


def present_tokens(blocks: Tensor, fmt: PageFormat) -> Tensor:
    """The masks of pages: [H, n] u8."""
    mask = blocks[..., fmt.valid : fmt.valid + T // 8]
    bits = (mask.unsqueeze(3) >> torch.arange(8)) & 1
    return bits.flatten(2).transpose(0, 1).flatten(1)


def decoded(
    blocks: Tensor,
    segments: Tensor | None,
    fmt: PageFormat,
    owner: list[int],
) -> tuple[Tensor, Tensor]:
    """K and V of pages, of which each is owned by one of the segments."""
    owned = None if segments is None else segments[owner]
    return decode(blocks, owned, fmt)


@pytest.mark.parametrize("rank", [0, 2])
def test_absent_tokens_are_masked_and_replaced_by_a_mean(rank):
    fmt = make_format(group=32, valid=True, bits=4, rank=rank)
    k = whole_numbers(2, 128, 64)
    v = whole_numbers(2, 128, 64)
    absent = torch.zeros(2, 128, dtype=torch.bool)
    absent[0, [0, 9, 33, 34, 127]] = True
    absent[1, 64:96] = True  # a whole group
    k[absent] = 500.0
    cut = Segmentation()
    expected = reference.encode(k, v, fmt, cut, absent)

    blocks, segments = encode(
        k.to(DEVICE),
        v.to(DEVICE),
        fmt,
        cut,
        absent.to(DEVICE),
    )

    present = present_tokens(blocks.cpu(), fmt)
    assert torch.equal(present, (~absent).to(torch.uint8))

    owner = [0, 0]
    decoded_k, decoded_v = decoded(blocks.cpu(), on_cpu(segments), fmt, owner)
    expected_k, expected_v = decoded(*expected, fmt, owner)
    assert relative_error(decoded_k, expected_k) <= 1e-3
    assert relative_error(decoded_v, expected_v) <= 1e-3
    assert decoded_k.abs().max() < 10  # the 500s widen no range


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kcvt", "mask"),
        ("int8", "mask"),
        ("ott", "each token"),  # absent says so of half a page
    ],
)
def test_absent_tokens_need_a_mask_of_the_pages_size(name, message):
    fmt = named_format(name)
    k = torch.zeros(1, fmt.tokens, fmt.head_dim)
    absent = torch.zeros(1, T, dtype=torch.bool)

    with pytest.raises(ValueError, match=message):
        ops.encode(k, k, fmt, None, absent)


def test_every_float8_is_rounded_as_torch_rounds_it():
    fmt = named_format("fp8")
    index = torch.arange(2 * T * 64)
    exponents = -20 * index.float() / len(index)
    signs = 1 - 2 * (index % 2)
    x = 448 * 2.0**exponents * signs
    x = x.view(1, 2 * T, 64)
    x[:, ::T, 0] = 448.0  # so that the scale is 1

    (blocks, _), expected = encode_both(fmt, x, x.roll(1, 2))

    assert torch.equal(blocks, expected[0])


@pytest.mark.parametrize(
    ("ends", "head_dim"),
    [
        (True, 80),
        (False, 80),
        (True, 256),
    ],
)
def test_outliers_are_those_of_the_reference(ends, head_dim):
    fmt = make_format(
        slots=2,
        head_dim=head_dim,
        group=head_dim,
        bits=4,
    )
    sparse = replace(fmt.k.sparse, ends=ends)
    fmt = replace(fmt, k=replace(fmt.k, sparse=sparse))
    k = whole_numbers(2, 128, head_dim)

    (blocks, _), expected = encode_both(fmt, k, k.flip(1))

    assert torch.equal(blocks, expected[0])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gear-l", {}),
        ("gear-l-shared", {}),
        ("gear", {}),
        ("gear-4bit", {}),
        ("gear", {"head_dim": 256}),
    ],
    ids=["gear-l", "gear-l-shared", "gear", "gear-4bit", "gear-256"],
)
def test_low_rank_pieces_add_what_the_reference_adds(name, changes):
    fmt = named_format(name, **changes)
    # fp32: no outliers are equal
    k, v = sequence_kv(192, heads=1, head_dim=fmt.head_dim)

    # another seed would be off by 1e-2 and more
    encoded, expected = encode_both(
        fmt,
        k,
        v,
        seed=(1 << 33) + 77,
        tokens=128,
    )

    owner = [0, 0, 1]
    decoded_k, decoded_v = decoded(*encoded, fmt, owner)
    expected_k, expected_v = decoded(*expected, fmt, owner)
    assert relative_error(decoded_k, expected_k) <= 1e-3
    assert relative_error(decoded_v, expected_v) <= 1e-3


def fit(missing: Tensor, fmt: PageFormat) -> tuple[Tensor, Tensor]:
    """A [2, H, n, rank] and B [2, H, D, rank] fp32 of residuals [2, H, n, D], with seed 0."""
    _, heads, n, _ = missing.shape
    options = {"dtype": torch.uint8, "device": DEVICE}
    blocks = torch.zeros(n // T, heads, fmt.block_bytes, **options)
    segments = torch.zeros(1, heads, fmt.segment_bytes, **options)
    encode_low_rank(
        missing.to(DEVICE),
        in_order(blocks),
        segments,
        fmt,
        Segmentation(n),
    )
    factors_a = []
    factors_b = []
    for side in (fmt.k, fmt.v):
        low = side.low_rank
        by_page = DenseBlocks(blocks).plane(
            torch.float16,
            low.a,
            (fmt.tokens, low.rank),
        )
        b = DenseBlocks(segments[0]).plane(
            torch.float16,
            low.b,
            (fmt.head_dim, low.rank),
        )
        a = by_page.transpose(0, 1).flatten(1, 2)
        factors_a.append(a.float().cpu())
        factors_b.append(b.float().cpu())
    return torch.stack(factors_a), torch.stack(factors_b)


@pytest.mark.parametrize("inner", [0, 1, 3])
def test_a_residual_of_less_than_the_rank_is_fitted_whole(inner):
    fmt = make_format(rank=4)
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(2, 2, 128, inner, generator=generator)
    y = torch.randn(2, 2, inner, 64, generator=generator)
    missing = (x @ y).half()

    a, b = fit(missing, fmt)

    product = a @ b.transpose(2, 3)
    error = (product - missing.float()).norm()
    assert error <= 2**-9 * missing.float().norm()
    assert torch.isfinite(product).all()


def test_factors_with_one_loud_direction_are_a_projection():
    fmt = make_format(rank=4)
    generator = torch.Generator().manual_seed(1)
    missing = torch.randn(2, 2, 128, 64, generator=generator)
    missing += 100 * missing[:, :, :, :1] * missing[:, :, :1]
    seeds = torch.tensor([[0, 2], [1, 3]])  # K and V of a head come one after the other
    factors = [
        low_rank(side.half().float(), 4, side_seeds)
        for side, side_seeds in zip(missing, seeds, strict=True)
    ]
    expected = torch.stack([x @ y.transpose(1, 2) for x, y in factors])
    expected_error = (missing - expected).norm()

    a, b = fit(missing.half(), fmt)

    # in the faint directions the reference sees rounding only
    product = a @ b.transpose(2, 3)
    error = (missing - product).norm()
    assert error <= expected_error + 2**-10 * missing.norm()

    lengths = a.norm(dim=2) / 128**0.5
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=2e-3)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        *product(("int8", "fp8", "kcvt", "gear"), (encode, ops.encode)),
        ("planes", ops.encode),
    ],
)
def test_pages_are_written_where_they_belong_and_nowhere_else(name, run):
    fmt = aligned_format(64) if name == "planes" else named_format(name)
    k, v = device_kv(192, fmt.head_dim)
    cut = Segmentation(128, 7)
    blocks, segments = run(k, v, fmt, cut)
    target = arena_for(blocks)
    expected = target.arena.clone()
    store_blocks(replace(target, arena=expected), blocks)

    no_blocks, same_segments = run(k, v, fmt, cut, target=target)

    assert torch.equal(target.arena, expected)
    assert not no_blocks.numel()
    assert segments is None or torch.equal(same_segments, segments)


def device_kv(n: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V [2, n, D] in fp16 on the device under test."""
    k, v = sequence_kv(
        n,
        heads=2,
        head_dim=head_dim,
        dtype=torch.float16,
    )
    return k.to(DEVICE), v.to(DEVICE)


def arena_for(blocks: Tensor) -> Target:
    """Places for three pages, with something around and beneath them."""
    stride = -(-(BASE + blocks[0].numel()) // 128)
    pages = int32(4, 1, 2) * stride + 1
    arena = torch.full((6 * stride * 128,), 0xA5, dtype=torch.uint8)
    return Target(
        arena.to(DEVICE),
        pages.to(DEVICE),
        BASE,
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda target: {"pages": target.pages[:2]}, ValueError),
        (lambda target: {"pages": target.pages.long()}, TypeError),
        (lambda target: {"arena": target.arena.view(torch.int8)}, TypeError),
    ],
    ids=["too-few-pages", "long-ids", "signed-arena"],
)
def test_targets_that_do_not_fit_the_blocks_are_refused(change, error):
    fmt = quant_format(2, 64, 32, 32)
    k, v = device_kv(192, head_dim=64)
    blocks, _ = ops.encode(k, v, fmt)
    target = arena_for(blocks)
    wrong = replace(target, **change(target))

    with pytest.raises(error):
        ops.encode(k, v, fmt, target=wrong)


def test_a_frozen_rotation_is_kept():
    fmt = named_format("decoquant")
    k, v = device_kv(128, fmt.head_dim)
    first_k, later_k = k.split(T, 1)
    first_v, later_v = v.split(T, 1)
    _, segments = reference.encode(
        first_k.cpu(),
        first_v.cpu(),
        fmt,
        Segmentation(),
    )
    cut = Segmentation(frozen=segments[0])
    expected, _ = reference.encode(
        later_k.cpu(),
        later_v.cpu(),
        fmt,
        cut,
    )

    blocks, same_segments = encode(later_k, later_v, fmt, cut)

    assert torch.equal(blocks.cpu(), expected)
    assert torch.equal(same_segments.cpu(), segments)


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e-5])
def test_a_rotation_of_numbers_close_to_zero_can_be_undone(size):
    of_rank_one = torch.ones(2, 64, 1) * torch.arange(64)
    x = size * of_rank_one

    unrotated = unrotate(x, rotation(x, 16))

    assert (unrotated.abs() <= 64 * size**0.5).all()


def test_formats_beyond_the_kernels_are_left_to_the_reference():
    """Sides of different ranks, and outliers of a range that the segment shares."""
    fmt = make_format(rank=2)
    of_rank_one = replace(fmt.v.low_rank, rank=1)
    two_ranks = replace(fmt, v=replace(fmt.v, low_rank=of_rank_one))
    only_v = replace(fmt, k=replace(fmt.k, low_rank=None))
    shared_range = make_format(
        slots=4,
        k_shared=True,
        head_dim=80,
        group=80,
        bits=4,
    )

    assert fmt.is_encodable
    assert named_format("fp8").is_encodable
    assert not two_ranks.is_encodable
    assert not only_v.is_encodable
    assert not shared_range.is_encodable


@pytest.mark.parametrize("run", [encode, reference.encode])
@pytest.mark.parametrize("name", ["gear-l", "gear"])
def test_a_head_has_the_bytes_that_it_has_without_the_others(name, run):
    """Seeds that went by how many heads a call has gave each split of the heads other pages."""
    fmt = named_format(name)
    cut = Segmentation(64, seed=9)
    k, v = device_kv(128, fmt.head_dim)
    blocks, segments = run(k, v, fmt, cut)

    head_blocks, head_segments = run(k[:1], v[:1], fmt, cut)

    assert torch.equal(head_blocks, blocks[:, :1])
    assert torch.equal(head_segments, segments[:, :1])
    assert HEAD_STRIDE > 128  # or seeds of heads and segments would meet


@pytest.mark.parametrize("name", ["kivi", "gear"])
def test_no_tokens_are_no_blocks(name):
    fmt = named_format(name)
    x = torch.zeros(2, 0, fmt.head_dim, device=DEVICE)

    for run in (encode, reference.encode):
        blocks, segments = run(x, x, fmt, Segmentation())

        has_segments = segments is not None
        assert blocks.shape == (0, 2, fmt.block_bytes)
        assert has_segments == bool(fmt.segment_bytes)
