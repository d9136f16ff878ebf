"""Attention on bit planes on a GPU: reference/aligned.py, whose two passes over pages are kernels.

    torch           q and the largest exponents of K         -> levels of the channels of K
    plane_scores    q, K at these levels                     -> scores of all tokens, in memory
    torch           softmax; 32 weights, high plane of V     -> levels of the tokens of V
    plane_values    weights, V at these levels               -> partial results of units

A level is the part of a number that is read: 0 all 16 bits, 1 the first 12, 2 the first 8; unread
bits count as 100...0. A plane is read if any query of the program needs it. Nothing waits for the
host, so a CUDA graph can record it. Planes are encoded by torch.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels import formats
from disagg.kernels.formats import AlignedFormat
from disagg.kernels.gpu.plan import TENSOR_COLUMNS, shape_of, warps_of
from disagg.kernels.gpu.tiles import column_of, find_unit, query_unit
from disagg.kernels.reference.aligned import (
    STRIDE,
    Bits,
    drops_below,
    k_drops,
    levels_of,
    mean_bits,
    tops_of,
)
from disagg.kernels.reference.pages import ArenaBlocks, plane_view
from disagg.kernels.reference.softmax import capped, columns_of, visible_tokens
from disagg.kernels.view import View, WorkPlan

NARROW = tl.constexpr(formats.NARROW)


@triton.jit(do_not_specialize=["queries", "width"])
def plane_scores_kernel(
    q_ptr, levels_ptr, bytes_ptr, pages_ptr, units_ptr, view, scores_ptr, scale, base, queries,
    width, FMT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Scores [B, H, P * T, M * G] fp32 of one unit, if it is of this view.

    levels_ptr: [B, H, D, M * G] i8, of channels
    """
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    C: tl.constexpr = SHAPE.columns
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    i_view, i_b, start, end, _ = find_unit(units_ptr, tl.program_id(2))
    if (start >= end) | (i_view != view):
        return
    heads = tl.num_programs(0)
    count = queries * SHAPE.group
    _, i_row, m_c = column_of(i_head, i_block, queries, SHAPE)
    o_row = (i_b * heads * count + i_row).to(tl.int64) * D
    factor, q_unit = query_unit(q_ptr + o_row, m_c, scale * 0.6931471805599453, D)
    o_d = tl.arange(0, triton.next_power_of_2(D))
    o_t = tl.arange(0, T)
    m_q = (o_d < D)[:, None] & m_c[None, :]
    b_q = tl.load(q_ptr + o_row[None, :] + o_d[:, None], mask=m_q, other=0.0)
    b_q = b_q * factor[None, :]
    i_column = i_block * C + tl.arange(0, C)
    first = (i_b * heads + i_head).to(tl.int64)
    p_level = levels_ptr + (first * D + o_d)[:, None] * count + i_column[None, :]
    level = tl.load(p_level, mask=m_q, other=3).to(tl.int32)
    q = split_by_level(b_q, level)
    # with many channels loads ahead would spill
    STAGES: tl.constexpr = 3 if D <= NARROW else 1
    for i in tl.range(start, end, num_stages=STAGES):
        page = tl.load(pages_ptr + i_b * width + i).to(tl.int64)
        block = bytes_ptr + (page * 128 + base + i_head * FMT.block_bytes)
        k = read_rows(block, tl.min(level, 1), T, FMT.k_high, FMT.k_middle, FMT.k_low)
        s = add_product(k, q, tl.zeros([T, C], tl.float32)) * q_unit[None, :]
        o_s = (first * width + i) * T + o_t
        p_s = scores_ptr + o_s[:, None] * count + i_column[None, :]
        tl.store(p_s, s, mask=m_c[None, :])


