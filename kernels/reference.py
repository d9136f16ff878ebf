"""What every attention kernel computes, in plain torch: read this first.

On a CPU it computes in fp64; fp32 takes the C library in cpu/, which says the same less plainly.

Attention works on the compressed form. With x = scale * (code + zero) per group,

    score[t] = sum_d q[d] k[t,d] = sum_d (q[d] ks[d]) code[t,d] + sum_d q[d] ks[d] kz[d]
    out[d]   = sum_t p[t] v[t,d] = sum_t (p[t] vs[t]) code[d,t] + sum_t p[t] vs[t] vz[t]

so the scale goes into the vector, the zero into one number per group, and K and V are never built.
Both lines are the same contraction, because V is stored as K is with tokens and channels swapped.

The arithmetic runs in the dtype of q, so that fp64 shows the algebra to be exact.

Encoding is in reference_encode.py, moving bytes in reference_pages.py, checks in ops.py.
"""

import torch
from torch import Tensor

from disagg.kernels.formats import PLANES, QuantFormat, RawFormat
from disagg.kernels.reference_pages import gather_raw, plane_view
from disagg.kernels.reference_words import unpack_words

# elements of codes unpacked at once: as floats they stay in a core's second-level cache
CHUNK_ELEMENTS = 1 << 19

Partial = tuple[Tensor, Tensor]


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
    """Attention over raw pages.

    q:       [B, M, Hq, D] fp32 or fp64 - query head i reads KV head i // (Hq/heads)
    arena:   [bytes] u8
    pages:   [B, P] i32 - page ids in token order
    lo, hi:  [B, M] i32 - query (b, m) sees tokens lo <= t < hi, counted from pages[b, 0]
    base:    byte offset of this layer's layer page inside a page
    scale:   multiplies q.k
    returns: o [B, M, Hq, D], lse [B, M, Hq] of the dtype of q - the natural log of
             sum exp(scale * q.k); a query that sees nothing has o = 0 and lse = -inf
    """
    first, last = visible_pages(lo, hi, fmt.tokens)
    k, v = gather_raw(arena, pages[:, first:last], fmt, base, heads)
    columns = columns_of(q * scale, heads)
    scores = k.to(q.dtype) @ columns
    p, lse = masked_softmax(scores, lo - first * fmt.tokens, hi - first * fmt.tokens)
    o = v.to(q.dtype).transpose(2, 3) @ p
    return rows_of(o, q.shape[1]), rows_of(lse.unsqueeze(2), q.shape[1]).squeeze(3)


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
    """Attention over quantised pages, on the codes. Arguments and results as in `attend_raw`.

    error: at most 1e-5 relative in fp32, 1e-12 in fp64, against exact attention on what
           `decode_quantized` makes of the pages
    """
    first, last = visible_pages(lo, hi, fmt.tokens)
    pages, tokens = pages[:, first:last], fmt.tokens
    columns = columns_of(q * scale, heads)
    batch, _, head_dim, width = columns.shape
    scores = columns.new_empty(batch, heads, last - first, tokens, width)
    for part in page_chunks(pages, heads * tokens * head_dim):
        codes, scales, zeros = _side(arena, pages[:, part], fmt, "k", base, heads, q.dtype)
        scores[:, :, part] = _contract(codes, scales, zeros, columns.unsqueeze(2))
    shift = first * tokens
    p, lse = masked_softmax(scores.flatten(2, 3), lo - shift, hi - shift)
    p = p.unflatten(2, (last - first, tokens))
    o = columns.new_zeros(batch, heads, head_dim, width)
    for part in page_chunks(pages, heads * tokens * head_dim):
        codes, scales, zeros = _side(arena, pages[:, part], fmt, "v", base, heads, q.dtype)
        o += _contract(codes, scales, zeros, p[:, :, part]).sum(2)
    return rows_of(o, q.shape[1]), rows_of(lse.unsqueeze(2), q.shape[1]).squeeze(3)


def merge(parts: list[Partial]) -> Tensor:
    """Attention over the union of disjoint token sets, from attention over each: [B, M, Hq, D]."""
    lse = torch.stack([part[1] for part in parts])
    weights = _exp_or_zero(lse, lse.amax(0))
    total = weights.sum(0).clamp_min(1.0)  # the largest term is 1; all zero where nothing is seen
    o = torch.stack([part[0] for part in parts])
    return (o * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)


