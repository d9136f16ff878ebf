"""Appends of Triton and of the C library write the bytes of the reference, and seal as it does."""

from dataclasses import dataclass, replace

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
    SEGMENT_BASE,
    banded_format,
    int32,
    make_format,
    named_format,
    quant_format,
    random_segment,
    raw_format,
    sequence_kv,
)
from tests.synthetic import relative_error

HEADS = 2
SEALED = {
    "kivi-4bit": quant_format(4, 64, 32, 64),
    "narrow": make_format(head_dim=48, bits=2, group=16),
    "D256-in-two-blocks": quant_format(4, 256, 64, 64),
}
KINDS = ("kivi", "pertoken", "pertoken-2bit", "int8", "fp8")
SEALED |= {name: named_format(name) for name in KINDS}
SEALED |= {
    "banded-2-D64": banded_format(2, 64),
    "banded-3-D64": banded_format(3, 64),
    "banded-2-D256": banded_format(2, 256),
}
SOURCE_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
RAW_DTYPES = ["float16", "bfloat16", "float32"]


@pytest.fixture(params=["triton", *library.PATHS])
def append(request):
    """An append of tensors on a CPU, by either."""

    def by_triton(
        arena: Tensor,
        k: Tensor,
        v: Tensor,
        rows: NewRows,
        sealing: Sealing | None = None,
    ) -> None:
        device_arena = arena.to(DEVICE, copy=True)
        if sealing is not None:
            device_rows = moved(sealing.rows)
            sealing = replace(sealing, rows=device_rows)
        gpu.append(
            device_arena,
            k.to(DEVICE),
            v.to(DEVICE),
            moved(rows),
            sealing,
        )
        arena.copy_(device_arena)

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


@pytest.mark.parametrize("dtype", RAW_DTYPES)
def test_bytes_equal_those_of_the_reference(dtype, append):
    heads = 3
    head_dim = 80
    item = getattr(torch, dtype).itemsize
    fused = torch.randn(6, heads, 3 * head_dim).to(getattr(torch, dtype))
    _, k, v = fused.split(head_dim, 2)  # views, as a fused projection gives them
    rows = NewRows(
        pages=int32(600, 0, 300, NO_PAGE, 0, 300),
        slots=int32(15, 0, 7, 2, 1, 8),
        fmt=raw_format(dtype, head_dim),
        base=BASE,
    )
    actual, expected = empty_arenas(1000 * 128)

    append(actual, k, v, rows)
    reference.append(expected, k, v, rows)

    assert torch.equal(actual, expected)

    numbers = 5 * heads * 2 * head_dim  # of five rows; one has no page
    nonzero = (expected != 0).sum()
    assert nonzero > numbers * (item - 1)
    assert nonzero <= numbers * item


@pytest.mark.parametrize("source_dtype", SOURCE_DTYPES)
@pytest.mark.parametrize("path", library.PATHS)
@pytest.mark.parametrize("dtype", RAW_DTYPES)
def test_the_library_rounds_what_it_copies_and_saturates_it(dtype, path, source_dtype):
    if path not in library.paths():
        pytest.skip(f"this machine cannot run {path}")
    magnitudes = 10.0 ** torch.randint(-8, 6, (80,))
    x = torch.randn(2, 4, HEADS, 80) * magnitudes
    x[:, 0, :, :4] = torch.tensor([torch.inf, -torch.inf, -65519.9, 3.4e38])
    k, v = x.to(source_dtype)
    rows = NewRows(
        pages=int32(300, 0, 300, 90),
        slots=int32(15, 0, 7, 2),
        fmt=raw_format(dtype, 80),
        base=BASE,
    )
    actual, expected = empty_arenas(500 * 128)

    with library.forced(path):
        cpu.append(actual, k, v, rows)
    reference.append(expected, k, v, rows)

    assert torch.equal(actual, expected)


@pytest.mark.parametrize("source_dtype", SOURCE_DTYPES)
@pytest.mark.parametrize("dtype", RAW_DTYPES)
def test_nan_stays_nan_in_a_tail(dtype, source_dtype, append):
    x = torch.randn(1, HEADS, 80).to(source_dtype)
    x[..., ::7] = torch.nan
    x[0, 1, 77] = -torch.nan
    rows = NewRows(
        pages=int32(0),
        slots=int32(0),
        fmt=raw_format(dtype, 80),
        base=BASE,
    )
    arena = torch.zeros(500 * 128, dtype=torch.uint8)

    append(arena, x, x, rows)

    tails = rows.pages.unsqueeze(0)
    for stored in gather_raw(arena, tails, rows.fmt, BASE, HEADS):
        first_token = stored[0, :, 0]
        assert torch.equal(first_token.isnan(), x[0].isnan())


