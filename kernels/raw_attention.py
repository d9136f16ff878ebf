"""The attention kernel on exact K and V: the tail, and every page of the raw codec.

A raw page is 16 tokens; a tile is four of them, gathered by their ids, so that the matrix products
are as tall as those on codes. fp16 goes to the tensor core as it is. bf16 has too few digits for q
and p, so these go as two bf16 terms. fp32 goes as three tf32 products: an
exact cache stays exact.
"""

import triton
import triton.language as tl

from disagg.kernels.tiles import (
    column_of,
    empty_softmax,
    hide,
    load_tile,
    query_unit,
    softmax_step,
    store_lse,
    whole_tiles,
)
from disagg.kernels.units import find_unit

TILE_PAGES = tl.constexpr(4)


@triton.jit
def attend_raw_kernel(
    q_ptr, arena_ptr, pages_ptr, lo_ptr, hi_ptr, span_lo_ptr, span_hi_ptr, o_ptr, lse_ptr,
    scale, base, batch, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over the tiles of one unit; arguments as paged_attention.py says.

    arena_ptr: the arena as items of the raw dtype; OPERAND: dtype of what is multiplied
    """
    T: tl.constexpr = FMT.tokens * TILE_PAGES
    D: tl.constexpr = FMT.head_dim
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    C: tl.constexpr = SHAPE.columns
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
    o_d = tl.arange(0, D_PAD)
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)
    q = operands(tl.trans(b_q * factor[:, None]), OPERAND)
    m, l = empty_softmax(T, C)
    b_o = tl.zeros([D_PAD, C], tl.float32)

    row_ptr = pages_ptr + i_b * width
    o_page = tl.arange(0, T) // FMT.tokens
    whole, whole_end = whole_tiles(lo, hi, start, end, m_c, T)
    pages = tl.load(row_ptr + tl.minimum(whole * TILE_PAGES + o_page, width - 1))
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        tokens = token_rows(arena_ptr, pages, base, i_head, FMT)
        pages = tl.load(row_ptr + tl.minimum((i + 1) * TILE_PAGES + o_page, width - 1))
        m, l, b_o = add_tokens(tokens, q, unit, (), m, l, b_o, FMT, OPERAND)
    for i in tl.range(start, end - (whole_end - whole), num_stages=1):
        i_tile = tl.where(i < whole, i, i + (whole_end - whole))
        pages = tl.load(row_ptr + tl.minimum(i_tile * TILE_PAGES + o_page, width - 1))
        tokens = token_rows(arena_ptr, pages, base, i_head, FMT)
        seen = (i_tile * T + tl.arange(0, T), lo, hi)
        m, l, b_o = add_tokens(tokens, q, unit, seen, m, l, b_o, FMT, OPERAND)

    i_out = i_slot * SHAPE.rows + i_row
    inverse = store_lse(lse_ptr + i_out, m, l, m_c)
    p_o = o_ptr + i_out.to(tl.int64)[None, :] * D + o_d[:, None]
    tl.store(p_o, b_o * inverse[None, :], mask=m_c[None, :] & (o_d < D)[:, None])


@triton.jit
def operands(x, DTYPE: tl.constexpr):
    """fp32 x as what a product with DTYPE takes: a tuple of one or two tiles whose sum is x."""
    x_high = x.to(DTYPE)
    if DTYPE == tl.bfloat16:
        return x_high, (x - x_high.to(tl.float32)).to(DTYPE)
    else:
        return (x_high,)


@triton.jit
def token_rows(arena_ptr, pages, base, i_head, FMT: tl.constexpr):
    """[T] pointers to the rows of a tile's tokens in their blocks, before the offset of K or V."""
    ITEM: tl.constexpr = arena_ptr.dtype.element_ty.primitive_bitwidth // 8
    o_slot = tl.arange(0, pages.shape[0]) % FMT.tokens
    at = pages.to(tl.int64) * (128 // ITEM) + o_slot * FMT.head_dim
    return arena_ptr + at + (base // ITEM + i_head * (FMT.block_bytes // ITEM))


@triton.jit
def add_tokens(tokens, q, unit, seen, m, l, o, FMT: tl.constexpr, OPERAND: tl.constexpr):
    """(m, l, o) after one more tile.

    tokens: [T] pointers to rows of D items; q: tiles [D, C]; o: [D, C] fp32
    seen:   (positions [T], lo [C], hi [C]), or () for a tile that all columns see whole
    """
    D: tl.constexpr = FMT.head_dim
    ITEM: tl.constexpr = tokens.dtype.element_ty.primitive_bitwidth // 8
    o_d = tl.arange(0, o.shape[0])[None, :]
    WHOLE: tl.constexpr = o.shape[0] == D
    # [T, D]
    b_k = load_tile(tokens[:, None] + FMT.k // ITEM + o_d, o_d < D, WHOLE).to(OPERAND)
    s = tl.dot(b_k, q[0], input_precision="tf32x3")
    for i in tl.static_range(1, len(q)):
        s = tl.dot(b_k, q[i], s)
    if len(seen) > 0:
        s = hide(s, seen[0], seen[1], seen[2])
    p, decay, m, l = softmax_step(s, unit, m, l, l.shape[0])
    b_v = load_tile(tokens[:, None] + FMT.v // ITEM + o_d, o_d < D, WHOLE).to(OPERAND)
    o *= decay[None, :]
    terms = operands(p, OPERAND)
    for i in tl.static_range(len(terms)):
        o = tl.dot(tl.trans(b_v), terms[i], o, input_precision="tf32x3")
    return m, l, o
