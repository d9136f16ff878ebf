"""Appends of Triton and of the C library write the very bytes of the reference, pages that they
complete included."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.kernels.cpu import append as cpu
from disagg.kernels.cpu import library
from disagg.kernels.formats import ExactFormat
from disagg.kernels.gpu import append as gpu
from disagg.kernels.reference import codes
from disagg.kernels.reference import encode as reference
from disagg.kernels.reference.pages import gather_raw, load_blocks, store_blocks
from disagg.kernels.sealing import NO_PAGE, NewRows, Sealing, SealRows, Target
from tests.kernels.cases import (
    BASE,
    DEVICE,
    FORMATS,
    SEGMENT_BASE,
    banded_format,
    make_format,
    quant_format,
    random_kv,
    random_segment,
    raw_format,
)
from tests.synthetic import relative_error

HEADS = 2
SEALED = {
    "kivi-4bit": quant_format(4, 64, 32, 64),
    "narrow": make_format(head_dim=48, bits=2, group=16),
    "D256-in-two-blocks": quant_format(4, 256, 64, 64),
}
KINDS = ("kivi", "pertoken", "pertoken-2bit", "int8", "fp8")
SEALED |= {name: make_format(**FORMATS[name]) for name in KINDS}
SEALED |= {
    f"banded-{b}-D{dim}": banded_format(b, dim)
    for b, dim in ((2, 64), (3, 64), (2, 256))
}


@pytest.fixture(params=["triton", *library.PATHS])
def append(request):
    """An append of tensors on a CPU, by either."""

    def by_triton(
        arena: Tensor, k: Tensor, v: Tensor, rows: NewRows, sealing=None
    ) -> None:
        on_device = arena.to(DEVICE, copy=True)
        if sealing is not None:
            sealing = replace(sealing, rows=moved(sealing.rows))
        gpu.append(on_device, k.to(DEVICE), v.to(DEVICE), moved(rows), sealing)
        arena.copy_(on_device)

    if request.param == "triton":
        yield by_triton
        return
    if request.param not in library.paths():
        pytest.skip(f"this machine cannot run {request.param}")
    with library.forced(request.param):
        yield cpu.append


def moved(tables):
    """Tables on the device under test."""
    tensors = {
        name: x.to(DEVICE) for name, x in vars(tables).items() if isinstance(x, Tensor)
    }
    return replace(tables, **tensors)


def empty_arenas(nbytes: int) -> tuple[Tensor, Tensor]:
    """One for the append under test, one for the reference."""
    arena = torch.zeros(nbytes, dtype=torch.uint8)
    return arena, arena.clone()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bytes_equal_those_of_the_reference(dtype, append):
    fmt = raw_format(dtype, 80)
    heads = 3
    rows = torch.randn(6, heads, 3 * 80).to(getattr(torch, dtype))
    k = rows[..., 80:160]  # views, as a fused projection gives them
    v = rows[..., 160:]
    pages = torch.tensor([600, 0, 300, NO_PAGE, 0, 300], dtype=torch.int32)
    slots = torch.tensor([15, 0, 7, 2, 1, 8], dtype=torch.int32)
    actual, expected = empty_arenas(1000 * 128)
    for run, arena in ((append, actual), (reference.append, expected)):
        run(arena, k, v, NewRows(pages, slots, fmt, BASE))

    assert torch.equal(actual, expected)

    item = getattr(torch, dtype).itemsize

    assert (expected != 0).sum() > 5 * heads * 2 * 80 * (item - 1)  # five of six rows
    assert (expected != 0).sum() <= 5 * heads * 2 * 80 * item


@pytest.mark.parametrize("source_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", library.PATHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_library_rounds_what_it_copies_and_saturates_it(dtype, path, source_dtype):
    if path not in library.paths():
        pytest.skip(f"this machine cannot run {path}")
    x = torch.randn(2, 4, HEADS, 80) * 10.0 ** torch.randint(-8, 6, (80,))
    x[:, 0, :, :4] = torch.tensor([torch.inf, -torch.inf, -65519.9, 3.4e38])
    k, v = x.to(source_dtype)
    pages = torch.tensor([300, 0, 300, 90]).int()
    slots = torch.tensor([15, 0, 7, 2]).int()
    rows = NewRows(pages, slots, raw_format(dtype, 80), BASE)
    actual, expected = empty_arenas(500 * 128)
    with library.forced(path):
        cpu.append(actual, k, v, rows)
    reference.append(expected, k, v, rows)

    assert torch.equal(actual, expected)


@pytest.mark.parametrize("source_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_no_number_is_none_in_a_tail(dtype, source_dtype, append):
    fmt = raw_format(dtype, 80)
    at = torch.zeros(1, 1).int()
    x = torch.randn(1, HEADS, 80).to(source_dtype)
    x[..., ::7] = torch.nan
    x[0, 1, 77] = -torch.nan
    arena = torch.zeros(500 * 128, dtype=torch.uint8)
    append(arena, x, x, NewRows(at[0], at[0], fmt, BASE))

    for stored in gather_raw(arena, at, fmt, BASE, HEADS):
        assert torch.equal(stored[0, :, 0].isnan(), x[0].isnan())


def test_scattered_channels_and_ids_are_read_where_they_are(append):
    """K and V need not be contiguous, nor the tables of a step."""
    fmt = raw_format("float32", 64)
    actual, expected = empty_arenas(9 << 16)
    k = torch.randn(2, 64, 3).transpose(1, 2)[:, ::2]
    v = torch.randn(2, 2, 128)[..., ::2]
    pages, slots = torch.tensor([[0, 3], [600, 9]]).int().unbind(1)
    for run, arena in ((append, actual), (reference.append, expected)):
        run(arena, k, v, NewRows(pages, slots, fmt, BASE))

    assert expected.any()
    assert torch.equal(actual, expected)


def page_ids(fmt, raw: ExactFormat) -> tuple[int, int]:
    """What a page id grows by, and the id of the page that is sealed."""
    largest = max(raw.block_bytes, fmt.block_bytes, fmt.segment_bytes)
    stride = -(-(BASE + HEADS * largest) // 128)
    return stride, 9 * stride


def make_tail(fmt, raw: ExactFormat, own: bool):
    """Two tails of T tokens and a row for each; the second one's page is complete.

    own: whether the row's token is the last one of that page; else it goes to another raw page
    """
    stride, page = page_ids(fmt, raw)
    segment = page + stride
    order = torch.randperm(8, generator=torch.Generator().manual_seed(5))
    tails = order.view(2, 4) * stride
    pages = torch.tensor([tails[0, 1], tails[1, 3] if own else 8 * stride])
    slots = torch.tensor([6, 15 if own else 0])
    rows = SealRows(
        pages=torch.tensor([NO_PAGE, page]).int(),
        tails=tails.int(),
        segments=torch.tensor([segment, segment]).int(),
        stretches=torch.tensor([0, 12]).int(),
    )
    arena = torch.full((11 * stride * 128 + 4096,), 0x5A, dtype=torch.uint8)
    if fmt.hadamard:
        target = Target(arena, rows.segments[:1], SEGMENT_BASE)
        store_blocks(target, random_segment(fmt, HEADS, 4)[None])
    dtype = getattr(torch, raw.dtype)
    k, v = random_kv([64], HEADS, raw.head_dim, 64)
    k = k[0].to(dtype).transpose(0, 1)  # [T, H, D]
    v = v[0].to(dtype).transpose(0, 1)
    at = tails[1].int().repeat_interleave(16)
    slot = torch.arange(16).repeat(4).int()
    reference.append(arena, k, v, NewRows(at, slot, raw, BASE))
    if own:  # what was in its place before
        x = torch.full_like(k[-1:], 7)
        reference.append(arena, x, x, NewRows(at[-1:], slot[-1:], raw, BASE))
    last = -1 if own else 5
    new_k = torch.stack([k[3] + 1, k[last]])
    new_v = torch.stack([v[3] + 1, v[last]])
    return arena, new_k, new_v, pages.int(), slots.int(), rows


def append_both(append, fmt, raw: ExactFormat, own: bool) -> tuple[Tensor, Tensor]:
    """The arena after the append under test, and after the reference."""
    expected, k, v, pages, slots, rows = make_tail(fmt, raw, own)
    actual = expected.clone()
    sealing = Sealing(rows, fmt, BASE, SEGMENT_BASE, seed=3 << 20)
    for run, arena in ((append, actual), (reference.append, expected)):
        run(arena, k, v, NewRows(pages, slots, raw, BASE), sealing)
    return actual, expected


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float16") for name in SEALED), ("kivi-4bit", "bfloat16")],
)
def test_completed_pages_are_those_of_the_reference(name, dtype, own, append):
    fmt = SEALED[name]

    assert fmt.is_sealable

    raw = raw_format(dtype, fmt.head_dim)
    actual, expected = append_both(append, fmt, raw, own)

    assert torch.equal(actual, expected)

    page = torch.tensor(page_ids(fmt, raw)[1:2])
    block = load_blocks(expected, page, BASE, HEADS, 64)

    assert not (block == 0x5A).all()


@pytest.mark.parametrize("name", ["gear-l-own", "gear-own", "gear-odd-own"])
def test_completed_pages_with_factors_stand_for_what_those_of_the_reference_do(
    name, append
):
    fmt = make_format(**FORMATS[name])

    assert fmt.is_sealable

    raw = raw_format("float16", fmt.head_dim)
    decoded = []
    page = torch.tensor(page_ids(fmt, raw)[1:])
    for arena in append_both(append, fmt, raw, True):
        block = load_blocks(arena, page, BASE, HEADS, fmt.block_bytes)
        decoded.append(codes.decode(block, None, fmt))

    for x, y in zip(*decoded, strict=True):
        assert relative_error(x, y.double()) <= 1e-3


def test_pages_that_need_more_than_one_tile_or_a_segment_are_not_for_an_append():
    for name in ("decoquant", "ott", "kcvt", "gear"):
        assert not make_format(**FORMATS[name]).is_sealable
