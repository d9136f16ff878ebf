"""Partial results become the answer, in one launch: the Triton form of reference/softmax.merge.

A view has a partial result (o, log-sum-exp) of each unit of work. Every program takes one row of
the answer and the units of its sequence in all views; o is their sum, weighted by 2**(lse - most).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.tiles import EMPTY
from disagg.kernels.view import Partial

COLUMNS = 64  # channels that a program takes together
FEW, MANY = 16, 64  # units of a view that it takes together, and where a sequence has many
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class UnitPartials:
    """What the units of work of a view found, each over tokens of its own.

    o:       [U, M * Hq, D] fp32; lse: [U, M * Hq] fp32, log2 of the sum of exponentials
    queries: (B, M, Hq)
    starts:  [B + 1] int32, as in `Units`; None: unit b is all of sequence b
    """

    o: Tensor
    lse: Tensor
    queries: tuple[int, ...]
    starts: Tensor | None = None


@triton.jit
def merge_kernel(
    views, o_ptr, lse_ptr, rows,
    VIEWS: tl.constexpr, D: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row of the answer, COLUMNS channels of it.

    views:          (o_ptr, lse_ptr, starts_ptr) of each, as `UnitPartials` says
    VIEWS:          how many; Triton 3.6 cannot take the length of a tuple that has a None
    o_ptr, lse_ptr: [B, rows, D] of any float dtype, and [B, rows] fp32, lse natural
    """
    i_row, i_part, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_part * COLUMNS + tl.arange(0, COLUMNS)
    state = (
        tl.full([1], EMPTY, tl.float32),
        tl.zeros([1], tl.float32),
        tl.zeros([COLUMNS], tl.float32),
    )
    for i in tl.static_range(VIEWS):
        starts_ptr = views[i][2]
        first, end = i_b, i_b + 1
        if starts_ptr is not None:
            first, end = tl.load(starts_ptr + i_b), tl.load(starts_ptr + i_b + 1)
        state = add_units(views[i], first, end, rows, i_row, o_d, state, D, UNITS)
    m, l, b_o = state
    i_out = i_b * rows + i_row
    p_o = o_ptr + i_out.to(tl.int64) * D + o_d
    b_o = b_o / tl.where(l > 0, l, 1.0)
    tl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=o_d < D)
    if i_part == 0:
        tl.store(lse_ptr + i_out + tl.arange(0, 1), (m + tl.log2(l)) * 0.6931471805599453)


@triton.jit
def add_units(view, first, end, rows, i_row, o_d, state, D: tl.constexpr, UNITS: tl.constexpr):
    """The state (m [1], l [1], o [COLUMNS]) after units first .. end - 1 of a view."""
    m, l, b_o = state
    part_o_ptr, part_lse_ptr = view[0], view[1]
    o_u = tl.arange(0, UNITS)
    for i in range(first, end, UNITS):
        m_u = i + o_u < end
        i_out = (i + o_u) * rows + i_row
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


def merge(found: Sequence[UnitPartials | Partial], dtype: torch.dtype = torch.float32) -> Tensor:
    """The answer of all views: [B, M, Hq, D] of dtype."""
    return join(found, dtype)[0]


def join(found: Sequence[UnitPartials | Partial], dtype: torch.dtype = torch.float32) -> Partial:
    """The answer, and its log-sum-exp [B, M, Hq] fp32."""
    views = [_as_units(view) for view in found]
    o, queries, head_dim = views[0].o, views[0].queries, views[0].o.shape[2]
    for view in views:
        if view.queries != queries or view.o.shape[1:] != o.shape[1:]:
            raise ValueError(f"views of {queries} and {view.queries} queries are not of one answer")
    batch, rows = queries[0], o.shape[1]
    merged = torch.empty(*queries, head_dim, dtype=dtype, device=o.device)
    lse = torch.empty(queries, device=o.device)
    many = max(view.o.shape[0] for view in views) > 2 * FEW * batch
    merge_kernel[(rows, triton.cdiv(head_dim, COLUMNS), batch)](
        tuple((x.o, x.lse, x.starts) for x in views), merged, lse, rows, len(views),
        head_dim, MANY if many else FEW, COLUMNS,
        num_warps=4 if many else 1, enable_fp_fusion=False,
    )  # fmt: skip
    return merged, lse


def _as_units(found: UnitPartials | Partial) -> UnitPartials:
    """One (o, log-sum-exp), from the reference, as one unit of each sequence."""
    if isinstance(found, UnitPartials):
        return found
    o, lse = found
    if not all(x.is_contiguous() and x.dtype == torch.float32 for x in found):
        raise ValueError("partial results are wanted in fp32, contiguous in memory")
    batch, queries, heads = lse.shape
    lse = (lse * LOG2_E).view(batch, -1)
    return UnitPartials(o.view(batch, queries * heads, -1), lse, (batch, queries, heads))
