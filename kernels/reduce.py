"""Partial results become one: units of a sequence, then pages of different kinds and the raw tail.

Each partial is (o, log-sum-exp) over its own tokens, so the sum is weighted by 2**(lse - largest).
"""

import triton
import triton.language as tl

from disagg.kernels.tiles import EMPTY
from disagg.kernels.units import find_cut, pick


@triton.jit
def reduce_units_kernel(
    part_o_ptr, part_lse_ptr, o_ptr, lse_ptr, span_lo_ptr, span_hi_ptr, batch, runs, slots, rows,
    D: tl.constexpr, TILE: tl.constexpr, BATCH_PAD: tl.constexpr,
    UNITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row of the answer, COLUMNS channels of it, from the units of its sequence.

    batch, runs: runs in all, and of each sequence; units.py cuts each run by itself
    span_hi_ptr: None where a sequence is one unit
    part_o_ptr, part_lse_ptr: [slots, rows, D] and [slots, rows] fp32, lse in log2
    o_ptr, lse_ptr:           [batch, rows, D] and [batch, rows] fp32, lse natural
    """
    i_row, i_part, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = i_b, 1
    if span_hi_ptr is not None:
        _, _, units, before = find_cut(span_lo_ptr, span_hi_ptr, batch, slots, TILE, BATCH_PAD)
        i_all = tl.arange(0, BATCH_PAD)
        first = pick(before, i_b * runs, i_all)
        count = tl.sum(tl.where(i_all // runs == i_b, units, 0), 0)
    o_d = i_part * COLUMNS + tl.arange(0, COLUMNS)
    o_u = tl.arange(0, UNITS)
    o_1 = tl.arange(0, 1)
    m, l = tl.full([1], EMPTY, tl.float32), tl.zeros([1], tl.float32)
    b_o = tl.zeros([COLUMNS], tl.float32)
    for i in range(0, count, UNITS):
        m_u = i + o_u < count
        i_out = (first + i + o_u) * rows + i_row
        b_lse = tl.load(part_lse_ptr + i_out, mask=m_u, other=float("-inf"))
        p_part = part_o_ptr + i_out.to(tl.int64)[:, None] * D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_u[:, None] & (o_d < D)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        decay = tl.exp2(m - m_new)
        b_w = tl.exp2(b_lse - m_new)
        l = l * decay + tl.sum(b_w, 0)
        b_o = b_o * decay + tl.sum(b_part * b_w[:, None], 0)
        m = m_new
    i_out = i_b * rows + i_row
    tl.store(o_ptr + i_out * D + o_d, b_o / tl.where(l > 0, l, 1.0), mask=o_d < D)
    if i_part == 0:
        tl.store(lse_ptr + i_out + o_1, (m + tl.log2(l)) * 0.6931471805599453)


@triton.jit
def merge_kernel(part_o_ptrs, part_lse_ptrs, o_ptr, lse_ptr, D: tl.constexpr, D_PAD: tl.constexpr):
    """One row of several answers over different tokens.

    part_o_ptrs, part_lse_ptrs: tuples of [rows, D] and [rows] fp32; o_ptr, lse_ptr: the same
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    top = tl.maximum(tl.load(part_lse_ptrs[0] + i_row), EMPTY)
    for i in tl.static_range(1, len(part_lse_ptrs)):
        top = tl.maximum(top, tl.load(part_lse_ptrs[i] + i_row))
    l = tl.exp(tl.load(part_lse_ptrs[0] + i_row) - top)
    b_o = tl.load(part_o_ptrs[0] + i_row * D + o_d, mask=m_d, other=0.0) * l
    for i in tl.static_range(1, len(part_lse_ptrs)):
        weight = tl.exp(tl.load(part_lse_ptrs[i] + i_row) - top)
        b_o += tl.load(part_o_ptrs[i] + i_row * D + o_d, mask=m_d, other=0.0) * weight
        l += weight
    tl.store(o_ptr + i_row * D + o_d, b_o / tl.where(l > 0, l, 1.0), mask=m_d)
    tl.store(lse_ptr + i_row, top + tl.log(l))
