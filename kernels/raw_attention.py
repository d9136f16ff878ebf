"""The attention kernel on exact K and V: tails, raw pages, kept tokens and those not dropped.

formats_exact.py says what these have in common, slot_places.py in what they differ. An iteration
takes a tile of four strips of 16 slots, each at its own address (four raw pages), so that
bookkeeping is paid once for 64 tokens. fp16 goes to the tensor core as it is. bf16 has too few
digits for q and p, so these go as two bf16 terms. fp32 goes as three tf32 products, or as fp32
where there are none: an exact cache stays exact.
"""

import triton
import triton.language as tl

from disagg.kernels.slot_places import (
    STRIP,
    TILE,
    find_places,
    find_slots,
    hide_slots,
    load_places,
)
from disagg.kernels.tiles import (
    P_BIAS,
    below,
    column_of,
    empty_softmax,
    load_tile,
    query_unit,
    softmax_step,
    store_lse,
    upper_lower,
    whole_tiles,
)


@triton.jit(do_not_specialize=["batch", "width"])
def attend_raw_kernel(
    q_ptr, arena_ptr, pages_ptr, lo_ptr, hi_ptr, span_lo_ptr, span_hi_ptr, sides_ptr,
    o_ptr, lse_ptr, scale, base, side_base, batch, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over the tiles of one unit; arguments as paged_exact.py says.

    arena_ptr: the arena as items of the raw dtype; OPERAND: dtype of what is multiplied
    """
    D: tl.constexpr = FMT.head_dim
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    C: tl.constexpr = SHAPE.columns
    tl.static_assert(FMT.strips * FMT.tile_pages * STRIP == TILE, "a tile is whole pages")
    i_head, i_block, i_slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, start, end, limit = find_slots(
        span_lo_ptr, span_hi_ptr, batch, width, i_slot, tl.num_programs(2), SHAPE.batch_pad, FMT
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
    m, l = empty_softmax(STRIP, C)
    state = (m, l, tl.zeros([D_PAD, C], tl.float32))

    ITEM: tl.constexpr = arena_ptr.dtype.element_ty.primitive_bitwidth // 8
    block_ptr = arena_ptr + (base // ITEM + i_head * (FMT.block_bytes // ITEM))
    places_ptr = find_places(arena_ptr, sides_ptr, base, side_base, i_b, i_head, FMT)
    row_ptr = pages_ptr + i_b * width
    whole, whole_end = start, end
    if FMT.counted:
        whole, whole_end = whole_tiles(lo, hi, start, end, m_c, TILE)
    pages = load_pages(row_ptr, whole, width, FMT)
    places = load_places(places_ptr, pages, whole, limit, FMT)
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        blocks = addresses(block_ptr, pages, FMT)
        seen = () if FMT.counted else (places, i, lo, hi)
        pages = load_pages(row_ptr, i + 1, width, FMT)
        places = load_places(places_ptr, pages, i + 1, limit, FMT)
        state = add_tile(blocks, q, unit, seen, state, FMT, OPERAND, PRECISION)
    if FMT.counted:
        for i in tl.range(start, end - (whole_end - whole), num_stages=1):
            i_tile = tl.where(i < whole, i, i + (whole_end - whole))
            blocks = addresses(block_ptr, load_pages(row_ptr, i_tile, width, FMT), FMT)
            seen = ((), i_tile, lo, hi)
            state = add_tile(blocks, q, unit, seen, state, FMT, OPERAND, PRECISION)

    m, l, b_o = state
    i_out = i_slot * SHAPE.rows + i_row
    inverse = store_lse(lse_ptr + i_out, m, l, P_BIAS, m_c)
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
def load_pages(row_ptr, i_tile, width, FMT: tl.constexpr):
    """The page id of each of the four strips of a tile; beyond the table the last one again."""
    ids = ()
    for j in tl.static_range(4):
        i_page = i_tile * FMT.tile_pages + j // FMT.strips
        ids = ids + (tl.load(row_ptr + tl.minimum(i_page, width - 1)),)
    return ids


@triton.jit
def addresses(block_ptr, pages, FMT: tl.constexpr):
    """Where the four strips of a tile begin, but for the offset of K or V."""
    ITEM: tl.constexpr = block_ptr.dtype.element_ty.primitive_bitwidth // 8
    blocks = ()
    for j in tl.static_range(4):
        o_strip = pages[j].to(tl.int64) * (128 // ITEM) + j % FMT.strips * STRIP * FMT.head_dim
        blocks = blocks + (block_ptr + o_strip,)
    return blocks


@triton.jit
def add_tile(
    blocks, q, unit, seen, state, FMT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr
):
    """The state (m, l, o) after one more tile, whose strips begin at four pointers.

    q:    tiles [D, C], to be summed
    seen: (positions, index of the tile, lo, hi), or () for a tile that all columns see whole
    """
    m, l, b_o = state
    D: tl.constexpr = FMT.head_dim
    D_PAD: tl.constexpr = b_o.shape[0]
    WHOLE: tl.constexpr = D == D_PAD and FMT.slots == FMT.strips * STRIP
    ITEM: tl.constexpr = blocks[0].dtype.element_ty.primitive_bitwidth // 8
    o_d, o_t = tl.arange(0, D_PAD), tl.arange(0, STRIP)
    o_k = o_t[:, None] * D + o_d[None, :]
    o_v = o_d[:, None] + o_t[None, :] * D
    s = ()
    for j in tl.static_range(4):
        m_t = j % FMT.strips * STRIP + o_t < FMT.slots
        m_k = m_t[:, None] & (o_d < D)[None, :]
        b_k = load_tile(blocks[j] + FMT.k // ITEM + o_k, m_k, WHOLE).to(OPERAND)  # [16, D]
        b_s = tl.dot(b_k, q[0], input_precision=PRECISION)
        for i in tl.static_range(1, len(q)):
            b_s = tl.dot(b_k, q[i], b_s, input_precision=PRECISION)
        s = s + (b_s,)
    s = below(below(s[0], s[1]), below(s[2], s[3]))
    if len(seen) > 0:
        s = hide_slots(s, seen[0], seen[1], seen[2], seen[3], FMT)
    p, decay, m, l = softmax_step(s, unit, m, l, P_BIAS, P_BIAS, STRIP)
    first, second = upper_lower(p)
    p = upper_lower(first) + upper_lower(second)
    b_o *= decay[None, :]
    for j in tl.static_range(4):
        m_t = j % FMT.strips * STRIP + o_t < FMT.slots
        m_v = (o_d < D)[:, None] & m_t[None, :]
        b_v = load_tile(blocks[j] + FMT.v // ITEM + o_v, m_v, WHOLE).to(OPERAND)  # [D, 16]
        terms = operands(p[j], OPERAND)
        for i in tl.static_range(len(terms)):
            b_o = tl.dot(b_v, terms[i], b_o, input_precision=PRECISION)
    return m, l, b_o
