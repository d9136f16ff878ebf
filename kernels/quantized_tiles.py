"""One page of codes inside the attention kernel: its scores, and what its values add.

Nothing is decoded. The scale of K is multiplied into q and the scale of V into p, tiles of C
columns; codes go to the tensor core as `bits.field` reads them, and zeros, which are in code units,
go there too, as rows that are all equal. formats.py draws the planes.
"""

import triton
import triton.language as tl

from disagg.kernels.bits import field, weight
from disagg.kernels.tiles import P_BIAS, below, load_tile, upper_lower


@triton.jit
def as_scales(block, OFFSET: tl.constexpr):
    """The fp16 items at a byte offset of a block."""
    return (block + OFFSET // 2).to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def first_of(s, COPIES: tl.constexpr):
    """[rows, C * COPIES] -> [rows, C]: the first of every COPIES equal columns."""
    if COPIES == 2:
        return tl.split(tl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))[0]
    else:
        return s


@triton.jit
def in_halves(x, HALVES: tl.constexpr):
    """[rows, C] cut into its halves: a tuple of one or two tiles."""
    if HALVES == 2:
        return upper_lower(x)
    else:
        return (x,)


@triton.jit
def fold_scale(block, g, q, FMT: tl.constexpr):
    """q with the scales of token group g folded in, and what the zeros add to its scores.

    q:       [C, H] fp16 for each half of the channels
    returns: [H, C] fp16 for each half; bias [R, C] fp32, all rows equal
    """
    HALVES: tl.constexpr = FMT.halves
    R: tl.constexpr = FMT.tokens // 4
    H: tl.constexpr = FMT.head_dim // HALVES
    H_PAD: tl.constexpr = q[0].shape[1]
    o_h = tl.arange(0, H_PAD)[None, :]
    b_bias = tl.zeros([R, q[0].shape[0]], tl.float32)
    folded = ()
    for j in tl.static_range(HALVES):
        o_group = g * FMT.head_dim + j * H + o_h
        b_scale = load_tile(as_scales(block, FMT.k_scale) + o_group, o_h < H, H == H_PAD)
        b_zero = load_tile(as_scales(block, FMT.k_zero) + o_group, o_h < H, H == H_PAD)
        b_q = tl.trans(q[j] * b_scale)
        b_bias = tl.dot(tl.broadcast_to(b_zero, [R, H_PAD]), b_q, b_bias)
        folded = folded + (b_q,)
    return folded, b_bias


