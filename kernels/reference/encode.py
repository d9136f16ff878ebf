"""Sealing pages, in plain torch: the spec of the encode kernels, and what a CPU can always do.

For each side, in this order, what its format has of

    turn        K's channels in order, V's mixed                as the frozen segment says
    rotate      x -> T_L with T_L T_S = x                       T_S of the segment, new or frozen
    set aside   the outliers of each column -> sparse slots     their mean takes their place
    quantise    -> codes, scales, zeros                         of the page or of the segment
    low rank    what is still missing -> A B^T

all in fp32, every number rounded as it is stored before the next step uses it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from disagg.kernels.formats import RAW_SLOTS, HadamardRotation, PageFormat, Side
from disagg.kernels.reference import quantize
from disagg.kernels.reference.lowrank import low_rank, rotation, unrotate
from disagg.kernels.reference.pages import (
    ArenaBlocks,
    DenseBlocks,
    gather_raw,
    load_blocks,
    pack_bits,
    pack_words,
    plane_view,
    store_blocks,
)
from disagg.kernels.reference.quantize import finite, rounded
from disagg.kernels.reference.turn import read_order, read_signs, turn
from disagg.kernels.sealing import HEAD_STRIDE, NewRows, Sealing, Segmentation, Target

# elements of K encoded at once: their floats stay in a core's second-level cache
CHUNK_ELEMENTS = 1 << 17


def encode(
    k: Tensor,
    v: Tensor,
    fmt: PageFormat,
    cut: Segmentation,
    absent: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal the pages of consecutive segments, of one layer.

    k, v:    [H, n, D] of any float dtype - n is a multiple of fmt.tokens; NaN becomes 0, what fp16
             cannot hold saturates
    absent:  [H, n] bool - tokens that the mask of their page leaves out; the mean of their group of
             K's scales takes their place, in K and in V. None: all are there
    returns: blocks [n / tokens, H, block_bytes] u8, segments [S, H, segment_bytes] u8 if any
    """
    if absent is not None:
        group = fmt.k.scale.group
        k, v = (quantize.with_group_means(finite(x), absent, group) for x in (k, v))
    heads, n, _ = k.shape
    shape = (n // fmt.tokens, heads, fmt.block_bytes)
    blocks = torch.zeros(shape, dtype=torch.uint8, device=k.device)
    segments = cut.begin(n, heads, fmt, k.device) if fmt.segment_bytes else None
    if fmt.has_own_basis:
        cut = replace(cut, tokens=fmt.tokens)
    shared = blocks if fmt.has_own_basis else segments
    if shared is not None and not fmt.turn:
        count = cut.tokens // fmt.tokens
        for i, seed in enumerate(cut.seeds(n) if n else ()):
            part = slice(i * cut.tokens, (i + 1) * cut.tokens)
            some = blocks[i * count : (i + 1) * count]
            fresh = cut.frozen is None
            _encode_segment(k[:, part], v[:, part], fmt, some, shared[i], seed, fresh)
    else:
        if fmt.turn and segments is not None:
            k, v = _turned(k, v, fmt.turn, DenseBlocks(segments[0]))
        sides = [
            *zip(
                k.split([side.columns for side in fmt.k_sides], 2),
                fmt.k_sides,
                strict=True,
            )
        ]
        step = max(1, CHUNK_ELEMENTS // (heads * fmt.tokens * fmt.head_dim))
        for start in range(0, blocks.shape[0], step):
            part = slice(start * fmt.tokens, (start + step) * fmt.tokens)
            pages = DenseBlocks(blocks[start : start + step])
            for x, side in (*sides, (v, fmt.v)):
                _encode(x[:, part], side, fmt, pages, pages)
    if fmt.valid is not None:
        mask = DenseBlocks(blocks).plane(torch.uint8, fmt.valid, (1, fmt.tokens // 8))
        mask.fill_(255)
        if absent is not None:
            there = (~absent).unflatten(1, (-1, fmt.tokens)).transpose(0, 1)
            mask.squeeze(-2).copy_(pack_bits(there))
    return blocks, segments


def append(
    arena: Tensor, k: Tensor, v: Tensor, rows: NewRows, sealing: Sealing | None = None
) -> None:
    """Write one token per row into raw pages, then the pages that they complete.

    k, v:    [N, H, D]
    sealing: which rows complete a page, as sealing.py draws it; None: no row does
    """
    written, fmt = rows.pages >= 0, rows.fmt
    pages, slots = rows.pages[written].long(), rows.slots[written].long()
    blocks = ArenaBlocks(arena, rows.pages, rows.base, k.shape[1], fmt.block_bytes)
    for offset, x in ((fmt.k, k), (fmt.v, v)):
        exact = rounded(x[written], fmt)
        plane = plane_view(blocks, exact.dtype, offset, (fmt.slots, fmt.head_dim))
        plane[pages, :, slots] = exact
    if sealing is not None:
        for tail_k, tail_v, cut, target in completed_pages(
            arena, k.shape[1], rows, sealing
        ):
            store_blocks(target, encode(tail_k, tail_v, sealing.fmt, cut)[0])


def completed_pages(
    arena: Tensor, heads: int, rows: NewRows, sealing: Sealing
) -> Iterator[tuple[Tensor, Tensor, Segmentation, Target]]:
    """Of each page that a row completes: its k and v [H, T, D], what it joins, where it belongs."""
    tables, fmt = sealing.rows, sealing.fmt
    for row, page in enumerate(tables.pages.tolist()):
        if page < 0:
            continue
        one, frozen = slice(row, row + 1), None
        k, v = gather_raw(arena, tables.tails[one], rows.fmt, rows.base, heads)
        if fmt.segment_bytes:
            there = tables.segments[one], sealing.segment_base, heads, fmt.segment_bytes
            frozen = load_blocks(arena, *there)[0]
        cut = Segmentation(
            fmt.tokens, sealing.seed + int(tables.stretches[row]), frozen
        )
        yield k[0], v[0], cut, Target(arena, tables.pages[one], sealing.base)


def sum_squares(q: Tensor, heads: int, begun: int) -> Tensor:
    """Sums of squares of q [Hq, n, D] over the query heads of a KV head and units of 16 tokens, of
    the first of which `begun` came before: [units, heads, D] fp64.

    Each square is a multiple of 2**-20, so that sums of sums are the same in any order.
    """
    some = q.transpose(0, 1).float()
    some = pad(some, (0, 0, 0, 0, begun, -(begun + len(some)) % RAW_SLOTS))
    exact = some.square().mul_(2.0**20).round_().unflatten(0, (-1, RAW_SLOTS))
    sums = exact.sum(1, dtype=torch.float64).unflatten(1, (heads, -1)).sum(2)
    return sums * 2.0**-20


def _encode_segment(
    k: Tensor,
    v: Tensor,
    fmt: PageFormat,
    blocks: Tensor,
    segment: Tensor,
    seed: int,
    fresh: bool,
) -> None:
    """The pages of one segment, head by head, and the segment [H, segment_bytes] u8, which is
    the page itself where that has a basis of its own."""
    for head in range(k.shape[0]):
        one = slice(head, head + 1)
        pages, shared = DenseBlocks(blocks[:, one]), DenseBlocks(segment[one])
        for odd, (x, side) in enumerate(((k, fmt.k), (v, fmt.v))):
            start = 2 * (seed * HEAD_STRIDE + head) + odd
            _encode(x[one], side, fmt, pages, shared, start, fresh)


def _encode(
    x: Tensor,
    side: Side,
    fmt: PageFormat,
    pages: DenseBlocks,
    shared: DenseBlocks,
    seed: int = 0,
    fresh: bool = True,
) -> None:
    """Write one side of x [H, n, D] into its pages, and into the segment that they share."""
    x = finite(x)
    if by := side.rotation:
        matrix = shared.plane(torch.float16, by.matrix, (by.block, by.block))
        if fresh:
            matrix.copy_(rotation(x, by.block))
        x = finite(unrotate(x, matrix))
    values = x.unflatten(1, (-1, fmt.tokens)).transpose(0, 1)
    if side is fmt.v:
        values = values.transpose(2, 3)
    missing = _encode_codes(values, side, pages, shared)
    if (low := side.low_rank) and missing is not None:
        if side is fmt.v:
            missing = missing.transpose(2, 3)
        tokens = missing.transpose(0, 1).flatten(1, 2)
        a, b = low_rank(tokens, low.rank, torch.full((1,), seed, device=x.device))
        by_page = a.unflatten(1, (-1, fmt.tokens)).transpose(0, 1)
        pages.plane(torch.float16, low.a, (fmt.tokens, low.rank)).copy_(by_page)
        shared.plane(torch.float16, low.b, (fmt.head_dim, low.rank)).copy_(b)


def _turned(
    k: Tensor, v: Tensor, by: HadamardRotation, segment: DenseBlocks
) -> tuple[Tensor, Tensor]:
    """K's channels in the order, and V's turned by the signs, of a segment; what then is beyond
    fp16 saturates."""
    order = read_order(segment, by, k.shape[2]).unsqueeze(1).expand_as(k)
    signs = read_signs(segment, by, k.shape[2]).unsqueeze(1)
    return k.gather(2, order), turn(finite(v), signs)


def _encode_codes(
    x: Tensor, side: Side, pages: DenseBlocks, shared: DenseBlocks
) -> Tensor | None:
    """Write codes, scales and slots of x [P, H, rows, columns]; what they miss of x, if needed."""
    if side.floating:
        codes, scales = quantize.to_float8(x)
        pages.words(side).copy_(codes)
        pages.plane(torch.float32, side.scale.scale, (1, 1)).copy_(scales)
        return None
    plain, sparse = x, side.sparse
    if sparse:
        mean = quantize.column_means(x, side.scale.shared)
        index = quantize.choose_outliers(x, mean, sparse)
        plain = quantize.with_means(x, mean, index)
    codes, scales, zeros = quantize.quantize_side(plain, side)
    if side.bits:
        pages.words(side).copy_(pack_words(codes, side.bits))
    there = shared if side.scale.shared else pages
    there.plane(torch.float16, side.scale.scale, side.scale_shape).copy_(scales)
    if side.scale.zero is not None:
        there.plane(torch.float16, side.scale.zero, side.scale_shape).copy_(zeros)
    if not sparse and not side.low_rank:
        return None
    scales, zeros = (quantize.expand(y.float(), side) for y in (scales, zeros))
    missing = x - (codes + zeros).mul_(scales)
    if sparse:
        shape = (side.columns, sparse.slots)
        by_column = missing.transpose(2, 3)
        pages.plane(torch.uint8, sparse.index, shape).copy_(index)
        delta = by_column.gather(3, index).clamp_(-quantize.LARGEST, quantize.LARGEST)
        pages.plane(torch.float16, sparse.delta, shape).copy_(delta)
        by_column.scatter_(3, index, 0.0)
    return missing
