"""Attention on codes, in plain torch: the spec of the kernels. Read this first.

Attention works on the compressed form. With x = scale * (code + zero) per group,

    score[t] = sum_d q[d] k[t,d] = sum_d (q[d] ks[d]) code[t,d] + sum_d q[d] ks[d] kz[d]
    out[d]   = sum_t p[t] v[t,d] = sum_t (p[t] vs[t]) code[d,t] + sum_t p[t] vs[t] vz[t]

so the scale goes into the vector, the zero into one number per group, and K and V are never built.
Both lines are the same contraction, because V is stored as K is with tokens and channels swapped.
Whatever else a query or a segment can absorb is absorbed once:

    scores   q -> T_S q -> q * scale of the segment, B^T q       once for each query and segment
             or q in the order of K's columns
             codes @ that, + A (B^T q), + sparse                 for each page
    output   p -> codes @ (p * scale), A^T p, + sparse           for each page, summed by segment
             T_S^T (...), + B (A^T p), or turned back            once for each query and segment

K in bands of columns is that many contractions, each with its part of q; where a band has no bits,
every token of a page gets the same: sum_c q[c] mean[c].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import LowRank, PageFormat, Scale, Side
from disagg.kernels.reference.pages import ArenaBlocks, Blocks, DenseBlocks
from disagg.kernels.reference.quantize import expand
from disagg.kernels.reference.softmax import (
    columns_of,
    masked_softmax,
    page_chunks,
    partial_of,
    seen_tokens,
    visible_pages,
)
from disagg.kernels.reference.turn import read_order, read_signs, turn_back
from disagg.kernels.view import Partial, View


def attend(q: Tensor, view: View, scale: float, cap: float = 0.0) -> Partial:
    """Attention over pages of codes. Arguments and results as in `exact.attend`.

    error: at most 1e-5 relative in fp32, 1e-12 in fp64, against exact attention on what
           `decode` makes of the pages
    """
    fmt = view.fmt
    assert isinstance(fmt, PageFormat)
    first, last = visible_pages(view, fmt.tokens)
    some = slice(first, last)
    pages = ArenaBlocks(
        view.arena, view.pages[:, some], view.base, view.heads, fmt.block_bytes
    )
    shared = _shared(view, fmt, pages, some)
    scores = _scores(columns_of(q * scale, view.heads), pages, fmt, shared).flatten(
        2, 3
    )
    seen = seen_tokens(view, first * fmt.tokens, scores.shape[2])
    if fmt.valid is not None:
        seen = seen & pages.bits(fmt.valid, fmt.tokens).flatten(2).unsqueeze(3)
    p, lse = masked_softmax(scores, seen, cap)
    o = _output(p.unflatten(2, (last - first, fmt.tokens)), pages, fmt, shared)
    return partial_of(o, lse, q.shape[1])


def decode(
    blocks: Tensor,
    segments: Tensor | None,
    fmt: PageFormat,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What attention sees: blocks [..., block_bytes] u8 -> k', v' [..., tokens, D] of dtype.

    segments: [..., segment_bytes] u8 - the segment of each block, if the format has any
    """
    pages = DenseBlocks(blocks)
    shared = pages if segments is None or fmt.has_own_basis else DenseBlocks(segments)
    k = torch.cat([_rebuild(side, pages, shared, dtype) for side in fmt.k_sides], -1)
    v = _rebuild(fmt.v, pages, shared, dtype).transpose(-1, -2)
    if fmt.turn:
        order = read_order(shared, fmt.turn, fmt.head_dim).unsqueeze(-2).expand_as(k)
        k = torch.empty_like(k).scatter_(-1, order, k)
        v = turn_back(v, read_signs(shared, fmt.turn, fmt.head_dim).unsqueeze(-2))
    found = []
    for x, side in ((k, fmt.k), (v, fmt.v)):
        if side.rotation:
            blockwise = x.unflatten(-1, (-1, side.rotation.block))
            x = (blockwise @ _matrix(side, shared, dtype).unsqueeze(-3)).flatten(-2)
        if low := side.low_rank:
            a = pages.plane(torch.float16, low.a, (fmt.tokens, low.rank)).to(dtype)
            x = x + a @ _basis(low, fmt, shared, dtype).transpose(-1, -2)
        found.append(x)
    return found[0], found[1]


