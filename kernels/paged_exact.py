"""Attention over exact tokens on a GPU: the Triton form of reference.attend_raw,
reference_kept.attend_kept and reference_dropped.attend_dropped.

One kernel for all three; formats_exact.py says what it needs to know of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import RawFormat
from disagg.kernels.formats_exact import ExactFormat, as_exact, dropped_as_exact
from disagg.kernels.launch import NVIDIA, TENSOR_COLUMNS, count_processors
from disagg.kernels.parts import UnitPartials
from disagg.kernels.raw_attention import attend_raw_kernel
from disagg.kernels.reference_dropped import DroppedFormat
from disagg.kernels.reference_kept import KeptFormat
from disagg.kernels.shape import (
    compile_options,
    pipeline_stages,
    programs_per_processor,
    raw_shape,
    tile_tokens,
)
from disagg.kernels.units import MIN_TILES

PRECISION = "tf32x3" if NVIDIA else "ieee"
OPERANDS = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


def attend_raw(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: RawFormat,
    base: int,
    heads: int,
    scale: float,
) -> UnitPartials:
    """Attention over raw pages. Shapes as in reference.attend_raw.

    error: about 5e-4 relative for fp16 and bf16 pages (q and p are rounded), 1e-5 for fp32 pages
    """
    return attend_exact(q, arena, pages, lo, hi, as_exact(fmt), base, heads, scale)


def attend_kept(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    sides: Tensor,
    lo: Tensor,
    hi: Tensor,
    raw: RawFormat,
    fmt: KeptFormat,
    raw_base: int,
    side_base: int,
    heads: int,
    scale: float,
) -> UnitPartials:
    """Attention over kept tokens. Shapes as in reference_kept.attend_kept, errors as above."""
    return attend_exact(
        q, arena, pages, lo, hi, as_exact(raw, fmt), raw_base, heads, scale, sides, side_base
    )


def attend_dropped(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: DroppedFormat,
    base: int,
    heads: int,
    scale: float,
) -> UnitPartials:
    """Attention over what was not dropped. Shapes as in reference_dropped.attend_dropped."""
    return attend_exact(q, arena, pages, lo, hi, dropped_as_exact(fmt), base, heads, scale)


def attend_exact(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: ExactFormat,
    base: int,
    heads: int,
    scale: float,
    sides: Tensor | None = None,
    side_base: int = 0,
) -> UnitPartials:
    """Attention over exact tokens of any kind."""
    for x in (q, pages, lo, hi, *(() if sides is None else (sides,))):
        if not x.is_contiguous() or x.dtype not in (torch.float32, torch.int32):
            raise ValueError("q fp32 and int32 tables are wanted, contiguous in memory")
    batch, queries, query_heads, head_dim = q.shape
    shape = raw_shape((batch, queries, query_heads), heads, TENSOR_COLUMNS)
    blocks = triton.cdiv(queries * shape.group, shape.columns)
    spans: tuple[Tensor | None, Tensor | None] = (None, None)
    slots = batch
    if fmt.side is None:
        room = programs_per_processor(fmt) * count_processors(q.device) // (heads * blocks)
        tiles = triton.cdiv(pages.shape[1], fmt.tile_pages)
        most = batch * (tiles // MIN_TILES.value + 1)
        slots = max(min(room, most), batch) + batch  # find_cut wants more slots than sequences
        # positions in pages tell nothing of where a window begins
        first = None if not fmt.counted else lo.view(-1) if queries == 1 else lo.amin(1)
        spans = first, hi.view(-1) if queries == 1 else hi.amax(1)
    part_o = torch.empty(slots, shape.rows, head_dim, device=q.device)
    part_lse = torch.empty(slots, shape.rows, device=q.device)
    # the interpreter cannot multiply bf16
    operand = OPERANDS["float32" if q.device.type == "cpu" else fmt.dtype]
    attend_raw_kernel[(heads, blocks, slots)](
        q, arena.view(getattr(torch, fmt.dtype)), pages, lo, hi, *spans, sides, part_o, part_lse,
        scale, base, side_base, batch, pages.shape[1], fmt, shape, operand, PRECISION,
        pipeline_stages(fmt, NVIDIA), **compile_options(fmt, NVIDIA),
    )  # fmt: skip
    rows = (batch, queries, query_heads)
    return UnitPartials(part_o, part_lse, rows, spans, tile=tile_tokens(fmt))
