"""Decode attention over page tables on a GPU: the Triton form of reference.attend_* and merge.

Two launches: one program per unit of work, KV head and block of query columns writes a partial
result (raw_attention.py, piece_attention.py); one program per row of the answer merges them
(reduce.py). Shapes of launches and buffers follow from shapes of tensors alone and nothing is read
back, so a CUDA graph of them serves any lengths.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import QuantFormat, RawFormat
from disagg.kernels.formats_paged import as_paged
from disagg.kernels.launch import (
    NVIDIA,
    REDUCE_COLUMNS,
    REDUCE_UNITS,
    TENSOR_COLUMNS,
    count_processors,
)
from disagg.kernels.paged_pieces import attend_paged
from disagg.kernels.raw_attention import attend_raw_kernel
from disagg.kernels.reduce import merge_kernel, reduce_units_kernel
from disagg.kernels.reference import Partial
from disagg.kernels.selftest import spelling_for
from disagg.kernels.shape import (
    Shape,
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
) -> Partial:
    """Attention over raw pages. Shapes as in reference.attend_raw.

    error: about 5e-4 relative for fp16 and bf16 pages (q and p are rounded), 1e-5 for fp32 pages
    """
    dtype = getattr(torch, fmt.dtype)
    shape = raw_shape((q.shape[0], q.shape[1], q.shape[2]), heads, TENSOR_COLUMNS)
    # the interpreter cannot multiply bf16
    operand = OPERANDS["float32" if q.device.type == "cpu" else fmt.dtype]
    return run_units(
        attend_raw_kernel, q, arena.view(dtype), pages, lo, hi, fmt, base, heads, scale, shape,
        OPERAND=operand, PRECISION=PRECISION,
    )  # fmt: skip


def attend_quantized(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: QuantFormat,
    base: int,
    heads: int,
    scale: float,
    spelling: str | None = None,
) -> Partial:
    """Attention over quantised pages, on the codes. Shapes as in reference.attend_quantized.

    spelling: how codes are read, of bits.py; None: as the chip takes them
    error: about 5e-4 relative (q times scale-of-K and p times scale-of-V are rounded to fp16)
    """
    return attend_paged(
        q, arena, pages, lo, hi, as_paged(fmt), base, heads, scale,
        spelling=spelling or spelling_for(q.device),
    )  # fmt: skip


def merge(parts: list[Partial]) -> Tensor:
    """Attention over the union of disjoint token sets. See reference.merge."""
    return join(parts)[0]


def join(parts: list[Partial]) -> Partial:
    """The same with its log-sum-exp, in one launch. See reference_kept.join."""
    for part in parts:
        if not all(x.is_contiguous() and x.dtype == torch.float32 for x in part):
            raise ValueError("parts are wanted in fp32, contiguous in memory")
    o, lse = torch.empty_like(parts[0][0]), torch.empty_like(parts[0][1])
    merge_kernel[(lse.numel(),)](
        tuple(part[0] for part in parts), tuple(part[1] for part in parts), o, lse,
        o.shape[-1], triton.next_power_of_2(o.shape[-1]), num_warps=1,
    )  # fmt: skip
    return o, lse


def run_units(
    kernel: triton.JITFunction,
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: RawFormat,
    base: int,
    heads: int,
    scale: float,
    shape: Shape,
    **options: str | tl.dtype,
) -> Partial:
    """Launch a kernel over units of work and merge what they found."""
    for x in (q, pages, lo, hi):
        if not x.is_contiguous():
            raise ValueError("q, pages, lo and hi are wanted contiguous in memory")
    batch, queries, query_heads, head_dim = q.shape
    tile = tile_tokens(fmt)
    blocks = triton.cdiv(queries * shape.group, shape.columns)
    room = programs_per_processor(fmt) * count_processors(q.device) // (heads * blocks)
    most = batch * (pages.shape[1] * fmt.tokens // tile // MIN_TILES.value + 1)
    slots = max(min(room, most), batch) + batch  # find_cut wants more slots than sequences
    part_o = torch.empty(slots, shape.rows, head_dim, device=q.device)
    part_lse = torch.empty(slots, shape.rows, device=q.device)
    spans = (lo.view(-1), hi.view(-1)) if queries == 1 else (lo.amin(1), hi.amax(1))
    kernel[(heads, blocks, slots)](
        q, arena, pages, lo, hi, *spans, part_o, part_lse,
        scale, base, batch, pages.shape[1], fmt, shape, STAGES=pipeline_stages(fmt, NVIDIA),
        **compile_options(fmt, NVIDIA), **options,
    )  # fmt: skip
    o = torch.empty_like(q)
    lse = torch.empty(batch, queries, query_heads, device=q.device)
    reduce_units_kernel[(shape.rows, triton.cdiv(head_dim, REDUCE_COLUMNS), batch)](
        part_o, part_lse, o, lse, *spans, batch, 1, slots, shape.rows,
        head_dim, tile, shape.batch_pad, REDUCE_UNITS, REDUCE_COLUMNS, num_warps=1,
    )  # fmt: skip
    return o, lse
