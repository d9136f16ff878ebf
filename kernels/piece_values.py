"""What the values of one page made of pieces add to the sums of attention.

The sums are a tuple of tuples, empty where a format has no such piece:

    o  four planes of channels (two, one) [W, C * X] fp32, in code units
    z  sums over zeros [16, C * X], one for every X groups of channels
    y  (A^T p [16, C],)
    e  (what sparse slots add, as `add_sparse` has it,)
"""

import triton
import triton.language as tl

from disagg.kernels.piece_scores import (
    add_sparse,
    by_rows,
    codes_of,
    load_codes,
    load_factor,
    weight_of,
)
from disagg.kernels.tiles import P_BIAS, as_scales, in_halves, load_tile


@triton.jit
def empty_sums(C: tl.constexpr, X: tl.constexpr, SIDE: tl.constexpr):
    """The sums before any page."""
    PLANES: tl.constexpr = SIDE.planes
    W: tl.constexpr = triton.next_power_of_2(SIDE.rows // SIDE.planes)
    o, z, y, e = (), (), (), ()
    for _ in tl.static_range(PLANES):
        o = o + (tl.zeros([W, C * X], tl.float32),)
    if SIDE.scale.by == "column":
        for _ in tl.static_range(0, SIDE.rows // SIDE.scale.group, X):
            z = z + (tl.zeros([16, C * X], tl.float32),)
    if SIDE.low_rank is not None:
        y = y + (tl.zeros([16, C], tl.float32),)
    if SIDE.sparse is not None:
        e = e + (tl.zeros([16, SIDE.rows // 16 * C], tl.float32),)
    return o, z, y, e


@triton.jit
def load_block_scale(block, SIDE: tl.constexpr):
    """The one fp32 scale of a side."""
    return tl.load((block + SIDE.scale.scale // 2).to(tl.pointer_type(tl.float32), bitcast=True))


@triton.jit
def value_bias(block, bias, SIDE: tl.constexpr):
    """The largest bias of p, up to `bias`, with which p times a scale of V stays in fp16."""
    if SIDE.scale.by == "block":
        top = load_block_scale(block, SIDE)
    else:
        COUNT: tl.constexpr = SIDE.rows // SIDE.scale.group * SIDE.columns
        PAD: tl.constexpr = triton.next_power_of_2(COUNT)
        o_s = tl.arange(0, PAD)
        p_scale = as_scales(block, SIDE.scale.scale) + o_s
        top = tl.max(load_tile(p_scale, o_s < COUNT, COUNT == PAD), 0).to(tl.float32)
    above = (top.to(tl.int32, bitcast=True) >> 23) - 126  # top < 2**above
    return tl.minimum(bias, P_BIAS - above.to(tl.float32))


@triton.jit
def add_values(block, p, decay, sums, FMT: tl.constexpr, X: tl.constexpr, SPELLING: tl.constexpr):
    """The sums, decayed, plus what the values of one page add.

    p: [T, C] fp32; decay: [C]
    """
    SIDE: tl.constexpr = FMT.v
    HALVES: tl.constexpr = SIDE.halves
    PLANES: tl.constexpr = SIDE.planes
    C: tl.constexpr = p.shape[1]
    o, z, y, e = sums
    wide = tl.reshape(tl.broadcast_to(decay[:, None], [C, X]), [C * X])[None, :]
    b_words = load_codes(block, SIDE)
    halves = in_halves(p.to(tl.float16), SIDE.halves)
    weighted, z_new, o_new, y_new, e_new = (), (), (), (), ()
    if SIDE.scale.by == "block":
        weighted = (in_halves((p * load_block_scale(block, SIDE)).to(tl.float16), SIDE.halves),)
    else:
        for g in tl.static_range(0, SIDE.rows // SIDE.scale.group, X):
            b_p, b_z = weigh(block, g, halves, z[g // X] * wide, X, SIDE)
            weighted, z_new = weighted + (b_p,), z_new + (b_z,)
    for f in tl.static_range(PLANES):
        o_new = o_new + (add_plane(b_words, weighted, o[f] * wide, f, SIDE, X, SPELLING),)
    if SIDE.low_rank is not None:
        b_a = tl.trans(load_factor(block, SIDE, FMT.tokens))
        y_new = (tl.dot(b_a, p.to(tl.float16), y[0] * decay[None, :]),)
    if SIDE.sparse is not None:
        R: tl.constexpr = SIDE.rows // 16
        b_e = tl.reshape(tl.broadcast_to(decay[None, :], [R, C]), [R * C])[None, :] * e[0]
        for j in tl.static_range(HALVES):
            b_e = add_sparse(block, halves[j], b_e, j, SIDE)
        e_new = (b_e,)
    return o_new, z_new, y_new, e_new


@triton.jit
def weigh(block, g, p, z, X: tl.constexpr, SIDE: tl.constexpr):
    """Weights with the scales of V groups g .. g+X-1 folded in, and z plus what their zeros add.

    p:       [U, C] fp16 for each half of the tokens
    z:       [16, C * X] fp32; rows 16/X * x and after belong to group g + x
    returns: [U, C * X] fp16 for each half of the tokens; z
    """
    HALVES: tl.constexpr = SIDE.halves
    U: tl.constexpr = SIDE.columns // SIDE.halves
    C: tl.constexpr = p[0].shape[1]
    o_u, o_x = tl.arange(0, U), tl.arange(0, X)
    weighted = ()
    for j in tl.static_range(HALVES):
        o_group = (g + o_x) * SIDE.columns + j * U
        b_scale = tl.load(as_scales(block, SIDE.scale.scale) + o_group[None, :] + o_u[:, None])
        b_p = tl.reshape(p[j][:, :, None] * b_scale[:, None, :], [U, C * X])
        if SIDE.scale.zero is None:
            b_zero = tl.full([16, U], SIDE.scale.center, tl.float16)
        else:
            b_zero = tl.load(as_scales(block, SIDE.scale.zero) + o_group[:, None] + o_u[None, :])
            b_zero = tl.reshape(tl.broadcast_to(b_zero[:, None, :], [X, 16 // X, U]), [16, U])
        z = tl.dot(b_zero, b_p, z)
        weighted = weighted + (b_p,)
    return weighted, z


@triton.jit
def add_plane(
    words, weighted, o, f: tl.constexpr, SIDE: tl.constexpr, X: tl.constexpr, SPELLING: tl.constexpr
):
    """o [W, C * X] plus what plane f of the value codes adds.

    words: [W, U]; weighted: what `weigh` returned for every X groups
    A plane is channels f * W + w; where these lie in several groups, each group takes its rows.
    """
    HALVES: tl.constexpr = SIDE.halves
    W: tl.constexpr = SIDE.rows // SIDE.planes
    GROUP: tl.constexpr = SIDE.scale.group if SIDE.scale.by == "column" else SIDE.rows
    FIRST: tl.constexpr = f * W // GROUP
    LAST: tl.constexpr = (f * W + W - 1) // GROUP
    group = (f * W + tl.arange(0, words.shape[0])[:, None]) // GROUP
    for j in tl.static_range(HALVES):
        b_codes = codes_of(words, f, j, SIDE, SPELLING)
        for g in tl.static_range(FIRST, LAST + 1):
            if FIRST == LAST:
                o = tl.dot(b_codes, weighted[g // X][j], o)
            else:
                b_part = tl.where(group == g, b_codes, 0.0)
                o = tl.dot(b_part, weighted[g // X][j], o)
    return o


@triton.jit
def plane_values(
    segment, sums, f: tl.constexpr, SIDE: tl.constexpr, X: tl.constexpr, SPELLING: tl.constexpr
):
    """The sums of plane f out of code units, with all pieces: channels f * W + w, [W, C] fp32."""
    W: tl.constexpr = SIDE.rows // SIDE.planes
    GROUP: tl.constexpr = SIDE.scale.group if SIDE.scale.by == "column" else SIDE.rows
    FIRST: tl.constexpr = f * W // GROUP
    LAST: tl.constexpr = (f * W + W - 1) // GROUP
    o, z, y, e = sums
    C: tl.constexpr = o[f].shape[1] // X
    o_w, o_x = tl.arange(0, o[f].shape[0])[:, None], tl.arange(0, X)[None, None, :]
    b_o = tl.reshape(o[f], [o[f].shape[0], C, X])
    b_o = tl.sum(tl.where(o_x == FIRST % X, b_o, 0.0), 2) * weight_of(f, SIDE, SPELLING)
    if SIDE.scale.by == "column":
        o_row = tl.arange(0, 16)[:, None, None]
        for g in tl.static_range(FIRST, LAST + 1):
            own = (o_row == g % X * (16 // X)) & (o_x == g % X)
            b_z = tl.sum(tl.sum(tl.where(own, tl.reshape(z[g // X], [16, C, X]), 0.0), 2), 0)
            b_o += tl.where((f * W + o_w) // GROUP == g, b_z[None, :], 0.0)
    if SIDE.sparse is not None:
        b_e = tl.reshape(by_rows(e[0], C), [SIDE.planes, W, C])
        o_f = tl.arange(0, SIDE.planes)[:, None, None]
        b_o += tl.sum(tl.where(o_f == f, b_e, 0.0), 0)
    if SIDE.low_rank is not None:
        RANK: tl.constexpr = SIDE.low_rank.rank
        o_r = tl.arange(0, 16)[None, :]
        p_b = as_scales(segment, SIDE.low_rank.b) + (f * W + o_w) * RANK + o_r
        b_b = tl.load(p_b, mask=(o_r < RANK) & (o_w < W), other=0.0).to(tl.float32)
        b_o = tl.dot(b_b, y[0], b_o, input_precision="ieee")
    if SIDE.rotation is not None:
        BLOCK: tl.constexpr = SIDE.rotation.block
        tl.static_assert(W % BLOCK == 0, "a plane of channels is whole blocks")
        o_v = tl.arange(0, o[f].shape[0])[None, :]
        p_m = as_scales(segment, SIDE.rotation.matrix) + o_v % BLOCK * BLOCK + o_w % BLOCK
        b_m = tl.load(p_m, mask=o_w // BLOCK == o_v // BLOCK, other=0.0).to(tl.float32)
        b_o = tl.dot(b_m, b_o, input_precision="ieee")
    return b_o
