"""Sealing pages on a GPU: the Triton form of reference_encode.py and reference_encode_paged.py.

    segment_scales_kernel   scales of the channels of a segment, where its pages share them
    encode_side_kernel      outliers, codes, scales and sparse slots of one side of one block
    lowrank.py              A B^T of what these left over

Blocks go straight to their addresses, in an arena or in order (places.py). The decomposition behind
a rotation is torch's on every device, in fp64: it is one small matrix for a segment and head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.encode_absent import store_mask, with_group_means
from disagg.kernels.encode_tiles import (
    LARGEST,
    at,
    axis_of,
    choose_outliers,
    encode_tile,
    finite,
    group_scale,
)
from disagg.kernels.formats import QuantFormat
from disagg.kernels.formats_paged import PagedFormat, Rotation, Side, as_paged, written_bytes
from disagg.kernels.lowrank import encode_low_rank
from disagg.kernels.places import Places, clear_gaps, in_order, new_blocks
from disagg.kernels.reference_lowrank import rotation, unrotate
from disagg.kernels.reference_pieces import DenseBlocks

CHANNELS = 32  # of a segment that one program reads


@triton.jit
def segment_scales_kernel(
    x_ptr, segments_ptr, stride_head, stride_token, stride_channel, n, segment_tokens,
    SIDE: tl.constexpr, BYTES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of some channels, over one segment without its outliers.

    x_ptr: [H, n, D] of any float dtype; segments_ptr: [S, H, BYTES] u8
    """
    i_segment, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    o_r, m_r = axis_of(SIDE.rows, SIDE.planes)
    m_c = o_c < SIDE.columns
    there = m_r[:, None] & m_c[None, :]
    first = i_segment * segment_tokens
    p_x = x_ptr + i_head.to(tl.int64) * stride_head + o_c[None, :].to(tl.int64) * stride_channel
    low = tl.full([CHANNELS], LARGEST, tl.float32)
    high = -low
    for i in tl.range(first, tl.minimum(first + segment_tokens, n), SIDE.rows, num_stages=3):
        p_page = p_x + (i + o_r)[:, None].to(tl.int64) * stride_token
        x = finite(tl.load(p_page, mask=there, other=0.0))
        if SIDE.sparse is not None:
            x = choose_outliers(x, there, SIDE)[1]
        low = tl.minimum(low, tl.min(tl.where(there, x, LARGEST), 0))
        high = tl.maximum(high, tl.max(tl.where(there, x, -LARGEST), 0))
    ends = tl.permute(tl.join(low, high), (1, 0))  # [2, CHANNELS]
    scale, zero = group_scale(ends, ends == ends, 0, SIDE)
    segment = segments_ptr + (i_segment * tl.num_programs(1) + i_head) * BYTES
    tl.store(at(segment, SIDE.scale.scale, tl.float16) + o_c, scale, mask=m_c)
    tl.store(at(segment, SIDE.scale.zero, tl.float16) + o_c, zero, mask=m_c)


@triton.jit(do_not_specialize=["segment_pages"])
def encode_side_kernel(
    x_ptr, bytes_ptr, pages_ptr, segments_ptr, missing_ptr, absent_ptr,
    stride_head, stride_row, stride_column, stride_page, missing_row, missing_column,
    unit, base, segment_pages, FMT: tl.constexpr, IS_V: tl.constexpr,
):  # fmt: skip
    """One side of one block.

    x_ptr:        [H, n, D] of any float dtype; strides in items, a page begins stride_page further
    bytes_ptr, pages_ptr, unit, base: where blocks lie, as places.py says
    segments_ptr: [S, H, bytes] u8 with their scales; a segment has segment_pages pages
    missing_ptr:  [H, P, rows * columns] fp16 - what a low-rank piece is fitted to, if there is one
    absent_ptr:   [H, n] u8 - tokens that the mask of their page leaves out; None: all are there
    """
    SIDE: tl.constexpr = FMT.v if IS_V else FMT.k
    T: tl.constexpr = FMT.tokens
    i_page, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_r, m_r = axis_of(SIDE.rows, SIDE.planes)
    o_c, m_c = axis_of(SIDE.columns, SIDE.halves)
    there = m_r[:, None] & m_c[None, :]
    p_x = x_ptr + i_page.to(tl.int64) * stride_page + i_head * stride_head
    p_x += o_r[:, None].to(tl.int64) * stride_row + o_c[None, :].to(tl.int64) * stride_column
    x = finite(tl.load(p_x, mask=there, other=0.0))
    page = tl.load(pages_ptr + i_page).to(tl.int64) * unit + base
    block = bytes_ptr + tl.multiple_of(page + i_head * FMT.block_bytes, 16)
    i_segment = i_page // segment_pages
    segment = segments_ptr + (i_segment * tl.num_programs(1) + i_head) * FMT.segment_bytes
    p_absent = absent_ptr
    if absent_ptr is not None:
        p_absent += (i_head * tl.num_programs(0) + i_page) * T
        if IS_V:
            gone = tl.load(p_absent + o_c, mask=m_c, other=0)
            x = with_group_means(x, there, gone, o_c, 1, T, FMT.k.scale.group)
        else:
            gone = tl.load(p_absent + o_r, mask=m_r, other=0)
            x = with_group_means(x, there, gone, o_r, 0, T, FMT.k.scale.group)
    if FMT.valid is not None and not IS_V:
        store_mask(block + FMT.valid, p_absent, T)
    missing = encode_tile(x, there, o_r, o_c, m_r, m_c, block, segment, SIDE)
    if SIDE.low_rank is not None:
        i_out = (i_head * tl.num_programs(0) + i_page) * (SIDE.rows * SIDE.columns)
        p_out = missing_ptr + i_out + o_r[:, None] * missing_row + o_c[None, :] * missing_column
        tl.store(p_out, missing.to(tl.float16), mask=there)


