"""Attention on a CPU: tables wait until they are merged, then one call of the library serves all.

What it does not know goes to the torch reference, table by table: fp64, and pages of other sizes.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from disagg.kernels.cpu.library import (
    TORCH,
    AttentionC,
    TableC,
    address,
    backend,
    call,
    format_of,
)
from disagg.kernels.formats import RawFormat
from disagg.kernels.formats_paged import PagedFormat, Side
from disagg.kernels.reference import Partial

MAX_DIM, MAX_TOKENS, MAX_RANK, OPERANDS, MAX_GROUPS, TILE, SPAN = 512, 128, 16, 16384, 64, 4, 256


@dataclass(frozen=True)
class Waiting:
    """A page table whose attention nobody asked for yet. Arguments as in `reference_paged`."""

    q: Tensor
    arena: Tensor
    pages: Tensor
    lo: Tensor
    hi: Tensor
    fmt: PagedFormat | RawFormat
    base: int
    heads: int
    scale: float
    segments: Tensor | None = None
    owner: Tensor | None = None
    segment_base: int = 0


def is_served(fmt: PagedFormat | RawFormat, q: Tensor) -> bool:
    """Whether the library attends to such pages for these queries."""
    return q.dtype == torch.float32 and not q.is_cuda and backend() != TORCH and _is_known(fmt)


def attend(waiting: list[Waiting]) -> Partial:
    """Attention over the tokens of all tables: o [B, M, Hq, D], lse [B, M, Hq] fp32.

    error: 1e-5 relative over raw pages, CODE_ERRORS over codes
    """
    one = waiting[0]
    q = one.q.contiguous()
    batch, m, query_heads, head_dim = q.shape
    o, lse = torch.empty_like(q), q.new_empty(batch, m, query_heads)
    tables = (TableC * len(waiting))()
    held = [_fill(table, x) for table, x in zip(tables, waiting, strict=True)]
    job = AttentionC(
        *(ctypes.addressof(tables), address(q), address(o), address(lse)),
        *(len(waiting), batch, m, one.heads, query_heads // one.heads, head_dim),
        one.scale,
    )
    call("disagg_attend", job)
    del held  # the tensors that the library read
    return o, lse


def _fill(table: ctypes.Structure, x: Waiting) -> list[Tensor | None]:
    """Say where a table is; the tensors that have to stay until it was read."""
    tensors = (x.pages, x.lo, x.hi, x.segments, x.owner)
    held = [None if y is None else y.contiguous() for y in tensors]
    segments = 0 if x.segments is None else x.segments.shape[1]
    values = (
        *(ctypes.addressof(format_of(x.fmt)), address(x.arena), *map(address, held)),
        *(x.pages.shape[1], segments, x.base, x.segment_base),
    )
    table.__init__(*values)  # type: ignore[misc]
    return held


@lru_cache(maxsize=256)
def _is_known(fmt: PagedFormat | RawFormat) -> bool:
    if fmt.head_dim % 16 or fmt.head_dim > MAX_DIM:
        return False
    if isinstance(fmt, RawFormat):
        return fmt.tokens == 16
    if fmt.tokens % 32 or fmt.tokens > MAX_TOKENS or fmt.v.scale.by == "row":
        return False
    return all(_is_known_side(side) for side in (fmt.k, fmt.v))


def _is_known_side(side: Side) -> bool:
    scale = side.scale
    if side.low_rank and (side.low_rank.rank > MAX_RANK or side.rotation):
        return False
    if side.sparse and side.rows > 256:
        return False
    if side.floating or scale.by == "block":
        return side.floating and scale.by == "block"
    if scale.by == "row" and (scale.group % 16 or side.sparse):
        return False
    groups = (side.rows if scale.by == "column" else side.columns) // scale.group
    return groups <= MAX_GROUPS and groups * TILE * max(side.columns, SPAN) <= OPERANDS
