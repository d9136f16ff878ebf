"""Attention on pages made of pieces, in plain torch: the spec of the kernels and of cpu/attend.h.

K and V are never built. Everything that a query or a segment can absorb is absorbed once:

    scores   q -> T_S q -> q * scale of the segment, B^T q       once for each query and segment
             codes @ that, + A (B^T q), + sparse                 for each page
    output   p -> codes @ (p * scale), A^T p, + sparse           for each page, summed by segment
             T_S^T (...), + B (A^T p)                            once for each query and segment

The arithmetic runs in the dtype of q, so that fp64 shows the algebra to be exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats_paged import PagedFormat, Side
from disagg.kernels.reference import (
    Partial,
    columns_of,
    masked_softmax,
    page_chunks,
    rows_of,
    visible_pages,
)
from disagg.kernels.reference_pieces import (
    ArenaBlocks,
    DenseBlocks,
    add_sparse,
    contract,
    read_codes,
    read_factor,
    read_scales,
    read_sparse,
    read_valid,
    rotate_back,
    rotate_query,
)


def attend_paged(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: PagedFormat,
    base: int,
    heads: int,
    scale: float,
    segments: Tensor | None = None,
    owner: Tensor | None = None,
    segment_base: int = 0,
) -> Partial:
    """Attention over pages of one layout. Arguments and results as in `reference.attend_raw`.

    segments:     [B, S] i32 - page ids of the segments of each sequence, if the format has any
    owner:        [B, P] i32 - which of them each page belongs to
    segment_base: byte offset of this layer's part of a segment record
    error:        at most 1e-5 relative in fp32, 1e-12 in fp64, against exact attention on what
                  `decode_paged` makes of the pages
    """
    first, last = visible_pages(lo, hi, fmt.tokens)
    blocks = ArenaBlocks(arena, pages[:, first:last], base, heads, fmt.block_bytes)
    shared = None
    if segments is not None and owner is not None:
        records = ArenaBlocks(arena, segments, segment_base, heads, fmt.segment_bytes)
        shared = Shared(records, owner[:, first:last].long())
    scores = _scores(columns_of(q * scale, heads), blocks, fmt, shared)
    if fmt.valid is not None:
        there = read_valid(blocks, fmt.valid, fmt.tokens)
        scores = scores.masked_fill(~there.unsqueeze(-1), -torch.inf)
    shift = first * fmt.tokens
    p, lse = masked_softmax(scores.flatten(2, 3), lo - shift, hi - shift)
    o = _output(p.unflatten(2, (last - first, fmt.tokens)), blocks, fmt, shared)
    return rows_of(o, q.shape[1]), rows_of(lse.unsqueeze(2), q.shape[1]).squeeze(3)


def decode_paged(
    blocks: Tensor, segments: Tensor | None, fmt: PagedFormat, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """What attention sees: blocks [..., block_bytes] u8 -> k', v' [..., tokens, D] of dtype.

    segments: [..., segment_bytes] u8 - the segment of each block, if the format has any
    """
    pages = DenseBlocks(blocks)
    shared = None if segments is None else DenseBlocks(segments)
    k = _rebuild(fmt.k, pages, shared, dtype)
    v = _rebuild(fmt.v, pages, shared, dtype).transpose(-1, -2)
    found = []
    for x, side in ((k, fmt.k), (v, fmt.v)):
        if shared is not None and side.rotation:
            blockwise = x.unflatten(-1, (-1, side.rotation.block))
            x = (blockwise @ _matrix(side, shared, dtype).unsqueeze(-3)).flatten(-2)
        if shared is not None and side.low_rank:
            rank = side.low_rank.rank
            a = read_factor(pages, side.low_rank.a, fmt.tokens, rank, dtype)
            b = read_factor(shared, side.low_rank.b, fmt.head_dim, rank, dtype)
            x = x + a @ b.transpose(-1, -2)
        found.append(x)
    return found[0], found[1]


@dataclass(frozen=True)
class Shared:
    """The segments of B sequences, and which of them each page belongs to.

    blocks: [B, S] records; owner: [B, P] i64
    """

    blocks: ArenaBlocks
    owner: Tensor

    def spread(self, x: Tensor, part: slice) -> Tensor:
        """From segments [B, H, S, ...] to their pages [B, H, P, ...]; [B, H, 1, ...] stays."""
        if x.shape[2] == 1:
            return x
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        return x.transpose(1, 2)[rows, self.owner[:, part]].transpose(1, 2)

    def collect(self, sums: Tensor, x: Tensor, part: slice) -> None:
        """Add pages [B, H, P, ...] to the sums of their segments [B, H, S, ...]."""
        for row, owner in enumerate(self.owner[:, part]):
            sums[row].index_add_(1, owner, x[row])


def _scores(x: Tensor, blocks: ArenaBlocks, fmt: PagedFormat, shared: Shared | None) -> Tensor:
    """Queries x [B, H, D, N] -> scores of every page [B, H, P, tokens, N]."""
    side, plain = fmt.k, x.unsqueeze(2)
    vector, low, bias = plain, None, None
    if shared is not None:
        if side.rotation:
            vector = rotate_query(vector, _matrix(side, shared.blocks, x.dtype))
        if side.low_rank:
            rank = side.low_rank
            basis = read_factor(shared.blocks, rank.b, fmt.head_dim, rank.rank, x.dtype)
            low = basis.transpose(-1, -2) @ vector
        if side.scale.shared:
            scales, zeros = read_scales(shared.blocks, side, x.dtype)
            vector = vector * scales.transpose(-1, -2)
            bias = zeros @ vector
    found = []
    for part in page_chunks(blocks.ids, blocks.heads * side.rows * side.columns):
        some = blocks.part(part)
        codes = read_codes(some, side, x.dtype)
        if shared is not None and bias is not None:
            out = codes @ shared.spread(vector, part) + shared.spread(bias, part)
        else:
            here = vector if shared is None else shared.spread(vector, part)
            out = contract(codes, *read_scales(some, side, x.dtype), side.scale, here)
        if side.low_rank and shared is not None and low is not None:
            factor = read_factor(some, side.low_rank.a, fmt.tokens, side.low_rank.rank, x.dtype)
            out += factor @ shared.spread(low, part)
        if side.sparse:
            add_sparse(out, *read_sparse(some, side, x.dtype), plain)
        found.append(out)
    return torch.cat(found, 2)


def _output(p: Tensor, blocks: ArenaBlocks, fmt: PagedFormat, shared: Shared | None) -> Tensor:
    """Weights p [B, H, P, tokens, N] -> the weighted sum of values [B, H, D, N]."""
    side = fmt.v
    batch, heads, _, _, width = p.shape
    segments = 1 if shared is None else shared.blocks.ids.shape[1]
    sums = p.new_zeros(batch, heads, segments, side.rows, width)
    rank = side.low_rank.rank if side.low_rank else 0
    low = p.new_zeros(batch, heads, segments, rank, width)
    for part in page_chunks(blocks.ids, heads * side.rows * side.columns):
        some, weights = blocks.part(part), p[:, :, part]
        codes = read_codes(some, side, p.dtype)
        out = contract(codes, *read_scales(some, side, p.dtype), side.scale, weights)
        if side.sparse:
            add_sparse(out, *read_sparse(some, side, p.dtype), weights)
        if shared is None:
            sums += out.sum(2, keepdim=True)
            continue
        shared.collect(sums, out, part)
        if side.low_rank:
            factor = read_factor(some, side.low_rank.a, fmt.tokens, rank, p.dtype)
            shared.collect(low, factor.transpose(-1, -2) @ weights, part)
    if shared is not None and side.rotation:
        sums = rotate_back(sums, _matrix(side, shared.blocks, p.dtype))
    if shared is not None and side.low_rank:
        basis = read_factor(shared.blocks, side.low_rank.b, fmt.head_dim, rank, p.dtype)
        sums = sums + basis @ low
    return sums.sum(2)


def _rebuild(
    side: Side, pages: DenseBlocks, shared: DenseBlocks | None, dtype: torch.dtype
) -> Tensor:
    """What codes and sparse slots stand for: [..., rows, columns] of dtype."""
    source = shared if side.scale.shared and shared is not None else pages
    scales, zeros = read_scales(source, side, dtype)
    if side.scale.by == "row":
        scales, zeros = scales.transpose(-1, -2), zeros.transpose(-1, -2)
    rows, columns = side.rows // scales.shape[-2], side.columns // scales.shape[-1]
    scales, zeros = (
        y.repeat_interleave(rows, -2).repeat_interleave(columns, -1) for y in (scales, zeros)
    )
    x = (read_codes(pages, side, dtype) + zeros) * scales
    if side.sparse:
        x.transpose(-1, -2).scatter_add_(-1, *read_sparse(pages, side, dtype))
    return x


def _matrix(side: Side, blocks: ArenaBlocks | DenseBlocks, dtype: torch.dtype) -> Tensor:
    assert side.rotation is not None
    block = side.rotation.block
    return blocks.plane(torch.float16, side.rotation.matrix, (block, block)).to(dtype)
