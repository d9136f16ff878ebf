"""Attention on codes, in plain torch: the spec of the kernels. Read this first.

Attention works on the compressed form. With x = scale * (code + zero) per group,

    score[t] = sum_d q[d] k[t,d] = sum_d (q[d] ks[d]) code[t,d] + sum_d q[d] ks[d] kz[d]
    out[d]   = sum_t p[t] v[t,d] = sum_t (p[t] vs[t]) code[d,t] + sum_t p[t] vs[t] vz[t]

so the scale goes into the vector, the zero into one number per group, and K and V are never built.
Both lines are the same contraction, because V is stored as K is with tokens and channels swapped.
Rotations, orders, segment scales and low-rank bases are applied once, to queries and outputs:

    scores   q -> T_S q -> q * scale of the segment, B^T q       once for each query and segment
             or q in the order of K's columns
             codes @ that, + A (B^T q), + sparse                 for each page
    output   p -> codes @ (p * scale), A^T p, + sparse           for each page, summed by segment
             T_S^T (...), + B (A^T p), or rotated back           once for each query and segment

Of a latent, V is the first channels of K: its codes are contracted again, lying, where a scale for
each column is one for each row:

    out[c]   = sum_t p[t] k[t,c] = sum_groups ks[c] (sum_t p[t] code[t,c] + kz[c] sum_t p[t])

K in bands of columns is one contraction per band, each with its part of q. A band without bits adds
the same to every token of a page: sum_c q[c] mean[c].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import LowRank, PageFormat, Scale, Side
from disagg.kernels.reference import hadamard
from disagg.kernels.reference.pages import ArenaBlocks, Blocks, DenseBlocks
from disagg.kernels.reference.quantize import expand
from disagg.kernels.reference.softmax import (
    columns_of,
    masked_softmax,
    page_chunks,
    partial_of,
    visible_pages,
    visible_tokens,
)
from disagg.kernels.view import Partial, View


def attend(
    q: Tensor,
    view: View,
    scale: float,
    cap: float = 0.0,
) -> Partial:
    """Attention over pages of codes. Arguments and results as in `exact.attend`.

    error: at most 1e-5 relative in fp32, 1e-12 in fp64, against exact attention on the output
           of `decode`
    """
    fmt = view.fmt
    assert isinstance(fmt, PageFormat)
    first, last = visible_pages(view, fmt.tokens)
    columns = slice(first, last)
    ids = view.pages[:, columns]
    pages = ArenaBlocks(view.arena, ids, view.base, view.heads, fmt.block_bytes)
    shared = _segments_of(view, fmt, pages, columns)

    queries = columns_of(q * scale, view.heads)  # [B, H, D, N]
    by_page = _scores(queries, pages, fmt, shared)  # [B, H, P, T, N]
    scores = by_page.flatten(2, 3)  # [B, H, n, N]
    visible = visible_tokens(view, first * fmt.tokens, scores.shape[2])
    if fmt.valid is not None:
        is_valid = pages.bits(fmt.valid, fmt.tokens)  # [B, H, P, T]
        visible = visible & is_valid.flatten(2).unsqueeze(3)
    p, lse = masked_softmax(scores, visible, cap)
    p = p.unflatten(2, (last - first, fmt.tokens))  # [B, H, P, T, N]
    if fmt.v is None:
        o = _latent_output(p, pages, fmt, shared)  # [B, H, latent, N]
    else:
        o = _output(p, pages, fmt, fmt.v, shared)  # [B, H, D, N]
    return partial_of(o, lse, q.shape[1])


def decode(
    blocks: Tensor,
    segments: Tensor | None,
    fmt: PageFormat,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """k' and v' [..., tokens, D] of dtype, as attention sees blocks [..., block_bytes] u8.

    Of latents, v' is their channels of k'.

    segments: [..., segment_bytes] u8 - the segment of each block, if the format has any
    """
    pages = DenseBlocks(blocks)
    shared = pages if segments is None or fmt.has_own_basis else DenseBlocks(segments)
    bands = [_dequantize(side, pages, shared, dtype) for side in fmt.k_sides]
    k = torch.cat(bands, -1)  # [..., T, D]
    if fmt.v is None:
        return k, k[..., : fmt.latent]
    v = _dequantize(fmt.v, pages, shared, dtype).transpose(-1, -2)  # [..., T, D]
    if fmt.hadamard:
        order = hadamard.read_order(shared, fmt.hadamard, fmt.head_dim)
        signs = hadamard.read_signs(shared, fmt.hadamard, fmt.head_dim)
        index = order.unsqueeze(-2).expand_as(k)
        k = torch.empty_like(k).scatter_(-1, index, k)
        v = hadamard.unrotate(v, signs.unsqueeze(-2))
    k = _with_factors(k, fmt.k, fmt, pages, shared)
    v = _with_factors(v, fmt.v, fmt, pages, shared)
    return k, v


@dataclass(frozen=True)
class Shared:
    """The segments of B sequences, and the segment of each page.

    blocks: [B, S] records
    owner:  [B, P] i64
    """

    blocks: ArenaBlocks
    owner: Tensor

    def spread(self, x: Tensor, columns: slice) -> Tensor:
        """From segments [B, H, S, ...] to their pages [B, H, P, ...]; [B, H, 1, ...] stays."""
        if x.shape[2] == 1:
            return x
        sequences = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        by_segment = x.transpose(1, 2)  # [B, S, H, ...]
        by_page = by_segment[sequences, self.owner[:, columns]]
        return by_page.transpose(1, 2)

    def collect(
        self,
        sums: Tensor,
        x: Tensor,
        columns: slice,
    ) -> None:
        """Add pages [B, H, P, ...] to the sums of their segments [B, H, S, ...]."""
        if sums.shape[2] == 1:
            sums += x.sum(2, keepdim=True)
            return
        for row, owner in enumerate(self.owner[:, columns]):
            sums[row].index_add_(1, owner, x[row])


def contract(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    kind: Scale,
    x: Tensor,
) -> Tensor:
    """Sum over columns of scale * (code + zero) * x, never forming scale * (code + zero).

    codes:         [..., rows, columns]
    scales, zeros: [..., *side.scale_shape]
    x:             [..., columns, N]
    returns:       [..., rows, N]
    """
    if kind.by == "column":
        return _contract_by_column(codes, scales, zeros, x)
    groups = scales.shape[-2]
    group = codes.shape[-1] // groups
    grouped_x = x.unflatten(-2, (groups, group))  # [..., groups, group, N]
    grouped_codes = codes.unflatten(-1, (groups, group))  # [..., rows, groups, group]
    products = grouped_codes.transpose(-3, -2) @ grouped_x  # [..., groups, rows, N]
    sum_x = grouped_x.sum(-2, keepdim=True)  # [..., groups, 1, N]
    sums = products + zeros.unsqueeze(-1) * sum_x
    scaled = sums * scales.unsqueeze(-1)
    return scaled.sum(-3)


def add_sparse(
    out: Tensor,
    index: Tensor,
    delta: Tensor,
    x: Tensor,
) -> None:
    """out [..., rows, N] += delta * x at the rows `index` [..., columns, slots] of each column."""
    products = delta.unsqueeze(-1) * x.unsqueeze(-2)  # [..., columns, slots, N]
    terms = products.flatten(-3, -2)  # [..., columns * slots, N]
    rows = index.flatten(-2).unsqueeze(-1).expand_as(terms)
    out.scatter_add_(-2, rows, terms)


def multiply_blocks(matrix: Tensor, x: Tensor) -> Tensor:
    """x [..., D, N] -> matrix [..., block, block] x, block by block of channels."""
    blocks = x.unflatten(-2, (-1, matrix.shape[-1]))  # [..., D / block, block, N]
    products = matrix.unsqueeze(-3) @ blocks
    return products.flatten(-3, -2)


def _segments_of(
    view: View,
    fmt: PageFormat,
    pages: ArenaBlocks,
    columns: slice,
) -> Shared:
    """The segments of these page columns of a view.

    Pages that have a basis of their own are their own segments. Where nothing is shared there is
    one segment per sequence, which is never read.
    """
    if fmt.has_own_basis:
        itself = torch.arange(pages.ids.shape[1], device=pages.ids.device)
        return Shared(pages, itself.expand_as(pages.ids))
    if view.segments is None or view.owner is None:
        return Shared(pages.select(slice(1)), torch.zeros_like(pages.ids))
    blocks = ArenaBlocks(
        arena=view.arena,
        ids=view.segments,
        base=view.segment_base,
        heads=view.heads,
        block_bytes=fmt.segment_bytes,
    )
    return Shared(blocks, view.owner[:, columns].long())


def _scores(
    q: Tensor,
    pages: ArenaBlocks,
    fmt: PageFormat,
    shared: Shared,
) -> Tensor:
    """Queries q [B, H, D, N] -> scores of every page [B, H, P, tokens, N]."""
    side = fmt.k
    plain = q.unsqueeze(2)  # [B, H, 1, D, N]
    vector = (
        plain  # [B, H, 1 or S, D, N]: what the codes of a segment are contracted with
    )
    bias = projected = None
    if side.rotation:
        vector = multiply_blocks(_matrix(side, shared.blocks, q.dtype), vector)
    if side.low_rank:
        basis = _basis(side.low_rank, fmt, shared.blocks, q.dtype)  # [B, H, S, D, rank]
        projected = basis.transpose(-1, -2) @ vector  # [B, H, S, rank, N]
    if side.scale.shared:
        scales, zeros = shared.blocks.scales(side, q.dtype)  # [B, H, S, 1, D]
        vector = vector * scales.transpose(-1, -2)
        bias = zeros @ vector  # [B, H, S, 1, N]
    if fmt.hadamard:
        order = hadamard.read_order(shared.blocks, fmt.hadamard, fmt.head_dim)
        vector = _in_order(plain, order)

    chunks = []
    for columns in page_chunks(pages.ids, pages.heads * fmt.tokens * fmt.head_dim):
        chunk = pages.select(columns)
        page_vector = shared.spread(vector, columns)  # [B, H, P, D, N]
        if bias is None:
            scores = _contract_bands(chunk, fmt.k_sides, page_vector)
        else:
            products = chunk.codes(side, q.dtype) @ page_vector
            scores = products + shared.spread(bias, columns)
        if side.low_rank and projected is not None:
            a = _factor(side.low_rank, fmt, chunk, q.dtype)  # [B, H, P, T, rank]
            scores += a @ shared.spread(projected, columns)
        if side.sparse:
            index, delta = chunk.sparse(side, q.dtype)
            add_sparse(scores, index, delta, plain)
        chunks.append(scores)
    return torch.cat(chunks, 2)


def _output(
    p: Tensor,
    pages: ArenaBlocks,
    fmt: PageFormat,
    side: Side,
    shared: Shared,
) -> Tensor:
    """Weights p [B, H, P, tokens, N] -> the weighted sum of values, a side: [B, H, D, N]."""
    low = side.low_rank
    batch, heads, _, _, width = p.shape
    segments = shared.blocks.ids.shape[1]
    rank = low.rank if low else 0
    sums = p.new_zeros(batch, heads, segments, side.rows, width)  # [B, H, S, D, N]
    projected = p.new_zeros(batch, heads, segments, rank, width)  # [B, H, S, rank, N]

    for columns in page_chunks(pages.ids, heads * side.rows * side.columns):
        chunk = pages.select(columns)
        weights = p[:, :, columns]  # [B, H, P, T, N]
        codes = chunk.codes(side, p.dtype)  # [B, H, P, D, T]
        scales, zeros = chunk.scales(side, p.dtype)
        products = contract(codes, scales, zeros, side.scale, weights)
        if side.sparse:
            index, delta = chunk.sparse(side, p.dtype)
            add_sparse(products, index, delta, weights)
        shared.collect(sums, products, columns)
        if low:
            a = _factor(low, fmt, chunk, p.dtype)  # [B, H, P, T, rank]
            shared.collect(projected, a.transpose(-1, -2) @ weights, columns)

    if side.rotation:
        matrix = _matrix(side, shared.blocks, p.dtype)
        sums = multiply_blocks(matrix.transpose(-1, -2), sums)
    if low:
        sums = sums + _basis(low, fmt, shared.blocks, p.dtype) @ projected
    if fmt.hadamard:
        signs = hadamard.read_signs(shared.blocks, fmt.hadamard, fmt.head_dim)
        by_query = hadamard.unrotate(sums.transpose(-1, -2), signs.unsqueeze(-2))
        sums = by_query.transpose(-1, -2)
    return sums.sum(2)


def _latent_output(
    p: Tensor,
    pages: ArenaBlocks,
    fmt: PageFormat,
    shared: Shared,
) -> Tensor:
    """Weights p [B, H, P, tokens, N] -> the weighted sum of latents [B, H, latent, N]."""
    batch, heads, _, _, width = p.shape
    lying = fmt.k.lying
    sums = p.new_zeros(batch, heads, fmt.head_dim, width)
    of_segments = None
    if lying.scale.shared:
        of_segments = shared.blocks.scales(fmt.k, p.dtype)  # [B, H, S, 1, D] twice
    for columns in page_chunks(pages.ids, heads * fmt.tokens * fmt.head_dim):
        chunk = pages.select(columns)
        codes = chunk.codes(fmt.k, p.dtype).transpose(-1, -2)  # [B, H, P, D, T]
        if of_segments is None:
            scales, zeros = chunk.scales(fmt.k, p.dtype)
        else:
            scales, zeros = (shared.spread(x, columns) for x in of_segments)
        products = contract(codes, scales, zeros, lying.scale, p[:, :, columns])
        sums += products.sum(2)
    return sums[:, :, : fmt.latent]


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [B, H, 1, D, N] in the order [B, H, S, D] of each segment: [B, H, S, D, N]."""
    shape = (*order.shape, x.shape[-1])
    index = order.unsqueeze(-1).expand(shape)
    return x.expand(shape).gather(-2, index)


