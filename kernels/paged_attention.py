"""Decode attention over page tables on a GPU: the Triton form of reference.attend_* and merge.

Two launches: one program per unit of work, KV head and block of query columns writes a partial
result (quantized_attention.py, raw_attention.py); one program per row of the answer merges them
(reduce.py). Shapes of launches and buffers follow from shapes of tensors alone and nothing is read
back, so a CUDA graph of them serves any lengths.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import QuantFormat, RawFormat
from disagg.kernels.quantized_attention import attend_quantized_kernel
from disagg.kernels.raw_attention import TILE_PAGES, attend_raw_kernel
from disagg.kernels.reduce import merge_kernel, reduce_units_kernel
from disagg.kernels.reference import Partial
from disagg.kernels.selftest import spelling_for
from disagg.kernels.units import MIN_TILES

PROGRAMS_PER_PROCESSOR = 8  # warps that fit beside each other at the kernels' 230 registers
REDUCE_UNITS, REDUCE_COLUMNS = 16, 64
OPERANDS = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


@dataclass(frozen=True)
class Shape:
    """How the queries of a batch are spread over programs; a compile-time constant of the kernels.

    queries:   M of each sequence; group: query heads of a KV head; rows: M * Hq
    columns:   C, queries times heads of one program
    copies:    how often each column is repeated in the product with K, to fill the tensor core
    groups:    V groups that lie side by side in the product with V, likewise
    batch_pad: B, rounded up to a power of two
    """

    queries: int
    group: int
    rows: int
    columns: int
    copies: int
    groups: int
    batch_pad: int


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
    shape = spread(q, heads, 8, 1, 1)
    # the interpreter cannot multiply bf16
    operand = OPERANDS["float32" if q.device.type == "cpu" else fmt.dtype]
    return run_units(
        attend_raw_kernel, q, arena.view(dtype), pages, lo, hi, fmt, base, heads, scale, shape,
        fmt.tokens * TILE_PAGES.value, OPERAND=operand,
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
) -> Partial:
    """Attention over quantised pages, on the codes. Shapes as in reference.attend_quantized.

    error: about 5e-4 relative (q times scale-of-K and p times scale-of-V are rounded to fp16)
    """
    shape = quantized_shape(q, heads, fmt)
    return run_units(
        attend_quantized_kernel, q, arena.view(torch.int16), pages, lo, hi, fmt, base, heads, scale,
        shape, fmt.tokens, SPELLING=spelling_for(q.device),
    )  # fmt: skip


def merge(parts: list[Partial]) -> Tensor:
    """Attention over the union of disjoint token sets. See reference.merge."""
    o, lse = parts[0]
    rows, head_dim = lse.numel(), o.shape[-1]
    for other, other_lse in parts[1:]:
        merged, merged_lse = torch.empty_like(o), torch.empty_like(lse)
        merge_kernel[(rows,)](
            o, lse, other, other_lse, merged, merged_lse, head_dim,
            triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
        o, lse = merged, merged_lse
    return o


def quantized_shape(q: Tensor, heads: int, fmt: QuantFormat) -> Shape:
    """Four columns where the queries are few: each then carries two groups of V side by side."""
    plane = fmt.head_dim // 4
    groups = fmt.head_dim // fmt.v_group
    pairs = groups % 2 == 0 and fmt.v_group % plane == 0
    if q.shape[1] * q.shape[2] // heads > 4:
        return spread(q, heads, 8, 1, 1)
    return spread(q, heads, 4, 2, 2 if pairs else 1)


def spread(q: Tensor, heads: int, columns: int, copies: int, groups: int) -> Shape:
    """The shape for queries [B, M, Hq, D]."""
    batch, queries, query_heads, _ = q.shape
    batch_pad = triton.next_power_of_2(batch)
    rows = queries * query_heads
    return Shape(queries, query_heads // heads, rows, columns, copies, groups, batch_pad)


def run_units(
    kernel: triton.JITFunction,
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: RawFormat | QuantFormat,
    base: int,
    heads: int,
    scale: float,
    shape: Shape,
    tile: int,
    **options: str | tl.dtype,
) -> Partial:
    """Launch a kernel over units of work and merge what they found."""
    batch, queries, query_heads, head_dim = q.shape
    blocks = triton.cdiv(queries * shape.group, shape.columns)
    slots = count_slots(q.device, batch, heads * blocks, pages.shape[1] * fmt.tokens // tile)
    part_o = torch.empty(slots, shape.rows, head_dim, device=q.device)
    part_lse = torch.empty(slots, shape.rows, device=q.device)
    spans = (lo.view(-1), hi.view(-1)) if queries == 1 else (lo.amin(1), hi.amax(1))
    kernel[(heads, blocks, slots)](
        q, arena, pages, lo, hi, *spans, part_o, part_lse,
        scale, base, batch, pages.shape[1], fmt, shape, STAGES=3, num_warps=1, **options,
    )  # fmt: skip
    o = torch.empty_like(q)
    lse = torch.empty(batch, queries, query_heads, device=q.device)
    reduce_units_kernel[(shape.rows, triton.cdiv(head_dim, REDUCE_COLUMNS), batch)](
        part_o, part_lse, o, lse, *spans, batch, slots, shape.rows,
        head_dim, tile, shape.batch_pad, REDUCE_UNITS, REDUCE_COLUMNS, num_warps=1,
    )  # fmt: skip
    return o, lse


def count_slots(device: torch.device, batch: int, programs: int, tiles: int) -> int:
    """Units of work to make room for: enough to fill the device, no more than there can be."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    room = PROGRAMS_PER_PROCESSOR * processors // programs
    most = batch * (tiles // MIN_TILES + 1)
    return max(min(room, most), batch) + batch
