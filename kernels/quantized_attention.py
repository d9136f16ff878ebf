"""The attention kernel on codes: one unit of work of units.py, pages through quantized_tiles.py.

The id of the next page is carried in a loop variable: loaded in the iteration that needs it, it
would make the compiler keep one page in flight instead of two or three (Triton 3.6 to 3.9).
"""

import triton
import triton.language as tl

from disagg.kernels.quantized_tiles import add_values, largest_bias, page_scores, plane_values
from disagg.kernels.tiles import (
    P_BIAS,
    column_of,
    empty_softmax,
    hide,
    query_unit,
    softmax_step,
    store_lse,
    whole_tiles,
)
from disagg.kernels.units import find_unit


@triton.jit
def attend_quantized_kernel(
    q_ptr, words_ptr, pages_ptr, lo_ptr, hi_ptr, span_lo_ptr, span_hi_ptr, o_ptr, lse_ptr,
    scale, base, batch, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr, SPELLING: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over the pages of one unit; arguments as paged_attention.py says."""
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    W_PAD: tl.constexpr = triton.next_power_of_2(D // 4)
    i_head, i_block, i_slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, start, end = find_unit(
        span_lo_ptr, span_hi_ptr, batch, i_slot, tl.num_programs(2), T, SHAPE.batch_pad
    )
    if i_b >= batch:
        return
    i_m, i_row, m_c = column_of(i_head, i_block, SHAPE)
    p_lo = i_b * SHAPE.queries + i_m
    lo = tl.load(lo_ptr + p_lo, mask=m_c, other=0)
    hi = tl.load(hi_ptr + p_lo, mask=m_c, other=0)
    p_q = q_ptr + (i_b * SHAPE.rows + i_row) * D
    factor, unit = query_unit(p_q, m_c, scale, D)
    q = load_query(p_q, m_c, factor, SHAPE.copies, FMT)
    state = empty_state(FMT, SHAPE)

    offset = base // 2 + i_head * (FMT.block_bytes // 2)
    row_ptr = pages_ptr + i_b * width
    whole, whole_end = whole_tiles(lo, hi, start, end, m_c, T)
    page = tl.load(row_ptr + whole, mask=whole < whole_end, other=0)
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        page = tl.load(row_ptr + tl.minimum(i + 1, whole_end - 1))
        state = add_page(words_ptr + at, q, unit, (), state, FMT, SHAPE, SPELLING)
    for i in tl.range(start, end - (whole_end - whole), num_stages=1):
        i_page = tl.where(i < whole, i, i + (whole_end - whole))
        at = tl.multiple_of(tl.load(row_ptr + i_page).to(tl.int64) * 64 + offset, 8)
        seen = (i_page * T, lo, hi)
        state = add_page(words_ptr + at, q, unit, seen, state, FMT, SHAPE, SPELLING)

    m, l, bias, o, z = state
    i_out = i_slot * SHAPE.rows + i_row
    inverse = store_lse(lse_ptr + i_out, m, l, bias, m_c)
    o_w = tl.arange(0, W_PAD)[:, None]
    for f in tl.static_range(4):
        b_o = plane_values(o, z, f, FMT, SHAPE.groups, SPELLING) * inverse[None, :]
        p_o = o_ptr + i_out.to(tl.int64)[None, :] * D + f * (D // 4) + o_w
        tl.store(p_o, b_o, mask=m_c[None, :] & (o_w < D // 4))


@triton.jit
def add_page(
    block, q, unit, seen, state, FMT: tl.constexpr, SHAPE: tl.constexpr, SPELLING: tl.constexpr
):
    """The state (m, l, bias, o, z) after one more page; `block`: int16 pointer to its block.

    seen: (first token of the page, lo, hi), or () for a page that all columns see whole
    """
    m, l, bias, o, z = state
    X: tl.constexpr = SHAPE.groups
    s = page_scores(block, q, SHAPE.copies, FMT, SPELLING)
    if len(seen) > 0:
        s = hide(s, seen[0] + tl.arange(0, FMT.tokens), seen[1], seen[2])
    new_bias = largest_bias(block, bias, FMT)
    p, decay, m, l = softmax_step(s, unit, m, l, bias, new_bias, FMT.tokens // 4)
    if X == 2:
        decay = tl.reshape(tl.join(decay, decay), [decay.shape[0] * 2])
    o, z = add_values(block, p, decay, o, z, FMT, X, SPELLING)
    return m, l, new_bias, o, z


@triton.jit
def load_query(p_q, m_c, factor, COPIES: tl.constexpr, FMT: tl.constexpr):
    """q * factor as fp16 [C * COPIES, H], one tile for each half of the channels."""
    HALVES: tl.constexpr = FMT.halves
    H: tl.constexpr = FMT.head_dim // HALVES
    H_PAD: tl.constexpr = triton.next_power_of_2(H)
    C: tl.constexpr = p_q.shape[0]
    o_h = tl.arange(0, H_PAD)[None, :]
    q = ()
    for j in tl.static_range(HALVES):
        b_q = tl.load(p_q[:, None] + j * H + o_h, mask=m_c[:, None] & (o_h < H), other=0.0)
        b_q = (b_q * factor[:, None]).to(tl.float16)
        b_q = tl.broadcast_to(b_q[:, None, :], [C, COPIES, H_PAD])
        q = q + (tl.reshape(b_q, [C * COPIES, H_PAD]),)
    return q


@triton.jit
def empty_state(FMT: tl.constexpr, SHAPE: tl.constexpr):
    """(m, l, bias, o, z) before any page: l, o and z are times 2**bias."""
    C: tl.constexpr = SHAPE.columns
    X: tl.constexpr = SHAPE.groups
    GROUPS: tl.constexpr = FMT.head_dim // FMT.v_group
    m, l = empty_softmax(FMT.tokens // 4, C)
    b_o = tl.zeros([triton.next_power_of_2(FMT.head_dim // 4), C * X], tl.float32)
    z = ()
    for _ in tl.static_range(0, GROUPS, X):
        z = z + (tl.zeros([16, C * X], tl.float32),)
    bias = tl.max(tl.full([C], P_BIAS, tl.float32), 0)
    return m, l, bias, (b_o, b_o, b_o, b_o), z
