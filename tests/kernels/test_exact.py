"""Attention over outliers and over heavy hitters, in Triton, against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.kernels.formats import FREE, POOL, RETIRED, ExactFormat, SlotsFormat
from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu.combine import merge
from disagg.kernels.reference import exact
from disagg.kernels.view import View
from tests.kernels.cases import (
    BASE,
    DEVICE,
    Case,
    append_records,
    assert_alike,
    int32,
    place,
    raw_format,
)

SIDE_BASE = 7 * 16


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def aligned(nbytes: int) -> int:
    """Planes begin on 16 bytes."""
    return -(-nbytes // 16) * 16


def heavy_format(slots: int, head_dim: int, tokens: int = 64) -> ExactFormat:
    """`slots` of `tokens` are in a page, with their positions unless that is all."""
    plane = 2 * slots * head_dim
    with_positions = slots != tokens
    position_bytes = 4 * slots if with_positions else 0
    return ExactFormat(
        dtype="float16",
        head_dim=head_dim,
        block_bytes=aligned(2 * plane + position_bytes),
        k=0,
        v=plane,
        slots=slots,
        tokens=tokens,
        positions=2 * plane if with_positions else None,
    )


def heavy_case(
    fmt: ExactFormat, lengths: list[int], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(arena, pages [B, P], tokens that each sequence covers [B, 1]); heads chose apart."""
    counts = [n // fmt.tokens for n in lengths]
    batch = len(lengths)
    width = max(counts)
    shape = (batch, width, heads, 2, fmt.slots, fmt.head_dim)
    numbers = torch.randn(shape, generator=source(fmt.slots)).half()
    planes = numbers.flatten(3).view(torch.uint8)
    blocks = torch.zeros(
        batch,
        width,
        heads,
        fmt.block_bytes,
        dtype=torch.uint8,
    )
    blocks[..., : planes.shape[-1]] = planes
    if fmt.positions is not None:
        write_positions(blocks, fmt, counts)
    arena, pages = place(blocks)
    for row, count in enumerate(counts):
        pages[row, count:] = pages[row, 0]
    covered = [[count * fmt.tokens] for count in counts]
    return arena, pages, int32(*covered)


def write_positions(blocks: Tensor, fmt: ExactFormat, counts: list[int]) -> None:
    """Each head of a row with some pages has chosen other tokens, and names them in order."""
    start = fmt.positions
    end = start + 4 * fmt.slots
    for row, count in enumerate(counts):
        for head in range(blocks.shape[2]):
            order = torch.randperm(
                count * fmt.tokens,
                generator=source(row + head),
            )
            chosen = order[: count * fmt.slots].sort().values
            by_page = chosen.int().view(count, fmt.slots)
            blocks[row, :count, head, start:end] = by_page.view(torch.uint8)


def check(view: View, width: int, m: int) -> None:
    """Attention of `width` query heads for each KV head, m queries of a sequence."""
    q = torch.randn(
        view.pages.shape[0],
        m,
        view.heads * width,
        view.fmt.head_dim,
        generator=source(width),
    )
    expected = exact.attend(q.double(), view, 0.15)
    assert expected[0].any()

    case = Case(q, view, k=q, v=q)
    q_on_device, view_on_device = case.on(DEVICE)
    o, lse = merge(gpu.attend(q_on_device, [view_on_device], 0.15))

    assert_alike(
        (o.cpu(), lse.cpu()),
        expected,
        tolerance=1e-3,
        near=2e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize(
    ("slots", "head_dim", "width"),
    [
        (32, 64, 4),
        (2, 64, 1),
        (20, 128, 3),
        (48, 80, 7),
        (64, 96, 8),
        (10, 256, 4),
    ],
)
def test_attention_over_heavy_hitters_is_that_of_the_reference(slots, head_dim, width):
    fmt = heavy_format(slots, head_dim)
    arena, pages, covered = heavy_case(fmt, [460, 64, 0, 200], heads=2)
    view = View(
        pages=pages,
        lo=torch.zeros_like(covered),
        hi=covered,
        fmt=fmt,
        arena=arena,
        base=BASE,
        heads=2,
    )

    check(view, width, m=1)


@pytest.mark.parametrize("slots", [16, 40, 64])
def test_windows_and_several_queries_see_different_heavy_hitters(slots):
    fmt = heavy_format(slots, 64)
    arena, pages, covered = heavy_case(fmt, [330, 140, 64], heads=1)
    view = View(
        pages=pages,
        lo=int32(
            [201, 202, 203],
            [63, 64, 65],
            [0, 60, 64],
        ),
        hi=covered.expand(3, 3).contiguous(),
        fmt=fmt,
        arena=arena,
        base=BASE,
        heads=1,
    )

    check(view, width=5, m=3)


def test_too_large_pages_and_missing_positions_are_refused():
    fmt = heavy_format(128, 64, tokens=256)
    arena, pages, covered = heavy_case(fmt, [256], heads=1)
    view = View(
        pages=pages,
        lo=torch.zeros_like(covered),
        hi=covered,
        fmt=fmt,
        arena=arena,
        base=BASE,
        heads=1,
    )
    q = torch.zeros(1, 1, 1, 64)

    with pytest.raises(ValueError, match="128 slots"):
        gpu.attend(q, [view], 1.0)
    with pytest.raises(ValueError, match="without positions"):
        ExactFormat(
            dtype="float16",
            head_dim=64,
            block_bytes=1 << 14,
            k=0,
            v=1 << 13,
            slots=40,
            tokens=64,
        )


def outlier_case(
    dtype: str, head_dim: int, used: list[int], slots: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, ExactFormat]:
    """(arena, pages [B, K], sides [B], format); used: slots in use of each sequence."""
    batch = len(used)
    page_counts = [-(-count // 16) for count in used]
    shape = (batch, max(page_counts), heads, 2 * 16 * head_dim)
    numbers = torch.randn(shape, generator=source(slots))
    values = numbers.to(getattr(torch, dtype))
    arena, pages = place(values.view(torch.uint8))
    for row, page_count in enumerate(page_counts):
        pages[row, max(1, page_count) :] = pages[row, 0]
    states = aligned(8 * slots)
    side = SlotsFormat(
        slots=slots,
        block_bytes=states + aligned(slots),
        positions=0,
        scores=4 * slots,
        states=states,
    )
    records = torch.zeros(batch, heads, side.block_bytes, dtype=torch.uint8)
    for row, count in enumerate(used):
        for head in range(heads):
            filled = max(0, count - head)  # the second head has a slot less
            seed = 9 * row + head
            write_side(records[row, head], side, filled, seed)
    arena, sides = append_records(arena, records, SIDE_BASE)
    fmt = replace(raw_format(dtype, head_dim), side=side)
    return arena, pages, sides, fmt


def write_side(record: Tensor, side: SlotsFormat, filled: int, seed: int) -> None:
    """Positions of all slots; the first `filled` are in the pool and retired by turns."""
    slots = side.slots
    order = torch.randperm(700, generator=source(seed))
    positions = order[:slots].int()
    state = torch.full((slots,), FREE, dtype=torch.uint8)
    by_turns = torch.tensor([POOL, RETIRED]).repeat(slots)
    state[:filled] = by_turns[:filled]
    record[: 4 * slots] = positions.view(torch.uint8)
    record[side.states : side.states + slots] = state


OUTLIERS = [
    ("float16", 64, 35, 4),
    ("bfloat16", 128, 100, 3),
    ("float16", 80, 6, 8),
    ("float16", 64, 70, 16),
    ("float16", 256, 35, 4),
]


@pytest.mark.parametrize(("dtype", "head_dim", "slots", "width"), OUTLIERS)
def test_attention_over_outliers_is_that_of_the_reference(
    dtype, head_dim, slots, width
):
    used = [min(slots, count) for count in (3, 33, 0, 90)]
    arena, pages, sides, fmt = outlier_case(
        dtype,
        head_dim,
        used,
        slots,
        heads=2,
    )
    view = View(
        pages=pages,
        lo=int32([0], [0], [0], [0]),
        hi=int32([700], [350], [500], [640]),
        fmt=fmt,
        sides=sides,
        arena=arena,
        heads=2,
        base=BASE,
        side_base=SIDE_BASE,
    )

    check(view, width, m=1)


def test_windows_and_several_queries_see_different_outliers():
    arena, pages, sides, fmt = outlier_case(
        "float16",
        head_dim=64,
        used=[35, 20, 1],
        slots=35,
        heads=1,
    )
    view = View(
        pages=pages,
        lo=int32(
            [100, 300, 100],
            [0, 0, 80],
            [0, 699, 700],
        ),
        hi=int32(
            [200, 400, 700],
            [0, 70, 90],
            [700, 700, 700],
        ),
        fmt=fmt,
        sides=sides,
        arena=arena,
        heads=1,
        base=BASE,
        side_base=SIDE_BASE,
    )

    check(view, width=5, m=3)
