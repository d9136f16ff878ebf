"""Cutting fp16 into bit planes on a GPU: the Triton form of reference_aligned.encode_aligned."""

import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.encode_tiles import finite
from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.places import Places, clear_gaps, in_order, new_blocks


@triton.jit
def encode_planes_kernel(
    x_ptr, bytes_ptr, pages_ptr, stride_head, stride_row, stride_column, stride_page, unit, base,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    HIGH: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr,
    TOP: tl.constexpr, TOP_AXIS: tl.constexpr,
):  # fmt: skip
    """One side of one block. K has channels as rows, V has tokens.

    x_ptr:    [H, n, D] of any float dtype; strides in items, a page begins stride_page further
    bytes_ptr, pages_ptr, unit, base: where blocks lie, as places.py says
    TOP_AXIS: along which a channel lies
    """
    i_page, i_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_r = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
    o_c = tl.arange(0, triton.next_power_of_2(COLUMNS))[None, :]
    p_x = x_ptr + i_page.to(tl.int64) * stride_page + i_head * stride_head
    p_x += o_r.to(tl.int64) * stride_row + o_c.to(tl.int64) * stride_column
    x = finite(tl.load(p_x, mask=(o_r < ROWS) & (o_c < COLUMNS), other=0.0))
    page = tl.load(pages_ptr + i_page).to(tl.int64) * unit + base
    block = bytes_ptr + tl.multiple_of(page + i_head * BLOCK, 16)
    store_planes(x, block, ROWS, COLUMNS, HIGH, MIDDLE, LOW, TOP, TOP_AXIS)


@triton.jit
def store_planes(
    x, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HIGH: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr,
    TOP: tl.constexpr, TOP_AXIS: tl.constexpr,
):  # fmt: skip
    """Cut x, finite in fp32, [ROWS, COLUMNS] padded with zeros to powers of two."""
    tl.static_assert(COLUMNS % 2 == 0, "two neighbours share a byte")
    R_PAD: tl.constexpr = x.shape[0]
    C_PAD: tl.constexpr = x.shape[1]
    o_r, o_c = tl.arange(0, R_PAD)[:, None], tl.arange(0, C_PAD)[None, :]
    word = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    there = (o_r < ROWS) & (o_c < COLUMNS)
    tl.store(block + HIGH + o_r * COLUMNS + o_c, (word >> 8).to(tl.uint8), mask=there)

    # two neighbours: [R, C / 2] each
    first, second = tl.split(tl.reshape(word, [R_PAD, C_PAD // 2, 2]))
    o_h = tl.arange(0, C_PAD // 2)[None, :]
    m_h = (o_r < ROWS) & (o_h < COLUMNS // 2)
    p_half = block + o_r * (COLUMNS // 2) + o_h
    tl.store(p_half + MIDDLE, (first >> 4 & 15 | second & 0xF0).to(tl.uint8), mask=m_h)
    tl.store(p_half + LOW, (first & 15 | (second & 15) << 4).to(tl.uint8), mask=m_h)

    top = tl.max(word & 0x7FFF, TOP_AXIS) >> 10
    o_top = tl.arange(0, R_PAD if TOP_AXIS == 1 else C_PAD)
    m_top = o_top < (ROWS if TOP_AXIS == 1 else COLUMNS)
    tl.store(block + TOP + o_top, top.to(tl.uint8), mask=m_top)


def encode_aligned(k: Tensor, v: Tensor, fmt: AlignedFormat) -> Tensor:
    """Seal pages of one layer. Shapes, results and bytes as in reference_aligned."""
    count = k.shape[1] // fmt.tokens
    blocks = new_blocks(count, k.shape[0], fmt.block_bytes, written_bytes(fmt), k.device)
    seal_aligned(k, v, in_order(blocks), fmt)
    return blocks


def seal_aligned(k: Tensor, v: Tensor, places: Places, fmt: AlignedFormat) -> None:
    """As `encode_aligned`, with blocks written where they belong."""
    heads, n, head_dim = k.shape
    if not n:
        return
    clear_gaps(places, heads, fmt.block_bytes, written_bytes(fmt))
    k_planes = (fmt.k_high, fmt.k_middle, fmt.k_low, fmt.k_top, 1)
    v_planes = (fmt.v_high, fmt.v_middle, fmt.v_low, fmt.v_top, 0)
    for x, axes, rows, columns, planes in (
        (k, (2, 1), head_dim, fmt.tokens, k_planes),
        (v, (1, 2), fmt.tokens, head_dim, v_planes),
    ):
        encode_planes_kernel[(n // fmt.tokens, heads)](
            x, places.arena, places.pages, x.stride(0), x.stride(axes[0]), x.stride(axes[1]),
            fmt.tokens * x.stride(1), places.unit, places.base,
            rows, columns, fmt.block_bytes, *planes, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def written_bytes(fmt: AlignedFormat) -> int:
    """Bytes of the planes of a block."""
    return (4 * fmt.tokens + 2) * fmt.head_dim
