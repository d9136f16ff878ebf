"""Attention over pages made of pieces on a GPU: the Triton form of reference_paged.attend_paged.

A run is the pages of a sequence that share a segment; without segments it is the whole sequence.
"""

import torch
import triton
from torch import Tensor

from disagg.kernels.bits import PLAIN, PTX
from disagg.kernels.formats_paged import PagedFormat, Side
from disagg.kernels.launch import NVIDIA, TENSOR_COLUMNS, count_processors
from disagg.kernels.parts import UnitPartials
from disagg.kernels.piece_attention import attend_pieces_kernel
from disagg.kernels.runs import run_spans
from disagg.kernels.selftest import spelling_for
from disagg.kernels.shape import (
    compile_options,
    piece_shape,
    pipeline_stages,
    programs_per_processor,
)
from disagg.kernels.units import MIN_TILES

FLOAT8_CAPABILITY = (8, 9)  # the first NVIDIA chips that convert float8


def attend_paged(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: PagedFormat,
    base: int,
    heads: int,
    scale: float,
    segments: Tensor | None = None,
    owner: Tensor | None = None,
    segment_base: int = 0,
    spelling: str | None = None,
) -> UnitPartials:
    """Attention over pages of one layout. Shapes as in reference_paged.attend_paged.

    spelling: how codes are read, of bits.py; None: as the chip takes them
    error: about 5e-4 relative (q and p, with scales folded in, are rounded to fp16)
    """
    for x in (q, pages, lo, hi, *(() if segments is None else (segments,))):
        if not x.is_contiguous() or x.dtype not in (torch.float32, torch.int32):
            raise ValueError("q fp32 and int32 tables are wanted, contiguous in memory")
    batch, queries, query_heads, head_dim = q.shape
    spans = (lo.view(-1), hi.view(-1)) if queries == 1 else (lo.amin(1), hi.amax(1))
    runs = 1
    if segments is not None and owner is not None:
        spans, runs = run_spans(*spans, owner, segments.shape[1], fmt.tokens), segments.shape[1]
    count = batch * runs
    shape = piece_shape((batch, queries, query_heads), heads, fmt, TENSOR_COLUMNS, count)
    blocks = triton.cdiv(queries * shape.group, shape.columns)
    room = programs_per_processor(fmt) * count_processors(q.device) // (heads * blocks)
    most = count + batch * (pages.shape[1] // MIN_TILES.value)
    slots = max(min(room, most), count) + count  # find_cut wants more slots than runs
    part_o = torch.empty(slots, shape.rows, head_dim, device=q.device)
    part_lse = torch.empty(slots, shape.rows, device=q.device)
    attend_pieces_kernel[(heads, blocks, slots)](
        q, arena.view(torch.int16), pages, lo, hi, *spans, pages if segments is None else segments,
        part_o, part_lse, scale, base, segment_base, count, runs, pages.shape[1],
        fmt, shape, spelling or _spelling(fmt, q.device), pipeline_stages(fmt, NVIDIA),
        **compile_options(fmt, NVIDIA),
    )  # fmt: skip
    rows = (batch, queries, query_heads)
    return UnitPartials(part_o, part_lse, rows, spans, runs, fmt.tokens)


def is_supported(fmt: PagedFormat) -> bool:
    """Whether the kernel runs this format; the reference runs any."""
    k, v = fmt.k, fmt.v
    if v.scale.by == "row" or v.scale.shared or (v.scale.by == "block" and v.scale.center):
        return False
    if k.scale.by == "column" and k.planes % (k.rows // k.scale.group):
        return False
    if fmt.tokens & (fmt.tokens - 1) or fmt.head_dim % 16:
        return False
    if (k.sparse or v.sparse) and fmt.head_dim & (fmt.head_dim - 1):
        return False
    return all(_is_turnable(side, fmt.head_dim) for side in (k, v))


def _spelling(fmt: PagedFormat, device: torch.device) -> str:
    """How codes are read; floats by bit moves where the chip has no conversion for them."""
    if (fmt.k.floating or fmt.v.floating) and device.type == "cuda" and NVIDIA:
        converts = torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
        return PTX if converts else PLAIN
    return spelling_for(device)


def _is_turnable(side: Side, head_dim: int) -> bool:
    """Whether the rotation of a side, if it has one, stays within tiles; and ranks fit one."""
    if side.low_rank and (side.rotation or side.low_rank.rank > 16):
        return False
    if not side.rotation:
        return True
    within = head_dim // (4 if side.rows == head_dim else side.halves)
    return head_dim & (head_dim - 1) == 0 and within % side.rotation.block == 0
