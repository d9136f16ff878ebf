"""A step's new tokens, and the pages that they complete, in one launch.

Every program writes K or V of one new token and head into its raw page. Where the token completes
a page, it then reads the raw pages that become it, seals them as encode.py does and writes the
block. The new token is taken from the step, not read back, so nothing waits for the write.

    k, v ──> raw page ──┐
      └─────────────────┴──> [T, D] in registers ──> codes, scales, slots, A B^T ──> page
"""

import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT, PageFormat
from disagg.kernels.gpu.bands import channels_of, rotated, side_of
from disagg.kernels.gpu.encode import encode_blocks, encode_warps, part_of
from disagg.kernels.gpu.encode_tiles import at, encode_tile, finite
from disagg.kernels.gpu.lowrank import WARPS as LOW_RANK_WARPS
from disagg.kernels.gpu.lowrank import WIDTH, fit_page, seed_of
from disagg.kernels.sealing import NewRows, Sealing

UNIT = tl.constexpr(ARENA_UNIT)


@triton.jit
def append_kernel(
    arena_ptr, k_ptr, v_ptr, pages_ptr, slots_ptr, raw_base, k_row, k_head, v_row, v_head,
    sealed_ptr, tails_ptr, segments_ptr, stretches_ptr, base, segment_base, seed, head,
    RAW: tl.constexpr, DTYPE: tl.constexpr, FMT: tl.constexpr, BANDS: tl.constexpr,
):  # fmt: skip
    """K or V (axis 2) of one new token (axis 0) and KV head (axis 1).

    arena_ptr:    u8; k_ptr, v_ptr: [N, H, D] of any float dtype, strides in items
    sealed_ptr .. stretches_ptr, base .. head: see sealing.py; FMT: None if nothing seals
    DTYPE:        that of raw pages; BANDS: how many bands K has
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    i_side = tl.program_id(2)
    raw_page = tl.load(pages_ptr + i_row)
    slot = tl.load(slots_ptr + i_row)
    raw = raw_base + i_head * RAW.block_bytes
    p_k = k_ptr + i_row * k_row + i_head * k_head
    p_v = v_ptr + i_row * v_row + i_head * v_head
    o_k = raw + RAW.k
    o_v = o_k
    if RAW.v is not None:
        o_v = raw + RAW.v
    if i_side == 0:
        append_token(arena_ptr, p_k, raw_page, slot, o_k, RAW, DTYPE)
    else:
        append_token(arena_ptr, p_v, raw_page, slot, o_v, RAW, DTYPE)
    if FMT is not None:
        page = tl.load(sealed_ptr + i_row).to(tl.int64)
        if page >= 0:
            p_tail = tails_ptr + i_row * (FMT.tokens // RAW.tokens)
            o_block = page * UNIT + base + i_head * FMT.block_bytes
            block = arena_ptr + tl.multiple_of(o_block, 16)
            segment = tl.load(segments_ptr + i_row).to(tl.int64) * UNIT + segment_base
            segment = arena_ptr + segment + i_head * FMT.segment_bytes
            start = seed_of(
                seed + tl.load(stretches_ptr + i_row), head + i_head, i_side
            )
            if i_side == 0:
                for band in tl.static_range(BANDS):
                    seal(
                        arena_ptr, p_k, raw_page, slot, o_k, p_tail, block, segment, start,
                        1, band, FMT, RAW, DTYPE,
                    )  # fmt: skip
            elif FMT.v is not None:
                seal(
                    arena_ptr, p_v, raw_page, slot, o_v, p_tail, block, segment, start,
                    0, 0, FMT, RAW, DTYPE,
                )  # fmt: skip


@triton.jit
def append_token(
    arena_ptr, p_new, page, slot, offset, RAW: tl.constexpr, DTYPE: tl.constexpr
):
    """Write one side of a token; nothing where its page is NO_PAGE.

    p_new:  pointer to the new numbers
    offset: of K or V of this head in the raw page
    """
    o_d = tl.arange(0, triton.next_power_of_2(RAW.head_dim))
    m_d = o_d < tl.where(page >= 0, RAW.head_dim, 0)
    p_raw = arena_ptr + tl.multiple_of(page.to(tl.int64) * UNIT + offset, 16)
    p_raw = at(p_raw, 0, DTYPE) + slot * RAW.head_dim + o_d
    tl.store(p_raw, load_new(p_new + o_d, m_d, DTYPE), mask=m_d)


@triton.jit
def load_new(p, mask, DTYPE: tl.constexpr):
    """New numbers in the dtype of raw pages; numbers beyond it saturate, NaN stays."""
    x = tl.load(p, mask=mask, other=0.0).to(tl.float32)
    LARGEST: tl.constexpr = largest_of(DTYPE)
    x = tl.where(tl.abs(x) > LARGEST, tl.where(x > 0, LARGEST, -LARGEST), x)
    return x.to(DTYPE)


@triton.constexpr_function
def largest_of(dtype: tl.dtype) -> float:
    """The largest number of a raw dtype."""
    largest = {
        "fp16": 65504.0,
        "bf16": 2.0**128 - 2.0**120,
        "fp32": 2.0**128 - 2.0**104,
    }
    return largest[dtype.name]


@triton.jit
def load_tail(
    arena_ptr, p_new, new_page, new_slot, offset, p_tail, o_t, m_t, o_d, m_d,
    D_AXIS: tl.constexpr, RAW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The tokens o_t of a tail in fp32, the new one among them, and which exist.

    p_new, new_page, new_slot, offset: of the new token, as in `append_token`
    D_AXIS: along which the channels o_d lie
    p_tail: the ids of the raw pages
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    page = tl.load(p_tail + o_t // RAW.tokens, mask=m_t, other=0)
    slot = o_t % RAW.tokens
    o_raw = page.to(tl.int64) * UNIT + offset + slot * (RAW.head_dim * ITEM)
    p_raw = at(arena_ptr + tl.multiple_of(o_raw, 16), 0, DTYPE)
    p_raw = tl.expand_dims(p_raw, D_AXIS) + tl.expand_dims(o_d, 1 - D_AXIS)
    m_x = tl.expand_dims(m_t, D_AXIS) & tl.expand_dims(m_d, 1 - D_AXIS)
    x = finite(tl.load(p_raw, mask=m_x, other=0.0))
    own = tl.expand_dims((page == new_page) & (slot == new_slot) & m_t, D_AXIS)
    new = finite(load_new(p_new + o_d, m_d, DTYPE))
    return tl.where(own, tl.expand_dims(new, 1 - D_AXIS), x), m_x


@triton.jit
def seal(
    arena_ptr, p_new, new_page, new_slot, offset, p_tail, block, segment, seed,
    D_AXIS: tl.constexpr, BAND: tl.constexpr,
    FMT: tl.constexpr, RAW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One side of a page, of K one band; segment: u8 pointer to the one it joins."""
    SIDE: tl.constexpr = side_of(FMT, BAND) if D_AXIS == 1 else FMT.v
    BLOCKS: tl.constexpr = encode_blocks(SIDE) if SIDE.low_rank is None else 1
    top = None
    if SIDE.floating and BLOCKS > 1:
        top = tl.max(tl.zeros([2], tl.float32), 0)
        for i in range(BLOCKS):
            o_r, m_r, o_c, m_c = part_of(i, BLOCKS, SIDE)
            x, _ = load_tail(
                arena_ptr, p_new, new_page, new_slot, offset, p_tail, o_r, m_r, o_c, m_c,
                D_AXIS, RAW, DTYPE,
            )  # fmt: skip
            top = tl.maximum(top, tl.max(tl.max(tl.abs(x), 1), 0))
    for i in range(BLOCKS):
        o_r, m_r, o_c, m_c = part_of(i, BLOCKS, SIDE)
        if D_AXIS == 1:
            channel = channels_of(o_c, segment, BAND, FMT)
            x, m_x = load_tail(
                arena_ptr, p_new, new_page, new_slot, offset, p_tail, o_r, m_r, channel, m_c,
                D_AXIS, RAW, DTYPE,
            )  # fmt: skip
        else:
            x, m_x = load_tail(
                arena_ptr, p_new, new_page, new_slot, offset, p_tail, o_c, m_c, o_r, m_r,
                D_AXIS, RAW, DTYPE,
            )  # fmt: skip
            if FMT.hadamard is not None:
                x = rotated(x, segment, FMT)
        missing = encode_tile(x, m_x, o_r, o_c, m_r, m_c, block, block, SIDE, top)
        if SIDE.low_rank is not None:
            missing = tl.where(m_x, missing, 0.0).to(tl.float16)
            if D_AXIS == 1:
                store_factors(tl.trans(missing), o_r, o_c, m_c, block, seed, SIDE)
            else:
                store_factors(missing, o_c, o_r, m_r, block, seed, SIDE)


