"""Attention over kept tokens, and over those not dropped, in Triton, against the reference."""

import pytest
import torch
from torch import Tensor

from disagg.kernels import paged_exact, reduce, reference_dropped, reference_kept
from disagg.kernels.formats import ARENA_UNIT
from disagg.kernels.formats_exact import dropped_as_exact
from disagg.kernels.reference_dropped import DroppedFormat
from disagg.kernels.reference_kept import FREE, POOL, RETIRED, KeptFormat
from disagg.kernels.reference_pages import store_blocks
from tests.kernels.cases import BASE, place, raw_format, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIDE_BASE = 7 * 16


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dropped_format(slots: int, head_dim: int, tokens: int = 64) -> DroppedFormat:
    size = 2 * slots * head_dim
    positions = None if slots == tokens else 2 * size
    end = 2 * size + (0 if positions is None else 4 * slots)
    return DroppedFormat(tokens, slots, head_dim, -(-end // 16) * 16, 0, size, positions)


def dropped_case(
    fmt: DroppedFormat, lengths: list[int], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(arena, pages [B, P], tokens that each sequence covers [B]); each head chose for itself."""
    counts = [n // fmt.tokens for n in lengths]
    batch, width = len(lengths), max(counts)
    shape = (batch, width, heads, 2, fmt.slots, fmt.head_dim)
    planes = torch.randn(shape, generator=source(fmt.slots)).half().flatten(3).view(torch.uint8)
    blocks = torch.zeros(batch, width, heads, fmt.block_bytes, dtype=torch.uint8)
    blocks[..., : planes.shape[-1]] = planes
    if fmt.positions is not None:
        for row, count in enumerate(counts):
            for head in range(heads):
                order = torch.randperm(count * fmt.tokens, generator=source(row + head))
                chosen = order[: count * fmt.slots].sort().values.int().view(count, fmt.slots)
                end = fmt.positions + 4 * fmt.slots
                blocks[row, :count, head, fmt.positions : end] = chosen.view(torch.uint8)
    arena, pages = place(blocks)
    for row, count in enumerate(counts):
        pages[row, count:] = pages[row, 0]
    return arena, pages, torch.tensor(counts) * fmt.tokens


def check(kernel, reference, *arguments, q: Tensor) -> None:
    tensors = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in (q, *arguments)]
    o, lse = (x.cpu() for x in reduce.join([kernel(*tensors)]))
    exact, exact_lse = reference(q.double(), *arguments)
    seen = exact_lse > -torch.inf
    assert seen.any()
    assert torch.equal(lse > -torch.inf, seen)
    assert torch.allclose(lse[seen].double(), exact_lse[seen], rtol=1e-3, atol=2e-3)
    assert relative_error(o, exact) <= 1e-3
    assert not o[~seen].any()


@pytest.mark.parametrize(
    ("slots", "head_dim", "width"),
    [(32, 64, 4), (2, 64, 1), (20, 128, 3), (48, 80, 7), (64, 96, 8)],
)
def test_attention_over_what_was_not_dropped_is_that_of_the_reference(slots, head_dim, width):
    fmt, heads = dropped_format(slots, head_dim), 2
    arena, pages, covered = dropped_case(fmt, [460, 64, 0, 200], heads)
    hi = covered.int().unsqueeze(1)
    q = torch.randn(4, 1, heads * width, head_dim, generator=source(width))
    tables = (arena, pages, torch.zeros_like(hi), hi, fmt, BASE, heads, 0.15)
    check(paged_exact.attend_dropped, reference_dropped.attend_dropped, *tables, q=q)


@pytest.mark.parametrize("slots", [16, 40, 64])
def test_windows_and_several_queries_see_different_tokens_of_what_was_not_dropped(slots):
    fmt = dropped_format(slots, 64)
    arena, pages, covered = dropped_case(fmt, [330, 140, 64], 1)
    hi = covered.int().unsqueeze(1).expand(3, 3).contiguous()
    lo = torch.tensor([[201, 202, 203], [63, 64, 65], [0, 60, 64]], dtype=torch.int32)
    q = torch.randn(3, 3, 5, 64, generator=source(1))
    tables = (arena, pages, lo, hi, fmt, BASE, 1, 0.15)
    check(paged_exact.attend_dropped, reference_dropped.attend_dropped, *tables, q=q)


def test_pages_that_do_not_fit_a_tile_or_do_not_say_their_positions_are_refused():
    with pytest.raises(ValueError, match="128 slots"):
        dropped_as_exact(dropped_format(128, 64, tokens=256))
    with pytest.raises(ValueError, match="without positions"):
        dropped_as_exact(dropped_format(40, 64, tokens=40))


def kept_case(
    dtype: str, head_dim: int, used: list[int], slots: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, KeptFormat]:
    """(arena, pages [B, K], sides [B]) of sequences that have used so many slots of each head."""
    batch, width = len(used), -(-max(used) // 16)
    shape = (batch, width, heads, 2 * 16 * head_dim)
    values = torch.randn(shape, generator=source(slots)).to(getattr(torch, dtype))
    arena, pages = place(values.view(torch.uint8))
    for row, count in enumerate(used):
        pages[row, max(1, -(-count // 16)) :] = pages[row, 0]
    states = 8 * slots + -8 * slots % 16
    fmt = KeptFormat(slots, states + -(-slots // 16) * 16, 0, 4 * slots, states)
    records = torch.zeros(batch, heads, fmt.block_bytes, dtype=torch.uint8)
    for row, count in enumerate(used):
        for head in range(heads):
            filled = max(0, count - head)  # heads have not filled as many
            chosen = torch.randperm(700, generator=source(9 * row + head))[:slots].int()
            state = torch.full((slots,), FREE, dtype=torch.uint8)
            state[:filled] = torch.tensor([POOL, RETIRED]).repeat(slots)[:filled]
            records[row, head, : 4 * slots] = chosen.view(torch.uint8)
            records[row, head, states : states + slots] = state
    stride = -(-(SIDE_BASE + records[0].numel()) // ARENA_UNIT)
    order = torch.randperm(batch, generator=source(3))
    sides = (order * stride + arena.numel() // ARENA_UNIT + 1).int()
    arena = torch.cat([arena, arena.new_zeros((batch + 1) * stride * ARENA_UNIT)])
    store_blocks(arena, records, sides, SIDE_BASE)
    return arena, pages, sides, fmt


@pytest.mark.parametrize(
    ("dtype", "head_dim", "slots", "width"),
    [
        ("float16", 64, 35, 4),
        ("bfloat16", 128, 100, 3),
        ("float16", 80, 6, 8),
        ("float16", 64, 70, 16),
    ],
)
def test_attention_over_kept_tokens_is_that_of_the_reference(dtype, head_dim, slots, width):
    used = [min(slots, x) for x in (3, 33, 0, 90)]
    arena, pages, sides, fmt = kept_case(dtype, head_dim, used, slots, 2)
    hi = torch.tensor([[700], [350], [500], [640]], dtype=torch.int32)
    q = torch.randn(4, 1, 2 * width, head_dim, generator=source(width))
    raw = raw_format(dtype, head_dim)
    tables = (arena, pages, sides, torch.zeros_like(hi), hi, raw, fmt, BASE, SIDE_BASE, 2, 0.15)
    check(paged_exact.attend_kept, reference_kept.attend_kept, *tables, q=q)


def test_windows_and_several_queries_see_different_kept_tokens():
    arena, pages, sides, fmt = kept_case("float16", 64, [35, 20, 1], 35, 1)
    hi = torch.tensor([[200, 400, 700], [0, 70, 90], [700, 700, 700]], dtype=torch.int32)
    lo = torch.tensor([[100, 300, 100], [0, 0, 80], [0, 699, 700]], dtype=torch.int32)
    q = torch.randn(3, 3, 5, 64, generator=source(2))
    raw = raw_format("float16", 64)
    tables = (arena, pages, sides, lo, hi, raw, fmt, BASE, SIDE_BASE, 1, 0.15)
    check(paged_exact.attend_kept, reference_kept.attend_kept, *tables, q=q)
