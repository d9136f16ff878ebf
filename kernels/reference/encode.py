"""Sealing pages, in plain torch: the spec of the encode kernels, and the fallback on a CPU.

Each side takes these steps, as far as its format has them:

    hadamard    K's channels in order, V's rotated              as the frozen segment says
    rotate      x -> T_L with T_L T_S = x                       T_S of the segment, new or frozen
    set aside   the outliers of each column -> sparse slots     their mean takes their place
    quantise    -> codes, scales, zeros                         of the page or of the segment
    low rank    the remaining error -> A B^T

All arithmetic is fp32. A number is rounded to its stored dtype before the next step uses it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from disagg.kernels.formats import RAW_SLOTS, HadamardRotation, PageFormat, Side, Sparse
from disagg.kernels.reference import hadamard, quantize
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
from disagg.kernels.sealing import HEAD_STRIDE, NewRows, Sealing, Segmentation, Target

# elements of K encoded at once: their floats stay in a core's second-level cache
CHUNK_ELEMENTS = 1 << 17


def encode(
    k: Tensor,
    v: Tensor | None,
    fmt: PageFormat,
    cut: Segmentation,
    absent: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal the pages of consecutive segments, of one layer.

    k, v:    [H, n, D] of any float dtype - n is a multiple of fmt.tokens; NaN becomes 0, numbers
             beyond fp16 saturate. v is None where pages hold a latent
    absent:  [H, n] bool - tokens that the mask of their page leaves out; the mean of their group of
             K's scales takes their place, in K and in V. None: all are present
    returns: blocks [n / tokens, H, block_bytes] u8, segments [S, H, segment_bytes] u8 if any
    """
    if absent is not None:
        group = fmt.k.scale.group
        k = quantize.with_group_means(finite(k), absent, group)
        v = v if v is None else quantize.with_group_means(finite(v), absent, group)
    heads, n, _ = k.shape
    shape = (n // fmt.tokens, heads, fmt.block_bytes)
    blocks = torch.zeros(shape, dtype=torch.uint8, device=k.device)
    segments = cut.begin(n, heads, fmt, k.device) if fmt.segment_bytes else None

    if fmt.hadamard and v is not None and segments is not None:
        k, v = _rotated(k, v, fmt.hadamard, DenseBlocks(segments[0]))
        _encode_pages(k, v, fmt, blocks)
    elif fmt.has_own_basis:
        _encode_segments(k, v, fmt, replace(cut, tokens=fmt.tokens), blocks, blocks)
    elif segments is not None:
        _encode_segments(k, v, fmt, cut, blocks, segments)
    else:
        _encode_pages(k, v, fmt, blocks)
    if fmt.valid is not None:
        _write_mask(blocks, fmt.valid, fmt.tokens, absent)
    return blocks, segments


def append(
    arena: Tensor,
    k: Tensor,
    v: Tensor | None,
    rows: NewRows,
    sealing: Sealing | None = None,
) -> None:
    """Write one token per row into raw pages, then the pages that they complete.

    k, v:    [N, H, D]; v is None where pages hold a latent
    sealing: the rows that complete a page, see sealing.py; None: there are none
    """
    fmt = rows.fmt
    heads = k.shape[1]
    is_written = rows.pages >= 0
    pages = rows.pages[is_written].long()
    slots = rows.slots[is_written].long()
    blocks = ArenaBlocks(arena, rows.pages, rows.base, heads, fmt.block_bytes)
    for offset, x in ((fmt.k, k), (fmt.v, v)):
        if offset is None or x is None:
            continue
        exact = rounded(x[is_written], fmt)
        plane = plane_view(blocks, exact.dtype, offset, (fmt.slots, fmt.head_dim))
        plane[pages, :, slots] = exact
    if sealing is None:
        return
    for page_k, page_v, cut, target in completed_pages(arena, heads, rows, sealing):
        sealed, _ = encode(page_k, page_v, sealing.fmt, cut)
        store_blocks(target, sealed)


def completed_pages(
    arena: Tensor,
    heads: int,
    rows: NewRows,
    sealing: Sealing,
) -> Iterator[tuple[Tensor, Tensor | None, Segmentation, Target]]:
    """Each page that a row completes: k and v [H, T, D], the segment it joins, and its address.

    v is None where pages hold a latent.
    """
    tables = sealing.rows
    fmt = sealing.fmt
    for row, page in enumerate(tables.pages.tolist()):
        if page < 0:
            continue
        this_row = slice(row, row + 1)
        k, v = gather_raw(arena, tables.tails[this_row], rows.fmt, rows.base, heads)
        frozen = None
        if fmt.segment_bytes:
            segments = load_blocks(
                arena,
                pages=tables.segments[this_row],
                base=sealing.segment_base,
                heads=heads,
                block_bytes=fmt.segment_bytes,
            )
            frozen = segments[0]
        seed = sealing.seed + int(tables.stretches[row])
        cut = Segmentation(fmt.tokens, seed, frozen, sealing.head)
        target = Target(arena, tables.pages[this_row], sealing.base)
        yield k[0], v[0] if fmt.v else None, cut, target


def sum_squares(
    q: Tensor,
    heads: int,
    begun: int,
) -> Tensor:
    """q^2 summed over the query heads of a KV head and units of 16 tokens.

    Squares are rounded to multiples of 2**-20, so sums are exact in any order.

    q:       [Hq, n, D]
    begun:   tokens of the first unit that precede q
    returns: [units, heads, D] fp64
    """
    tokens = q.transpose(0, 1).float()  # [n, Hq, D]
    behind = -(begun + len(tokens)) % RAW_SLOTS
    padded = pad(tokens, (0, 0, 0, 0, begun, behind))
    squares = padded.square().mul_(2.0**20).round_()
    units = squares.unflatten(0, (-1, RAW_SLOTS))  # [units, 16, Hq, D]
    by_query_head = units.sum(1, dtype=torch.float64)  # [units, Hq, D]
    sums = by_query_head.unflatten(1, (heads, -1)).sum(2)
    return sums * 2.0**-20


def _rotated(
    k: Tensor,
    v: Tensor,
    rotation: HadamardRotation,
    segment: DenseBlocks,
) -> tuple[Tensor, Tensor]:
    """K's channels in the order of a segment, and V rotated with its signs.

    Numbers beyond fp16 saturate.
    """
    head_dim = k.shape[2]
    order = hadamard.read_order(segment, rotation, head_dim).unsqueeze(1)
    signs = hadamard.read_signs(segment, rotation, head_dim).unsqueeze(1)
    ordered_k = k.gather(2, order.expand_as(k))
    return ordered_k, hadamard.rotate(finite(v), signs)


def _encode_pages(
    k: Tensor,
    v: Tensor | None,
    fmt: PageFormat,
    blocks: Tensor,
) -> None:
    """Write pages that need no segment, a chunk at a time."""
    heads = k.shape[0]
    widths = [side.columns for side in fmt.k_sides]
    bands = k.split(widths, 2)
    step = max(1, CHUNK_ELEMENTS // (heads * fmt.tokens * fmt.head_dim))
    for start in range(0, blocks.shape[0], step):
        tokens = slice(start * fmt.tokens, (start + step) * fmt.tokens)
        pages = DenseBlocks(blocks[start : start + step])
        for x, side in zip(bands, fmt.k_sides, strict=True):
            _encode_side(x[:, tokens], side, fmt, pages, pages)
        if v is not None and fmt.v is not None:
            _encode_side(v[:, tokens], fmt.v, fmt, pages, pages)


def _encode_segments(
    k: Tensor,
    v: Tensor | None,
    fmt: PageFormat,
    cut: Segmentation,
    blocks: Tensor,
    segments: Tensor,
) -> None:
    """Write segments [S, H, segment_bytes] u8 and the pages that share them, head by head.

    A page with a basis of its own is its own segment: `segments` are then the blocks.
    """
    heads, n, _ = k.shape
    if not n:
        return
    pages_per_segment = cut.tokens // fmt.tokens
    is_new = cut.frozen is None
    for i, segment_seed in enumerate(cut.seeds(n)):
        tokens = slice(i * cut.tokens, (i + 1) * cut.tokens)
        columns = slice(i * pages_per_segment, (i + 1) * pages_per_segment)
        for head in range(heads):
            one = slice(head, head + 1)
            pages = DenseBlocks(blocks[columns, one])
            shared = DenseBlocks(segments[i, one])
            seed = 2 * (segment_seed * HEAD_STRIDE + cut.head + head)
            _encode_side(k[one, tokens], fmt.k, fmt, pages, shared, seed, is_new)
            if v is None or fmt.v is None:
                continue
            _encode_side(v[one, tokens], fmt.v, fmt, pages, shared, seed + 1, is_new)


def _write_mask(
    blocks: Tensor,
    offset: int,
    tokens: int,
    absent: Tensor | None,
) -> None:
    """Write the mask of present tokens of each page."""
    mask = DenseBlocks(blocks).plane(torch.uint8, offset, (1, tokens // 8))
    mask.fill_(255)
    if absent is not None:
        present = (~absent).unflatten(1, (-1, tokens)).transpose(0, 1)  # [P, H, T]
        mask.squeeze(-2).copy_(pack_bits(present))


def _encode_side(
    x: Tensor,
    side: Side,
    fmt: PageFormat,
    pages: DenseBlocks,
    shared: DenseBlocks,
    seed: int = 0,
    is_new: bool = True,
) -> None:
    """Write one side of x [H, n, D] into its pages, and into the segment that they share.

    is_new: compute the rotation of the segment; else read it
    """
    x = finite(x)
    if side.rotation:
        block = side.rotation.block
        matrix = shared.plane(torch.float16, side.rotation.matrix, (block, block))
        if is_new:
            matrix.copy_(rotation(x, block))
        x = finite(unrotate(x, matrix))
    is_v = side is fmt.v
    values = x.unflatten(1, (-1, fmt.tokens)).transpose(0, 1)  # [P, H, T, D]
    if is_v:
        values = values.transpose(2, 3)  # [P, H, rows, columns]
    missing = _encode_codes(values, side, pages, shared)
    if side.low_rank is None or missing is None:
        return
    low = side.low_rank
    if is_v:
        missing = missing.transpose(2, 3)
    by_token = missing.transpose(0, 1).flatten(1, 2)  # [H, n, D]
    seeds = torch.full((1,), seed, device=x.device)
    a, b = low_rank(by_token, low.rank, seeds)
    by_page = a.unflatten(1, (-1, fmt.tokens)).transpose(0, 1)  # [P, H, T, rank]
    pages.plane(torch.float16, low.a, (fmt.tokens, low.rank)).copy_(by_page)
    shared.plane(torch.float16, low.b, (fmt.head_dim, low.rank)).copy_(b)


def _encode_codes(
    x: Tensor,
    side: Side,
    pages: DenseBlocks,
    shared: DenseBlocks,
) -> Tensor | None:
    """Write codes, scales and slots of x [P, H, rows, columns]; returns their error, if needed."""
    if side.floating:
        codes, scales = quantize.to_float8(x)
        pages.words(side).copy_(codes)
        pages.plane(torch.float32, side.scale.scale, (1, 1)).copy_(scales)
        return None
    plain = x
    if side.sparse:
        mean = quantize.column_means(x, side.scale.shared)
        outliers = quantize.choose_outliers(x, mean, side.sparse)
        plain = quantize.with_means(x, mean, outliers)
    codes, scales, zeros = quantize.quantize_side(plain, side)
    if side.bits:
        pages.words(side).copy_(pack_words(codes, side.bits))
    home = shared if side.scale.shared else pages
    home.plane(torch.float16, side.scale.scale, side.scale_shape).copy_(scales)
    if side.scale.zero is not None:
        home.plane(torch.float16, side.scale.zero, side.scale_shape).copy_(zeros)
    if not side.sparse and not side.low_rank:
        return None
    steps = quantize.expand(scales.float(), side)
    offsets = quantize.expand(zeros.float(), side)
    missing = x - (codes + offsets).mul_(steps)
    if side.sparse:
        _encode_outliers(missing, outliers, side.sparse, pages)
    return missing


def _encode_outliers(
    missing: Tensor,
    rows: Tensor,
    sparse: Sparse,
    pages: DenseBlocks,
) -> None:
    """Move the error [P, H, rows, columns] at outliers [P, H, columns, slots] to sparse slots."""
    by_column = missing.transpose(2, 3)
    delta = by_column.gather(3, rows)
    delta = delta.clamp_(-quantize.LARGEST, quantize.LARGEST)
    shape = (by_column.shape[2], sparse.slots)
    pages.plane(torch.uint8, sparse.index, shape).copy_(rows)
    pages.plane(torch.float16, sparse.delta, shape).copy_(delta)
    by_column.scatter_(3, rows, 0.0)
