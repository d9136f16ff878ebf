"""Attention on a GPU: one launch computes the units of work of all views, another merges them.

    pages of the prompt    units ──┐
    sealed while decoding  units ──┤  attend_kernel: a program for each unit, KV head
    tokens kept exact      units ──┤  and block of query columns ──> partial results ──> combine.py
    the tail               units ──┘

The set of views is compiled in, so each program runs one loop, of codes.py or exact.py. Bit planes
take two passes, in aligned.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import AlignedFormat, PageFormat, latent_of, value_dim
from disagg.kernels.gpu import aligned
from disagg.kernels.gpu.bits import PLAIN, PTX, unpack_mode_for
from disagg.kernels.gpu.codes import attend_codes
from disagg.kernels.gpu.combine import UnitPartials
from disagg.kernels.gpu.exact import attend_exact
from disagg.kernels.gpu.latent import attend_latents, scale_query
from disagg.kernels.gpu.plan import (
    AMD_COLUMNS,
    LATENT_ROWS,
    NVIDIA,
    NVIDIA_COLUMNS,
    LoopFormat,
    Shape,
    check_slots,
    check_tables,
    check_tile,
    compile_options,
    converts_float8,
    pipeline_stages,
    shape_of,
    units_of,
)
from disagg.kernels.gpu.tiles import column_of, find_unit
from disagg.kernels.view import View, WorkPlan


@dataclass(frozen=True)
class Chip:
    """The properties of a chip that kernels depend on.

    codes, float8: how it unpacks codes, and floats of 8 bits; see bits.py
    operand:       the dtype in which exact tokens are multiplied, if not their own
    """

    nvidia: bool
    codes: str
    float8: str
    operand: str = ""

    @property
    def columns(self) -> int:
        """Columns of a product of its tensor cores."""
        return NVIDIA_COLUMNS if self.nvidia else AMD_COLUMNS


@lru_cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a device; on a CPU that is the interpreter, which cannot multiply bf16."""
    return Chip(
        nvidia=NVIDIA,
        codes=unpack_mode_for(device),
        float8=PTX if converts_float8(device) else PLAIN,
        operand="float32" if device.type == "cpu" else "",
    )


@dataclass(frozen=True)
class ViewSpec:
    """How the pages of a view are read.

    number:      of the view among the units
    unpack_mode: how codes are read, see bits.py
    item:        dtype of exact pages
    operand:     dtype of a product with exact pages
    precision:   of that product
    cap:         of scores, compiled in where a model has one
    """

    number: int
    fmt: LoopFormat
    shape: Shape
    stages: int
    unpack_mode: str = PLAIN
    item: Any = None
    operand: Any = None
    precision: str = ""
    cap: float = 0.0

    @property
    def codes(self) -> bool:
        """Whether these are pages of codes."""
        return isinstance(self.fmt, PageFormat)


