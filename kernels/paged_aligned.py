"""Attention over bit planes on a GPU: the Triton form of reference_aligned.attend_aligned.

Four launches, whose shapes follow from shapes of tensors alone: a CUDA graph serves any lengths.
Scores of all tokens wait in memory between two of them: 4 bytes for each query, head and token.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from disagg.kernels.aligned_attention import (
    CLASSES,
    allow_drops_kernel,
    channel_levels_kernel,
    plane_scores_kernel,
    plane_values_kernel,
)
from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.launch import TENSOR_COLUMNS, count_processors
from disagg.kernels.parts import UnitPartials
from disagg.kernels.reference_aligned import Bits
from disagg.kernels.shape import Shape, raw_shape
from disagg.kernels.units import MIN_TILES

PROGRAMS = 4  # resident on a processor, by their registers


def attend_aligned(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: AlignedFormat,
    base: int,
    heads: int,
    scale: float,
) -> tuple[UnitPartials, Bits]:
    """Attention over bit planes, and the bits read. Shapes as in reference_aligned.attend_aligned.

    error: about 5e-4 relative to the reference, since q and p are rounded to fp16; of equal largest
           weights of a class the first alone is in the estimate, which may read more bits
    """
    for x in (q, pages, lo, hi):
        if not x.is_contiguous() or x.dtype not in (torch.float32, torch.int32):
            raise ValueError("q fp32 and int32 tables are wanted, contiguous in memory")
    batch, queries, query_heads = q.shape[:3]
    shape = raw_shape((batch, queries, query_heads), heads, TENSOR_COLUMNS)
    blocks = triton.cdiv(queries * shape.group, shape.columns)
    room = PROGRAMS * count_processors(q.device) // (heads * blocks)
    slots = max(min(room, batch * (pages.shape[1] // MIN_TILES.value + 1)), batch) + batch
    spans = (lo.view(-1), hi.view(-1)) if queries == 1 else (lo.amin(1), hi.amax(1))
    work = Work(arena, pages, spans, base, fmt, shape, (heads, blocks, slots))
    found, k_bits = score_tokens(work, q, lo, hi, scale)
    part_o, v_bits = sum_values(work, found)
    rows = (batch, queries, query_heads)
    part = UnitPartials(part_o, found.part_lse, rows, spans, tile=fmt.tokens)
    return part, Bits(k_bits, v_bits.view_as(k_bits))


@dataclass(frozen=True)
class Work:
    """What both passes run over; grid: KV heads, blocks of query columns, slots for units."""

    arena: Tensor
    pages: Tensor
    spans: tuple[Tensor, Tensor]
    base: int
    fmt: AlignedFormat
    shape: Shape
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Scores:
    """What the first pass leaves, as aligned_attention.py draws it."""

    scores: Tensor
    part_lse: Tensor
    best: Tensor
    place: Tensor
    tops: Tensor


def score_tokens(
    work: Work, q: Tensor, lo: Tensor, hi: Tensor, scale: float
) -> tuple[Scores, Tensor]:
    """The first pass, over K; and the bits read for it [B, M, Hq]."""
    batch, queries, query_heads, head_dim = q.shape
    fmt, shape, width, device = work.fmt, work.shape, work.pages.shape[1], q.device
    heads, _, slots = work.grid
    levels = torch.empty(batch, shape.rows, head_dim, dtype=torch.int8, device=device)
    tops = torch.empty(batch, queries, heads, head_dim, dtype=torch.uint8, device=device)
    bits = torch.empty(batch, queries, query_heads, device=device)
    channel_levels_kernel[(batch, queries, heads)](
        q, work.arena, work.pages, lo, hi, levels, tops, bits,
        scale, work.base, width, fmt, shape, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    scores = torch.empty(batch, shape.rows, width * fmt.tokens, device=device)
    part_lse = torch.empty(slots, shape.rows, device=device)
    best = torch.empty(slots, shape.rows, CLASSES.value, device=device)
    place = torch.empty_like(best, dtype=torch.int32)
    plane_scores_kernel[work.grid](
        q, work.arena, work.pages, lo, hi, *work.spans, levels, scores, part_lse, best, place,
        scale, work.base, batch, width, fmt, shape,
        num_warps=aligned_warps(head_dim), enable_fp_fusion=False,
    )  # fmt: skip
    return Scores(scores, part_lse, best, place, tops), bits


def sum_values(work: Work, found: Scores) -> tuple[Tensor, Tensor]:
    """The second pass, over V: partial results [slots, rows, D]; and the bits read [B, rows]."""
    fmt, shape, device = work.fmt, work.shape, work.arena.device
    batch, width = work.pages.shape
    slots = work.grid[2]
    lse = torch.empty(batch, shape.rows, device=device)
    allowed = torch.empty_like(lse, dtype=torch.int32)
    allow_drops_kernel[(shape.rows, batch)](
        work.arena, work.pages, *work.spans, found.tops, found.part_lse, found.best, found.place,
        lse, allowed, work.base, batch, slots, width, fmt, shape,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    part_o = torch.empty(slots, shape.rows, fmt.head_dim, device=device)
    bits, seen = torch.zeros(2, batch, shape.rows, dtype=torch.int32, device=device)
    plane_values_kernel[work.grid](
        work.arena, work.pages, *work.spans, found.scores, lse, allowed, found.part_lse, part_o,
        bits, seen, work.base, batch, width, fmt, shape,
        num_warps=aligned_warps(fmt.head_dim), enable_fp_fusion=False,
    )  # fmt: skip
    return part_o, bits / seen.clamp_min(1)


def aligned_warps(head_dim: int) -> int:
    """Warps that hold the planes of a page in their registers."""
    return 4 if head_dim <= 128 else 8
