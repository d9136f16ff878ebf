"""Attention on pages of codes on a GPU, whatever formats.py describes; for attend.py's kernel.

The Triton form of reference/codes.py. The page id is carried in a loop variable, otherwise the
compiler keeps one page in flight instead of two or three (Triton 3.6 to 3.9).
"""

import triton
import triton.language as tl

from disagg.kernels.formats import NARROW, PageFormat
from disagg.kernels.gpu.bands import unrotate
from disagg.kernels.gpu.pv import add_values, empty_sums, field_values, value_bias
from disagg.kernels.gpu.qk import page_scores, prepare_query
from disagg.kernels.gpu.sparse import sparse_rows
from disagg.kernels.gpu.tiles import (
    P_BIAS,
    empty_softmax,
    hide,
    softmax_step,
    store_lse,
    whole_tiles,
)


@triton.jit
def attend_codes(unit_of, queries, at_bytes, out, scale, LOOP: tl.constexpr):
    """Attention of C columns over the pages of one unit.

    unit_of:  (first tile, end tile, page id of the segment, KV head)
    queries:  (pointers to rows of q [C], lo [C], hi [C], is it real [C], lo_ptr)
    at_bytes: (the arena, the sequence's row of the page table, base, base of segments)
    out:      (o, lse, number of the row of each column [C]): pointers are made where they are used
    """
    start, end, i_segment, i_head = unit_of
    p_q, lo, hi, m_c, lo_ptr = queries
    arena_ptr, row_ptr, base, segment_base = at_bytes
    FMT: tl.constexpr = LOOP.fmt
    SHAPE: tl.constexpr = LOOP.shape
    SPELLING: tl.constexpr = LOOP.spelling
    STAGES: tl.constexpr = LOOP.stages
    CAP: tl.constexpr = LOOP.cap
    PRECISION: tl.constexpr = LOOP.precision
    FIELDS: tl.constexpr = FMT.v.fields
    T: tl.constexpr = FMT.tokens
    W: tl.constexpr = FMT.head_dim // FMT.v.fields
    words_ptr = arena_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    offset = segment_base // 2 + i_head * (FMT.segment_bytes // 2)
    segment = words_ptr + (i_segment.to(tl.int64) * 64 + offset)
    own = sparse_rows(lo_ptr, FMT, SHAPE)
    query, unit = prepare_query(p_q, m_c, scale, segment, SHAPE.copies, FMT)
    m, l = empty_softmax(T // 4, SHAPE.columns)
    bias = tl.max(tl.full([SHAPE.columns], P_BIAS, tl.float32), 0)
    V_SIDE: tl.constexpr = FMT.v  # Triton 3.6 does not take an attribute as an argument
    state = (m, l, bias, empty_sums(SHAPE.columns, SHAPE.groups, V_SIDE))

    offset = base // 2 + i_head * (FMT.block_bytes // 2)
    whole, whole_end = start, start
    if two_loops_fit(FMT):
        whole, whole_end = whole_tiles(lo, hi, start, end, m_c, T)
    page = tl.load(row_ptr + whole, mask=whole < whole_end, other=0)
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        page = tl.load(row_ptr + tl.minimum(i + 1, whole_end - 1))
        state = add_page(
            words_ptr + at, query, own, unit, (), state, FMT, SHAPE, SPELLING, CAP
        )
    gap = whole_end - whole
    rest = end - gap
    page = tl.load(
        row_ptr + tl.where(start < whole, start, whole_end), mask=start < rest, other=0
    )
    for i in tl.range(
        start, rest, num_stages=STAGES
    ):  # loads that wait in registers would spill
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        after = tl.minimum(i + 1, rest - 1)
        page = tl.load(row_ptr + tl.where(after < whole, after, after + gap))
        seen = (tl.where(i < whole, i, i + gap) * T, lo, hi)
        state = add_page(
            words_ptr + at, query, own, unit, seen, state, FMT, SHAPE, SPELLING, CAP
        )

    m, l, bias, sums = state
    i_out = out[2].to(tl.int64)
    inverse = store_lse(out[1] + i_out, m, l, bias, m_c)
    p_o = out[0] + i_out * FMT.head_dim
    o_w = tl.arange(0, triton.next_power_of_2(W))[:, None]
    o = ()
    for f in tl.static_range(FIELDS):
        b_o = (
            field_values(segment, sums, f, V_SIDE, SHAPE.groups, SPELLING)
            * inverse[None, :]
        )
        o = o + (b_o,)
    if FMT.hadamard is not None:
        o = unrotate(segment, o, FMT, PRECISION)
    for f in tl.static_range(FIELDS):
        tl.store(p_o[None, :] + f * W + o_w, o[f], mask=m_c[None, :] & (o_w < W))


@triton.constexpr_function
def two_loops_fit(fmt: PageFormat) -> bool:
    """Whether a loop that hides nothing fits the registers beside one that does (Triton 3.9): not
    with a low-rank basis of each page, nor with sparse slots beside more than two bits, nor with
    bands of many channels."""
    dense = fmt.k.sparse is None and fmt.v.sparse is None
    narrow = not fmt.bands or fmt.head_dim <= NARROW
    return narrow and not fmt.has_own_basis and (dense or fmt.k.bits == 2)


@triton.jit
def add_page(
    block, query, own, unit, seen, state,
    FMT: tl.constexpr, SHAPE: tl.constexpr, SPELLING: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The state (m, l, bias, sums) after one more page; `block`: int16 pointer to its block.

    own:  as `sparse_rows` gives it
    seen: (first token of the page, lo, hi), or () for a page that all columns see whole
    """
    m, l, bias, sums = state
    s = page_scores(block, query, own, SHAPE.copies, FMT, SPELLING)
    if len(seen) > 0:
        s = hide(s, seen[0] + tl.arange(0, FMT.tokens), seen[1], seen[2])
    V_SIDE: tl.constexpr = FMT.v
    new_bias = value_bias(block, bias, V_SIDE)
    p, decay, m, l = softmax_step(s, unit, m, l, bias, new_bias, FMT.tokens // 4, CAP)
    sums = add_values(block, p, decay, sums, own, FMT, SHAPE.groups, SPELLING)
    return m, l, new_bias, sums
