"""The attention kernel on pages made of pieces: one kernel, whatever formats_paged.py describes.

A unit of work lies within a run: pages of one sequence that share a segment. Runs take the place of
sequences in units.py. The page id is carried in a loop variable, otherwise the compiler
keeps one page in flight instead of two or three (Triton 3.6 to 3.9).
"""

import triton
import triton.language as tl

from disagg.kernels.piece_query import prepare_query
from disagg.kernels.piece_scores import piece_scores
from disagg.kernels.piece_sparse import sparse_places
from disagg.kernels.piece_values import add_values, empty_sums, plane_values, value_bias
from disagg.kernels.tiles import (
    P_BIAS,
    column_of,
    empty_softmax,
    hide,
    softmax_step,
    store_lse,
    whole_tiles,
)
from disagg.kernels.units import find_unit


@triton.jit(do_not_specialize=["batch", "runs", "width"])
def attend_pieces_kernel(
    q_ptr, words_ptr, pages_ptr, lo_ptr, hi_ptr, span_lo_ptr, span_hi_ptr, segments_ptr,
    o_ptr, lse_ptr, scale, base, segment_base, batch, runs, width,
    FMT: tl.constexpr, SHAPE: tl.constexpr, SPELLING: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over the pages of one unit; arguments as paged_attention.py says.

    batch, runs:  runs in all, and of each sequence
    span_*_ptr:   [batch] int32 - the tokens of a run that any query of its sequence sees
    segments_ptr: [batch] int32 - the page id of the segment of each run
    """
    PLANES: tl.constexpr = FMT.v.planes
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    W: tl.constexpr = D // FMT.v.planes
    i_head, i_block, i_slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_run, start, end = find_unit(
        span_lo_ptr, span_hi_ptr, batch, i_slot, tl.num_programs(2), T, SHAPE.batch_pad
    )
    if i_run >= batch:
        return
    i_b = i_run // runs
    i_m, i_row, m_c = column_of(i_head, i_block, SHAPE)
    p_lo = i_b * SHAPE.queries + i_m
    lo = tl.load(lo_ptr + p_lo, mask=m_c, other=0)
    hi = tl.load(hi_ptr + p_lo, mask=m_c, other=0)
    p_q = q_ptr + (i_b * SHAPE.rows + i_row) * D
    offset = segment_base // 2 + i_head * (FMT.segment_bytes // 2)
    segment = words_ptr + (tl.load(segments_ptr + i_run).to(tl.int64) * 64 + offset)
    places = sparse_places(lo_ptr, FMT, SHAPE)
    query, unit = prepare_query(p_q, m_c, scale, segment, SHAPE.copies, FMT)
    m, l = empty_softmax(T // 4, SHAPE.columns)
    bias = tl.max(tl.full([SHAPE.columns], P_BIAS, tl.float32), 0)
    V_SIDE: tl.constexpr = FMT.v  # Triton 3.6 does not take an attribute as an argument
    state = (m, l, bias, empty_sums(SHAPE.columns, SHAPE.groups, V_SIDE))

    offset = base // 2 + i_head * (FMT.block_bytes // 2)
    row_ptr = pages_ptr + i_b * width
    whole, whole_end = whole_tiles(lo, hi, start, end, m_c, T)
    page = tl.load(row_ptr + whole, mask=whole < whole_end, other=0)
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        page = tl.load(row_ptr + tl.minimum(i + 1, whole_end - 1))
        state = add_page(words_ptr + at, query, places, unit, (), state, FMT, SHAPE, SPELLING)
    gap = whole_end - whole
    rest = end - gap
    page = tl.load(row_ptr + tl.where(start < whole, start, whole_end), mask=start < rest, other=0)
    for i in tl.range(start, rest, num_stages=STAGES):  # loads that wait in registers would spill
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        after = tl.minimum(i + 1, rest - 1)
        page = tl.load(row_ptr + tl.where(after < whole, after, after + gap))
        seen = (tl.where(i < whole, i, i + gap) * T, lo, hi)
        state = add_page(words_ptr + at, query, places, unit, seen, state, FMT, SHAPE, SPELLING)

    m, l, bias, sums = state
    i_out = i_slot * SHAPE.rows + i_row
    inverse = store_lse(lse_ptr + i_out, m, l, bias, m_c)
    o_w = tl.arange(0, triton.next_power_of_2(W))[:, None]
    for f in tl.static_range(PLANES):
        b_o = plane_values(segment, sums, f, V_SIDE, SHAPE.groups, SPELLING) * inverse[None, :]
        p_o = o_ptr + i_out.to(tl.int64)[None, :] * D + f * W + o_w
        tl.store(p_o, b_o, mask=m_c[None, :] & (o_w < W))


@triton.jit
def add_page(
    block, query, places, unit, seen, state,
    FMT: tl.constexpr, SHAPE: tl.constexpr, SPELLING: tl.constexpr,
):  # fmt: skip
    """The state (m, l, bias, sums) after one more page; `block`: int16 pointer to its block.

    seen: (first token of the page, lo, hi), or () for a page that all columns see whole
    """
    m, l, bias, sums = state
    s = piece_scores(block, query, places, SHAPE.copies, FMT, SPELLING)
    if len(seen) > 0:
        s = hide(s, seen[0] + tl.arange(0, FMT.tokens), seen[1], seen[2])
    V_SIDE: tl.constexpr = FMT.v
    new_bias = value_bias(block, bias, V_SIDE)
    p, decay, m, l = softmax_step(s, unit, m, l, bias, new_bias, FMT.tokens // 4)
    sums = add_values(block, p, decay, sums, places, FMT, SHAPE.groups, SPELLING)
    return m, l, new_bias, sums
