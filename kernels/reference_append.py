"""A step's new tokens, and the pages that they complete, in plain torch: the spec of append.py."""

import torch
from torch import Tensor

from disagg.kernels.formats import RawFormat
from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.formats_paged import PagedFormat
from disagg.kernels.reference_aligned import encode_aligned, to_fp16
from disagg.kernels.reference_encode_paged import encode_segments
from disagg.kernels.reference_pages import append_raw, gather_raw, store_blocks
from disagg.kernels.sealing import SealFormat, Sealing


def append(
    arena: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    slots: Tensor,
    raw: RawFormat,
    raw_base: int,
    sealing: Sealing | None = None,
) -> None:
    """Write one token per row into raw pages, then the pages that they complete.

    k, v:     [N, H, D] of the raw dtype
    pages:    [N] i32 - raw page ids, or NO_PAGE for a row that is not written
    slots:    [N] i32 - which of their tokens; no two rows have one in common
    raw_base: offset of a layer's raw page inside a page
    sealing:  which rows complete a page, as sealing.py draws it; None: no row does
    """
    written = pages >= 0
    there = slice(None) if bool(written.all()) else written
    append_raw(arena, k[there], v[there], pages[there], slots[there], raw, raw_base)
    if sealing is None:
        return
    rows, heads = sealing.rows, k.shape[1]
    for row, page in enumerate(rows.pages.tolist()):
        if page < 0:
            continue
        one = slice(row, row + 1)
        tail = gather_raw(arena, rows.tails[one], raw, raw_base, heads)
        seed = sealing.seed + int(rows.stretches[row])
        block, segment = seal_page(tail[0][0], tail[1][0], sealing.fmt, seed)
        store_blocks(arena, block, rows.pages[one], sealing.base)
        if segment is not None:
            store_blocks(arena, segment, rows.segments[one], sealing.segment_base)


def seal_page(k: Tensor, v: Tensor, fmt: SealFormat, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """One page by itself: block [1, H, block_bytes] u8, and its segment where it has one.

    k, v: [H, T, D] - exact
    """
    if isinstance(fmt, PagedFormat):
        return encode_segments(k, v, fmt, [seed], fmt.tokens)
    if isinstance(fmt, AlignedFormat):
        return encode_aligned(k, v, fmt), None
    assert fmt.k < fmt.v
    both = torch.stack([to_fp16(k), to_fp16(v)], 1)  # [H, 2, T, D], the order of the planes
    return both.flatten(1).view(torch.uint8).unsqueeze(0), None
