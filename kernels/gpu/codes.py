"""Attention on pages of codes on a GPU: one kernel, whatever formats.py describes.

The Triton form of reference/codes.py. A program takes one unit of work, KV head and block of query
columns, and writes a partial result; reduce.py makes one answer of all. The page id is carried in a
loop variable, otherwise the compiler keeps one page in flight instead of two or three (Triton 3.6
to 3.9).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import PageFormat
from disagg.kernels.gpu.bits import PLAIN, PTX, spelling_for
from disagg.kernels.gpu.plan import (
    NVIDIA,
    TENSOR_COLUMNS,
    check_tables,
    compile_options,
    converts_float8,
    pipeline_stages,
    shape_of,
    units_of,
)
from disagg.kernels.gpu.reduce import UnitPartials
from disagg.kernels.gpu.scores import page_scores, prepare_query
from disagg.kernels.gpu.sparse import sparse_rows
from disagg.kernels.gpu.tiles import (
    P_BIAS,
    column_of,
    empty_softmax,
    find_unit,
    hide,
    softmax_step,
    store_lse,
    whole_tiles,
)
from disagg.kernels.gpu.values import add_values, empty_sums, field_values, value_bias
from disagg.kernels.view import View


@triton.jit(do_not_specialize=["queries", "width"])
def attend_codes_kernel(
    q_ptr, words_ptr, pages_ptr, lo_ptr, hi_ptr, units_ptr, o_ptr, lse_ptr,
    scale, base, segment_base, queries, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr, SPELLING: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over the pages of one unit; tables as view.py draws them.

    words_ptr: the arena as int16; queries: M; width: columns of the page table
    o_ptr:     [U, M * Hq, D] fp32; lse_ptr: [U, M * Hq] fp32, log2
    """
    FIELDS: tl.constexpr = FMT.v.fields
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    W: tl.constexpr = D // FMT.v.fields
    i_head, i_block, i_slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, start, end, i_segment = find_unit(units_ptr, i_slot)
    if start >= end:
        return
    rows = queries * tl.num_programs(0) * SHAPE.group
    i_m, i_row, m_c = column_of(i_head, i_block, queries, SHAPE)
    p_lo = i_b * queries + i_m
    lo = tl.load(lo_ptr + p_lo, mask=m_c, other=0)
    hi = tl.load(hi_ptr + p_lo, mask=m_c, other=0)
    p_q = q_ptr + (i_b * rows + i_row) * D
    offset = segment_base // 2 + i_head * (FMT.segment_bytes // 2)
    segment = words_ptr + (i_segment.to(tl.int64) * 64 + offset)
    own = sparse_rows(lo_ptr, FMT, SHAPE)
    query, unit = prepare_query(p_q, m_c, scale, segment, SHAPE.copies, FMT)
    m, l = empty_softmax(T // 4, SHAPE.columns)
    bias = tl.max(tl.full([SHAPE.columns], P_BIAS, tl.float32), 0)
    V_SIDE: tl.constexpr = FMT.v  # Triton 3.6 does not take an attribute as an argument
    state = (m, l, bias, empty_sums(SHAPE.columns, SHAPE.groups, V_SIDE))

    offset = base // 2 + i_head * (FMT.block_bytes // 2)
    row_ptr = pages_ptr + i_b * width
    whole, whole_end = whole_tiles(lo, hi, start, end, m_c, T)
    page = tl.load(row_ptr + whole, mask=whole < whole_end, other=0)
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        page = tl.load(row_ptr + tl.minimum(i + 1, whole_end - 1))
        state = add_page(words_ptr + at, query, own, unit, (), state, FMT, SHAPE, SPELLING)
    gap = whole_end - whole
    rest = end - gap
    page = tl.load(row_ptr + tl.where(start < whole, start, whole_end), mask=start < rest, other=0)
    for i in tl.range(start, rest, num_stages=STAGES):  # loads that wait in registers would spill
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        after = tl.minimum(i + 1, rest - 1)
        page = tl.load(row_ptr + tl.where(after < whole, after, after + gap))
        seen = (tl.where(i < whole, i, i + gap) * T, lo, hi)
        state = add_page(words_ptr + at, query, own, unit, seen, state, FMT, SHAPE, SPELLING)

    m, l, bias, sums = state
    i_out = i_slot * rows + i_row
    inverse = store_lse(lse_ptr + i_out, m, l, bias, m_c)
    o_w = tl.arange(0, triton.next_power_of_2(W))[:, None]
    for f in tl.static_range(FIELDS):
        b_o = field_values(segment, sums, f, V_SIDE, SHAPE.groups, SPELLING) * inverse[None, :]
        p_o = o_ptr + i_out.to(tl.int64)[None, :] * D + f * W + o_w
        tl.store(p_o, b_o, mask=m_c[None, :] & (o_w < W))


@triton.jit
def add_page(
    block, query, own, unit, seen, state,
    FMT: tl.constexpr, SHAPE: tl.constexpr, SPELLING: tl.constexpr,
):  # fmt: skip
    """The state (m, l, bias, sums) after one more page; `block`: int16 pointer to its block.

    own:  as `sparse_rows` gives it
    seen: (first token of the page, lo, hi), or () for a page that all columns see whole
    """
    m, l, bias, sums = state
    s = page_scores(block, query, own, SHAPE.copies, FMT, SPELLING)
    if len(seen) > 0:
        s = hide(s, seen[0] + tl.arange(0, FMT.tokens), seen[1], seen[2])
    V_SIDE: tl.constexpr = FMT.v
    new_bias = value_bias(block, bias, V_SIDE)
    p, decay, m, l = softmax_step(s, unit, m, l, bias, new_bias, FMT.tokens // 4)
    sums = add_values(block, p, decay, sums, own, FMT, SHAPE.groups, SPELLING)
    return m, l, new_bias, sums


def attend(q: Tensor, view: View, scale: float, spelling: str | None = None) -> UnitPartials:
    """Attention over pages of codes. Arguments as in reference/codes.py, q in fp32.

    spelling: how codes are read, of bits.py; None: as the chip takes them
    error:    about 5e-4 relative (q and p, with scales folded in, are rounded to fp16)
    """
    fmt = view.fmt
    assert isinstance(fmt, PageFormat)
    units = units_of(q, view)
    check_tables(q, view.pages, view.lo, view.hi, units.table)
    queries, query_heads, head_dim = q.shape[1:]
    shape = shape_of(fmt, queries, query_heads // view.heads, TENSOR_COLUMNS)
    slots, rows = units.table.shape[0], queries * query_heads
    o = torch.empty(slots, rows, head_dim, device=q.device)
    lse = torch.empty(slots, rows, device=q.device)
    attend_codes_kernel[(view.heads, shape.blocks(queries), slots)](
        q, view.arena.view(torch.int16), view.pages, view.lo, view.hi, units.table, o, lse,
        scale, view.base, view.segment_base, queries, view.pages.shape[1],
        fmt, shape, spelling or _spelling(fmt, q.device), pipeline_stages(fmt, NVIDIA),
        **compile_options(fmt, NVIDIA),
    )  # fmt: skip
    return UnitPartials(o, lse, tuple(q.shape[:3]), units.starts)


def _spelling(fmt: PageFormat, device: torch.device) -> str:
    """How codes are read; floats by bit moves where the chip has no conversion for them."""
    if fmt.k.floating or fmt.v.floating:
        return PTX if converts_float8(device) else PLAIN
    return spelling_for(device)
