"""Weights of the softmax with scales of V folded in, and the zeros that they meet."""

import triton
import triton.language as tl

from disagg.kernels.formats_paged import Side
from disagg.kernels.piece_query import two_rows
from disagg.kernels.tiles import as_scales, in_halves


@triton.constexpr_function
def groups_in_rows(x: int, columns: int, side: Side) -> int:
    """How many V groups share the rows of a product with zeros: x, or two in place of one."""
    return 2 if x == 1 and columns == 8 and side.rows // side.scale.group % 2 == 0 else x


@triton.jit
def weigh(block, g, p, X: tl.constexpr, SIDE: tl.constexpr):
    """Weights with the scales of V groups g .. g+X-1 folded in: [U, C * X] fp16 for each half.

    p: [U, C * X] fp16 for each half of the tokens, all X copies of a column equal
    """
    HALVES: tl.constexpr = SIDE.halves
    U: tl.constexpr = SIDE.columns // SIDE.halves
    C: tl.constexpr = p[0].shape[1] // X
    o_t, o_x = tl.arange(0, SIDE.columns)[:, None], tl.arange(0, X)[None, :]
    o_group = (g + o_x) * SIDE.columns
    b_scale = in_halves(tl.load(as_scales(block, SIDE.scale.scale) + o_group + o_t), HALVES)
    weighted = ()
    for j in tl.static_range(HALVES):
        b_x = tl.broadcast_to(b_scale[j][:, None, :], [U, C, X])
        weighted = weighted + (p[j] * tl.reshape(b_x, [U, C * X]),)
    return weighted


@triton.jit
def zero_rows(block, g, C: tl.constexpr, Y: tl.constexpr, SIDE: tl.constexpr):
    """Zeros of V groups g .. g+Y-1, 16/Y rows of each: [16, U] fp16 for each half of the tokens.

    C: columns of the product
    """
    HALVES: tl.constexpr = SIDE.halves
    U: tl.constexpr = SIDE.columns // SIDE.halves
    rows = ()
    if Y == 2 and C == 8:
        for j in tl.static_range(HALVES):
            first = g * SIDE.columns + j * U
            rows = rows + (two_rows(block, first, SIDE.columns, U, U, SIDE),)
    else:
        o_t, o_y = tl.arange(0, SIDE.columns)[:, None], tl.arange(0, Y)[None, :]
        if SIDE.scale.zero is None:
            b_zero = tl.full([SIDE.columns, Y], SIDE.scale.center, tl.float16)
        else:
            b_zero = tl.load(as_scales(block, SIDE.scale.zero) + (g + o_y) * SIDE.columns + o_t)
        for j in tl.static_range(HALVES):
            b_half = tl.trans(in_halves(b_zero, HALVES)[j])[:, None, :]
            rows = rows + (tl.reshape(tl.broadcast_to(b_half, [Y, 16 // Y, U]), [16, U]),)
    return rows