@triton.jit
def store_factors(x_t, o_t, o_d, m_d, block, seed, SIDE: tl.constexpr):
    """Store A and B of the error of a page, x_t [D, T]."""
    RANK: tl.constexpr = SIDE.low_rank.rank
    a, b = fit_page(x_t, o_d, m_d, seed, RANK)
    o_r = tl.arange(0, WIDTH)[None, :]
    p_a = at(block, SIDE.low_rank.a, tl.float16) + o_t[:, None] * RANK + o_r
    p_b = at(block, SIDE.low_rank.b, tl.float16) + o_d[:, None] * RANK + o_r
    tl.store(p_a, a.to(tl.float16), mask=o_r < RANK)
    tl.store(p_b, b.to(tl.float16), mask=m_d[:, None] & (o_r < RANK))


def append(
    arena: Tensor,
    k: Tensor,
    v: Tensor | None,
    rows: NewRows,
    sealing: Sealing | None = None,
) -> None:
    """Write one token per row into raw pages, and the pages that they complete.

    Shapes as in reference/encode.append; the same bytes, except where encode.py says otherwise.
    """
    if not k.shape[0]:
        return
    k = k if k.stride(2) == 1 else k.contiguous()
    sides = 1 if v is None else 2
    v = k if v is None else v  # the kernel does not read it then
    v = v if v.stride(2) == 1 else v.contiguous()
    pages = rows.pages.contiguous()
    slots = rows.slots.contiguous()
    if sealing is None:  # the kernel reads none of these
        fmt = None
        bands = 0
        tables = (pages, pages, pages, pages)
        offsets = (0, 0, 0, 0)
    else:
        fmt = sealing.fmt
        bands = len(fmt.k_sides)
        seals = sealing.rows
        tables = (seals.pages, seals.tails, seals.segments, seals.stretches)
        offsets = (sealing.base, sealing.segment_base, sealing.seed, sealing.head)
    append_kernel[(k.shape[0], k.shape[1], sides)](
        arena, k, v, pages, slots, rows.base, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *tables, *offsets, rows.fmt, getattr(tl, rows.fmt.dtype), fmt, bands,
        num_warps=append_warps(fmt), enable_fp_fusion=False,
    )  # fmt: skip


def append_warps(fmt: PageFormat | None) -> int:
    """Warps of a program: those of an encoder where it may seal."""
    if fmt is None:
        return 1
    if fmt.k.low_rank is not None:
        return LOW_RANK_WARPS
    return max(encode_warps(side) for side in fmt.sides)