def _contract_bands(
    pages: ArenaBlocks,
    sides: tuple[Side, ...],
    x: Tensor,
) -> Tensor:
    """Sum over the columns of all bands: x [..., columns, N] -> [..., rows, N]."""
    widths = [side.columns for side in sides]
    total = x.new_zeros(())
    for side, part in zip(sides, x.split(widths, -2), strict=True):
        scales, zeros = pages.scales(side, x.dtype)
        if side.bits:
            codes = pages.codes(side, x.dtype)
            total = total + contract(codes, scales, zeros, side.scale, part)
        else:
            total = total + scales @ part
    return total


def _contract_by_column(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    x: Tensor,
) -> Tensor:
    """`contract` where each column and group of rows has a scale."""
    groups = scales.shape[-2]
    group = codes.shape[-2] // groups
    scaled_x = scales.unsqueeze(-1) * x.unsqueeze(-3)  # [..., groups, columns, N]
    bias = zeros.unsqueeze(-2) @ scaled_x  # [..., groups, 1, N]
    grouped_codes = codes.unflatten(-2, (groups, group))
    sums = grouped_codes @ scaled_x + bias  # [..., groups, group, N]
    return sums.flatten(-3, -2)


def _dequantize(
    side: Side,
    pages: Blocks,
    shared: Blocks,
    dtype: torch.dtype,
) -> Tensor:
    """Codes and sparse slots dequantised: [..., rows, columns] of dtype."""
    source = shared if side.scale.shared else pages
    scales, zeros = source.scales(side, dtype)
    scales = expand(scales, side)
    zeros = expand(zeros, side)
    if not side.bits:
        return scales
    x = (pages.codes(side, dtype) + zeros) * scales
    if side.sparse:
        index, delta = pages.sparse(side, dtype)
        x.transpose(-1, -2).scatter_add_(-1, index, delta)
    return x