@triton.jit(do_not_specialize=["queries", "stride_b", "stride_m", "stride_h"])
def attend_kernel(
    q_ptr, arenas, tables, bases, widths, units_ptr, o_ptr, lse_ptr,
    scale, queries, stride_b, stride_m, stride_h, LOOPS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over one unit of one view; tables as view.py draws them.

    q_ptr:  [B, M, Hq, D] of any float dtype, strides in items, all multiples of 8
    arenas: u8 of each view; tables: (pages, lo, hi, sides) of each
    widths: of each view's pages, twice the columns and one: Triton compiles anew for integers of a
            tuple that are 1 or divide by 16, in spite of do_not_specialize; these never do
    bases:  (base, that of segments or side records) of each; LOOPS: how each is read, or None
    o_ptr:  [U, M * Hq, D] fp32; lse_ptr: [U, M * Hq] fp32, log2
    """
    i_view, i_b, start, end, i_segment = find_unit(units_ptr, tl.program_id(2))
    if start >= end:
        return
    for j in tl.static_range(COUNT):
        attend_unit(
            i_view, i_b, start, end, i_segment, q_ptr, scale, queries, stride_b, stride_m, stride_h,
            arenas[j], tables[j], bases[j], widths[j] // 2, o_ptr, lse_ptr, loop_of(LOOPS, j),
        )  # fmt: skip


@triton.constexpr_function
def loop_of(loops: tuple[ViewSpec, ...], number: int) -> ViewSpec:
    """One of them: Triton 3.6 does not take an item as an argument."""
    return loops[number]


@triton.jit
def attend_unit(
    i_view, i_b, start, end, i_segment, q_ptr, scale, queries, stride_b, stride_m, stride_h,
    arena_ptr, tables, bases, width, o_ptr, lse_ptr, VIEW: tl.constexpr,
):  # fmt: skip
    """Attention over a unit, if it is of the view that this loop is for.

    i_view .. i_segment: as `find_unit` returns them
    arena_ptr .. width:  of the view, as `attend_kernel` has them
    """
    SHAPE: tl.constexpr = VIEW.shape
    if i_view == VIEW.number:
        pages_ptr, lo_ptr, hi_ptr, sides_ptr = tables
        i_head = tl.program_id(0)
        i_block = tl.program_id(1)
        i_slot = tl.program_id(2)
        i_m, i_row, m_c = column_of(i_head, i_block, queries, SHAPE)
        rows = queries * tl.num_programs(0) * SHAPE.group
        i_query = i_row - i_m * tl.num_programs(0) * SHAPE.group
        o_q = i_b.to(tl.int64) * stride_b + i_m.to(tl.int64) * stride_m
        p_q = q_ptr + tl.multiple_of(o_q + i_query.to(tl.int64) * stride_h, 8)
        lo = tl.load(lo_ptr + i_b * queries + i_m, mask=m_c, other=0)
        hi = tl.load(hi_ptr + i_b * queries + i_m, mask=m_c, other=0)
        i_out = i_slot * rows + i_row
        row_ptr = pages_ptr + i_b * width
        if VIEW.fmt.latent is not None:
            first = i_block * SHAPE.columns
            attend_latents(
                start, end, i_segment, p_q, lo, hi, m_c, arena_ptr, row_ptr, width,
                bases[0], bases[1], o_ptr, lse_ptr, i_slot * rows + first, rows - first, scale,
                VIEW,
            )  # fmt: skip
        elif VIEW.codes:
            attend_codes(
                start, end, i_segment, i_head, p_q, lo, hi, m_c, lo_ptr,
                arena_ptr, row_ptr, bases[0], bases[1], o_ptr, lse_ptr, i_out, scale, VIEW,
            )  # fmt: skip
        else:
            side = 0
            if VIEW.fmt.side is not None:
                side = tl.load(sides_ptr + i_b)
            attend_exact(
                start, end, i_head, p_q, lo, hi, m_c, arena_ptr, row_ptr, bases[0], bases[1],
                side, width, o_ptr, lse_ptr, i_out, scale, VIEW,
            )  # fmt: skip


def attend(
    q: Tensor,
    views: Sequence[View],
    scale: float,
    units: WorkPlan | None = None,
    cap: float = 0.0,
) -> UnitPartials:
    """The partial results of all units of the views; q [B, M, Hq, D] of any float dtype.

    units: as plan.py cuts them; None: they are planned here, which asks the host
    scale, cap: as in `Softmax`
    error: about 5e-4 relative (q and p, with scales folded in, are rounded to 16 bits), 1e-5 for
           exact tokens of fp32
    """
    if units is None:
        latent_blocks = -(-q.shape[1] * q.shape[2] // LATENT_ROWS)
        blocks = latent_blocks if latent_of(views[0].fmt) else 1
        units = units_of(views, q.device, blocks)
    check_tables(units.table, units.starts)
    for view in views:
        check_tables(view.pages, view.lo, view.hi, view.sides)
        if latent_of(view.fmt) and view.heads != 1:
            raise ValueError(f"{view.heads} KV heads of latents; expected 1")
    q = _aligned_rows(q)
    if latent_of(views[0].fmt):
        q = scale_query(q)
    batch, queries, query_heads, _ = q.shape
    slots = units.table.shape[0]
    rows = queries * query_heads
    o = torch.empty(slots, rows, value_dim(views[0].fmt), device=q.device)
    lse = torch.empty(slots, rows, device=q.device)
    _attend_in_one_launch(q, views, scale, units, o, lse, cap)
    for i, view in enumerate(views):
        if isinstance(view.fmt, AlignedFormat):
            aligned.attend(q, view, scale, i, units, o, lse, cap)
    return UnitPartials(o, lse, (batch, queries, query_heads), units.starts)


def _aligned_rows(q: Tensor) -> Tensor:
    """q with rows that a kernel can load: contiguous, and aligned to 16 bytes."""
    strides_fit = q.stride(3) == 1 and not any(x % 8 for x in q.stride()[:3])
    if strides_fit and q.data_ptr() % 16 == 0:
        return q
    return q.contiguous()


def _attend_in_one_launch(
    q: Tensor,
    views: Sequence[View],
    scale: float,
    units: WorkPlan,
    o: Tensor,
    lse: Tensor,
    cap: float,
) -> None:
    """Write the partial results of all views but those of bit planes."""
    numbers = []
    formats: list[LoopFormat] = []
    for i, view in enumerate(views):
        if not isinstance(view.fmt, AlignedFormat):
            numbers.append(i)
            formats.append(view.fmt)
    if not numbers:
        return
    queries = q.shape[1]
    heads = views[0].heads
    chip = chip_of(q.device)
    loops = loops_of(formats, numbers, queries, q.shape[2] // heads, chip, cap)
    blocks = max(loop.shape.blocks(queries) for loop in loops)
    arenas, tables, bases, widths = [], [], [], []
    for i in numbers:
        view = views[i]
        record_base = view.segment_base if view.sides is None else view.side_base
        arenas.append(view.arena)
        tables.append((view.pages, view.lo, view.hi, view.sides))
        bases.append((view.base, record_base))
        widths.append(2 * view.pages.shape[1] + 1)
    attend_kernel[(heads, blocks, units.table.shape[0])](
        q, tuple(arenas), tuple(tables), tuple(bases), tuple(widths), units.table, o, lse,
        scale, queries, *q.stride()[:3], loops, len(loops),
        **compile_options(formats[0], chip.nvidia),
    )  # fmt: skip


def loops_of(
    formats: Sequence[LoopFormat],
    numbers: Sequence[int],
    queries: int,
    group: int,
    chip: Chip,
    cap: float = 0.0,
) -> tuple[ViewSpec, ...]:
    """How a chip reads pages of these formats.

    numbers: of the views among the units
    queries: of each sequence
    group:   query heads of a KV head
    """
    loops = []
    for number, fmt in zip(numbers, formats, strict=True):
        loop = ViewSpec(
            number=number,
            fmt=fmt,
            shape=shape_of(fmt, queries, group, chip.columns),
            stages=pipeline_stages(fmt, chip.nvidia, len(formats) > 1),
            precision="tf32x3" if chip.nvidia else "ieee",
            cap=cap,
        )
        if isinstance(fmt, PageFormat):
            if chip.codes == PTX:
                check_slots(fmt)
            is_floating = any(side.floating for side in fmt.sides)
            mode = chip.float8 if is_floating else chip.codes
            loops.append(replace(loop, unpack_mode=mode))
        else:
            check_tile(fmt)
            item = getattr(tl, fmt.dtype)
            operand = getattr(tl, chip.operand or fmt.dtype)
            loops.append(replace(loop, item=item, operand=operand))
    return tuple(loops)