@dataclass(frozen=True)
class Shared:
    """What pages of B sequences share, in one segment or several, and which each page belongs to.

    blocks: [B, S] records; owner: [B, P] i64
    """

    blocks: ArenaBlocks
    owner: Tensor

    def spread(self, x: Tensor, some: slice) -> Tensor:
        """From segments [B, H, S, ...] to their pages [B, H, P, ...]; [B, H, 1, ...] stays."""
        if x.shape[2] == 1:
            return x
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        return x.transpose(1, 2)[rows, self.owner[:, some]].transpose(1, 2)

    def collect(self, sums: Tensor, x: Tensor, some: slice) -> None:
        """Add pages [B, H, P, ...] to the sums of their segments [B, H, S, ...]."""
        if sums.shape[2] == 1:
            sums += x.sum(2, keepdim=True)
            return
        for row, owner in enumerate(self.owner[:, some]):
            sums[row].index_add_(1, owner, x[row])


def _shared(view: View, fmt: PageFormat, pages: ArenaBlocks, some: slice) -> Shared:
    """The segments of some pages of a view: the pages themselves where each has all of its own; one
    that nobody reads where nothing is shared."""
    if fmt.has_own_basis:
        each = torch.arange(pages.ids.shape[1], device=pages.ids.device)
        return Shared(pages, each.expand_as(pages.ids))
    if view.segments is None or view.owner is None:
        return Shared(pages.some(slice(1)), torch.zeros_like(pages.ids))
    at = view.arena, view.segments, view.segment_base, view.heads
    return Shared(ArenaBlocks(*at, fmt.segment_bytes), view.owner[:, some].long())


def _scores(x: Tensor, blocks: ArenaBlocks, fmt: PageFormat, shared: Shared) -> Tensor:
    """Queries x [B, H, D, N] -> scores of every page [B, H, P, tokens, N]."""
    side, plain = fmt.k, x.unsqueeze(2)
    vector, low, bias = plain, None, None
    if side.rotation:
        vector = rotate(vector, _matrix(side, shared.blocks, x.dtype))
    if side.low_rank:
        low = (
            _basis(side.low_rank, fmt, shared.blocks, x.dtype).transpose(-1, -2)
            @ vector
        )
    if side.scale.shared:
        scales, zeros = shared.blocks.scales(side, x.dtype)
        vector = vector * scales.transpose(-1, -2)
        bias = zeros @ vector
    if fmt.turn:
        vector = _ordered(plain, read_order(shared.blocks, fmt.turn, fmt.head_dim))
    found = []
    for some in page_chunks(blocks.ids, blocks.heads * fmt.tokens * fmt.head_dim):
        pages, here = blocks.some(some), shared.spread(vector, some)
        if bias is not None:
            out = pages.codes(side, x.dtype) @ here + shared.spread(bias, some)
        else:
            out = _contract_bands(pages, fmt.k_sides, here)
        if side.low_rank and low is not None:
            shape = fmt.tokens, side.low_rank.rank
            factor = pages.plane(torch.float16, side.low_rank.a, shape).to(x.dtype)
            out += factor @ shared.spread(low, some)
        if side.sparse:
            add_sparse(out, *pages.sparse(side, x.dtype), plain)
        found.append(out)
    return torch.cat(found, 2)


