"""Attention on a CPU: one call of the C library attends to all views of a query.

The torch reference attends to what the library does not support, view by view: queries in fp64, and
pages of other sizes.
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
    values_of,
)
from disagg.kernels.formats import (
    RAW_SLOTS,
    ExactFormat,
    Format,
    PageFormat,
    Side,
    value_dim,
)
from disagg.kernels.view import Partial, View

MAX_DIM = 576
MIN_WORDS = 32  # code words of a token whose channels are values
MAX_TOKENS = 128
MAX_RANK = 16
MAX_SLOTS = 64
# of a vector that codes are contracted with
MAX_GROUPS = 64
MAX_SPAN = 256
MAX_NUMBERS = 4096


def is_served(fmt: Format, q: Tensor) -> bool:
    """Whether the library attends to such pages for these queries."""
    return (
        q.dtype == torch.float32
        and not q.is_cuda
        and backend() != TORCH
        and _is_supported(fmt)
    )


def attend(q: Tensor, views: Sequence[View], scale: float, cap: float = 0.0) -> Partial:
    """Attention over the tokens of all views: o [B, M, Hq, D], lse [B, M, Hq] fp32.

    Over latents o is [B, M, Hq, latent].

    error: 1e-5 relative over raw pages, CODE_ERRORS over codes
    """
    q = q.contiguous()
    heads = views[0].heads
    batch, m, query_heads, head_dim = q.shape
    o = q.new_empty(batch, m, query_heads, value_dim(views[0].fmt))
    lse = q.new_empty(batch, m, query_heads)
    tables, owners = fill(views)
    job = AttentionC(
        tables=ctypes.addressof(tables),
        q=address(q),
        o=address(o),
        lse=address(lse),
        num_tables=len(views),
        batch=batch,
        m=m,
        heads=heads,
        width=query_heads // heads,
        head_dim=head_dim,
        type=TYPES[q.dtype],
        q_row=query_heads * head_dim,
        q_head=head_dim,
        layer=0,
        ahead=0,
        scale=scale,
        cap=cap,
    )
    call("disagg_attend", job)
    del owners
    return o, lse


def fill(views: Sequence[View]) -> tuple[ctypes.Array, list[list[object]]]:
    """The tables of views, and the objects that own their memory: hold these during the call."""
    tables = (TableC * len(views))()
    owners = [_fill(table, view) for table, view in zip(tables, views, strict=True)]
    return tables, owners


def _fill(table: ctypes.Structure, view: View) -> list[object]:
    assert not isinstance(view.fmt, ExactFormat) or view.fmt.counted
    num_pages = view.pages.shape[1]
    segments = view.segments
    owner = view.owner
    segment_base = view.segment_base
    if isinstance(view.fmt, PageFormat) and view.fmt.has_own_basis:
        segments = view.pages
        owner = torch.arange(num_pages, dtype=torch.int32).expand_as(view.pages)
        segment_base = view.base
    tensors = (view.pages, view.lo, view.hi, segments, owner)
    contiguous = [None if x is None else x.contiguous() for x in tensors]
    pages, lo, hi, segments, owner = contiguous
    fmt = format_of(view.fmt)
    table.format = ctypes.addressof(fmt)
    table.arena = address(view.arena)
    table.pages = address(pages)
    table.lo = address(lo)
    table.hi = address(hi)
    table.segments = address(segments)
    table.owner = address(owner)
    table.num_pages = num_pages
    table.num_segments = 0 if segments is None else segments.shape[1]
    table.base = view.base
    table.segment_base = segment_base
    return [*contiguous, fmt]


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [_, _, D] as the library reads it: of this dtype, the numbers of a token adjacent."""
    x = x.to(dtype)
    if x.stride(2) == 1:
        return x
    return x.contiguous()


@lru_cache(maxsize=256)
def _is_supported(fmt: Format) -> bool:
    if fmt.head_dim % 16 or fmt.head_dim > MAX_DIM or value_dim(fmt) % 16:
        return False
    if isinstance(fmt, ExactFormat):
        return fmt.counted and fmt.tokens == RAW_SLOTS
    if not isinstance(fmt, PageFormat) or len(fmt.k_sides) > MAX_BANDS:
        return False
    if fmt.tokens % 32 or fmt.tokens > MAX_TOKENS or not _has_supported_values(fmt):
        return False
    return all(map(_is_supported_side, fmt.sides))


def _has_supported_values(fmt: PageFormat) -> bool:
    if fmt.v is not None:
        return fmt.v.scale.by != "row"
    k = fmt.k
    is_plain = not (k.low_rank or k.sparse or k.rotation or fmt.bands or fmt.hadamard)
    is_wide = k.floating or k.columns // k.halves >= MIN_WORDS
    return is_plain and is_wide and _has_supported_scales(values_of(fmt))


def _is_supported_side(side: Side) -> bool:
    low = side.low_rank
    sparse = side.sparse
    if low and (low.rank > MAX_RANK or side.rotation):
        return False
    if sparse and (side.rows > 256 or sparse.slots > MAX_SLOTS):
        return False
    return _has_supported_scales(side)


def _has_supported_scales(side: Side) -> bool:
    scale = side.scale
    if side.floating or scale.by == "block":
        return side.floating and scale.by == "block"
    if scale.by == "row" and (scale.group % 16 or side.sparse):
        return False
    if scale.by == "row":
        return side.columns // scale.group <= MAX_GROUPS
    groups = side.rows // scale.group
    numbers = groups * max(side.columns, MAX_SPAN)
    return groups <= MAX_GROUPS and numbers <= MAX_NUMBERS
