"""What a unit of work makes of its queries once, before its pages: segments are absorbed here.

A unit never leaves a segment (units.py), so whatever a segment shares is multiplied into q outside
the loop: its rotation, its scales, its low-rank basis. formats_paged.py names the pieces.
"""

import triton
import triton.language as tl

from disagg.kernels.formats_paged import Side
from disagg.kernels.tiles import as_scales, in_halves, load_tile, settle, upper_lower


@triton.jit
def prepare_query(p_q, m_c, scale, segment, COPIES: tl.constexpr, FMT: tl.constexpr):
    """(q, folded, low, sums) and the power of two that scores are multiplied by, [C].

    p_q:     [C] pointers to rows of D items; segment: int16 pointer to the segment's block
    q:       fp16 [H, C * COPIES] in [-1, 1], a tile for each of `query_parts`
    folded:  what `fold_scale` gives for scales of the segment, else ()
    low:     (B^T q fp16 [16, C * COPIES],), in the unit of q, or ()
    sums:    [C * COPIES] fp32, over channels of each group of row scales, or ()
    """
    SIDE: tl.constexpr = FMT.k
    PARTS: tl.constexpr = query_parts(SIDE, p_q.shape[0] * COPIES)
    H: tl.constexpr = FMT.head_dim // PARTS
    o_h = tl.arange(0, triton.next_power_of_2(H))[None, :]
    top = tl.max(tl.zeros([p_q.shape[0], 2], tl.float32), 1) + 1e-30
    parts = ()
    for j in tl.static_range(PARTS):
        b_q = tl.load(p_q[:, None] + j * H + o_h, mask=m_c[:, None] & (o_h < H), other=0.0)
        b_q = b_q * (scale * 1.4426950408889634)
        if SIDE.rotation is not None:
            b_q = rotate_rows(b_q, segment, SIDE)
        top = tl.maximum(top, tl.max(tl.abs(b_q), 1))
        parts = parts + (b_q,)
    unit = tl.exp2(tl.ceil(tl.log2(top)))
    q = operand(parts, unit, COPIES)
    folded, low, sums = (), (), ()
    if SIDE.low_rank is not None:
        b_low, shrink = project(segment, q, SIDE)
        low, unit = (b_low,), unit / shrink
        q = operand(parts, unit, COPIES)
    if SIDE.scale.shared:
        folded = fold_scale(segment, 0, q, SIDE)
    if SIDE.scale.by == "row":
        for g in tl.static_range(SIDE.columns // SIDE.scale.group):
            sums = sums + (group_sum(q, g, SIDE),)
    return (q, folded, low, sums), unit


@triton.jit
def operand(parts, unit, COPIES: tl.constexpr):
    """fp16 [H, C * COPIES] of each of the parts [C, H] of q, in a unit [C]."""
    q = ()
    for j in tl.static_range(len(parts)):
        q = q + (tl.trans(repeat_rows((parts[j] / unit[:, None]).to(tl.float16), COPIES)),)
    return q


@triton.constexpr_function
def query_parts(side: Side, columns: int) -> int:
    """In how many tiles the columns of K are worked on: two where `fold_scale` can use `two_rows`.

    columns: of the product; a tile has at least 16 of those of K
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
    b_m = tl.load(as_scales(segment, SIDE.rotation.matrix) + o_b[None, :] * BLOCK + o_b[:, None])
    rows = tl.reshape(x, [x.shape[0] * (x.shape[1] // BLOCK), BLOCK])
    turned = tl.dot(rows, b_m.to(tl.float32), input_precision="ieee")
    return tl.reshape(turned, [x.shape[0], x.shape[1]])


@triton.jit
def fold_scale(block, g, q, SIDE: tl.constexpr):
    """q with the scales of row group g folded in, and what the zeros add to its sums.

    q:       [H, C] fp16 for each of `query_parts`
    returns: [H, C] fp16 for each of them; bias [R, C] fp32, all rows equal
    """
    PARTS: tl.constexpr = len(q)
    R: tl.constexpr = SIDE.rows // SIDE.planes
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
def two_rows(block, first, apart, H: tl.constexpr, H_PAD: tl.constexpr, SIDE: tl.constexpr):
    """A tensor-core operand of zeros [16, H_PAD] fp16: 8 equal rows, and 8 others that are equal.

    H zeros from `first` on, and as many from `apart` behind it. Were all 16 rows equal, two moves
    would be due for each of its registers. So two products share the operand: of one the upper
    rows are wanted, of the other the lower, and what else comes of them is dropped.
    """
    if SIDE.scale.zero is None:
        return tl.full([16, H_PAD], SIDE.scale.center, tl.float16)
    else:
        o_h, o_kind = tl.arange(0, H_PAD)[None, None, :], tl.arange(0, 2)[:, None, None]
        p_zero = as_scales(block, SIDE.scale.zero) + first + o_kind * apart + o_h
        b_zero = load_tile(p_zero, o_h < H, H == H_PAD)
        return tl.reshape(tl.broadcast_to(b_zero, [2, 8, H_PAD]), [16, H_PAD])


@triton.jit
def project(segment, q, SIDE: tl.constexpr):
    """B^T q as fp16 [16, C], and what it and q are multiplied by so that it fits.

    That is 1 unless B has numbers above 256, and never below 2**-8, which leaves q exact enough.
    """
    RANK: tl.constexpr = SIDE.low_rank.rank
    H: tl.constexpr = SIDE.columns // len(q)
    o_r, o_h = tl.arange(0, 16)[:, None], tl.arange(0, q[0].shape[0])[None, :]
    b_low = tl.zeros([16, q[0].shape[1]], tl.float32)
    for j in tl.static_range(len(q)):
        p_b = as_scales(segment, SIDE.low_rank.b) + (j * H + o_h) * RANK + o_r
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
