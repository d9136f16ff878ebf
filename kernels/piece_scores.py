"""Scores of one page made of pieces: codes under any scale, low rank, sparse slots, validity."""

import triton
import triton.language as tl

from disagg.kernels.bits import field, float8, float8_weight, weight
from disagg.kernels.piece_query import fold_scale, in_group
from disagg.kernels.piece_sparse import sparse_sums
from disagg.kernels.tiles import as_bytes, as_scales, below, first_of, load_tile


@triton.jit
def load_codes(block, j, PARTS: tl.constexpr, SIDE: tl.constexpr):
    """Part j of the code words of a side: int16 [rows/planes, columns/halves/PARTS].

    Of floats the bytes.
    """
    R: tl.constexpr = SIDE.rows // SIDE.planes
    S: tl.constexpr = SIDE.columns // SIDE.halves
    H: tl.constexpr = S // PARTS
    R_PAD: tl.constexpr = triton.next_power_of_2(R)
    H_PAD: tl.constexpr = triton.next_power_of_2(H)
    o_r, o_h = tl.arange(0, R_PAD)[:, None], tl.arange(0, H_PAD)[None, :]
    WHOLE: tl.constexpr = R == R_PAD and H == H_PAD
    mask = (o_r < R) & (o_h < H)
    if SIDE.floating:
        p = (block + SIDE.codes // 2).to(tl.pointer_type(tl.int8), bitcast=True)
        return load_tile(p + o_r * S + j * H + o_h, mask, WHOLE)
    else:
        return load_tile(block + SIDE.codes // 2 + o_r * S + j * H + o_h, mask, WHOLE)


@triton.jit
def codes_of(words, f: tl.constexpr, j: tl.constexpr, SIDE: tl.constexpr, SPELLING: tl.constexpr):
    """The codes of one plane and half as fp16, times 1 / weight_of."""
    if SIDE.floating:
        return float8(words, SPELLING)
    else:
        return field(words, f, j, SIDE.bits, SPELLING)


@triton.jit
def weight_of(f: tl.constexpr, SIDE: tl.constexpr, SPELLING: tl.constexpr):
    """What sums over codes_of a plane are multiplied by to be sums over codes."""
    if SIDE.floating:
        return float8_weight(SPELLING)
    else:
        return weight(f, SIDE.bits, SPELLING)


@triton.jit
def stack(s, PLANES: tl.constexpr):
    """The planes of a tile, one below the other."""
    if PLANES == 4:
        return below(below(s[0], s[1]), below(s[2], s[3]))
    elif PLANES == 2:
        return below(s[0], s[1])
    else:
        return s[0]


@triton.jit
def piece_scores(
    block, query, places, COPIES: tl.constexpr, FMT: tl.constexpr, SPELLING: tl.constexpr
):
    """q.k of one page: [T, C] fp32; -inf for tokens that are not there.

    block:  int16 pointer to the page's block
    query:  as `prepare_query` gives it; places: as `sparse_places` does
    """
    q, folded, low, sums = query
    SIDE: tl.constexpr = FMT.k
    b_words = load_codes(block, 0, len(q) // SIDE.halves, SIDE)
    if SIDE.scale.by == "column":
        s = column_scores(block, b_words, q, folded, low, COPIES, SIDE, SPELLING)
    else:
        s = row_scores(block, b_words, q, sums, COPIES, SIDE, SPELLING)
        if SIDE.low_rank is not None:
            s += first_of(tl.dot(repeat_factor(block, SIDE, FMT.tokens), low[0]), COPIES)
    o_t = tl.arange(0, FMT.tokens)
    if SIDE.sparse is not None:
        if COPIES == 1:
            s = sparse_sums(block, q, (s,), places[0], places[2], 1, 1, SIDE, SPELLING)[0]
        else:
            b_parts = sparse_sums(
                block, q, (), places[0], places[2], COPIES, COPIES, SIDE, SPELLING
            )
            s += stack(b_parts, COPIES)
    if FMT.valid is not None:
        b_bits = tl.load(as_bytes(block, FMT.valid) + o_t // 8).to(tl.int32)
        s = tl.where(((b_bits >> (o_t % 8)) & 1)[:, None] != 0, s, float("-inf"))
    return s


@triton.jit
def column_scores(
    block, words, q, folded, low,
    COPIES: tl.constexpr, SIDE: tl.constexpr, SPELLING: tl.constexpr,
):  # fmt: skip
    """Codes with scales by column: these are in q already, or go into it here. And low rank.

    Low rank is added by a product that continues from s. That costs nothing more, and because it
    comes last, p reaches the tensor core as the codes of V do: behind a `join` the compiler would
    take four items of a row at a time, which fits neither ldmatrix nor the zeros (Triton 3.9).
    """
    PARTS: tl.constexpr = len(q)
    HALVES: tl.constexpr = SIDE.halves
    PLANES: tl.constexpr = SIDE.planes
    GROUPS: tl.constexpr = SIDE.rows // SIDE.scale.group
    tl.static_assert(SIDE.planes % GROUPS == 0, "a group of rows is whole planes")
    parts = (words,)
    if HALVES < PARTS:
        parts = (words, load_codes(block, 1, PARTS, SIDE))
    groups = ()
    for g in tl.static_range(GROUPS):
        if SIDE.scale.shared:
            groups = groups + (folded,)
        else:
            groups = groups + (fold_scale(block, g, q, SIDE),)
    s = ()
    for f in tl.static_range(PLANES):
        b_q, b_bias = groups[f * GROUPS // SIDE.planes]
        b_s = tl.zeros(b_bias.shape, tl.float32)
        for j in tl.static_range(PARTS):
            b_codes = codes_of(parts[j % len(parts)], f, j % HALVES, SIDE, SPELLING)
            b_s = tl.dot(b_codes, b_q[j], b_s)
        b_s = b_s * weight_of(f, SIDE, SPELLING) + b_bias
        s = s + (b_s if SIDE.low_rank is not None else first_of(b_s, COPIES),)
    s = stack(s, SIDE.planes)
    if SIDE.low_rank is not None:
        s = first_of(tl.dot(repeat_factor(block, SIDE, SIDE.rows), low[0], s), COPIES)
    return s


@triton.jit
def row_scores(
    block, words, q, sums, COPIES: tl.constexpr, SIDE: tl.constexpr, SPELLING: tl.constexpr
):
    """Codes with scales by row, or one for all: the sum over each group of columns is scaled."""
    HALVES: tl.constexpr = SIDE.halves
    PLANES: tl.constexpr = SIDE.planes
    R: tl.constexpr = words.shape[0]
    H: tl.constexpr = SIDE.columns // SIDE.halves
    GROUPS: tl.constexpr = SIDE.columns // SIDE.scale.group if SIDE.scale.by == "row" else 1
    o_r = tl.arange(0, SIDE.rows)
    ROWS: tl.constexpr = SIDE.rows
    s = tl.zeros([ROWS, q[0].shape[1] // COPIES], tl.float32)
    for g in tl.static_range(GROUPS):
        planes = ()
        for f in tl.static_range(PLANES):
            b_s = tl.zeros([R, q[0].shape[1]], tl.float32)
            for j in tl.static_range(HALVES):
                if GROUPS == 1:
                    b_s = tl.dot(codes_of(words, f, j, SIDE, SPELLING), q[j], b_s)
                elif j * H < (g + 1) * SIDE.scale.group and g * SIDE.scale.group < (j + 1) * H:
                    b_q = in_group(q[j], j, g, SIDE)
                    b_s = tl.dot(codes_of(words, f, j, SIDE, SPELLING), b_q, b_s)
            planes = planes + (first_of(b_s, COPIES) * weight_of(f, SIDE, SPELLING),)
        b_s = stack(planes, SIDE.planes)
        if SIDE.scale.by == "block":
            p_scale = (block + SIDE.scale.scale // 2).to(tl.pointer_type(tl.float32), bitcast=True)
            s += b_s * tl.load(p_scale)
        else:
            b_sum = first_of(sums[g][None, :], COPIES)
            o_group = g * SIDE.rows + o_r
            b_scale = tl.load(as_scales(block, SIDE.scale.scale) + o_group).to(tl.float32)
            if SIDE.scale.zero is None:
                b_s += b_sum * SIDE.scale.center
            else:
                b_zero = tl.load(as_scales(block, SIDE.scale.zero) + o_group).to(tl.float32)
                b_s += b_zero[:, None] * b_sum
            s += b_s * b_scale[:, None]
    return s


@triton.jit
def load_factor(block, o_t, o_r, SIDE: tl.constexpr):
    """A of a page: fp16 at tokens o_t and ranks o_r.

    Beyond the rank there is 0 or, where that needs no mask, A again: what it meets there is 0, or
    what comes of it is dropped.
    """
    RANK: tl.constexpr = SIDE.low_rank.rank
    p_a = as_scales(block, SIDE.low_rank.a) + o_t * RANK
    if 16 % RANK == 0:
        return tl.load(p_a + o_r % RANK)
    else:
        return tl.load(p_a + o_r, mask=o_r < RANK, other=0.0)


@triton.jit
def repeat_factor(block, SIDE: tl.constexpr, T: tl.constexpr):
    """A of a page: fp16 [T, 16], as `load_factor` has it but loaded once."""
    RANK: tl.constexpr = SIDE.low_rank.rank
    if 16 % RANK == 0:
        b_a = tl.load(as_scales(block, SIDE.low_rank.a) + tl.arange(0, T * RANK))
        b_a = tl.broadcast_to(tl.reshape(b_a, [T, 1, RANK]), [T, 16 // RANK, RANK])
        return tl.reshape(b_a, [T, 16])
    else:
        return load_factor(block, tl.arange(0, T)[:, None], tl.arange(0, 16)[None, :], SIDE)