def encode_quantized(k: Tensor, v: Tensor, fmt: QuantFormat) -> Tensor:
    """Seal pages of one layer. Shapes, results and bytes as in reference_encode."""
    return encode_segments(k, v, as_paged(fmt), [0], k.shape[1])[0]


def encode_segments(
    k: Tensor,
    v: Tensor,
    fmt: PagedFormat,
    seeds: list[int],
    tokens: int,
    frozen: Tensor | None = None,
    absent: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal pages of one layer, segment by segment. As in reference_encode_paged.encode_segments.

    error: codes, scales and slots are the reference's, byte for byte, but where the mean of a
           column, which is summed in another order, tips a rounding; A B^T is off by 2**-9 of it
    """
    count = k.shape[1] // fmt.tokens
    blocks = new_blocks(count, k.shape[0], fmt.block_bytes, written_bytes(fmt), k.device)
    return blocks, seal_segments(k, v, in_order(blocks), fmt, seeds, tokens, frozen, absent)


def seal_segments(
    k: Tensor,
    v: Tensor,
    places: Places,
    fmt: PagedFormat,
    seeds: list[int],
    tokens: int,
    frozen: Tensor | None = None,
    absent: Tensor | None = None,
) -> Tensor | None:
    """As `encode_segments`, with blocks written where they belong; the segments, if any."""
    heads, n, _ = k.shape
    shape = (len(seeds), heads, fmt.segment_bytes)
    segments = torch.zeros(shape, dtype=torch.uint8, device=k.device)
    if frozen is not None:
        segments.copy_(frozen)
    if not n:
        return segments if fmt.segment_bytes else None
    clear_gaps(places, heads, fmt.block_bytes, written_bytes(fmt))
    needed = fmt.k.low_rank is not None
    missing = torch.empty(
        2 if needed else 0, heads, n, k.shape[2], dtype=torch.float16, device=k.device
    )
    gone = None if absent is None else absent.contiguous().view(torch.uint8)
    for i, (x, side) in enumerate(((k, fmt.k), (v, fmt.v))):
        if side.rotation:
            x = _rotate(x, side.rotation, segments, tokens, frozen is None)
        left = missing[i] if needed else x
        _encode_side(x, i == 1, fmt, places, segments, left, gone, tokens)
    if needed:
        encode_low_rank(missing, places, segments, fmt, seeds, tokens)
    return segments if fmt.segment_bytes else None


def _encode_side(
    x: Tensor,
    is_v: bool,
    fmt: PagedFormat,
    places: Places,
    segments: Tensor,
    missing: Tensor,
    absent: Tensor | None,
    tokens: int,
) -> None:
    """K [H, n, D] of all pages, or V."""
    side = fmt.v if is_v else fmt.k
    heads, n, head_dim = x.shape
    stride_head, stride_token, stride_channel = x.stride()
    if side.scale.shared:
        segment_scales_kernel[(segments.shape[0], heads, triton.cdiv(head_dim, CHANNELS))](
            x, segments, stride_head, stride_token, stride_channel, n, tokens,
            side, fmt.segment_bytes, CHANNELS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    strides = (stride_channel, stride_token) if is_v else (stride_token, stride_channel)
    dense = (1, head_dim) if is_v else (head_dim, 1)
    encode_side_kernel[(n // fmt.tokens, heads)](
        x, places.arena, places.pages, segments, missing, absent,
        stride_head, *strides, fmt.tokens * stride_token, *dense,
        places.unit, places.base, max(1, tokens // fmt.tokens), fmt, is_v,
        num_warps=encode_warps(side), enable_fp_fusion=False,
    )  # fmt: skip


def encode_warps(side: Side) -> int:
    """Warps of a program: 64 numbers a thread fit its registers, or 32 and what codes miss."""
    numbers = 32 if side.sparse or side.low_rank else 64
    return 4 if side.rows * side.columns <= 4 * 32 * numbers else 8


def _rotate(x: Tensor, piece: Rotation, segments: Tensor, tokens: int, fresh: bool) -> Tensor:
    """T_L of x [H, n, D] fp32, by the T_S of each segment."""
    matrices = DenseBlocks(segments).plane(torch.float16, piece.matrix, (piece.block, piece.block))
    parts = (
        torch.nan_to_num(x.float(), nan=0.0).clamp(-LARGEST.value, LARGEST.value).split(tokens, 1)
    )
    for part, matrix in zip(parts, matrices, strict=True):
        if fresh:
            matrix.copy_(rotation(part, piece.block))
    turned = [unrotate(part, matrix) for part, matrix in zip(parts, matrices, strict=True)]
    return torch.cat(turned, 1)