def test_scattered_channels_and_ids_are_read_where_they_are(append):
    """K and V need not be contiguous, nor the tables of a step."""
    k = torch.randn(2, 64, 3).transpose(1, 2)[:, ::2]
    v = torch.randn(2, 2, 128)[..., ::2]
    pages, slots = int32([0, 3], [600, 9]).unbind(1)
    rows = NewRows(pages, slots, raw_format("float32", 64), BASE)
    actual, expected = empty_arenas(9 << 16)

    append(actual, k, v, rows)
    reference.append(expected, k, v, rows)

    assert expected.any()
    assert torch.equal(actual, expected)


@dataclass(frozen=True)
class Tails:
    """Two tails of T tokens and a row for each; the second one's page is complete.

    k, v: [2, H, D] - the rows
    page: the id of the page that is sealed
    """

    arena: Tensor
    k: Tensor
    v: Tensor
    rows: NewRows
    sealing: Sealing
    page: int


def make_tails(fmt, raw: ExactFormat, own: bool) -> Tails:
    """own: the row's token is the last one of that page; else it goes to another raw page."""
    largest = max(raw.block_bytes, fmt.block_bytes, fmt.segment_bytes)
    stride = -(-(BASE + HEADS * largest) // 128)
    page = 9 * stride
    segment = 10 * stride
    arena = torch.full((11 * stride * 128 + 4096,), 0x5A, dtype=torch.uint8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(5))
    tails = order.view(2, 4).int() * stride
    seals = SealRows(
        pages=int32(NO_PAGE, page),
        tails=tails,
        segments=int32(segment, segment),
        stretches=int32(0, 12),
    )
    if fmt.hadamard:
        target = Target(arena, seals.segments[:1], SEGMENT_BASE)
        store_blocks(target, random_segment(fmt, HEADS, 4)[None])
    k, v = tokens_first(raw)
    fill_tail(arena, k, v, tails[1], raw)
    if own:
        overwrite_last(arena, k, tails[1], raw)
    last = -1 if own else 5
    last_page = int(tails[1, 3]) if own else 8 * stride
    last_slot = 15 if own else 0
    rows = NewRows(
        pages=int32(int(tails[0, 1]), last_page),
        slots=int32(6, last_slot),
        fmt=raw,
        base=BASE,
    )
    return Tails(
        arena,
        k=torch.stack([k[3] + 1, k[last]]),
        v=torch.stack([v[3] + 1, v[last]]),
        rows=rows,
        sealing=Sealing(seals, fmt, BASE, SEGMENT_BASE, seed=3 << 20),
        page=page,
    )


def tokens_first(raw: ExactFormat) -> tuple[Tensor, Tensor]:
    """K and V of a page's tokens: [T, H, D]."""
    dtype = getattr(torch, raw.dtype)
    k, v = sequence_kv(64, HEADS, raw.head_dim, dtype)
    return k.transpose(0, 1), v.transpose(0, 1)


def fill_tail(arena, k, v, tail, raw) -> None:
    rows = NewRows(
        pages=tail.repeat_interleave(16),
        slots=torch.arange(16).repeat(4).int(),
        fmt=raw,
        base=BASE,
    )
    reference.append(arena, k, v, rows)


def overwrite_last(arena, k, tail, raw) -> None:
    """Something else is in the place of the token that completes the page."""
    x = torch.full_like(k[-1:], 7)
    rows = NewRows(tail[-1:], int32(15), raw, BASE)
    reference.append(arena, x, x, rows)


def append_both(append, tails: Tails) -> tuple[Tensor, Tensor]:
    """The arena after the append under test, and after the reference."""
    actual = tails.arena.clone()
    expected = tails.arena.clone()
    for run, arena in (
        (append, actual),
        (reference.append, expected),
    ):
        run(arena, tails.k, tails.v, tails.rows, tails.sealing)
    return actual, expected


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float16") for name in SEALED), ("kivi-4bit", "bfloat16")],
)
def test_completed_pages_are_those_of_the_reference(name, dtype, own, append):
    fmt = SEALED[name]
    tails = make_tails(fmt, raw_format(dtype, fmt.head_dim), own)

    actual, expected = append_both(append, tails)

    block = load_blocks(expected, int32(tails.page), BASE, HEADS, 64)
    assert fmt.is_sealable
    assert torch.equal(actual, expected)
    assert not (block == 0x5A).all()


@pytest.mark.parametrize("name", ["gear-l-own", "gear-own", "gear-odd-own"])
def test_sealed_pages_with_factors_decode_as_the_reference(name, append):
    fmt = named_format(name)
    raw = raw_format("float16", fmt.head_dim)
    tails = make_tails(fmt, raw, own=True)

    decoded = []
    for arena in append_both(append, tails):
        block = load_blocks(
            arena,
            int32(tails.page),
            BASE,
            HEADS,
            fmt.block_bytes,
        )
        decoded.append(codes.decode(block, None, fmt))

    assert fmt.is_sealable
    for x, y in zip(*decoded, strict=True):
        assert relative_error(x, y) <= 1e-3


@pytest.mark.parametrize("name", ["decoquant", "ott", "kcvt", "gear"])
def test_pages_of_several_tiles_or_a_segment_are_not_sealable(name):
    assert not named_format(name).is_sealable
