"""Encoding pages made of pieces, in plain torch: the spec of the encode kernels and the CPU path.

For each side, in this order, what its format has of

    rotate      x -> T_L with T_L T_S = x                       T_S of the segment, new or frozen
    set aside   the outliers of each column -> sparse slots     their mean takes their place
    quantise    -> codes, scales, zeros                         of the page or of the segment
    low rank    what is still missing -> A B^T

all in fp32, every number rounded as it is stored before the next step uses it.
"""

import torch
from torch import Tensor

from disagg.kernels.formats_paged import LowRank, PagedFormat, Rotation, Side
from disagg.kernels.reference_absent import pack_mask, with_group_means
from disagg.kernels.reference_encode import CHUNK_ELEMENTS, LARGEST
from disagg.kernels.reference_lowrank import low_rank, rotation, unrotate
from disagg.kernels.reference_outliers import choose_outliers, with_means
from disagg.kernels.reference_pieces import DenseBlocks
from disagg.kernels.reference_quantize import expand, quantize_side, to_float8
from disagg.kernels.reference_words import pack_words, word_shape


def encode_paged(
    k: Tensor, v: Tensor, fmt: PagedFormat, seed: int = 0, frozen: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Seal the pages of one segment, of one layer.

    k, v:    [H, n, D] of any float dtype - n is a multiple of fmt.tokens; NaN becomes 0, what fp16
             cannot hold saturates
    seed:    with head and side, the start of power iterations
    frozen:  [H, segment_bytes] u8 - a segment whose rotation is kept; None: a new one is made
    returns: blocks [n / tokens, H, block_bytes] u8, the segment [H, segment_bytes] u8 if any
    """
    heads, n, head_dim = k.shape
    count = n // fmt.tokens
    blocks = torch.zeros(count, heads, fmt.block_bytes, dtype=torch.uint8, device=k.device)
    segment = None
    if not fmt.segment_bytes:
        step = max(1, CHUNK_ELEMENTS // (heads * fmt.tokens * head_dim))
        for start in range(0, count, step):
            tokens = slice(start * fmt.tokens, (start + step) * fmt.tokens)
            for x, side in ((k, fmt.k), (v, fmt.v)):
                _encode(x[:, tokens], side, fmt, DenseBlocks(blocks[start : start + step]))
        return blocks, None
    segment = torch.zeros(heads, fmt.segment_bytes, dtype=torch.uint8, device=k.device)
    if frozen is not None:
        segment.copy_(frozen)
    for head in range(heads):
        one = slice(head, head + 1)
        pages, shared = DenseBlocks(blocks[:, one]), DenseBlocks(segment[one])
        for odd, (x, side) in enumerate(((k, fmt.k), (v, fmt.v))):
            start = 2 * (seed * heads + head) + odd
            _encode(x[one], side, fmt, pages, shared, start, frozen is None)
    return blocks, segment


def encode_segments(
    k: Tensor,
    v: Tensor,
    fmt: PagedFormat,
    seeds: list[int],
    tokens: int,
    frozen: Tensor | None = None,
    absent: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal the pages of consecutive segments, of one layer.

    seeds:   one for each segment; tokens: of each, but for the last, which may have fewer
    absent:  [H, n] bool - tokens that the mask of their page leaves out; the mean of their group of
             K's scales takes their place, in K and in V. None: all are there
    returns: blocks as `encode_paged`; segments [S, H, segment_bytes] u8 if any
    """
    if absent is not None:
        k, v = (with_group_means(finite(x), absent, fmt.k.scale.group) for x in (k, v))
    if fmt.segment_bytes:
        parts = zip(k.split(tokens, 1), v.split(tokens, 1), seeds, strict=True)
        found = [encode_paged(a, b, fmt, seed, frozen) for a, b, seed in parts]
    else:
        found = [encode_paged(k, v, fmt)]
    blocks = torch.cat([blocks for blocks, _ in found])
    if fmt.valid is not None:
        mask = DenseBlocks(blocks).plane(torch.uint8, fmt.valid, (1, fmt.tokens // 8))
        mask.fill_(255)
        if absent is not None:
            mask.squeeze(-2).copy_(pack_mask(absent, fmt.tokens))
    segments = [segment for _, segment in found if segment is not None]
    return blocks, torch.stack(segments) if segments else None


def finite(x: Tensor) -> Tensor:
    """x in fp32; NaN becomes 0, what fp16 cannot hold saturates."""
    x = x.float()
    if not bool((x.abs().amax() <= LARGEST).all()):  # also where one is NaN
        x = torch.nan_to_num(x, nan=0.0).clamp(-LARGEST, LARGEST)
    return x


def _encode(
    x: Tensor,
    side: Side,
    fmt: PagedFormat,
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
        tokens = missing.transpose(0, 1).flatten(1, 2)
        _encode_low_rank(tokens, side.low_rank, fmt, pages, shared, seed)


def _encode_codes(
    x: Tensor, side: Side, pages: DenseBlocks, shared: DenseBlocks | None
) -> Tensor | None:
    """Write codes, scales and slots of x [P, H, rows, columns]; what they miss of x, if needed."""
    if side.floating:
        codes, scales = to_float8(x)
        pages.plane(torch.float8_e4m3fn, side.codes, (side.rows, side.columns)).copy_(codes)
        pages.plane(torch.float32, side.scale.scale, (1, 1)).copy_(scales)
        return None
    index = choose_outliers(x, side.sparse) if side.sparse else None
    codes, scales, zeros = quantize_side(x if index is None else with_means(x, index), side)
    pages.plane(torch.int16, side.codes, word_shape(side.bits, side.rows, side.columns)).copy_(
        pack_words(codes, side.bits)
    )
    there = shared if side.scale.shared and shared is not None else pages
    _write_scales(there, side, scales, zeros)
    if side.sparse is None and side.low_rank is None:
        return None
    seen = (codes + expand(zeros, side)).mul_(expand(scales, side))
    missing = x - seen
    if side.sparse and index is not None:
        shape = (side.columns, side.sparse.slots)
        by_column = missing.transpose(2, 3)
        pages.plane(torch.uint8, side.sparse.index, shape).copy_(index)
        delta = by_column.gather(3, index).clamp_(-LARGEST, LARGEST)
        pages.plane(torch.float16, side.sparse.delta, shape).copy_(delta)
        by_column.scatter_(3, index, 0.0)
    return missing


def _write_scales(blocks: DenseBlocks, side: Side, scales: Tensor, zeros: Tensor) -> None:
    blocks.plane(torch.float16, side.scale.scale, side.scale_shape).copy_(scales)
    if side.scale.zero is not None:
        blocks.plane(torch.float16, side.scale.zero, side.scale_shape).copy_(zeros)


def _encode_low_rank(
    missing: Tensor,
    piece: LowRank,
    fmt: PagedFormat,
    pages: DenseBlocks,
    shared: DenseBlocks,
    seed: int,
) -> None:
    """Write A and B of what is missing [1, n, D]."""
    a, b = low_rank(missing, piece.rank, torch.tensor([seed], device=missing.device))
    by_page = a.unflatten(1, (-1, fmt.tokens)).transpose(0, 1)
    pages.plane(torch.float16, piece.a, (fmt.tokens, piece.rank)).copy_(by_page)
    shared.plane(torch.float16, piece.b, (fmt.head_dim, piece.rank)).copy_(b)


def _rotate(x: Tensor, piece: Rotation, shared: DenseBlocks, fresh: bool) -> Tensor:
    """T_L of x [1, n, D], by the segment's T_S."""
    matrix = shared.plane(torch.float16, piece.matrix, (piece.block, piece.block))
    if fresh:
        matrix.copy_(rotation(x, piece.block))
    return unrotate(x, matrix)
