"""Attention on pages of codes on a GPU, in all formats of formats.py; part of attend.py's kernel.

The Triton form of reference/codes.py. The page id is carried in a loop variable; otherwise the
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
def attend_codes(
    start, end, i_segment, i_head, p_q, lo, hi, m_c, lo_ptr,
    arena_ptr, row_ptr, base, segment_base, o_ptr, lse_ptr, i_out, scale, VIEW: tl.constexpr,
):  # fmt: skip
    """Attention of C columns over the pages of one unit.

    start, end: tiles of the unit
    i_segment:  page id of its segment
    p_q:        [C] pointers to rows of q
    lo, hi:     [C] tokens that each column sees
    m_c:        [C] whether a column is real
    row_ptr:    the sequence's row of the page table
    i_out:      [C] the row of each column in o and lse: pointers are made where they are used
    """
    FMT: tl.constexpr = VIEW.fmt
    SHAPE: tl.constexpr = VIEW.shape
    UNPACK_MODE: tl.constexpr = VIEW.unpack_mode
    STAGES: tl.constexpr = VIEW.stages
    CAP: tl.constexpr = VIEW.cap
    PRECISION: tl.constexpr = VIEW.precision
    FIELDS: tl.constexpr = FMT.v.fields
    T: tl.constexpr = FMT.tokens
    W: tl.constexpr = FMT.head_dim // FMT.v.fields
    words_ptr = arena_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    offset = segment_base // 2 + i_head * (FMT.segment_bytes // 2)
    segment = words_ptr + (i_segment.to(tl.int64) * 64 + offset)
    own = sparse_rows(lo_ptr, FMT, SHAPE)
    query, q_unit = prepare_query(p_q, m_c, scale, segment, SHAPE.copies, FMT)
    m, l = empty_softmax(T // 4, SHAPE.columns)
    bias = tl.max(tl.full([SHAPE.columns], P_BIAS, tl.float32), 0)
    V_SIDE: tl.constexpr = FMT.v  # Triton 3.6 does not take an attribute as an argument
    sums = empty_sums(SHAPE.columns, SHAPE.groups, V_SIDE)

    offset = base // 2 + i_head * (FMT.block_bytes // 2)
    whole = start
    whole_end = start
    if two_loops_fit(FMT):
        whole, whole_end = whole_tiles(lo, hi, start, end, m_c, T)
    page = tl.load(row_ptr + whole, mask=whole < whole_end, other=0)
    for i in tl.range(whole, whole_end, num_stages=STAGES):
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        page = tl.load(row_ptr + tl.minimum(i + 1, whole_end - 1))
        m, l, bias, sums = add_page(
            words_ptr + at, query, own, q_unit, (), m, l, bias, sums,
            FMT, SHAPE, UNPACK_MODE, CAP,
        )  # fmt: skip
    gap = whole_end - whole
    rest = end - gap
    m_first = start < rest
    first = tl.where(start < whole, start, whole_end)
    page = tl.load(row_ptr + first, mask=m_first, other=0)
    # stages: loads that wait in registers would spill
    for i in tl.range(start, rest, num_stages=STAGES):
        at = tl.multiple_of(page.to(tl.int64) * 64 + offset, 8)
        after = tl.minimum(i + 1, rest - 1)
        page = tl.load(row_ptr + tl.where(after < whole, after, after + gap))
        window = (tl.where(i < whole, i, i + gap) * T, lo, hi)
        m, l, bias, sums = add_page(
            words_ptr + at, query, own, q_unit, window, m, l, bias, sums,
            FMT, SHAPE, UNPACK_MODE, CAP,
        )  # fmt: skip

    i_out = i_out.to(tl.int64)
    inverse = store_lse(lse_ptr + i_out, m, l, bias, m_c)
    p_o = o_ptr + i_out * FMT.head_dim
    o_w = tl.arange(0, triton.next_power_of_2(W))[:, None]
    o = ()
    for f in tl.static_range(FIELDS):
        b_o = field_values(segment, sums, f, V_SIDE, SHAPE.groups, UNPACK_MODE)
        o = o + (b_o * inverse[None, :],)
    if FMT.hadamard is not None:
        o = unrotate(segment, o, FMT, PRECISION)
    for f in tl.static_range(FIELDS):
        tl.store(p_o[None, :] + f * W + o_w, o[f], mask=m_c[None, :] & (o_w < W))


@triton.constexpr_function
def two_loops_fit(fmt: PageFormat) -> bool:
    """Whether a loop without a mask fits the registers beside one with a mask (Triton 3.9).

    It does not with a low-rank basis of each page, nor with sparse slots beside more than two bits,
    nor with bands of many channels.
    """
    is_dense = fmt.k.sparse is None and fmt.v.sparse is None
    is_narrow = not fmt.bands or fmt.head_dim <= NARROW
    return is_narrow and not fmt.has_own_basis and (is_dense or fmt.k.bits == 2)


@triton.jit
def add_page(
    block, query, own, q_unit, window, m, l, bias, sums,
    FMT: tl.constexpr, SHAPE: tl.constexpr, UNPACK_MODE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The state (m, l, bias, sums) after one more page.

    block:       int16 pointer to the page's block
    query, q_unit: from `prepare_query`
    own:         from `sparse_rows`
    window:      (first token of the page, lo, hi), or () for a page that all columns see whole
    """
    s = page_scores(block, query, own, SHAPE.copies, FMT, UNPACK_MODE)
    if len(window) > 0:
        first, lo, hi = window
        s = hide(s, first + tl.arange(0, FMT.tokens), lo, hi)
    V_SIDE: tl.constexpr = FMT.v
    new_bias = value_bias(block, bias, V_SIDE)
    p, decay, m, l = softmax_step(s, q_unit, m, l, bias, new_bias, FMT.tokens // 4, CAP)
    sums = add_values(block, p, decay, sums, own, FMT, SHAPE.groups, UNPACK_MODE)
    return m, l, new_bias, sums
