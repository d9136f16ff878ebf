"""Attention on exact K and V on a GPU: tails, raw pages, outliers and heavy hitters.

Part of attend.py's kernel.

The Triton form of reference/exact.py. An iteration takes a tile of four strips of 16 slots, each at
its own address (four raw pages), so that bookkeeping is paid once for 64 tokens; with more than 128
channels it takes two strips. fp16 goes to the tensor core as it is. bf16 has too few digits for q
and p, so these go as two bf16 terms. fp32 goes as three tf32 products, or as fp32 on chips without
tf32: an exact cache stays exact.

These pages differ only in which token a slot holds. Counted tokens need no load, and most tiles
need no mask. Positions are loaded one tile ahead, with the page ids, so nothing waits for them.
"""

import triton
import triton.language as tl

from disagg.kernels import formats
from disagg.kernels.gpu.tiles import (
    P_BIAS,
    as_bytes,
    empty_softmax,
    hide,
    load_tile,
    query_unit,
    softmax_step,
    stack,
    store_lse,
    unstack,
    whole_tiles,
)

STRIP = tl.constexpr(formats.STRIP)
NARROW = tl.constexpr(formats.NARROW)
FAR = tl.constexpr(1 << 30)  # behind all tokens: an empty slot
IS_FREE = tl.constexpr(formats.FREE)


