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
    place,
    raw_format,
)

SIDE_BASE = 7 * 16


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def heavy_format(slots: int, head_dim: int, tokens: int = 64) -> ExactFormat:
    size = 2 * slots * head_dim
    positions = None if slots == tokens else 2 * size
    end = 2 * size + (0 if positions is None else 4 * slots)
    block = -(-end // 16) * 16
    return ExactFormat("float16", head_dim, block, 0, size, slots, tokens, positions)


def heavy_case(
    fmt: ExactFormat, lengths: list[int], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(arena, pages [B, P], tokens that each sequence covers [B]); each head chose for itself."""
    counts = [n // fmt.tokens for n in lengths]
    batch = len(lengths)
    width = max(counts)
    shape = (batch, width, heads, 2, fmt.slots, fmt.head_dim)
    numbers = torch.randn(shape, generator=source(fmt.slots)).half()
    planes = numbers.flatten(3).view(torch.uint8)
    blocks = torch.zeros(batch, width, heads, fmt.block_bytes, dtype=torch.uint8)
    blocks[..., : planes.shape[-1]] = planes
    if fmt.positions is not None:
        for row, count in enumerate(counts):
            for head in range(heads):
                order = torch.randperm(count * fmt.tokens, generator=source(row + head))
                chosen = order[: count * fmt.slots].sort().values.int()
                positions = chosen.view(count, fmt.slots).view(torch.uint8)
                end = fmt.positions + 4 * fmt.slots
                blocks[row, :count, head, fmt.positions : end] = positions
    arena, pages = place(blocks)
    for row, count in enumerate(counts):
        pages[row, count:] = pages[row, 0]
    return arena, pages, torch.tensor(counts) * fmt.tokens


def check(view: View, width: int, m: int) -> None:
    """Attention of `width` query heads for each KV head, m queries of a sequence."""
    batch = view.pages.shape[0]
    head_dim = view.fmt.head_dim
    q = torch.randn(batch, m, view.heads * width, head_dim, generator=source(width))
    q_on_device, view_on_device = Case(q, view, q, q).on(DEVICE)
    o, lse = merge(gpu.attend(q_on_device, [view_on_device], 0.15))
    expected = exact.attend(q.double(), view, 0.15)
    assert expected[0].any()
    assert_alike((o.cpu(), lse.cpu()), expected, 1e-3, 2e-3, 1e-3)


@pytest.mark.parametrize(
    ("slots", "head_dim", "width"),
    [(32, 64, 4), (2, 64, 1), (20, 128, 3), (48, 80, 7), (64, 96, 8), (10, 256, 4)],
)
def test_attention_over_heavy_hitters_is_that_of_the_reference(slots, head_dim, width):
    fmt = heavy_format(slots, head_dim)
    arena, pages, covered = heavy_case(fmt, [460, 64, 0, 200], 2)
    hi = covered.int().unsqueeze(1)
    lo = torch.zeros_like(hi)
    view = View(pages, lo, hi, fmt, arena=arena, base=BASE, heads=2)

    check(view, width, 1)


@pytest.mark.parametrize("slots", [16, 40, 64])
def test_windows_and_several_queries_see_different_heavy_hitters(slots):
    fmt = heavy_format(slots, 64)
    arena, pages, covered = heavy_case(fmt, [330, 140, 64], 1)
    hi = covered.int().unsqueeze(1).expand(3, 3).contiguous()
    lo = torch.tensor([[201, 202, 203], [63, 64, 65], [0, 60, 64]], dtype=torch.int32)
    check(View(pages, lo, hi, fmt, arena=arena, base=BASE, heads=1), 5, 3)


def test_pages_that_do_not_fit_a_tile_or_do_not_say_their_positions_are_refused():
    fmt = heavy_format(128, 64, tokens=256)
    arena, pages, covered = heavy_case(fmt, [256], 1)
    hi = covered.int().unsqueeze(1)
    view = View(pages, 0 * hi, hi, fmt, arena=arena, base=BASE, heads=1)

    with pytest.raises(ValueError, match="128 slots"):
        gpu.attend(torch.zeros(1, 1, 1, 64), [view], 1.0)
    with pytest.raises(ValueError, match="without positions"):
        ExactFormat("float16", 64, 1 << 14, 0, 1 << 13, slots=40, tokens=64)


def outlier_case(
    dtype: str, head_dim: int, used: list[int], slots: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, ExactFormat]:
    """(arena, pages [B, K], sides [B], format); used: slots in use of each sequence."""
    batch = len(used)
    width = -(-max(used) // 16)
    shape = (batch, width, heads, 2 * 16 * head_dim)
    values = torch.randn(shape, generator=source(slots)).to(getattr(torch, dtype))
    arena, pages = place(values.view(torch.uint8))
    for row, count in enumerate(used):
        pages[row, max(1, -(-count // 16)) :] = pages[row, 0]
    states = 8 * slots + -8 * slots % 16
    side = SlotsFormat(slots, states + -(-slots // 16) * 16, 0, 4 * slots, states)
    records = torch.zeros(batch, heads, side.block_bytes, dtype=torch.uint8)
    for row, count in enumerate(used):
        for head in range(heads):
            filled = max(0, count - head)  # heads have not filled as many
            chosen = torch.randperm(700, generator=source(9 * row + head))[:slots].int()
            state = torch.full((slots,), FREE, dtype=torch.uint8)
            state[:filled] = torch.tensor([POOL, RETIRED]).repeat(slots)[:filled]
            records[row, head, : 4 * slots] = chosen.view(torch.uint8)
            records[row, head, states : states + slots] = state
    arena, sides = append_records(arena, records, SIDE_BASE)
    return arena, pages, sides, replace(raw_format(dtype, head_dim), side=side)


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
    used = [min(slots, x) for x in (3, 33, 0, 90)]
    arena, pages, sides, fmt = outlier_case(dtype, head_dim, used, slots, 2)
    hi = torch.tensor([[700], [350], [500], [640]], dtype=torch.int32)
    view = View(
        pages,
        torch.zeros_like(hi),
        hi,
        fmt,
        sides=sides,
        arena=arena,
        heads=2,
        base=BASE,
        side_base=SIDE_BASE,
    )

    check(view, width, 1)


def test_windows_and_several_queries_see_different_outliers():
    arena, pages, sides, fmt = outlier_case("float16", 64, [35, 20, 1], 35, 1)
    hi = torch.tensor(
        [[200, 400, 700], [0, 70, 90], [700, 700, 700]], dtype=torch.int32
    )
    lo = torch.tensor([[100, 300, 100], [0, 0, 80], [0, 699, 700]], dtype=torch.int32)
    view = View(
        pages,
        lo,
        hi,
        fmt,
        sides=sides,
        arena=arena,
        heads=1,
        base=BASE,
        side_base=SIDE_BASE,
    )

    check(view, 5, 3)
