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

from disagg.kernels.formats import ExactFormat, PageFormat, Rotation, Side, Turn
from disagg.kernels.reference.lowrank import low_rank, rotation, unrotate
from disagg.kernels.reference.pages import (
    DenseBlocks,
    append_raw,
    codes_plane,
    gather_raw,
    load_blocks,
    pack_bits,
    pack_words,
    store_blocks,
)
from disagg.kernels.reference.quantize import (
    LARGEST,
    choose_outliers,
    column_means,
    expand,
    finite,
    quantize_side,
    to_float8,
    to_fp16,
    with_group_means,
    with_means,
)
from disagg.kernels.reference.turn import read_order, read_signs, turn
from disagg.kernels.sealing import (
    HEAD_STRIDE,
    NewRows,
    SealFormat,
    Sealing,
    Segmentation,
    Target,
)

# elements of K encoded at once: their floats stay in a core's second-level cache
CHUNK_ELEMENTS = 1 << 17


def encode(
    k: Tensor, v: Tensor, fmt: PageFormat, cut: Segmentation, absent: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Seal the pages of consecutive segments, of one layer.

    k, v:    [H, n, D] of any float dtype - n is a multiple of fmt.tokens; NaN becomes 0, what fp16
             cannot hold saturates
    absent:  [H, n] bool - tokens that the mask of their page leaves out; the mean of their group of
             K's scales takes their place, in K and in V. None: all are there
    returns: blocks [n / tokens, H, block_bytes] u8, segments [S, H, segment_bytes] u8 if any
    """
    if absent is not None:
        k, v = (with_group_means(finite(x), absent, fmt.k.scale.group) for x in (k, v))
    heads, n, _ = k.shape
    shape = (n // fmt.tokens, heads, fmt.block_bytes)
    blocks = torch.zeros(shape, dtype=torch.uint8, device=k.device)
    segments = cut.begin(n, heads, fmt, k.device) if fmt.segment_bytes else None
    if fmt.has_own_basis:
        cut = replace(cut, tokens=fmt.tokens)
    shared = blocks if fmt.has_own_basis else segments
    if shared is not None and not fmt.turn:
        pages = cut.tokens // fmt.tokens
        for i, seed in enumerate(cut.seeds(n) if n else ()):
            part = slice(i * cut.tokens, (i + 1) * cut.tokens)
            some = blocks[i * pages : (i + 1) * pages]
            fresh = cut.frozen is None
            _encode_segment(k[:, part], v[:, part], fmt, some, shared[i], seed, fresh)
    else:
        if fmt.turn and segments is not None:
            k, v = _turned(k, v, fmt.turn, DenseBlocks(segments[0]))
        sides = [*zip(k.split([side.columns for side in fmt.k_sides], 2), fmt.k_sides, strict=True)]
        step = max(1, CHUNK_ELEMENTS // (heads * fmt.tokens * fmt.head_dim))
        for start in range(0, blocks.shape[0], step):
            part = slice(start * fmt.tokens, (start + step) * fmt.tokens)
            for x, side in (*sides, (v, fmt.v)):
                _encode(x[:, part], side, fmt, DenseBlocks(blocks[start : start + step]))
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

    k, v:    [N, H, D] of the raw dtype
    sealing: which rows complete a page, as sealing.py draws it; None: no row does
    """
    written = rows.pages >= 0
    there = slice(None) if bool(written.all()) else written
    at = rows.pages[there], rows.slots[there], rows.fmt, rows.base
    append_raw(arena, k[there], v[there], *at)
    if sealing is not None:
        for tail_k, tail_v, cut, target in completed_pages(arena, k.shape[1], rows, sealing):
            store_blocks(target, seal_page(tail_k, tail_v, sealing.fmt, cut))


def completed_pages(
    arena: Tensor, heads: int, rows: NewRows, sealing: Sealing
) -> Iterator[tuple[Tensor, Tensor, Segmentation, Target]]:
    """Of each page that a row completes: its k and v [H, T, D], what it joins, where it belongs."""
    tables, fmt = sealing.rows, sealing.fmt
    segment_bytes = fmt.segment_bytes if isinstance(fmt, PageFormat) else 0
    for row, page in enumerate(tables.pages.tolist()):
        if page < 0:
            continue
        one, frozen = slice(row, row + 1), None
        k, v = gather_raw(arena, tables.tails[one], rows.fmt, rows.base, heads)
        if segment_bytes:
            there = tables.segments[one], sealing.segment_base, heads, segment_bytes
            frozen = load_blocks(arena, *there)[0]
        cut = Segmentation(fmt.tokens, sealing.seed + int(tables.stretches[row]), frozen)
        yield k[0], v[0], cut, Target(arena, tables.pages[one], sealing.base)


def seal_page(k: Tensor, v: Tensor, fmt: SealFormat, cut: Segmentation) -> Tensor:
    """One page by itself: block [1, H, block_bytes] u8 of k, v [H, T, D]."""
    if not isinstance(fmt, ExactFormat):
        return encode(k, v, fmt, cut)[0]
    assert fmt.k < fmt.v
    both = torch.stack([to_fp16(k), to_fp16(v)], 1)  # [H, 2, T, D], the order of the planes
    return both.flatten(1).view(torch.uint8).unsqueeze(0)


def _encode_segment(
    k: Tensor, v: Tensor, fmt: PageFormat, blocks: Tensor, segment: Tensor, seed: int, fresh: bool
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
    shared: DenseBlocks | None = None,
    seed: int = 0,
    fresh: bool = True,
) -> None:
    """Write one side of x [H, n, D] into its pages and its segment."""
    x = finite(x)
    if side.rotation and shared is not None:
        x = _rotate(x, side.rotation, shared, fresh)
    values = x.unflatten(1, (-1, fmt.tokens)).transpose(0, 1)
    if side is fmt.v:
        values = values.transpose(2, 3)
    missing = _encode_codes(values, side, pages, shared)
    if side.low_rank and shared is not None and missing is not None:
        if side is fmt.v:
            missing = missing.transpose(2, 3)
        tokens, factors = missing.transpose(0, 1).flatten(1, 2), side.low_rank
        a, b = low_rank(tokens, factors.rank, torch.tensor([seed], device=x.device))
        by_page = a.unflatten(1, (-1, fmt.tokens)).transpose(0, 1)
        pages.plane(torch.float16, factors.a, (fmt.tokens, factors.rank)).copy_(by_page)
        shared.plane(torch.float16, factors.b, (fmt.head_dim, factors.rank)).copy_(b)


def _turned(k: Tensor, v: Tensor, by: Turn, segment: DenseBlocks) -> tuple[Tensor, Tensor]:
    """K's channels in the order, and V's turned by the signs, of a segment; what then is beyond
    fp16 saturates."""
    order = read_order(segment, by, k.shape[2]).unsqueeze(1).expand_as(k)
    signs = read_signs(segment, by, k.shape[2]).unsqueeze(1)
    return k.gather(2, order), turn(finite(v), signs)


def _encode_codes(
    x: Tensor, side: Side, pages: DenseBlocks, shared: DenseBlocks | None
) -> Tensor | None:
    """Write codes, scales and slots of x [P, H, rows, columns]; what they miss of x, if needed."""
    if side.floating:
        codes, scales = to_float8(x)
        codes_plane(pages, side).copy_(codes)
        pages.plane(torch.float32, side.scale.scale, (1, 1)).copy_(scales)
        return None
    index, plain = None, x
    if side.sparse:
        mean = column_means(x, side.scale.shared)
        index = choose_outliers(x, mean, side.sparse)
        plain = with_means(x, mean, index)
    codes, scales, zeros = quantize_side(plain, side)
    if side.bits:
        codes_plane(pages, side).copy_(pack_words(codes, side.bits))
    there = shared if side.scale.shared and shared is not None else pages
    there.plane(torch.float16, side.scale.scale, side.scale_shape).copy_(scales)
    if side.scale.zero is not None:
        there.plane(torch.float16, side.scale.zero, side.scale_shape).copy_(zeros)
    if side.sparse is None and side.low_rank is None:
        return None
    seen = (codes + expand(zeros.float(), side)).mul_(expand(scales.float(), side))
    missing = x - seen
    if side.sparse and index is not None:
        shape = (side.columns, side.sparse.slots)
        by_column = missing.transpose(2, 3)
        pages.plane(torch.uint8, side.sparse.index, shape).copy_(index)
        delta = by_column.gather(3, index).clamp_(-LARGEST, LARGEST)
        pages.plane(torch.float16, side.sparse.delta, shape).copy_(delta)
        by_column.scatter_(3, index, 0.0)
    return missing


def _rotate(x: Tensor, turn: Rotation, shared: DenseBlocks, fresh: bool) -> Tensor:
    """T_L of x [1, n, D], by the segment's T_S."""
    matrix = shared.plane(torch.float16, turn.matrix, (turn.block, turn.block))
    if fresh:
        matrix.copy_(rotation(x, turn.block))
    return unrotate(x, matrix)