@triton.jit
def attend_exact(
    start, end, i_head, p_q, lo, hi, m_c, arena_ptr, row_ptr, base, side_base,
    side, width, o_ptr, lse_ptr, i_out, scale, VIEW: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over the tiles of one unit; arguments as in `attend_codes`.

    side:  page id of the sequence's side record
    width: columns of the page table
    """
    FMT: tl.constexpr = VIEW.fmt
    OPERAND: tl.constexpr = VIEW.operand
    PRECISION: tl.constexpr = VIEW.precision
    STAGES: tl.constexpr = VIEW.stages
    CAP: tl.constexpr = VIEW.cap
    D: tl.constexpr = FMT.head_dim
    D_PAD: tl.constexpr = max(16, triton.next_power_of_2(D))  # as tl.dot wants
    C: tl.constexpr = VIEW.shape.columns
    TILE: tl.constexpr = FMT.strips * FMT.tile_pages * STRIP
    # there is one loop, in which tokens are hidden
    HIDES: tl.constexpr = not FMT.counted or D > NARROW
    arena_ptr = arena_ptr.to(tl.pointer_type(VIEW.item), bitcast=True)
    limit = last_slot(hi, width, FMT)
    factor, q_unit = query_unit(p_q, m_c, scale, D)
    o_d = tl.arange(0, D_PAD)
    m_q = m_c[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_q, other=0.0)
    q = operands(tl.trans(b_q.to(tl.float32) * factor[:, None]), OPERAND)
    m, l = empty_softmax(STRIP, C)
    b_o = tl.zeros([D_PAD, C], tl.float32)

    ITEM: tl.constexpr = arena_ptr.dtype.element_ty.primitive_bitwidth // 8
    block_ptr = arena_ptr + (base // ITEM + i_head * (FMT.block_bytes // ITEM))
    positions_ptr = find_positions(arena_ptr, side, base, side_base, i_head, FMT)
    whole = start
    whole_end = end if HIDES else start
    if not HIDES and STAGES > 1:  # of a tail beside pages a second loop might spill
        whole, whole_end = whole_tiles(lo, hi, start, end, m_c, TILE)
    pages = load_pages(row_ptr, whole, width, FMT)
    at = load_positions(positions_ptr, pages, whole, limit, FMT)
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        blocks = addresses(block_ptr, pages, FMT)
        window = (at, i, lo, hi) if HIDES else ()
        pages = load_pages(row_ptr, i + 1, width, FMT)
        at = load_positions(positions_ptr, pages, i + 1, limit, FMT)
        m, l, b_o = add_tile(
            blocks, q, q_unit, window, m, l, b_o, FMT, OPERAND, PRECISION, CAP
        )
    if not HIDES:
        for i in tl.range(start, end - (whole_end - whole), num_stages=1):
            i_tile = tl.where(i < whole, i, i + (whole_end - whole))
            blocks = addresses(block_ptr, load_pages(row_ptr, i_tile, width, FMT), FMT)
            window = ((), i_tile, lo, hi)
            m, l, b_o = add_tile(
                blocks, q, q_unit, window, m, l, b_o, FMT, OPERAND, PRECISION, CAP
            )

    i_out = i_out.to(tl.int64)
    inverse = store_lse(lse_ptr + i_out, m, l, P_BIAS, m_c)
    p_o = (o_ptr + i_out * D)[None, :] + o_d[:, None]
    tl.store(p_o, b_o * inverse[None, :], mask=m_c[None, :] & (o_d < D)[:, None])


@triton.jit
def operands(x, DTYPE: tl.constexpr):
    """fp32 x as operands of a product with DTYPE: one or two tiles that add up to x."""
    x_high = x.to(DTYPE)
    if DTYPE == tl.bfloat16:
        return x_high, (x - x_high.to(tl.float32)).to(DTYPE)
    else:
        return (x_high,)


@triton.jit
def load_pages(row_ptr, i_tile, width, FMT: tl.constexpr):
    """The page id of each strip of a tile; beyond the table the last one again."""
    ids = ()
    for j in tl.static_range(FMT.strips * FMT.tile_pages):
        i_page = i_tile * FMT.tile_pages + j // FMT.strips
        ids = ids + (tl.load(row_ptr + tl.minimum(i_page, width - 1)),)
    return ids


@triton.jit
def addresses(block_ptr, pages, FMT: tl.constexpr):
    """The start of each strip of a tile, without the offset of K or V."""
    ITEM: tl.constexpr = block_ptr.dtype.element_ty.primitive_bitwidth // 8
    blocks = ()
    for j in tl.static_range(len(pages)):
        o_page = pages[j].to(tl.int64) * (128 // ITEM)
        o_strip = o_page + j % FMT.strips * STRIP * FMT.head_dim
        blocks = blocks + (block_ptr + o_strip,)
    return blocks


@triton.jit
def add_tile(
    blocks, q, q_unit, window, m, l, b_o,
    FMT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The state (m, l, o) after one more tile, whose strips begin at `blocks`.

    q:      tiles [D, C], to be summed
    window: (positions, index of the tile, lo, hi), or () for a tile that all columns see whole
    """
    D: tl.constexpr = FMT.head_dim
    D_PAD: tl.constexpr = b_o.shape[0]
    WHOLE: tl.constexpr = D == D_PAD and FMT.slots == FMT.strips * STRIP
    ITEM: tl.constexpr = blocks[0].dtype.element_ty.primitive_bitwidth // 8
    o_d = tl.arange(0, D_PAD)
    o_t = tl.arange(0, STRIP)
    o_k = o_t[:, None] * D + o_d[None, :]
    o_v = o_d[:, None] + o_t[None, :] * D
    s = ()
    for j in tl.static_range(len(blocks)):
        m_t = j % FMT.strips * STRIP + o_t < FMT.slots
        m_k = m_t[:, None] & (o_d < D)[None, :]
        p_k = blocks[j] + FMT.k // ITEM + o_k
        b_k = load_tile(p_k, m_k, WHOLE).to(OPERAND)  # [16, D]
        b_s = tl.dot(b_k, q[0], input_precision=PRECISION)
        for i in tl.static_range(1, len(q)):
            b_s = tl.dot(b_k, q[i], b_s, input_precision=PRECISION)
        s = s + (b_s,)
    s = stack(s, len(blocks))
    if len(window) > 0:
        positions, i_tile, lo, hi = window
        s = hide_slots(s, positions, i_tile, lo, hi, FMT)
    p, decay, m, l = softmax_step(s, q_unit, m, l, P_BIAS, P_BIAS, STRIP, CAP)
    p = unstack(p, len(blocks))
    b_o *= decay[None, :]
    for j in tl.static_range(len(blocks)):
        m_t = j % FMT.strips * STRIP + o_t < FMT.slots
        m_v = (o_d < D)[:, None] & m_t[None, :]
        p_v = blocks[j] + FMT.v // ITEM + o_v
        b_v = load_tile(p_v, m_v, WHOLE).to(OPERAND)  # [D, 16]
        terms = operands(p[j], OPERAND)
        for i in tl.static_range(len(terms)):
            b_o = tl.dot(b_v, terms[i], b_o, input_precision=PRECISION)
    return m, l, b_o


@triton.jit
def last_slot(hi, width, FMT: tl.constexpr):
    """The end of the slots that may hold a token: slots of the side record that have pages.

    Or the tokens of the sequence, if fewer: a short row of a table is padded with repeated pages.
    """
    if FMT.side is not None:
        return tl.minimum(width * STRIP, FMT.side.slots)
    else:
        return tl.max(hi, 0)


@triton.jit
def find_positions(arena_ptr, side, base, side_base, i_head, FMT: tl.constexpr):
    """int32 pointer to the block of the side record of a sequence, or of page 0."""
    words_ptr = arena_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if FMT.side is not None:
        block = (side_base + i_head * FMT.side.block_bytes) // 4
        return words_ptr + (side.to(tl.int64) * 32 + block)
    else:
        return words_ptr + (base + i_head * FMT.block_bytes) // 4


@triton.jit
def load_positions(positions_ptr, pages, i_tile, limit, FMT: tl.constexpr):
    """Positions of the tokens in the slots of a tile, FAR for an empty one; () if counted.

    positions_ptr: from `find_positions`
    limit:         from `last_slot`
    pages:         the page id of each strip
    """
    TILE: tl.constexpr = STRIP * len(pages)
    o_s = tl.arange(0, TILE)
    if FMT.counted:
        at = ()
    elif FMT.side is not None:
        o_slot = i_tile * TILE + o_s
        m_s = o_slot < limit
        p_state = as_bytes(positions_ptr, FMT.side.states) + o_slot
        free = tl.load(p_state, mask=m_s, other=IS_FREE) == IS_FREE
        p_at = positions_ptr + FMT.side.positions // 4 + o_slot
        at = tl.where(free, FAR, tl.load(p_at, mask=m_s, other=FAR))
    else:
        STRIPS: tl.constexpr = FMT.strips
        o_strip = o_s // STRIP
        page = tl.where(o_strip == 0, pages[0], pages[1])
        if len(pages) == 4:
            page = tl.where(
                o_strip == 2, pages[2], tl.where(o_strip == 3, pages[3], page)
            )
        o_slot = o_strip % STRIPS * STRIP + o_s % STRIP
        first = (i_tile * FMT.tile_pages + o_strip // STRIPS) * FMT.tokens
        p_at = positions_ptr + page.to(tl.int64) * 32 + FMT.positions // 4 + o_slot
        m_s = (o_slot < FMT.slots) & (first < limit)
        at = tl.load(p_at, mask=m_s, other=FAR)
    return at


@triton.jit
def hide_slots(s, at, i_tile, lo, hi, FMT: tl.constexpr):
    """Scores of a tile; those of tokens outside [lo, hi) of their column become -inf."""
    if FMT.counted:
        return hide(s, tl.arange(0, s.shape[0]) + i_tile * s.shape[0], lo, hi)
    else:
        return hide(s, at, lo, hi)