def _output(p: Tensor, blocks: ArenaBlocks, fmt: PageFormat, shared: Shared) -> Tensor:
    """Weights p [B, H, P, tokens, N] -> the weighted sum of values [B, H, D, N]."""
    side = fmt.v
    batch, heads, _, _, width = p.shape
    segments, rank = (
        shared.blocks.ids.shape[1],
        side.low_rank.rank if side.low_rank else 0,
    )
    sums = p.new_zeros(batch, heads, segments, side.rows, width)
    low = p.new_zeros(batch, heads, segments, rank, width)
    for some in page_chunks(blocks.ids, heads * side.rows * side.columns):
        pages, weights = blocks.some(some), p[:, :, some]
        codes = pages.codes(side, p.dtype)
        out = contract(codes, *pages.scales(side, p.dtype), side.scale, weights)
        if side.sparse:
            add_sparse(out, *pages.sparse(side, p.dtype), weights)
        shared.collect(sums, out, some)
        if side.low_rank:
            factor = pages.plane(torch.float16, side.low_rank.a, (fmt.tokens, rank)).to(
                p.dtype
            )
            shared.collect(low, factor.transpose(-1, -2) @ weights, some)
    if side.rotation:
        sums = rotate(sums, _matrix(side, shared.blocks, p.dtype).transpose(-1, -2))
    if side.low_rank:
        sums = sums + _basis(side.low_rank, fmt, shared.blocks, p.dtype) @ low
    if fmt.turn:
        signs = read_signs(shared.blocks, fmt.turn, fmt.head_dim).unsqueeze(-2)
        sums = turn_back(sums.transpose(-1, -2), signs).transpose(-1, -2)
    return sums.sum(2)


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [B, H, 1, D, N] in the order [B, H, S, D] of each segment: [B, H, S, D, N]."""
    shape = (*order.shape, x.shape[-1])
    return x.expand(shape).gather(-2, order.unsqueeze(-1).expand(shape))


def _contract_bands(pages: ArenaBlocks, sides: tuple[Side, ...], x: Tensor) -> Tensor:
    """Sum over the columns of all bands: x [..., columns, N] -> [..., rows, N]."""
    total = x.new_zeros(())
    for side, part in zip(
        sides, x.split([side.columns for side in sides], -2), strict=True
    ):
        scales, zeros = pages.scales(side, x.dtype)
        if side.bits:
            codes = pages.codes(side, x.dtype)
            total = total + contract(codes, scales, zeros, side.scale, part)
        else:
            total = total + scales @ part
    return total


def contract(
    codes: Tensor, scales: Tensor, zeros: Tensor, kind: Scale, x: Tensor
) -> Tensor:
    """Sum over columns of scale * (code + zero) * x, never forming scale * (code + zero).

    codes:         [..., rows, columns]
    scales, zeros: [..., *side.scale_shape]
    x:             [..., columns, N]
    returns:       [..., rows, N]
    """
    if kind.by == "column":
        groups, rows = scales.shape[-2], codes.shape[-2]
        folded = scales.unsqueeze(-1) * x.unsqueeze(-3)  # [..., groups, columns, N]
        bias = zeros.unsqueeze(-2) @ folded
        return (codes.unflatten(-2, (groups, rows // groups)) @ folded + bias).flatten(
            -3, -2
        )
    groups, columns = scales.shape[-2], codes.shape[-1]
    grouped_x = x.unflatten(-2, (groups, columns // groups))  # [..., groups, group, N]
    grouped = codes.unflatten(-1, (groups, columns // groups)).transpose(-3, -2)
    sums = grouped @ grouped_x + zeros.unsqueeze(-1) * grouped_x.sum(-2, keepdim=True)
    return (sums * scales.unsqueeze(-1)).sum(-3)


def add_sparse(out: Tensor, index: Tensor, delta: Tensor, x: Tensor) -> None:
    """out [..., rows, N] += delta * x at the rows `index` [..., columns, slots] of each column."""
    terms = (delta.unsqueeze(-1) * x.unsqueeze(-2)).flatten(
        -3, -2
    )  # [..., columns * slots, N]
    rows = index.flatten(-2).unsqueeze(-1).expand_as(terms)
    out.scatter_add_(-2, rows, terms)


def rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., D, N] -> matrix [..., block, block] x, block by block of channels."""
    blocks = x.unflatten(-2, (-1, matrix.shape[-1]))
    return (matrix.unsqueeze(-3) @ blocks).flatten(-3, -2)


def _rebuild(side: Side, pages: Blocks, shared: Blocks, dtype: torch.dtype) -> Tensor:
    """What codes and sparse slots stand for: [..., rows, columns] of dtype."""
    source = shared if side.scale.shared else pages
    scales, zeros = (expand(y, side) for y in source.scales(side, dtype))
    if not side.bits:
        return scales
    x = (pages.codes(side, dtype) + zeros) * scales
    if side.sparse:
        x.transpose(-1, -2).scatter_add_(-1, *pages.sparse(side, dtype))
    return x


def _basis(low: LowRank, fmt: PageFormat, shared: Blocks, dtype: torch.dtype) -> Tensor:
    """B of a low-rank product: [..., head_dim, rank] of dtype."""
    return shared.plane(torch.float16, low.b, (fmt.head_dim, low.rank)).to(dtype)


def _matrix(side: Side, shared: Blocks, dtype: torch.dtype) -> Tensor:
    """T_S of a rotation: [..., block, block] of dtype."""
    assert side.rotation is not None
    block = side.rotation.block
    return shared.plane(torch.float16, side.rotation.matrix, (block, block)).to(dtype)
