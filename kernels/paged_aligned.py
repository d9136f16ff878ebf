"""Attention over bit planes on a GPU: the Triton form of reference_aligned.attend_aligned.

Five launches, whose shapes follow from shapes of tensors alone: a CUDA graph serves any lengths.
Scores of all tokens wait in memory between two of them: 4 bytes for each query, head and token.
"""

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
from disagg.kernels.launch import REDUCE_COLUMNS, REDUCE_UNITS, TENSOR_COLUMNS, count_processors
from disagg.kernels.reduce import reduce_units_kernel
from disagg.kernels.reference import Partial
from disagg.kernels.reference_aligned import Bits
from disagg.kernels.shape import raw_shape
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
) -> tuple[Partial, Bits]:
    """Attention over bit planes, and the bits read. Shapes as in reference_aligned.attend_aligned.

    error: about 5e-4 relative to the reference, since q and p are rounded to fp16; of equal largest
           weights of a class the first alone is in the estimate, which may read more bits
    """
    for x in (q, pages, lo, hi):
        if not x.is_contiguous() or x.dtype not in (torch.float32, torch.int32):
            raise ValueError("q fp32 and int32 tables are wanted, contiguous in memory")
    batch, queries, query_heads, head_dim = q.shape
    width, device = pages.shape[1], q.device
    shape = raw_shape((batch, queries, query_heads), heads, TENSOR_COLUMNS)
    blocks = triton.cdiv(queries * shape.group, shape.columns)
    room = PROGRAMS * count_processors(device) // (heads * blocks)
    slots = max(min(room, batch * (width // MIN_TILES.value + 1)), batch) + batch
    spans = (lo.view(-1), hi.view(-1)) if queries == 1 else (lo.amin(1), hi.amax(1))
    levels = torch.empty(batch, shape.rows, head_dim, dtype=torch.int8, device=device)
    tops = torch.empty(batch, queries, heads, head_dim, dtype=torch.uint8, device=device)
    k_bits = torch.empty(batch, queries, query_heads, device=device)
    channel_levels_kernel[(batch, queries, heads)](
        q, arena, pages, lo, hi, levels, tops, k_bits, scale, base, width, fmt, shape, num_warps=4
    )
    warps = aligned_warps(head_dim)
    scores = torch.empty(batch, shape.rows, width * fmt.tokens, device=device)
    part_lse = torch.empty(slots, shape.rows, device=device)
    best = torch.empty(slots, shape.rows, CLASSES.value, device=device)
    place = torch.empty_like(best, dtype=torch.int32)
    plane_scores_kernel[(heads, blocks, slots)](
        q, arena, pages, lo, hi, *spans, levels, scores, part_lse, best, place,
        scale, base, batch, width, fmt, shape, num_warps=warps,
    )  # fmt: skip
    row_lse = torch.empty(batch, shape.rows, device=device)
    allowed = torch.empty_like(row_lse, dtype=torch.int32)
    allow_drops_kernel[(shape.rows, batch)](
        arena, pages, *spans, tops, part_lse, best, place, row_lse, allowed,
        base, batch, slots, width, fmt, shape, num_warps=1,
    )  # fmt: skip
    part_o = torch.empty(slots, shape.rows, head_dim, device=device)
    bits, seen = torch.zeros(2, *k_bits.shape, dtype=torch.int32, device=device)
    plane_values_kernel[(heads, blocks, slots)](
        arena, pages, *spans, scores, row_lse, allowed, part_lse, part_o, bits, seen,
        base, batch, width, fmt, shape, num_warps=warps,
    )  # fmt: skip
    o, lse = torch.empty_like(q), torch.empty_like(k_bits)
    reduce_units_kernel[(shape.rows, triton.cdiv(head_dim, REDUCE_COLUMNS), batch)](
        part_o, part_lse, o, lse, *spans, batch, 1, slots, shape.rows,
        head_dim, fmt.tokens, shape.batch_pad, REDUCE_UNITS, REDUCE_COLUMNS, num_warps=1,
    )  # fmt: skip
    return (o, lse), Bits(k_bits, bits / seen.clamp_min(1))


def aligned_warps(head_dim: int) -> int:
    """Warps that hold the planes of a page in their registers."""
    return 4 if head_dim <= 128 else 8