@triton.jit(do_not_specialize=["queries", "width"])
def plane_values_kernel(
    p_ptr, total_ptr, levels_ptr, bytes_ptr, pages_ptr, units_ptr, view, o_ptr, lse_ptr, base,
    queries, width, FMT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """The partial result of one unit, if it is of this view.

    p_ptr, levels_ptr: [B, H, P * T, M * G] fp32, i8 - weights and levels of tokens
    total_ptr:         [B, H, M * G] fp32 - the log-sum-exp, natural, that weights are relative to
    """
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    C: tl.constexpr = SHAPE.columns
    i_head = tl.program_id(0)
    i_block = tl.program_id(1)
    i_slot = tl.program_id(2)
    i_view, i_b, start, end, _ = find_unit(units_ptr, i_slot)
    if (start >= end) | (i_view != view):
        return
    heads = tl.num_programs(0)
    count = queries * SHAPE.group
    _, i_row, m_c = column_of(i_head, i_block, queries, SHAPE)
    i_column = i_block * C + tl.arange(0, C)
    o_d = tl.arange(0, triton.next_power_of_2(D))
    o_t = tl.arange(0, T)
    b_o = tl.zeros([o_d.shape[0], C], tl.float32)
    l = tl.zeros([C], tl.float32)
    first = (i_b * heads + i_head).to(tl.int64)
    for i in tl.range(start, end):
        page = tl.load(pages_ptr + i_b * width + i).to(tl.int64)
        block = bytes_ptr + (page * 128 + base + i_head * FMT.block_bytes)
        o_p = ((first * width + i) * T + o_t)[:, None] * count + i_column[None, :]
        p = tl.load(p_ptr + o_p, mask=m_c[None, :], other=0.0)
        level = tl.load(levels_ptr + o_p, mask=m_c[None, :], other=3).to(tl.int32)
        v = read_rows(block, tl.min(level, 1), D, FMT.v_high, FMT.v_middle, FMT.v_low)
        l += tl.sum(p, 0)
        b_o = add_product(v, split_by_level(p * 32768.0, level), b_o)
    total = tl.load(total_ptr + first * count + i_column, mask=m_c, other=0.0)
    i_out = (i_slot * heads * count + i_row).to(tl.int64)
    tl.store(lse_ptr + i_out, total * 1.4426950408889634 + tl.log2(l), mask=m_c)
    b_o *= (tl.where(l > 0, 1.0 / l, 0.0) / 32768.0)[None, :]
    p_o = o_ptr + i_out[None, :] * D + o_d[:, None]
    tl.store(p_o, b_o, mask=m_c[None, :] & (o_d < D)[:, None])


@triton.jit
def split_by_level(x, level):
    """fp32 x as three fp16 tiles that add up to it, one for each level."""
    x = x.to(tl.float16)
    none = tl.zeros(x.shape, tl.float16)
    return (
        tl.where(level == 0, x, none),
        tl.where(level == 1, x, none),
        tl.where(level == 2, x, none),
    )


@triton.jit
def read_rows(
    block, least, COLUMNS: tl.constexpr,
    HIGH: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """int16 [R, COLUMNS padded] of the high plane, shifted into place, and [R, half] of the rest.

    A row's plane is read only where it is used.

    block: u8 pointer to the block of a page
    least: [R] the lowest level that any query needs
    """
    PAD: tl.constexpr = triton.next_power_of_2(COLUMNS)
    o_r = tl.arange(0, least.shape[0])[:, None]
    o_c = tl.arange(0, PAD)[None, :]
    o_h = tl.arange(0, PAD // 2)[None, :]
    m_c = o_c < COLUMNS
    m_h = o_h < COLUMNS // 2
    least = least[:, None]
    word = tl.load(block + HIGH + o_r * COLUMNS + o_c, mask=(least <= 2) & m_c, other=0)
    p_half = block + o_r * (COLUMNS // 2) + o_h
    middle = tl.load(p_half + MIDDLE, mask=(least <= 1) & m_h, other=0).to(tl.int16)
    low = tl.load(p_half + LOW, mask=(least == 0) & m_h, other=0).to(tl.int16)
    return word.to(tl.int16) << 8, middle, low


@triton.jit
def neighbours(packed):
    """Bytes [R, C / 2] of two nibbles, the first one low -> [R, C]."""
    both = tl.join(packed & 15, packed >> 4)
    return tl.reshape(both, [packed.shape[0], 2 * packed.shape[1]])


@triton.jit
def as_fp16(words):
    return words.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def add_product(planes, y, total):
    """total + X^T y[level] of rows X at each level; planes: of `read_rows`; y: [R, C] fp16 each.
    One level after another: all at once are too large for the shared memory of consumer chips."""
    word, middle, low = planes
    total = tl.dot(tl.trans(as_fp16(word | 0x80)), y[2], total)
    longer = word | neighbours(middle) << 4
    total = tl.dot(tl.trans(as_fp16(longer | 8)), y[1], total)
    return tl.dot(tl.trans(as_fp16(longer | neighbours(low))), y[0], total)


def attend(
    q: Tensor,
    view: View,
    scale: float,
    number: int,
    units: WorkPlan,
    o: Tensor,
    lse: Tensor,
    cap: float = 0.0,
) -> Callable[[], Bits]:
    """Attention over bit planes. Arguments as in reference/aligned.py.

    number:  of the view among the units, whose partial results are written to o and lse
    returns: a function that counts the bits that were read
    error:   about 5e-4 relative to the reference, since q and p are rounded to fp16
    """
    fmt = view.fmt
    q = q.float().contiguous()
    assert isinstance(fmt, AlignedFormat)
    batch, queries, query_heads, head_dim = q.shape
    width = view.pages.shape[1]
    slots = units.table.shape[0]
    heads = view.heads
    shape = shape_of(fmt, queries, query_heads // heads, TENSOR_COLUMNS)
    grid = heads, shape.blocks(queries), slots
    options = {"num_warps": 4 * warps_of(head_dim)}
    tables = view.arena, view.pages, units.table, number

    blocks = ArenaBlocks(view.arena, view.pages, view.base, heads, fmt.block_bytes)
    visible = visible_tokens(view, 0, width * fmt.tokens)  # [B, 1, n, M]
    pages = visible.squeeze(1).unflatten(1, (-1, fmt.tokens)).any(2)  # [B, P, M]
    columns = columns_of(q * scale, heads)
    k_drop = k_drops(columns, tops_of(blocks, fmt.k_top, head_dim, pages, shape.group))
    scores = q.new_zeros(batch, heads, width * fmt.tokens, columns.shape[3])
    plane_scores_kernel[grid](
        q, levels_of(k_drop).contiguous(), *tables, scores, scale, view.base, queries, width,
        fmt, shape, **options,
    )  # fmt: skip
    hidden = ~visible.repeat_interleave(shape.group, 3)
    scores = capped(scores, cap).masked_fill_(hidden, -torch.inf)
    total = scores.logsumexp(2)
    total = total.masked_fill(total == -torch.inf, 0.0)
    p = scores.sub_(total.unsqueeze(2)).exp_()

    tops = tops_of(blocks, fmt.v_top, head_dim, pages, shape.group)
    v_drop = drops_below(_estimate(p, view, blocks), p, tops)
    v_level = torch.where(p > 0, levels_of(v_drop), 3).to(torch.int8)
    plane_values_kernel[grid](
        p, total, v_level.contiguous(), *tables, o, lse, view.base, queries, width, fmt, shape,
        **options,
    )  # fmt: skip
    return lambda: Bits(
        mean_bits(k_drop, None, queries), mean_bits(v_drop, p > 0, queries)
    )


def _estimate(p: Tensor, view: View, blocks: ArenaBlocks) -> Tensor:
    """Magnitudes of the output [B, H, D, N] from the largest weight of each class of tokens."""
    fmt = view.fmt
    assert isinstance(fmt, AlignedFormat)
    weight, index = p.unflatten(2, (-1, STRIDE)).max(2)  # [B, H, 32, N]
    token = index * STRIDE + torch.arange(STRIDE, device=p.device)[:, None]
    ids = view.pages.long().gather(1, (token // fmt.tokens).flatten(1)).view_as(token)
    head = torch.arange(view.heads, device=p.device)[:, None, None]
    plane = plane_view(blocks, torch.uint8, fmt.v_high, (fmt.tokens, fmt.head_dim))
    high = plane[ids, head, token % fmt.tokens]  # [B, H, 32, N, D]
    words = (high.int() & 0x7F) << 8 | 0x80
    values = words.short().view(torch.float16).float()
    return (weight.unsqueeze(4) * values).sum(2).transpose(2, 3)
