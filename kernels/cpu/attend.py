"""Attention on a CPU: one call of the C library serves all views of a query that it knows.

What it does not know is left to the torch reference, view by view: fp64, and pages of other sizes.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from disagg.kernels.cpu.library import (
    MAX_BANDS,
    TORCH,
    TYPES,
    AttentionC,
    TableC,
    address,
    backend,
    call,
    format_of,
)
from disagg.kernels.formats import RAW_SLOTS, ExactFormat, Format, PageFormat, Side
from disagg.kernels.view import Partial, View

MAX_DIM, MAX_TOKENS, MAX_RANK, MAX_SLOTS = 512, 128, 16, 64
MAX_GROUPS, MAX_SPAN, MAX_NUMBERS = 64, 256, 4096  # of a vector that is contracted


def is_served(fmt: Format, q: Tensor) -> bool:
    """Whether the library attends to such pages for these queries."""
    return (
        q.dtype == torch.float32
        and not q.is_cuda
        and backend() != TORCH
        and _is_known(fmt)
    )


def attend(q: Tensor, views: Sequence[View], scale: float, cap: float = 0.0) -> Partial:
    """Attention over the tokens of all views: o [B, M, Hq, D], lse [B, M, Hq] fp32.

    error: 1e-5 relative over raw pages, CODE_ERRORS over codes
    """
    q, heads = q.contiguous(), views[0].heads
    batch, m, query_heads, head_dim = q.shape
    o, lse = torch.empty_like(q), q.new_empty(batch, m, query_heads)
    tables, held = fill(views)
    job = AttentionC(
        *(ctypes.addressof(tables), address(q), address(o), address(lse)),
        *(len(views), batch, m, heads, query_heads // heads, head_dim, TYPES[q.dtype]),
        *(query_heads * head_dim, head_dim, 0, 0, scale, cap),
    )
    call("disagg_attend", job)
    del held  # what the library read
    return o, lse


def fill(views: Sequence[View]) -> tuple[ctypes.Array, list[list[object]]]:
    """Where views are; and what has to stay until it was read."""
    tables = (TableC * len(views))()
    return tables, [
        _fill(table, view) for table, view in zip(tables, views, strict=True)
    ]


def _fill(table: ctypes.Structure, view: View) -> list[object]:
    assert not isinstance(view.fmt, ExactFormat) or view.fmt.counted
    segments, owner, base = view.segments, view.owner, view.segment_base
    if isinstance(view.fmt, PageFormat) and view.fmt.has_own_basis:
        segments, base = view.pages, view.base
        owner = torch.arange(view.pages.shape[1], dtype=torch.int32).expand_as(
            view.pages
        )
    tensors = (view.pages, view.lo, view.hi, segments, owner)
    held = [None if x is None else x.contiguous() for x in tensors]
    count, fmt = 0 if segments is None else segments.shape[1], format_of(view.fmt)
    values = (
        *(ctypes.addressof(fmt), address(view.arena), *map(address, held)),
        *(view.pages.shape[1], count, view.base, base),
    )
    table.__init__(*values)  # type: ignore[misc]
    return [*held, fmt]


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [_, _, D] as the library reads it: of a dtype, the numbers of a token side by side."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


@lru_cache(maxsize=256)
def _is_known(fmt: Format) -> bool:
    if fmt.head_dim % 16 or fmt.head_dim > MAX_DIM:
        return False
    if isinstance(fmt, ExactFormat):
        return fmt.counted and fmt.tokens == RAW_SLOTS
    if not isinstance(fmt, PageFormat) or len(fmt.k_sides) > MAX_BANDS:
        return False
    if fmt.tokens % 32 or fmt.tokens > MAX_TOKENS or fmt.v.scale.by == "row":
        return False
    return all(_is_known_side(side) for side in (*fmt.k_sides, fmt.v))


def _is_known_side(side: Side) -> bool:
    scale = side.scale
    if side.low_rank and (side.low_rank.rank > MAX_RANK or side.rotation):
        return False
    if side.sparse and (side.rows > 256 or side.sparse.slots > MAX_SLOTS):
        return False
    if side.floating or scale.by == "block":
        return side.floating and scale.by == "block"
    if scale.by == "row" and (scale.group % 16 or side.sparse):
        return False
    groups = (side.rows if scale.by == "column" else side.columns) // scale.group
    return groups <= MAX_GROUPS and groups * max(side.columns, MAX_SPAN) <= MAX_NUMBERS
