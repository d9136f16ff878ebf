"""Scores of a page of codes: a unit of work prepares its queries once, then multiplies each page.

A unit lies within one segment, so the segment's order of channels, rotation, scales and low-rank
basis are applied to q once, before the loop over pages. Each page then adds its codes, low rank,
sparse slots and mask. K in bands of columns is one product per band, added to the same scores.
formats.py describes all formats.
"""

import triton
import triton.language as tl

from disagg.kernels.formats import Side
from disagg.kernels.gpu.bands import channels_of, side_of
from disagg.kernels.gpu.bits import field, float8, float8_weight, weight
from disagg.kernels.gpu.sparse import sparse_sums
from disagg.kernels.gpu.tiles import (
    as_bytes,
    as_scales,
    first_of,
    in_halves,
    load_tile,
    query_unit,
    settle,
    stack,
    upper_lower,
)


@triton.jit
def prepare_query(p_q, m_c, scale, segment, COPIES: tl.constexpr, FMT: tl.constexpr):
    """The query of a unit, (q, folded, low, sums), and the power of two to multiply scores by, [C].

    p_q:     [C] pointers to rows of D items; segment: int16 pointer to the segment's block
    q:       per band of K: fp16 [H, C * COPIES] in [-1, 1], a tile for each of `query_parts`
    folded:  q with the scales of the segment, see `fold_scale`; () without such scales
    low:     (B^T q fp16 [16, C * COPIES],), divided by q_unit; () without a basis in the segment
    sums:    [C * COPIES] fp32, sums of q over each group of row scales; () without row scales
    """
    SIDE: tl.constexpr = FMT.k
    COUNT: tl.constexpr = len(FMT.k_sides)
    parts = ()
    q = ()
    for i in tl.static_range(COUNT):
        parts = parts + (load_parts(p_q, m_c, scale, segment, COPIES, i, FMT),)
    if FMT.hadamard is None:
        top = tl.max(tl.zeros([p_q.shape[0], 2], tl.float32), 1) + 1e-30
        for j in tl.static_range(len(parts[0])):
            top = tl.maximum(top, tl.max(tl.abs(parts[0][j]), 1))
        q_unit = tl.exp2(tl.ceil(tl.log2(top)))
    else:  # from the gathered channels it would have a layout that costs each page 5 % (Triton 3.9)
        q_unit = query_unit(p_q, m_c, scale, FMT.head_dim)[1]
    for i in tl.static_range(COUNT):
        q = q + (operand(parts[i], q_unit, COPIES),)
    folded = ()
    low = ()
    sums = ()
    if SIDE.low_rank is not None and SIDE.low_rank.shared:
        b_low, shrink = project(segment, q[0], SIDE)
        low = (b_low,)
        q_unit = q_unit / shrink
        q = (operand(parts[0], q_unit, COPIES),)
    if SIDE.scale.shared:
        folded = fold_scale(segment, 0, q[0], SIDE)
    if SIDE.scale.by == "row":
        for g in tl.static_range(SIDE.columns // SIDE.scale.group):
            sums = sums + (group_sum(q[0], g, SIDE),)
    return (q, folded, low, sums), q_unit


@triton.jit
def load_parts(
    p_q,
    m_c,
    scale,
    segment,
    COPIES: tl.constexpr,
    BAND: tl.constexpr,
    FMT: tl.constexpr,
):
    """The channels of q in a band of columns, scaled: fp32 [C, H] for each part."""
    SIDE: tl.constexpr = side_of(FMT, BAND)
    PARTS: tl.constexpr = query_parts(SIDE, p_q.shape[0] * COPIES)
    H: tl.constexpr = SIDE.columns // PARTS
    o_h = tl.arange(0, triton.next_power_of_2(H))
    parts = ()
    for j in tl.static_range(PARTS):
        channel = channels_of(j * H + o_h, as_bytes(segment, 0), BAND, FMT)[None, :]
        m_q = m_c[:, None] & (o_h < H)[None, :]
        b_q = tl.load(p_q[:, None] + channel, mask=m_q, other=0.0)
        b_q = b_q.to(tl.float32) * (scale * 1.4426950408889634)
        if SIDE.rotation is not None:
            b_q = rotate_rows(b_q, segment, SIDE)
        parts = parts + (b_q,)
    return parts


@triton.jit
def operand(parts, q_unit, COPIES: tl.constexpr):
    """The parts [C, H] of q as operands fp16 [H, C * COPIES], divided by q_unit [C]."""
    q = ()
    for j in tl.static_range(len(parts)):
        b_q = (parts[j] / q_unit[:, None]).to(tl.float16)
        q = q + (tl.trans(repeat_rows(b_q, COPIES)),)
    return q


@triton.constexpr_function
def query_parts(side: Side, columns: int) -> int:
    """Tiles that the columns of K are split into: two where `fold_scale` can use `two_rows`.

    columns: of the product; a tile has at least 16 columns of K
    """
    can_use = side.scale.by == "column" and side.rotation is None and side.columns >= 32
    return 2 if can_use and columns == 8 else side.halves


@triton.jit
def repeat_rows(x, COPIES: tl.constexpr):
    """[C, H] -> [C * COPIES, H]."""
    if COPIES == 1:
        return settle(x)
    else:
        x = tl.broadcast_to(x[:, None, :], [x.shape[0], COPIES, x.shape[1]])
        return tl.reshape(x, [x.shape[0] * COPIES, x.shape[2]])


@triton.jit
def rotate_rows(x, segment, SIDE: tl.constexpr):
    """Rows x [C, H] times the transpose of the segment's matrix, block by block of channels."""
    BLOCK: tl.constexpr = SIDE.rotation.block
    tl.static_assert(x.shape[1] % BLOCK == 0, "a half of the channels is whole blocks")
    o_b = tl.arange(0, BLOCK)
    p_m = as_scales(segment, SIDE.rotation.matrix) + o_b[None, :] * BLOCK + o_b[:, None]
    b_m = tl.load(p_m)
    rows = tl.reshape(x, [x.shape[0] * (x.shape[1] // BLOCK), BLOCK])
    rotated = tl.dot(rows, b_m.to(tl.float32), input_precision="ieee")
    return tl.reshape(rotated, [x.shape[0], x.shape[1]])


@triton.jit
def fold_scale(block, g, q, SIDE: tl.constexpr):
    """q with the scales of row group g folded in, and the bias that the zeros add to scores.

    q:       [H, C] fp16 for each of `query_parts`
    returns: [H, C] fp16 for each of them; bias [R, C] fp32, all rows equal
    """
    PARTS: tl.constexpr = len(q)
    R: tl.constexpr = SIDE.rows // SIDE.fields
    C: tl.constexpr = q[0].shape[1]
    H: tl.constexpr = SIDE.columns // PARTS
    H_PAD: tl.constexpr = q[0].shape[0]
    o_c = tl.arange(0, PARTS * H_PAD)
    m_c = o_c % H_PAD < H
    if H != H_PAD:
        o_c = o_c // H_PAD * H + o_c % H_PAD
    first = g * SIDE.columns
    p_scale = as_scales(block, SIDE.scale.scale) + first + o_c
    b_scale = in_halves(load_tile(p_scale, m_c, H == H_PAD)[:, None], PARTS)
    folded = ()
    if PARTS == 2 and C == 8 and R % 8 == 0:
        folded = (q[0] * b_scale[0], q[1] * b_scale[1])
        b_rows = two_rows(block, first, H, H, H_PAD, SIDE)
        b_bias = upper_lower(tl.dot(b_rows, folded[0]))[0]
        b_bias += upper_lower(tl.dot(b_rows, folded[1]))[1]
        b_bias = tl.reshape(tl.broadcast_to(b_bias[None, :, :], [R // 8, 8, C]), [R, C])
    else:
        if SIDE.scale.zero is None:
            b_zero = tl.full([PARTS * H_PAD, 1], SIDE.scale.center, tl.float16)
        else:
            p_zero = as_scales(block, SIDE.scale.zero) + first + o_c
            b_zero = load_tile(p_zero, m_c, H == H_PAD)[:, None]
        b_bias = tl.zeros([R, C], tl.float32)
        for j in tl.static_range(PARTS):
            b_rows = tl.broadcast_to(tl.trans(in_halves(b_zero, PARTS)[j]), [R, H_PAD])
            b_q = q[j] * b_scale[j]
            b_bias = tl.dot(b_rows, b_q, b_bias)
            folded = folded + (b_q,)
    return folded, b_bias


@triton.jit
def two_rows(
    block, first, apart, H: tl.constexpr, H_PAD: tl.constexpr, SIDE: tl.constexpr
):
    """A tensor-core operand of zeros [16, H_PAD] fp16: two different rows, each repeated 8 times.

    The rows are the H zeros from `first` on, and those `apart` after them. Two products share the
    operand: one uses the upper rows of its result, the other the lower rows. With 16 equal rows
    each register would take two moves.
    """
    if SIDE.scale.zero is None:
        return tl.full([16, H_PAD], SIDE.scale.center, tl.float16)
    else:
        o_h = tl.arange(0, H_PAD)[None, None, :]
        o_kind = tl.arange(0, 2)[:, None, None]
        p_zero = as_scales(block, SIDE.scale.zero) + first + o_kind * apart + o_h
        b_zero = load_tile(p_zero, o_h < H, H == H_PAD)
        return tl.reshape(tl.broadcast_to(b_zero, [2, 8, H_PAD]), [16, H_PAD])


@triton.jit
def project(home, q, SIDE: tl.constexpr):
    """B^T q as fp16 [16, C], and the factor that it and q are multiplied by so that it fits fp16.

    The factor is 1 unless B has numbers above 256, and never below 2**-8, so q stays precise.

    home: the block that holds B
    """
    RANK: tl.constexpr = SIDE.low_rank.rank
    H: tl.constexpr = SIDE.columns // len(q)
    o_r = tl.arange(0, 16)[:, None]
    o_h = tl.arange(0, q[0].shape[0])[None, :]
    b_low = tl.zeros([16, q[0].shape[1]], tl.float32)
    for j in tl.static_range(len(q)):
        p_b = as_scales(home, SIDE.low_rank.b) + (j * H + o_h) * RANK + o_r
        b_b = tl.load(p_b, mask=(o_r < RANK) & (o_h < H), other=0.0)
        b_low = tl.dot(b_b, q[j], b_low)
    top = tl.max(tl.max(tl.abs(b_low), 1), 0) + 1e-30
    shrink = tl.exp2(tl.minimum(15.0 - tl.ceil(tl.log2(top)), 0.0))
    return settle((b_low * shrink).to(tl.float16)), shrink


@triton.jit
def in_group(x, j, g, SIDE: tl.constexpr):
    """Half j of q with 0 for all columns outside group g of row scales."""
    H: tl.constexpr = SIDE.columns // SIDE.halves
    o_h = tl.arange(0, x.shape[0])[:, None]
    return tl.where((j * H + o_h) // SIDE.scale.group == g, x, 0.0)


@triton.jit
def group_sum(q, g, SIDE: tl.constexpr):
    """The sum of q over the columns of group g of row scales: [C] fp32."""
    HALVES: tl.constexpr = SIDE.halves
    total = tl.sum(in_group(q[0], 0, g, SIDE).to(tl.float32), 0)
    for j in tl.static_range(1, HALVES):
        total += tl.sum(in_group(q[j], j, g, SIDE).to(tl.float32), 0)
    return total


@triton.jit
def load_codes(block, j, PARTS: tl.constexpr, SIDE: tl.constexpr):
    """Part j of the code words of a side: int16 [rows/fields, columns/halves/PARTS].

    Of float8 these are the bytes.
    """
    R: tl.constexpr = SIDE.rows // SIDE.fields
    S: tl.constexpr = SIDE.columns // SIDE.halves
    H: tl.constexpr = S // PARTS
    R_PAD: tl.constexpr = triton.next_power_of_2(R)
    H_PAD: tl.constexpr = triton.next_power_of_2(H)
    o_r = tl.arange(0, R_PAD)[:, None]
    o_h = tl.arange(0, H_PAD)[None, :]
    WHOLE: tl.constexpr = R == R_PAD and H == H_PAD
    mask = (o_r < R) & (o_h < H)
    if SIDE.floating:
        p = (block + SIDE.codes // 2).to(tl.pointer_type(tl.int8), bitcast=True)
        return load_tile(p + o_r * S + j * H + o_h, mask, WHOLE)
    else:
        return load_tile(block + SIDE.codes // 2 + o_r * S + j * H + o_h, mask, WHOLE)


@triton.jit
def codes_of(
    words,
    f: tl.constexpr,
    j: tl.constexpr,
    SIDE: tl.constexpr,
    UNPACK_MODE: tl.constexpr,
):
    """The codes of one field and half as fp16, times 1 / weight_of."""
    if SIDE.floating:
        return float8(words, UNPACK_MODE)
    else:
        return field(words, f, j, SIDE.bits, UNPACK_MODE)


@triton.jit
def weight_of(f: tl.constexpr, SIDE: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """The factor that turns sums over `codes_of` a field into sums over codes."""
    if SIDE.floating:
        return float8_weight(UNPACK_MODE)
    else:
        return weight(f, SIDE.bits, UNPACK_MODE)


@triton.jit
def page_scores(
    block,
    query,
    own,
    COPIES: tl.constexpr,
    FMT: tl.constexpr,
    UNPACK_MODE: tl.constexpr,
):
    """q.k of one page: [T, C] fp32; -inf for absent tokens.

    block: int16 pointer to the page's block
    query: from `prepare_query`
    own:   from `sparse_rows`
    """
    q, folded, low, sums = query
    SIDE: tl.constexpr = FMT.k
    if SIDE.scale.by == "column":
        s = column_scores(block, q, folded, low, COPIES, FMT, UNPACK_MODE)
    else:
        s = row_scores(block, q[0], sums, COPIES, SIDE, UNPACK_MODE)
        if SIDE.low_rank is not None:
            s += first_of(low_rank_scores(block, q[0], low, FMT.tokens, SIDE), COPIES)
    o_t = tl.arange(0, FMT.tokens)
    if SIDE.sparse is not None:
        if COPIES == 1:
            s = sparse_sums(block, q[0], (s,), own[0], own[2], 1, 1, SIDE, UNPACK_MODE)[
                0
            ]
        else:
            b_parts = sparse_sums(
                block, q[0], (), own[0], own[2], COPIES, COPIES, SIDE, UNPACK_MODE
            )
            s += stack(b_parts, COPIES)
    if FMT.valid is not None:
        b_bits = tl.load(as_bytes(block, FMT.valid) + o_t // 8).to(tl.int32)
        s = tl.where(((b_bits >> (o_t % 8)) & 1)[:, None] != 0, s, float("-inf"))
    return s


@triton.jit
def column_scores(
    block, q, folded, low,
    COPIES: tl.constexpr, FMT: tl.constexpr, UNPACK_MODE: tl.constexpr,
):  # fmt: skip
    """Scores of the codes of all bands, with scales by column, and of the low rank.

    Scales of a segment are in q already; those of a page are folded in here. The low rank is a
    product that accumulates into s, at no extra cost. It must come last: after a `join` the
    compiler would lay out p with four items of a row together, which fits neither ldmatrix nor the
    zeros (Triton 3.9).
    """
    SIDE: tl.constexpr = FMT.k
    FIELDS: tl.constexpr = FMT.k.fields
    fields = band_scores(block, q[0], folded, (), side_of(FMT, 0), UNPACK_MODE)
    for i in tl.static_range(1, len(q)):
        fields = band_scores(block, q[i], (), fields, side_of(FMT, i), UNPACK_MODE)
    s = ()
    for f in tl.static_range(FIELDS):
        b_s = fields[f]
        if SIDE.low_rank is None:
            b_s = first_of(b_s, COPIES)
        s = s + (b_s,)
    s = stack(s, SIDE.fields)
    if SIDE.low_rank is not None and SIDE.low_rank.shared:
        s = first_of(tl.dot(repeat_factor(block, SIDE, SIDE.rows), low[0], s), COPIES)
    elif SIDE.low_rank is not None:
        s = first_of(s + low_rank_scores(block, q[0], low, SIDE.rows, SIDE), COPIES)
    return s


@triton.jit
def band_scores(block, q, folded, s, SIDE: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """The scores s plus those of a band: [R, C * COPIES] for each field; s: () at first.

    A band without codes adds its means times q to all tokens of a page.
    """
    PARTS: tl.constexpr = len(q)
    HALVES: tl.constexpr = SIDE.halves
    FIELDS: tl.constexpr = SIDE.fields
    added = ()
    if SIDE.bits == 0:
        H: tl.constexpr = SIDE.columns // PARTS
        b_bias = tl.zeros(s[0].shape, tl.float32)
        for j in tl.static_range(PARTS):
            p_mean = as_scales(block, SIDE.scale.scale) + j * H + tl.arange(0, H)
            b_rows = tl.broadcast_to(tl.load(p_mean)[None, :], [s[0].shape[0], H])
            b_bias = tl.dot(b_rows, q[j], b_bias)
        for f in tl.static_range(len(s)):
            added = added + (s[f] + b_bias,)
    else:
        GROUPS: tl.constexpr = SIDE.rows // SIDE.scale.group
        tl.static_assert(SIDE.fields % GROUPS == 0, "a group of rows is whole fields")
        words = (load_codes(block, 0, PARTS // HALVES, SIDE),)
        group = folded
        if HALVES < PARTS:
            words = (words[0], load_codes(block, 1, PARTS, SIDE))
        for f in tl.static_range(FIELDS):
            if not SIDE.scale.shared and f * GROUPS % FIELDS == 0:
                group = fold_scale(block, f * GROUPS // FIELDS, q, SIDE)
            b_q, b_bias = group
            b_s = tl.zeros(b_bias.shape, tl.float32)
            for j in tl.static_range(PARTS):
                b_codes = codes_of(
                    words[j % len(words)], f, j % HALVES, SIDE, UNPACK_MODE
                )
                b_s = tl.dot(b_codes, b_q[j], b_s)
            b_s = b_s * weight_of(f, SIDE, UNPACK_MODE) + b_bias
            if len(s) > 0:
                b_s += s[f]
            added = added + (b_s,)
    return added


@triton.jit
def row_scores(
    block, q, sums, COPIES: tl.constexpr, SIDE: tl.constexpr, UNPACK_MODE: tl.constexpr
):
    """Scores of codes with scales by row, or one for all: sums per group of columns, scaled."""
    HALVES: tl.constexpr = SIDE.halves
    FIELDS: tl.constexpr = SIDE.fields
    H: tl.constexpr = SIDE.columns // SIDE.halves
    words = load_codes(block, 0, 1, SIDE)
    R: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = (
        SIDE.columns // SIDE.scale.group if SIDE.scale.by == "row" else 1
    )
    o_r = tl.arange(0, SIDE.rows)
    ROWS: tl.constexpr = SIDE.rows
    s = tl.zeros([ROWS, q[0].shape[1] // COPIES], tl.float32)
    for g in tl.static_range(GROUPS):
        fields = ()
        for f in tl.static_range(FIELDS):
            b_s = tl.zeros([R, q[0].shape[1]], tl.float32)
            for j in tl.static_range(HALVES):
                if GROUPS == 1:
                    b_s = tl.dot(codes_of(words, f, j, SIDE, UNPACK_MODE), q[j], b_s)
                elif (
                    j * H < (g + 1) * SIDE.scale.group
                    and g * SIDE.scale.group < (j + 1) * H
                ):
                    b_q = in_group(q[j], j, g, SIDE)
                    b_s = tl.dot(codes_of(words, f, j, SIDE, UNPACK_MODE), b_q, b_s)
            fields = fields + (first_of(b_s, COPIES) * weight_of(f, SIDE, UNPACK_MODE),)
        b_s = stack(fields, SIDE.fields)
        if SIDE.scale.by == "block":
            p_scale = (block + SIDE.scale.scale // 2).to(
                tl.pointer_type(tl.float32), bitcast=True
            )
            s += b_s * tl.load(p_scale)
        else:
            b_sum = first_of(sums[g][None, :], COPIES)
            o_group = g * SIDE.rows + o_r
            b_scale = tl.load(as_scales(block, SIDE.scale.scale) + o_group).to(
                tl.float32
            )
            if SIDE.scale.zero is None:
                b_s += b_sum * SIDE.scale.center
            else:
                b_zero = tl.load(as_scales(block, SIDE.scale.zero) + o_group).to(
                    tl.float32
                )
                b_s += b_zero[:, None] * b_sum
            s += b_s * b_scale[:, None]
    return s


@triton.jit
def low_rank_scores(block, q, low, T: tl.constexpr, SIDE: tl.constexpr):
    """A B^T q: [T, C] fp32; low: B^T q of the segment, () if B is in the page."""
    b_a = repeat_factor(block, SIDE, T)
    if SIDE.low_rank.shared:
        return tl.dot(b_a, low[0])
    else:
        b_low, shrink = project(block, q, SIDE)
        return tl.dot(b_a, b_low) / shrink


@triton.jit
def load_factor(block, o_t, o_r, SIDE: tl.constexpr):
    """A of a page: fp16 at tokens o_t and ranks o_r.

    Beyond the rank it is 0, or A again where that saves a mask: those rows meet zeros, or their
    result is dropped.
    """
    RANK: tl.constexpr = SIDE.low_rank.rank
    p_a = as_scales(block, SIDE.low_rank.a) + o_t * RANK
    if 16 % RANK == 0:
        return tl.load(p_a + o_r % RANK)
    else:
        return tl.load(p_a + o_r, mask=o_r < RANK, other=0.0)


@triton.jit
def repeat_factor(block, SIDE: tl.constexpr, T: tl.constexpr):
    """A of a page: fp16 [T, 16], as `load_factor` but loaded once."""
    RANK: tl.constexpr = SIDE.low_rank.rank
    if 16 % RANK == 0:
        b_a = tl.load(as_scales(block, SIDE.low_rank.a) + tl.arange(0, T * RANK))
        b_a = tl.broadcast_to(tl.reshape(b_a, [T, 1, RANK]), [T, 16 // RANK, RANK])
        return tl.reshape(b_a, [T, 16])
    else:
        return load_factor(
            block, tl.arange(0, T)[:, None], tl.arange(0, 16)[None, :], SIDE
        )
