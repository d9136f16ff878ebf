"""Sealing pages on a GPU: the Triton form of reference/encode.py.

    torch                scales of a segment, where its pages share them, and rotations
    encode_side_kernel   outliers, codes, scales and sparse slots of one side of one block
    lowrank.py           A B^T of what these left over

Blocks go straight to where they belong, in an arena or in order. The decomposition behind a
rotation is in fp64: it is one small matrix for a segment and head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import BlockRotation, PageFormat, Side
from disagg.kernels.gpu.bands import channels_of, rotated, side_of
from disagg.kernels.gpu.encode_tiles import (
    axis_of,
    encode_tile,
    finite,
    is_padded,
    store_mask,
)
from disagg.kernels.gpu.lowrank import encode_low_rank
from disagg.kernels.reference import quantize
from disagg.kernels.reference.lowrank import rotation, unrotate
from disagg.kernels.reference.pages import DenseBlocks
from disagg.kernels.sealing import Segmentation, Target, in_order


@triton.jit(do_not_specialize=["segment_pages"])
def encode_side_kernel(
    x_ptr, bytes_ptr, pages_ptr, segments_ptr, missing_ptr, absent_ptr,
    stride_head, stride_row, stride_column, stride_page, missing_row, missing_column,
    unit, base, segment_pages, FMT: tl.constexpr, IS_V: tl.constexpr, BAND: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One side of one block (of K one band), or a part of its columns if programs share them.

    x_ptr:        [H, n, D] of any float dtype; strides in items, a page begins stride_page further
    bytes_ptr, pages_ptr, unit, base: where blocks lie, as `Target` says
    segments_ptr: [S, H, bytes] u8 with their scales; a segment has segment_pages pages
    missing_ptr:  [H, P, rows * columns] fp16 - what a low-rank product is fitted to, if any
    absent_ptr:   [H, n] u8 - tokens that the mask of their page leaves out; None: all are present
    """
    SIDE: tl.constexpr = FMT.v if IS_V else side_of(FMT, BAND)
    i_page = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    o_r, m_r, o_c, m_c = part_of(tl.program_id(2), BLOCKS, SIDE)
    m_x = m_r[:, None] & m_c[None, :]
    i_segment = i_page // segment_pages
    segment = segments_ptr
    segment += (i_segment * tl.num_programs(1) + i_head) * FMT.segment_bytes
    channel = o_c
    if not IS_V:
        channel = channels_of(o_c, segment, BAND, FMT)
    p_x = x_ptr + i_page.to(tl.int64) * stride_page + i_head * stride_head
    o_row = o_r[:, None].to(tl.int64) * stride_row
    o_column = channel[None, :].to(tl.int64) * stride_column
    x = finite(tl.load(p_x + o_row + o_column, mask=m_x, other=0.0))
    if FMT.hadamard is not None and IS_V:
        x = rotated(x, segment, FMT)
    page = tl.load(pages_ptr + i_page).to(tl.int64) * unit + base
    block = bytes_ptr + tl.multiple_of(page + i_head * FMT.block_bytes, 16)
    if FMT.valid is not None and not IS_V:
        p_absent = absent_ptr
        if absent_ptr is not None:
            p_absent += (i_head * tl.num_programs(0) + i_page) * FMT.tokens
        store_mask(block + FMT.valid, p_absent, FMT.tokens)
    top = None
    if SIDE.floating and BLOCKS > 1:
        top = tl.max(tl.zeros([2], tl.float32), 0)
        for i in range(BLOCKS):
            _, _, o_c, _ = part_of(i, BLOCKS, SIDE)
            o_column = o_c[None, :].to(tl.int64) * stride_column
            b_x = finite(tl.load(p_x + o_row + o_column))
            top = tl.maximum(top, tl.max(tl.max(tl.abs(b_x), 1), 0))
        o_c = part_of(tl.program_id(2), BLOCKS, SIDE)[2]
    missing = encode_tile(x, m_x, o_r, o_c, m_r, m_c, block, segment, SIDE, top)
    if SIDE.low_rank is not None:
        i_out = (i_head * tl.num_programs(0) + i_page) * (SIDE.rows * SIDE.columns)
        p_out = missing_ptr + i_out + o_r[:, None] * missing_row
        p_out += o_c[None, :] * missing_column
        tl.store(p_out, missing.to(tl.float16), mask=m_x)