def _with_factors(
    x: Tensor,
    side: Side,
    fmt: PageFormat,
    pages: Blocks,
    shared: Blocks,
) -> Tensor:
    """x [..., tokens, D] times the rotation of its side, plus the low-rank product."""
    if side.rotation:
        matrix = _matrix(side, shared, x.dtype)
        blocks = x.unflatten(
            -1, (-1, side.rotation.block)
        )  # [..., T, D / block, block]
        x = (blocks @ matrix.unsqueeze(-3)).flatten(-2)
    if side.low_rank:
        a = _factor(side.low_rank, fmt, pages, x.dtype)  # [..., T, rank]
        b = _basis(side.low_rank, fmt, shared, x.dtype)  # [..., D, rank]
        x = x + a @ b.transpose(-1, -2)
    return x


def _factor(
    low: LowRank,
    fmt: PageFormat,
    pages: Blocks,
    dtype: torch.dtype,
) -> Tensor:
    """A of a low-rank product: [..., tokens, rank] of dtype."""
    return pages.plane(torch.float16, low.a, (fmt.tokens, low.rank)).to(dtype)


def _basis(
    low: LowRank,
    fmt: PageFormat,
    shared: Blocks,
    dtype: torch.dtype,
) -> Tensor:
    """B of a low-rank product: [..., head_dim, rank] of dtype."""
    return shared.plane(torch.float16, low.b, (fmt.head_dim, low.rank)).to(dtype)


def _matrix(
    side: Side,
    shared: Blocks,
    dtype: torch.dtype,
) -> Tensor:
    """T_S of a rotation: [..., block, block] of dtype."""
    assert side.rotation is not None
    block = side.rotation.block
    return shared.plane(torch.float16, side.rotation.matrix, (block, block)).to(dtype)
