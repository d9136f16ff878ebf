"""Partial results become the answer, in one launch: the Triton form of reference/softmax.merge.

Attention has a partial result (o, log-sum-exp) of each unit of work. Every program takes one row of
the answer and the units of its sequence; o is their sum, weighted by 2**(lse - most).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.tiles import EMPTY
from disagg.kernels.view import Partial

COLUMNS = 64  # channels that a program takes together
FEW = 16  # units that it takes together, and where a sequence has many
MANY = 64
WARPS = {FEW: 1, MANY: 4}


@dataclass(frozen=True)
class UnitPartials:
    """The partial results of units of work, each over its own tokens.

    o:       [U, M * Hq, D] fp32
    lse:     [U, M * Hq] fp32, log2 of the sum of exponentials
    queries: (B, M, Hq)
    starts:  [B + 1] int32, as in `WorkPlan`
    """

    o: Tensor
    lse: Tensor
    queries: tuple[int, ...]
    starts: Tensor


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    part_o_ptr, part_lse_ptr, starts_ptr, sinks_ptr, o_ptr, lse_ptr, rows,
    D: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One row of the answer, COLUMNS channels of it.

    part_o_ptr, part_lse_ptr, starts_ptr: as `UnitPartials` says
    sinks_ptr: [SINKS] of any float dtype, one of each query head; nowhere if that is 0
    o_ptr, lse_ptr: [B, rows, D] of any float dtype, and [B, rows] fp32, lse natural
    """
    i_row = tl.program_id(0)
    i_part = tl.program_id(1)
    i_b = tl.program_id(2)
    o_d = i_part * COLUMNS + tl.arange(0, COLUMNS)
    o_u = tl.arange(0, UNITS)
    m = tl.full([1], EMPTY, tl.float32)
    l = tl.zeros([1], tl.float32)
    b_o = tl.zeros([COLUMNS], tl.float32)
    if SINKS > 0:
        sink = tl.load(sinks_ptr + i_row % SINKS + tl.arange(0, 1)).to(tl.float32)
        m = sink * 1.4426950408889634
        l = l + 1.0
    end = tl.load(starts_ptr + i_b + 1)
    for i in range(tl.load(starts_ptr + i_b), end, UNITS):
        m_u = i + o_u < end
        i_unit = (i + o_u) * rows + i_row
        b_lse = tl.load(part_lse_ptr + i_unit, mask=m_u, other=float("-inf"))
        p_part = part_o_ptr + i_unit.to(tl.int64)[:, None] * D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_u[:, None] & (o_d < D)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        decay = tl.exp2(m - m_new)
        b_w = tl.exp2(b_lse - m_new)
        l = l * decay + tl.sum(b_w, 0)
        b_o = b_o * decay + tl.sum(b_part * b_w[:, None], 0)
        m = m_new
    i_out = i_b * rows + i_row
    p_o = o_ptr + i_out.to(tl.int64) * D + o_d
    b_o = b_o / tl.where(l > 0, l, 1.0)
    tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=o_d < D)
    if i_part == 0:
        p_lse = lse_ptr + i_out + tl.arange(0, 1)
        tl.store(p_lse, (m + tl.log2(l)) * 0.6931471805599453)


def merge(
    partials: UnitPartials,
    dtype: torch.dtype = torch.float32,
    sinks: Tensor | None = None,
) -> Partial:
    """The answer [B, M, Hq, D] of dtype, and its log-sum-exp [B, M, Hq] fp32; sinks: `Softmax`."""
    o = partials.o
    queries = partials.queries
    head_dim = partials.o.shape[2]
    batch = queries[0]
    rows = o.shape[1]
    merged = torch.empty(*queries, head_dim, dtype=dtype, device=o.device)
    lse = torch.empty(queries, device=o.device)
    heads = 0 if sinks is None else queries[2]
    units = MANY if o.shape[0] > 2 * FEW * batch else FEW
    merge_kernel[(rows, triton.cdiv(head_dim, COLUMNS), batch)](
        o, partials.lse, partials.starts, lse if sinks is None else sinks, merged, lse, rows,
        head_dim, units, COLUMNS, heads, num_warps=WARPS[units], enable_fp_fusion=False,
    )  # fmt: skip
    return merged, lse
