"""The kernels of attention on bit planes, in the order in which they run.

    channel_levels_kernel   q and the largest exponents of K        -> levels of the channels of K
    plane_scores_kernel     q, K at these levels                    -> scores; partial softmax
    allow_drops_kernel      the 32 largest weights, high plane of V -> what V may drop; softmax
    plane_values_kernel     scores, V at the levels they leave      -> partial results

The rest is reduce.py's. Bits of V depend on the finished softmax, so K and V cannot share a pass
and the scores wait in memory. A plane is read where one of the queries of a program needs it; every
query counts its own bits and no more.
"""

import triton
import triton.language as tl

from disagg.kernels.aligned_tiles import (
    GUARD,
    add_product,
    as_fp16,
    exponents,
    level_of,
    read_rows,
    split_by_level,
)
from disagg.kernels.tiles import (
    EMPTY,
    column_of,
    empty_softmax,
    hide,
    query_unit,
    softmax_step,
    store_lse,
    upper_lower,
)
from disagg.kernels.units import find_cut, find_unit, pick

CLASSES = tl.constexpr(32)  # sets of tokens, one of each 32 in a row, whose largest weight counts
PAGES = tl.constexpr(32)  # whose largest exponents are read at once


@triton.jit(do_not_specialize=["width"])
def channel_levels_kernel(
    q_ptr, bytes_ptr, pages_ptr, lo_ptr, hi_ptr, levels_ptr, tops_ptr, k_bits_ptr,
    scale, base, width, FMT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Levels of K for one query and the heads that read one KV head.

    levels_ptr: [B, rows, D] i8; tops_ptr: [B, M, H, D] u8 - the largest exponents of V in its pages
    k_bits_ptr: [B, rows] fp32 - bits read of K, on the mean
    """
    D: tl.constexpr = FMT.head_dim
    G_PAD: tl.constexpr = triton.next_power_of_2(SHAPE.group)
    i_b, i_m, i_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d, o_g = tl.arange(0, triton.next_power_of_2(D))[None, :], tl.arange(0, G_PAD)[:, None]
    m_q = (o_d < D) & (o_g < SHAPE.group)
    lo = tl.load(lo_ptr + i_b * SHAPE.queries + i_m)
    hi = tl.load(hi_ptr + i_b * SHAPE.queries + i_m)
    end = tl.where(hi > lo, tl.cdiv(hi, FMT.tokens), 0)
    k_top = tl.zeros(o_d.shape, tl.int32)
    v_top = tl.zeros(o_d.shape, tl.int32)
    for i in tl.range(lo // FMT.tokens, end, PAGES):
        o_p = i + tl.arange(0, PAGES)
        page = tl.load(pages_ptr + i_b * width + o_p, mask=o_p < end, other=0).to(tl.int64)
        p_top = bytes_ptr + (page * 128 + base + i_head * FMT.block_bytes)[:, None] + o_d
        m_top = (o_p < end)[:, None] & (o_d < D)
        b_top = tl.load(p_top + FMT.k_top, mask=m_top, other=0).to(tl.int32)
        k_top = tl.maximum(k_top, tl.max(b_top, 0, keep_dims=True))
        b_top = tl.load(p_top + FMT.v_top, mask=m_top, other=0).to(tl.int32)
        v_top = tl.maximum(v_top, tl.max(b_top, 0, keep_dims=True))
    heads = tl.num_programs(2)
    p_tops = tops_ptr + ((i_b * SHAPE.queries + i_m) * heads + i_head) * D + o_d
    tl.store(p_tops, v_top.to(tl.uint8), mask=o_d < D)
    i_row = i_b * SHAPE.rows + (i_m * heads + i_head) * SHAPE.group + o_g  # [G, 1]
    b_q = tl.load(q_ptr + i_row.to(tl.int64) * D + o_d, mask=m_q, other=0.0)
    share = tl.where(o_d < D, exponents(b_q * scale) + k_top, 0)
    level = level_of(tl.max(share, 1, keep_dims=True) - share)
    tl.store(levels_ptr + i_row.to(tl.int64) * D + o_d, level.to(tl.int8), mask=m_q)
    bits = tl.sum(tl.where(o_d < D, 16 - 4 * level, 0), 1, keep_dims=True)
    tl.store(k_bits_ptr + i_row, bits.to(tl.float32) / D, mask=o_g < SHAPE.group)


@triton.jit(do_not_specialize=["batch", "width"])
def plane_scores_kernel(
    q_ptr, bytes_ptr, pages_ptr, lo_ptr, hi_ptr, span_lo_ptr, span_hi_ptr, levels_ptr,
    scores_ptr, lse_ptr, best_ptr, place_ptr, scale, base, batch, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Scores of C columns over the pages of one unit; arguments as paged_aligned.py says.

    scores_ptr: [B, rows, width * T] fp32 in log2 units, -inf where a query does not see a token
    lse_ptr:    [slots, rows] fp32, log2
    best_ptr, place_ptr: [slots, rows, 32] fp32, i32 - the largest score of a class, and its token
    """
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    C: tl.constexpr = SHAPE.columns
    tl.static_assert(T == 2 * CLASSES, "a page is two rounds of classes")
    i_head, i_block, i_slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, start, end = find_unit(
        span_lo_ptr, span_hi_ptr, batch, i_slot, tl.num_programs(2), T, SHAPE.batch_pad
    )
    if i_b >= batch:
        return
    i_m, i_row, m_c = column_of(i_head, i_block, SHAPE)
    lo = tl.load(lo_ptr + i_b * SHAPE.queries + i_m, mask=m_c, other=0)
    hi = tl.load(hi_ptr + i_b * SHAPE.queries + i_m, mask=m_c, other=0)
    o_row = (i_b * SHAPE.rows + i_row).to(tl.int64)
    factor, unit = query_unit(q_ptr + o_row * D, m_c, scale, D)
    o_d = tl.arange(0, triton.next_power_of_2(D))
    m_q = m_c[:, None] & (o_d < D)[None, :]
    p_q = o_row[:, None] * D + o_d[None, :]
    b_q = tl.load(q_ptr + p_q, mask=m_q, other=0.0) * factor[:, None]
    level = tl.load(levels_ptr + p_q, mask=m_q, other=3).to(tl.int32)
    q = split_by_level(tl.trans(b_q), tl.trans(level))
    least = tl.min(level, 0)
    m, l = empty_softmax(CLASSES, C)
    best = tl.full([CLASSES, C], float("-inf"), tl.float32)
    place = tl.zeros([CLASSES, C], tl.int32)
    o_t, o_class = tl.arange(0, T), tl.arange(0, CLASSES)[:, None]
    page = tl.load(pages_ptr + i_b * width + start)
    for i in tl.range(start, end):
        block = bytes_ptr + (page.to(tl.int64) * 128 + base + i_head * FMT.block_bytes)
        page = tl.load(pages_ptr + i_b * width + tl.minimum(i + 1, end - 1))
        k = read_rows(
            block, least <= 2, least <= 1, least == 0, T, FMT.k_high, FMT.k_middle, FMT.k_low
        )
        s = hide(add_product(k, q, tl.zeros([T, C], tl.float32)), i * T + o_t, lo, hi)
        p_s = scores_ptr + (o_row * width + i)[None, :] * T + o_t[:, None]
        tl.store(p_s, s * unit[None, :], mask=m_c[None, :])
        _, _, m, l = softmax_step(s, unit, m, l, 0.0, 0.0, CLASSES)
        rounds = upper_lower(s * unit[None, :])
        for j in tl.static_range(2):
            better = rounds[j] > best
            best = tl.where(better, rounds[j], best)
            place = tl.where(better, i * T + j * CLASSES + o_class, place)
    o_part = i_slot * SHAPE.rows + i_row
    store_lse(lse_ptr + o_part, m, l, 0.0, m_c)
    p_class = o_part.to(tl.int64)[None, :] * CLASSES + o_class
    tl.store(best_ptr + p_class, best, mask=m_c[None, :])
    tl.store(place_ptr + p_class, place, mask=m_c[None, :])


@triton.jit(do_not_specialize=["batch", "slots", "width"])
def allow_drops_kernel(
    bytes_ptr, pages_ptr, span_lo_ptr, span_hi_ptr, tops_ptr, part_lse_ptr, best_ptr, place_ptr,
    lse_ptr, allowed_ptr, base, batch, slots, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """The softmax of one row over all units, and the exponent from which on V drops bits.

    lse_ptr, allowed_ptr: [B, rows] fp32 in log2, i32
    """
    D: tl.constexpr = FMT.head_dim
    i_row, i_b = tl.program_id(0), tl.program_id(1)
    _, _, units, before = find_cut(
        span_lo_ptr, span_hi_ptr, batch, slots, FMT.tokens, SHAPE.batch_pad
    )
    i_all = tl.arange(0, SHAPE.batch_pad)
    first = pick(before, i_b, i_all)
    o_class = tl.arange(0, CLASSES)
    best = tl.full([CLASSES], float("-inf"), tl.float32)
    place = tl.zeros([CLASSES], tl.int32)
    m, l = tl.max(best, 0), tl.sum(tl.zeros([CLASSES], tl.float32), 0)
    m = tl.maximum(m, EMPTY)
    for i in range(first, first + pick(units, i_b, i_all)):
        o_part = i * SHAPE.rows + i_row
        lse = tl.load(part_lse_ptr + o_part)
        m_new = tl.maximum(m, lse)
        l = l * tl.exp2(m - m_new) + tl.exp2(lse - m_new)
        m = m_new
        b_best = tl.load(best_ptr + o_part.to(tl.int64) * CLASSES + o_class)
        b_place = tl.load(place_ptr + o_part.to(tl.int64) * CLASSES + o_class)
        place = tl.where(b_best > best, b_place, place)
        best = tl.maximum(b_best, best)
    lse = m + tl.log2(tl.maximum(l, 1e-30))
    p = tl.exp2(best - lse)

    heads = SHAPE.rows // SHAPE.queries // SHAPE.group
    i_head = i_row // SHAPE.group % heads
    o_d = tl.arange(0, triton.next_power_of_2(D))
    page = tl.load(pages_ptr + i_b * width + place // FMT.tokens).to(tl.int64)
    o_v = (page * 128 + base + i_head * FMT.block_bytes + FMT.v_high)[:, None]
    o_v += (place % FMT.tokens)[:, None] * D + o_d[None, :]
    # [32, D]
    m_v = (p > 0)[:, None] & (o_d < D)[None, :]
    word = tl.load(bytes_ptr + o_v, mask=m_v, other=0).to(tl.int16) & 0x7F
    b_v = as_fp16(word << 8 | 0x80).to(tl.float32)
    estimate = tl.sum(p[:, None] * b_v, 0)
    i_top = (i_b * SHAPE.queries + i_row // (heads * SHAPE.group)) * heads + i_head
    top = tl.load(tops_ptr + i_top * D + o_d, mask=o_d < D, other=0).to(tl.int32)
    allowed = tl.where(o_d < D, exponents(estimate) + GUARD - top, 1 << 20)
    tl.store(lse_ptr + i_b * SHAPE.rows + i_row, lse)
    tl.store(allowed_ptr + i_b * SHAPE.rows + i_row, tl.min(allowed, 0))


@triton.jit(do_not_specialize=["batch", "width"], do_not_specialize_on_alignment=["seen_ptr"])
def plane_values_kernel(
    bytes_ptr, pages_ptr, span_lo_ptr, span_hi_ptr, scores_ptr, lse_ptr, allowed_ptr,
    part_lse_ptr, part_o_ptr, bits_ptr, seen_ptr, base, batch, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Sums over V of C columns and the pages of one unit; shapes as above.

    part_o_ptr:         [slots, rows, D] fp32
    bits_ptr, seen_ptr: [B, rows] i32 - bits of V, and tokens of weight above 0, are added to these
    """
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    i_head, i_block, i_slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, start, end = find_unit(
        span_lo_ptr, span_hi_ptr, batch, i_slot, tl.num_programs(2), T, SHAPE.batch_pad
    )
    if i_b >= batch:
        return
    _, i_row, m_c = column_of(i_head, i_block, SHAPE)
    o_row = (i_b * SHAPE.rows + i_row).to(tl.int64)
    lse = tl.load(lse_ptr + o_row, mask=m_c, other=0.0)
    allowed = tl.load(allowed_ptr + o_row, mask=m_c, other=1 << 20)
    o_d, o_t = tl.arange(0, triton.next_power_of_2(D)), tl.arange(0, T)
    C: tl.constexpr = SHAPE.columns  # Triton 3.6 takes no attribute in the list of an argument
    b_o = tl.zeros([o_d.shape[0], C], tl.float32)
    bits, seen = tl.zeros([T, C], tl.int32), tl.zeros([T, C], tl.int32)
    page = tl.load(pages_ptr + i_b * width + start)
    for i in tl.range(start, end):
        block = bytes_ptr + (page.to(tl.int64) * 128 + base + i_head * FMT.block_bytes)
        page = tl.load(pages_ptr + i_b * width + tl.minimum(i + 1, end - 1))
        p_s = scores_ptr + (o_row * width + i)[None, :] * T + o_t[:, None]
        p = tl.exp2(tl.load(p_s, mask=m_c[None, :], other=float("-inf")) - lse[None, :])
        level = tl.where(p > 0, level_of(allowed[None, :] - exponents(p)), 3)
        bits += tl.where(p > 0, 16 - 4 * level, 0)
        seen += (p > 0).to(tl.int32)
        least = tl.min(level, 1)
        v = read_rows(
            block, least <= 2, least <= 1, least == 0, D, FMT.v_high, FMT.v_middle, FMT.v_low
        )
        b_o = add_product(v, split_by_level(p * 32768.0, level), b_o)
    tl.atomic_add(bits_ptr + o_row, tl.sum(bits, 0), mask=m_c)
    tl.atomic_add(seen_ptr + o_row, tl.sum(seen, 0), mask=m_c)
    o_part = i_slot * SHAPE.rows + i_row
    part_lse = tl.load(part_lse_ptr + o_part, mask=m_c, other=0.0)
    # far below the rest of its sequence every weight of a unit was 0 in fp16, and 0 it remains
    share = tl.exp2(tl.minimum(lse - part_lse, 64.0) - 15.0)
    share = tl.where(part_lse > EMPTY, share, 0.0)
    p_o = part_o_ptr + o_part.to(tl.int64)[None, :] * D + o_d[:, None]
    tl.store(p_o, b_o * share[None, :], mask=m_c[None, :] & (o_d < D)[:, None])
