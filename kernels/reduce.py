"""Parts of attention become the answer, in one launch: the Triton form of reference.merge.

A part has a partial result (o, log-sum-exp) for each unit of work. Every program takes one row of
the answer and finds the units of its sequence in all parts; o is their sum, weighted by
2**(lse - largest).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.parts import UnitPart, UnitPartials
from disagg.kernels.reference import Partial
from disagg.kernels.shape import pad_batch
from disagg.kernels.tiles import EMPTY
from disagg.kernels.units import find_cut, pick

COLUMNS = 64  # channels that a program takes together
FEW, MANY = 16, 64  # units of a part that it takes together, and where a sequence has many
LOG2_E = 1.4426950408889634


@triton.jit
def merge_kernel(
    parts, o_ptr, lse_ptr, rows,
    PARTS: tl.constexpr, D: tl.constexpr, BATCH_PAD: tl.constexpr, UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row of the answer, COLUMNS channels of it.

    parts:          (o_ptr, lse_ptr, span_lo_ptr, span_hi_ptr, runs, slots, tile) of each, as
                    parts.py says; BATCH_PAD: at least the runs of any
    PARTS:          how many; Triton 3.6 cannot take the length of a tuple that has a None
    o_ptr, lse_ptr: [B, rows, D] of any float dtype, and [B, rows] fp32, lse natural
    """
    i_row, i_part, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_part * COLUMNS + tl.arange(0, COLUMNS)
    state = (
        tl.full([1], EMPTY, tl.float32),
        tl.zeros([1], tl.float32),
        tl.zeros([COLUMNS], tl.float32),
    )
    for i in tl.static_range(PARTS):
        first, count = units_of(parts[i], i_b, BATCH_PAD)
        state = add_units(parts[i], first, count, rows, i_row, o_d, state, D, UNITS)
    m, l, b_o = state
    i_out = i_b * rows + i_row
    p_o = o_ptr + i_out.to(tl.int64) * D + o_d
    b_o = b_o / tl.where(l > 0, l, 1.0)
    tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=o_d < D)
    if i_part == 0:
        tl.store(lse_ptr + i_out + tl.arange(0, 1), (m + tl.log2(l)) * 0.6931471805599453)


@triton.jit
def units_of(part, i_b, BATCH_PAD: tl.constexpr):
    """The first unit of a sequence in a part, and how many units it has there."""
    _, _, span_lo_ptr, span_hi_ptr, runs, slots, tile = part
    if span_hi_ptr is None:
        return i_b, 1
    else:
        all_runs = tl.num_programs(2) * runs
        _, _, units, before = find_cut(span_lo_ptr, span_hi_ptr, all_runs, slots, tile, BATCH_PAD)
        i_all = tl.arange(0, BATCH_PAD)
        own = tl.where(i_all // runs == i_b, units, 0)
        return pick(before, i_b * runs, i_all), tl.sum(own, 0)


@triton.jit
def add_units(
    part, first, count, rows, i_row, o_d, state, D: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """The state (m [1], l [1], o [COLUMNS]) after some units of a part."""
    m, l, b_o = state
    part_o_ptr, part_lse_ptr = part[0], part[1]
    o_u = tl.arange(0, UNITS)
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
    return m, l, b_o


def merge(parts: list[UnitPart], dtype: torch.dtype = torch.float32) -> Tensor:
    """The answer of all parts: [B, M, Hq, D] of dtype. See reference.merge."""
    return join(parts, dtype)[0]


def join(parts: list[UnitPart], dtype: torch.dtype = torch.float32) -> Partial:
    """The answer, and its log-sum-exp [B, M, Hq] fp32."""
    found = [as_units(part) for part in parts]
    o, queries, head_dim = found[0].o, found[0].queries, found[0].o.shape[2]
    for part in found:
        if part.queries != queries or part.o.shape[1:] != o.shape[1:]:
            raise ValueError(
                f"parts for {queries} and {part.queries} queries are not of one answer"
            )
    batch, rows = queries[0], o.shape[1]
    merged = torch.empty(*queries, head_dim, dtype=dtype, device=o.device)
    lse = torch.empty(queries, device=o.device)
    many = max(part.o.shape[0] for part in found) > 2 * FEW * batch
    pad = pad_batch(batch * max(part.runs for part in found))
    merge_kernel[(rows, triton.cdiv(head_dim, COLUMNS), batch)](
        tuple((x.o, x.lse, *x.spans, x.runs, x.o.shape[0], x.tile) for x in found), merged, lse,
        rows, len(found), head_dim, pad, MANY if many else FEW, COLUMNS,
        num_warps=4 if many else 1, enable_fp_fusion=False,
    )  # fmt: skip
    return merged, lse


def as_units(part: UnitPart) -> UnitPartials:
    """A part that is one (o, log-sum-exp), from the reference, as one unit of each sequence."""
    if isinstance(part, UnitPartials):
        return part
    o, lse = part
    if not all(x.is_contiguous() and x.dtype == torch.float32 for x in part):
        raise ValueError("parts are wanted in fp32, contiguous in memory")
    batch, queries, heads = lse.shape
    lse = (lse * LOG2_E).view(batch, -1)
    return UnitPartials(o.view(batch, queries * heads, -1), lse, (batch, queries, heads))