def encode(
    k: Tensor,
    v: Tensor | None,
    fmt: PageFormat,
    cut: Segmentation,
    absent: Tensor | None = None,
    target: Target | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal the pages of consecutive segments, of one layer. As reference/encode.encode.

    target: where the blocks are written; None: they are the result
    error:  codes, scales and slots are the reference's, byte for byte, but where the mean of a
            column, which is summed in another order, tips a rounding; A B^T is off by 2**-9 of it
    """
    heads, n, _ = k.shape
    num_blocks = 0 if target else n // fmt.tokens
    shape = (num_blocks, heads, fmt.block_bytes)
    blocks = torch.empty(shape, dtype=torch.uint8, device=k.device)
    segments = cut.begin(n, heads, fmt, k.device)
    if n:
        _encode(k, v, fmt, cut, absent, target or in_order(blocks), segments)
    return blocks, segments if fmt.segment_bytes else None


def _encode(
    k: Tensor,
    v: Tensor | None,
    fmt: PageFormat,
    cut: Segmentation,
    absent: Tensor | None,
    target: Target,
    segments: Tensor,
) -> None:
    """Write the blocks of all pages, and the segments."""
    missing = (
        None  # what codes miss of K and V, where a low-rank product is fitted to it
    )
    if fmt.k.low_rank is not None:
        missing = torch.empty(2, *k.shape, dtype=torch.float16, device=k.device)
    mask = None
    if absent is not None:
        mask = absent.contiguous().view(torch.uint8)
        group = fmt.k.scale.group
        k = quantize.with_group_means(quantize.finite(k), absent, group)
        if v is not None:
            v = quantize.with_group_means(quantize.finite(v), absent, group)
    if fmt.k.rotation:
        k = _rotate(k, fmt.k.rotation, segments, cut)
    k_missing = k if missing is None else missing[0]
    for band in range(len(fmt.k_sides)):
        _encode_side(k, False, band, fmt, target, segments, k_missing, mask, cut.tokens)
    if v is None:
        return
    if fmt.values.rotation:
        v = _rotate(v, fmt.values.rotation, segments, cut)
    v_missing = v if missing is None else missing[1]
    _encode_side(v, True, 0, fmt, target, segments, v_missing, mask, cut.tokens)
    if missing is not None:
        encode_low_rank(missing, target, segments, fmt, cut)


def _encode_side(
    x: Tensor,
    is_v: bool,
    band: int,
    fmt: PageFormat,
    target: Target,
    segments: Tensor,
    missing: Tensor,
    absent: Tensor | None,
    segment_tokens: int,
) -> None:
    """A band of K [H, n, D] of all pages, or V."""
    side = fmt.values if is_v else fmt.k_sides[band]
    heads, n, head_dim = x.shape
    stride_head, stride_token, stride_channel = x.stride()
    if side.scale.shared:
        _share_scales(x, side, segments, segment_tokens)
    stride_row = stride_token
    stride_column = stride_channel
    missing_row = head_dim
    missing_column = 1
    if is_v:
        stride_row, stride_column = stride_column, stride_row
        missing_row, missing_column = missing_column, missing_row
    blocks = encode_blocks(side)
    segment_pages = max(1, segment_tokens // fmt.tokens)
    encode_side_kernel[(n // fmt.tokens, heads, blocks)](
        x, target.arena, target.pages, segments, missing, absent,
        stride_head, stride_row, stride_column, fmt.tokens * stride_token,
        missing_row, missing_column, target.unit, target.base, segment_pages,
        fmt, is_v, band, blocks, num_warps=encode_warps(side), enable_fp_fusion=False,
    )  # fmt: skip


def _share_scales(x: Tensor, side: Side, segments: Tensor, tokens: int) -> None:
    """Scales and zeros of the channels of x [H, n, D], over each segment."""
    shared = DenseBlocks(segments)
    assert side.scale.zero is not None
    all_scales = shared.plane(torch.float16, side.scale.scale, side.scale_shape)
    all_zeros = shared.plane(torch.float16, side.scale.zero, side.scale_shape)
    for i, part in enumerate(quantize.finite(x).split(tokens, 1)):
        _, scales, zeros = quantize.quantize(part, part.shape[1], side.bits)
        all_scales[i].copy_(scales)
        all_zeros[i].copy_(zeros)


def encode_warps(side: Side) -> int:
    """Warps of a program: 32 numbers a thread, and what codes miss of them, fit its registers."""
    is_small = side.rows * side.columns <= 4 * 32 * 32
    return 4 if is_small and not side.sparse else 8


@triton.constexpr_function
def encode_blocks(side: Side) -> int:
    """Programs that share a side: parts of its columns, or of its rows where these have the scales.

    Columns that are independent are shared where none is padded. Choosing outliers takes registers
    too. A side as wide as a latent is shared in any case: in columns to a power of two, all of one
    scale read by all, or in rows.
    """
    part = side.columns // side.halves
    width = triton.next_power_of_2(part)
    if side.rows * width * side.halves > 16 * 32 * 32 and is_padded(part):
        if side.scale.by == "row":
            rows = side.rows // side.fields
            return max(1, rows * side.fields * width * side.halves // (8 * 32 * 32))
        return part // (part & -part)
    if side.scale.by != "column" or is_padded(part):
        return 1
    fitting = (4 if side.sparse else 8) * 32 * 32
    return triton.next_power_of_2(triton.cdiv(side.rows * side.columns, fitting))


@triton.jit
def part_of(i_block, BLOCKS: tl.constexpr, SIDE: tl.constexpr):
    """Rows, which of them exist, columns and which of them exist, of one of the programs."""
    if SIDE.scale.by == "row":
        o_r, m_r = axis_of(SIDE.rows, SIDE.fields, i_block, BLOCKS)
        o_c, m_c = axis_of(SIDE.columns, SIDE.halves)
    else:
        o_r, m_r = axis_of(SIDE.rows, SIDE.fields)
        o_c, m_c = axis_of(SIDE.columns, SIDE.halves, i_block, BLOCKS)
    return o_r, m_r, o_c, m_c


def _rotate(
    x: Tensor, by: BlockRotation, segments: Tensor, cut: Segmentation
) -> Tensor:
    """T_L of x [H, n, D] fp32, by the T_S of each segment."""
    shape = (by.block, by.block)
    matrices = DenseBlocks(segments).plane(torch.float16, by.matrix, shape)
    parts = quantize.finite(x).split(cut.tokens, 1)
    results = []
    for part, matrix in zip(parts, matrices, strict=True):
        if cut.frozen is None:
            matrix.copy_(rotation(part, by.block))
        results.append(unrotate(part, matrix))
    return torch.cat(results, 1)