def _contract(codes: Tensor, scales: Tensor, zeros: Tensor, x: Tensor) -> Tensor:
    """Sum over columns c of scale * (code + zero) * x, never forming scale * (code + zero).

    codes:         [..., rows, columns]
    scales, zeros: [..., rows/group, columns] - one per group of rows
    x:             [..., columns, N]
    returns:       [..., rows, N]
    """
    rows = codes.shape[-2]
    groups = scales.shape[-2]
    folded = scales.unsqueeze(-1) * x.unsqueeze(-3)  # [..., groups, columns, N]
    bias = (zeros.unsqueeze(-2) @ folded).expand(*folded.shape[:-2], rows // groups, -1)
    grouped = codes.unflatten(-2, (groups, rows // groups))
    return (grouped @ folded).add_(bias).flatten(-3, -2)


def _side(
    arena: Tensor,
    pages: Tensor,
    fmt: QuantFormat,
    side: str,
    base: int,
    heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [B, heads, P, rows, columns], scales and zeros [B, heads, P, rows/group, columns]."""
    if side == "k":
        rows, columns, group = fmt.tokens, fmt.head_dim, fmt.k_group
        offsets = (fmt.k_codes, fmt.k_scale, fmt.k_zero)
    else:
        rows, columns, group = fmt.head_dim, fmt.tokens, fmt.v_group
        offsets = (fmt.v_codes, fmt.v_scale, fmt.v_zero)
    shapes = ((rows // PLANES, columns // fmt.halves),) + 2 * ((rows // group, columns),)
    planes: list[Tensor] = []
    for offset, shape in zip(offsets, shapes, strict=True):
        stored = torch.float16 if planes else torch.int16
        plane = plane_view(arena, stored, base + offset, heads, fmt.block_bytes, shape)
        found = plane.index_select(0, pages.flatten()).unflatten(0, pages.shape)
        planes.append(found.transpose(1, 2))
    return unpack_words(planes[0], fmt.bits, dtype), planes[1].to(dtype), planes[2].to(dtype)


def visible_pages(lo: Tensor, hi: Tensor, tokens: int) -> tuple[int, int]:
    """The range of page columns that some query sees; at least one page."""
    sees = hi > lo
    if not sees.any():
        return 0, 1
    first = int(lo[sees].min()) // tokens
    return first, -(-int(hi[sees].max()) // tokens)


def page_chunks(pages: Tensor, page_elements: int) -> list[slice]:
    """Page columns in pieces of about CHUNK_ELEMENTS codes."""
    batch, count = pages.shape
    step = max(1, CHUNK_ELEMENTS // (batch * page_elements))
    return [slice(start, start + step) for start in range(0, count, step)]


def columns_of(q: Tensor, heads: int) -> Tensor:
    """[B, M, Hq, D] -> [B, heads, D, M * G]: the queries that read a KV head, side by side."""
    batch, m, _, head_dim = q.shape
    grouped = q.view(batch, m, heads, -1, head_dim).permute(0, 2, 4, 1, 3)
    return grouped.reshape(batch, heads, head_dim, -1)


def rows_of(x: Tensor, m: int) -> Tensor:
    """[B, heads, D, M * G] -> [B, M, Hq, D]: the inverse of `columns_of`."""
    batch, heads, head_dim, _ = x.shape
    return x.view(batch, heads, head_dim, m, -1).permute(0, 3, 1, 4, 2).flatten(2, 3).contiguous()


def masked_softmax(scores: Tensor, lo: Tensor, hi: Tensor) -> Partial:
    """scores [B, heads, tokens, M * G] -> weights of the same shape, lse [B, heads, M * G]."""
    position = torch.arange(scores.shape[2], device=scores.device)[:, None]
    seen = (position >= lo[:, None, :]) & (position < hi[:, None, :])  # [B, tokens, M]
    if not seen.all():
        width = scores.shape[3] // lo.shape[1]
        hidden = ~seen.repeat_interleave(width, 2).unsqueeze(1)
        scores = scores.masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(2)
    return _exp_or_zero(scores, lse.unsqueeze(2)), lse


def _exp_or_zero(x: Tensor, top: Tensor) -> Tensor:
    """exp(x - top), and 0 where both are -inf."""
    return (x - top.masked_fill(top == -torch.inf, 0.0)).exp_()