@triton.jit
def page_scores(block, q, COPIES: tl.constexpr, FMT: tl.constexpr, SPELLING: tl.constexpr):
    """q.k of one page: [T, C] fp32.

    block: int16 pointer to the page's block; q: [C, H] fp16 for each half of channels
    """
    HALVES: tl.constexpr = FMT.halves
    BITS: tl.constexpr = FMT.bits
    R: tl.constexpr = FMT.tokens // 4
    H: tl.constexpr = FMT.head_dim // HALVES
    H_PAD: tl.constexpr = q[0].shape[1]
    GROUPS: tl.constexpr = FMT.tokens // FMT.k_group
    tl.static_assert(4 % GROUPS == 0, "a group of tokens is whole planes")
    o_r, o_h = tl.arange(0, R)[:, None], tl.arange(0, H_PAD)[None, :]
    # [R, H] int16
    b_words = load_tile(block + FMT.k_codes // 2 + o_r * H + o_h, o_h < H, H == H_PAD)
    folded = ()
    for g in tl.static_range(GROUPS):
        folded = folded + (fold_scale(block, g, q, FMT),)
    s = ()
    for f in tl.static_range(4):
        b_q, b_bias = folded[f * GROUPS // 4]
        b_s = tl.zeros(b_bias.shape, tl.float32)
        for j in tl.static_range(HALVES):
            b_s = tl.dot(field(b_words, f, j, BITS, SPELLING), b_q[j], b_s)
        s = s + (first_of(b_s, COPIES) * weight(f, BITS, SPELLING) + first_of(b_bias, COPIES),)
    return below(below(s[0], s[1]), below(s[2], s[3]))


@triton.jit
def largest_bias(block, bias, FMT: tl.constexpr):
    """The largest bias of p, up to `bias`, with which p times a scale of V stays in fp16."""
    COUNT: tl.constexpr = FMT.head_dim // FMT.v_group * FMT.tokens
    PAD: tl.constexpr = triton.next_power_of_2(COUNT)
    o_s = tl.arange(0, PAD)
    b_scale = load_tile(as_scales(block, FMT.v_scale) + o_s, o_s < COUNT, COUNT == PAD)
    top = tl.max(b_scale, 0).to(tl.float32)
    above = (top.to(tl.int32, bitcast=True) >> 23) - 126  # top < 2**above
    return tl.minimum(bias, P_BIAS - above.to(tl.float32))


@triton.jit
def weigh(block, g, p, z, X: tl.constexpr, FMT: tl.constexpr):
    """Weights with the scales of V groups g .. g+X-1 folded in, and z plus what their zeros add.

    p:       [U, C] fp16 for each half of the tokens
    z:       [16, C * X] fp32; rows 16/X * x and after belong to group g + x
    returns: [U, C * X] fp16 for each half of the tokens; z
    """
    HALVES: tl.constexpr = FMT.halves
    U: tl.constexpr = FMT.tokens // HALVES
    C: tl.constexpr = p[0].shape[1]
    o_u, o_x = tl.arange(0, U), tl.arange(0, X)
    weighted = ()
    for j in tl.static_range(HALVES):
        o_group = (g + o_x) * FMT.tokens + j * U
        b_scale = tl.load(as_scales(block, FMT.v_scale) + o_group[None, :] + o_u[:, None])
        b_zero = tl.load(as_scales(block, FMT.v_zero) + o_group[:, None] + o_u[None, :])
        b_p = tl.reshape(p[j][:, :, None] * b_scale[:, None, :], [U, C * X])
        b_zero = tl.reshape(tl.broadcast_to(b_zero[:, None, :], [X, 16 // X, U]), [16, U])
        z = tl.dot(b_zero, b_p, z)
        weighted = weighted + (b_p,)
    return weighted, z


@triton.jit
def add_plane(
    words, weighted, o, f: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr, SPELLING: tl.constexpr
):
    """o [W, C * X] plus what plane f of the value codes adds.

    words: [W, U] int16; weighted: what `weigh` returned for every X groups
    A plane is channels f * W + w; where these lie in several groups, each group takes its rows.
    """
    HALVES: tl.constexpr = FMT.halves
    BITS: tl.constexpr = FMT.bits
    W: tl.constexpr = FMT.head_dim // 4
    FIRST: tl.constexpr = f * W // FMT.v_group
    LAST: tl.constexpr = (f * W + W - 1) // FMT.v_group
    group = (f * W + tl.arange(0, words.shape[0])[:, None]) // FMT.v_group
    for j in tl.static_range(HALVES):
        b_codes = field(words, f, j, BITS, SPELLING)
        for g in tl.static_range(FIRST, LAST + 1):
            if FIRST == LAST:
                o = tl.dot(b_codes, weighted[g // X][j], o)
            else:
                b_part = tl.where(group == g, b_codes, 0.0)
                o = tl.dot(b_part, weighted[g // X][j], o)
    return o


@triton.jit
def add_values(block, p, decay, o, z, FMT: tl.constexpr, X: tl.constexpr, SPELLING: tl.constexpr):
    """The sums o and z, decayed, plus what the values of one page add.

    p: [T, C] fp32; decay: [C * X]
    o: four planes of channels [W, C * X] fp32, in code units
    z: sums over zeros [16, C * X] fp32, one for every X groups of channels
    """
    U: tl.constexpr = FMT.tokens // FMT.halves
    W: tl.constexpr = FMT.head_dim // 4
    W_PAD: tl.constexpr = o[0].shape[0]
    GROUPS: tl.constexpr = FMT.head_dim // FMT.v_group
    o_w, o_u = tl.arange(0, W_PAD)[:, None], tl.arange(0, U)[None, :]
    # [W, U] int16
    b_words = load_tile(block + FMT.v_codes // 2 + o_w * U + o_u, o_w < W, W == W_PAD)
    p = in_halves(p.to(tl.float16), FMT.halves)
    weighted, z_new = (), ()
    for g in tl.static_range(0, GROUPS, X):
        b_p, b_z = weigh(block, g, p, z[g // X] * decay[None, :], X, FMT)
        weighted, z_new = weighted + (b_p,), z_new + (b_z,)
    o_new = ()
    for f in tl.static_range(4):
        b_o = add_plane(b_words, weighted, o[f] * decay[None, :], f, FMT, X, SPELLING)
        o_new = o_new + (b_o,)
    return o_new, z_new


@triton.jit
def plane_values(o, z, f: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr, SPELLING: tl.constexpr):
    """The sums of plane f out of code units: channels f * W + w of the output, [W, C] fp32."""
    BITS: tl.constexpr = FMT.bits
    W: tl.constexpr = FMT.head_dim // 4
    C: tl.constexpr = o[f].shape[1] // X
    FIRST: tl.constexpr = f * W // FMT.v_group
    LAST: tl.constexpr = (f * W + W - 1) // FMT.v_group
    o_w, o_x = tl.arange(0, o[f].shape[0])[:, None], tl.arange(0, X)[None, None, :]
    b_o = tl.reshape(o[f], [o[f].shape[0], C, X])
    b_o = tl.sum(tl.where(o_x == FIRST % X, b_o, 0.0), 2) * weight(f, BITS, SPELLING)
    o_row = tl.arange(0, 16)[:, None, None]
    for g in tl.static_range(FIRST, LAST + 1):
        own = (o_row == g % X * (16 // X)) & (o_x == g % X)
        b_z = tl.sum(tl.sum(tl.where(own, tl.reshape(z[g // X], [16, C, X]), 0.0), 2), 0)
        b_o += tl.where((f * W + o_w) // FMT.v_group == g, b_z[None, :], 0.0)
    return b_o
