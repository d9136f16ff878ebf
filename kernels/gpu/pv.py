"""The product of weights and one page of codes, added to the sums of attention.

The sums are a tuple of tuples, empty if the format does not need them:

    o  four fields of channels (two, one) [W, C * X] fp32, in code units
    z  sums over zeros [16, C * X], one for every X groups of channels; of its rows, those count
       that `zero_rows` gives to the group
    y  (A^T p [16, C * X],), all X copies of a column equal; () where pages have B, and o has it all
"""

import triton
import triton.language as tl

from disagg.kernels.formats import Side
from disagg.kernels.gpu.qk import codes_of, load_codes, load_factor, two_rows, weight_of
from disagg.kernels.gpu.sparse import sparse_sums
from disagg.kernels.gpu.tiles import (
    P_BIAS,
    as_scales,
    first_of,
    in_halves,
    load_tile,
    settle,
)


@triton.jit
def empty_sums(C: tl.constexpr, X: tl.constexpr, SIDE: tl.constexpr):
    """The sums before any page."""
    FIELDS: tl.constexpr = SIDE.fields
    W: tl.constexpr = triton.next_power_of_2(SIDE.rows // SIDE.fields)
    o = ()
    z = ()
    y = ()
    for _ in tl.static_range(FIELDS):
        o = o + (tl.zeros([W, C * X], tl.float32),)
    if SIDE.scale.by == "column":
        for _ in tl.static_range(0, SIDE.rows // SIDE.scale.group, X):
            z = z + (tl.zeros([16, C * X], tl.float32),)
    if SIDE.low_rank is not None and SIDE.low_rank.shared:
        y = y + (tl.zeros([16, C * X], tl.float32),)
    return o, z, y


@triton.jit
def load_block_scale(block, SIDE: tl.constexpr):
    """The one fp32 scale of a side."""
    p_scale = block + SIDE.scale.scale // 2
    return tl.load(p_scale.to(tl.pointer_type(tl.float32), bitcast=True))


@triton.jit
def value_bias(block, bias, SIDE: tl.constexpr):
    """The largest bias of p, up to `bias`, with which products of p and V stay in fp16."""
    if SIDE.scale.by == "block":
        top = load_block_scale(block, SIDE)
    else:
        COUNT: tl.constexpr = SIDE.rows // SIDE.scale.group * SIDE.columns
        tops = magnitudes(as_scales(block, SIDE.scale.scale), COUNT)
        top = tl.max(tops, 0).to(tl.float32)
    if SIDE.sparse is not None:
        p_delta = as_scales(block, SIDE.sparse.delta)
        more = magnitudes(p_delta, SIDE.columns * SIDE.sparse.slots)
        if SIDE.scale.by == "column" and more.shape[0] == tops.shape[0]:
            # across threads only once
            top = tl.max(tl.maximum(tops, more), 0).to(tl.float32)
        else:
            top = tl.maximum(top, tl.max(more, 0).to(tl.float32))
    above = (top.to(tl.int32, bitcast=True) >> 23) - 126  # top < 2**above
    return tl.minimum(bias, -above.to(tl.float32) + P_BIAS)


@triton.jit
def magnitudes(p, COUNT: tl.constexpr):
    """The magnitudes of COUNT items of fp16, and 0 up to a power of two."""
    PAD: tl.constexpr = triton.next_power_of_2(COUNT)
    o_i = tl.arange(0, PAD)
    return tl.abs(load_tile(p + o_i, o_i < COUNT, COUNT == PAD))


@triton.jit
def add_values(
    block, p, decay, sums, own,
    FMT: tl.constexpr, X: tl.constexpr, UNPACK_MODE: tl.constexpr,
):  # fmt: skip
    """The sums, decayed, plus those of one page.

    The order takes the fewest registers at once; with sparse slots it differs.

    p:     [T, C] fp32
    decay: [C]
    own:   from `sparse_rows`
    """
    SIDE: tl.constexpr = FMT.v
    FIELDS: tl.constexpr = SIDE.fields
    C: tl.constexpr = p.shape[1]
    o, z, y = sums
    decay = tl.reshape(tl.broadcast_to(decay[:, None], [C, X]), [C * X])[None, :]
    copies = copies_of(p, X, SIDE)
    o_new = ()
    y_new = ()
    FACTOR: tl.constexpr = SIDE.low_rank is not None and SIDE.low_rank.shared
    if FACTOR and SIDE.sparse is not None:
        y_new = (add_factor(block, copies, y[0] * decay, SIDE),)
    if SIDE.sparse is not None:
        o_new = add_sparse(block, copies, o, decay, own, X, SIDE, UNPACK_MODE)
    else:
        for f in tl.static_range(FIELDS):
            o_new = o_new + (o[f] * decay,)
    b_words = load_codes(block, 0, 1, SIDE)
    weighted, z_new = weigh_groups(block, p, copies, z, decay, X, SIDE)
    o_new = add_fields(b_words, weighted, o_new, X, SIDE, UNPACK_MODE)
    if FACTOR and SIDE.sparse is None:
        y_new = (add_factor(block, copies, y[0] * decay, SIDE),)
    if SIDE.low_rank is not None and not FACTOR:
        o_new = add_product(block, copies, o_new, SIDE, UNPACK_MODE)
    return o_new, z_new, y_new


@triton.jit
def copies_of(p, X: tl.constexpr, SIDE: tl.constexpr):
    """p [T, C] in fp16, each column X times: [U, C * X] for each half of the tokens."""
    HALVES: tl.constexpr = SIDE.halves
    U: tl.constexpr = SIDE.columns // SIDE.halves
    C: tl.constexpr = p.shape[1]
    halves = in_halves(p.to(tl.float16), SIDE.halves)
    copies = ()
    for j in tl.static_range(HALVES):
        # without `settle` each product would bring p through shared memory anew
        if X == 1:
            copies = copies + (settle(halves[j]),)
        else:
            b_x = tl.broadcast_to(halves[j][:, :, None], [U, C, X])
            copies = copies + (tl.reshape(b_x, [U, C * X]),)
    return copies


@triton.jit
def weigh_groups(block, p, copies, z, decay, X: tl.constexpr, SIDE: tl.constexpr):
    """Weights with scales folded in, for every X groups of channels; and the sums over zeros.

    p:      [T, C] fp32
    copies: of p, from `copies_of`
    z:      the sums so far; decay: [1, C * X]
    """
    HALVES: tl.constexpr = SIDE.halves
    C: tl.constexpr = p.shape[1]
    weighted = ()
    z_new = ()
    if SIDE.scale.by == "block":
        b_p = (p * load_block_scale(block, SIDE)).to(tl.float16)
        weighted = (in_halves(b_p, SIDE.halves),)
    else:
        Y: tl.constexpr = groups_in_rows(X, C, SIDE)
        for g in tl.static_range(0, SIDE.rows // SIDE.scale.group, X):
            b_z = z[g // X] * decay
            b_p = weigh(block, g, copies, X, SIDE)
            if g % Y == 0:
                b_rows = zero_rows(block, g, C * X, Y, SIDE)
            for j in tl.static_range(HALVES):
                b_z = tl.dot(b_rows[j], b_p[j], b_z)
            weighted = weighted + (b_p,)
            z_new = z_new + (b_z,)
    return weighted, z_new


@triton.jit
def add_factor(block, x, y, SIDE: tl.constexpr):
    """y [16, C] plus A^T x; x: [U, C] fp16 for each half of the tokens."""
    U: tl.constexpr = SIDE.columns // SIDE.halves
    for j in tl.static_range(len(x)):
        o_t = (j * U + tl.arange(0, U))[None, :]
        y = tl.dot(load_factor(block, o_t, tl.arange(0, 16)[:, None], SIDE), x[j], y)
    return y


@triton.jit
def add_product(block, x, o, SIDE: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """The fields o [W, C] plus B A^T x; x as above, at most 2**15.

    Columns of A are sqrt(T) long, so A^T x is at most T * 2**15 and over T it fits fp16.
    """
    RANK: tl.constexpr = SIDE.low_rank.rank
    W: tl.constexpr = SIDE.rows // SIDE.fields
    o_w = tl.arange(0, o[0].shape[0])[:, None]
    o_r = tl.arange(0, 16)[None, :]
    b_y = add_factor(block, x, tl.zeros([16, o[0].shape[1]], tl.float32), SIDE)
    b_y = (b_y * (1.0 / SIDE.columns)).to(tl.float16)
    added = ()
    for f in tl.static_range(len(o)):
        p_b = as_scales(block, SIDE.low_rank.b) + (f * W + o_w) * RANK + o_r
        b_b = tl.load(p_b, mask=(o_r < RANK) & (o_w < W), other=0.0)
        b_product = tl.dot(b_b, b_y) * (SIDE.columns / weight_of(f, SIDE, UNPACK_MODE))
        added = added + (o[f] + b_product,)
    return added


@triton.jit
def add_sparse(
    block,
    x,
    o,
    decay,
    own,
    X: tl.constexpr,
    SIDE: tl.constexpr,
    UNPACK_MODE: tl.constexpr,
):
    """The fields o, decayed, plus the sparse slots."""
    W: tl.constexpr = SIDE.rows // SIDE.fields
    GROUP: tl.constexpr = SIDE.scale.group if SIDE.scale.by == "column" else SIDE.rows
    sparse = sparse_sums(
        block, x, (), own[1], own[2], SIDE.fields, X, SIDE, UNPACK_MODE
    )
    added = ()
    for f in tl.static_range(len(o)):
        b_o = o[f] * decay
        b_sparse = sparse[f] * (1 / weight_of(f, SIDE, UNPACK_MODE))
        if X == 1:
            b_o += b_sparse
        else:
            even, odd = tl.split(tl.reshape(b_o, [b_o.shape[0], b_o.shape[1] // 2, 2]))
            if f * W // GROUP % 2 == 0:
                even += b_sparse
            else:
                odd += b_sparse
            b_o = tl.reshape(tl.join(even, odd), b_o.shape)
        added = added + (b_o,)
    return added


@triton.jit
def add_fields(
    words, weighted, o, X: tl.constexpr, SIDE: tl.constexpr, UNPACK_MODE: tl.constexpr
):
    """The fields o [W, C * X] plus the codes.

    words: [W, U]; weighted: what `weigh` returned for every X groups
    A field is channels f * W + w; where these lie in several groups, each group takes its rows.
    """
    HALVES: tl.constexpr = SIDE.halves
    W: tl.constexpr = SIDE.rows // SIDE.fields
    GROUP: tl.constexpr = SIDE.scale.group if SIDE.scale.by == "column" else SIDE.rows
    o_w = tl.arange(0, words.shape[0])[:, None]
    added = ()
    for f in tl.static_range(len(o)):
        b_o = o[f]
        for j in tl.static_range(HALVES):
            b_codes = codes_of(words, f, j, SIDE, UNPACK_MODE)
            for g in tl.static_range(f * W // GROUP, (f * W + W - 1) // GROUP + 1):
                if W <= GROUP and GROUP % W == 0:
                    b_o = tl.dot(b_codes, weighted[g // X][j], b_o)
                else:
                    b_part = tl.where((f * W + o_w) // GROUP == g, b_codes, 0.0)
                    b_o = tl.dot(b_part, weighted[g // X][j], b_o)
        added = added + (b_o,)
    return added


@triton.jit
def field_values(
    segment,
    sums,
    f: tl.constexpr,
    SIDE: tl.constexpr,
    X: tl.constexpr,
    UNPACK_MODE: tl.constexpr,
):
    """The sums of field f, out of code units and complete: channels f * W + w, [W, C] fp32."""
    W: tl.constexpr = SIDE.rows // SIDE.fields
    GROUP: tl.constexpr = SIDE.scale.group if SIDE.scale.by == "column" else SIDE.rows
    FIRST: tl.constexpr = f * W // GROUP
    LAST: tl.constexpr = (f * W + W - 1) // GROUP
    o, z, y = sums
    C: tl.constexpr = o[f].shape[1] // X
    o_w = tl.arange(0, o[f].shape[0])[:, None]
    o_x = tl.arange(0, X)[None, None, :]
    b_o = tl.reshape(o[f], [o[f].shape[0], C, X])
    b_o = tl.sum(tl.where(o_x == FIRST % X, b_o, 0.0), 2) * weight_of(
        f, SIDE, UNPACK_MODE
    )
    if SIDE.scale.by == "column":
        Y: tl.constexpr = groups_in_rows(X, C, SIDE)
        o_row = tl.arange(0, 16)[:, None, None]
        for g in tl.static_range(FIRST, LAST + 1):
            own = (o_row == g % Y * (16 // Y)) & (o_x == g % X)
            b_rows = tl.reshape(z[g // X], [16, C, X])
            b_z = tl.sum(tl.sum(tl.where(own, b_rows, 0.0), 2), 0)
            b_o += tl.where((f * W + o_w) // GROUP == g, b_z[None, :], 0.0)
    if len(y) > 0:
        RANK: tl.constexpr = SIDE.low_rank.rank
        o_r = tl.arange(0, 16)[None, :]
        p_b = as_scales(segment, SIDE.low_rank.b) + (f * W + o_w) * RANK + o_r
        b_b = tl.load(p_b, mask=(o_r < RANK) & (o_w < W), other=0.0).to(tl.float32)
        b_o = tl.dot(b_b, first_of(y[0], X), b_o, input_precision="ieee")
    if SIDE.rotation is not None:
        BLOCK: tl.constexpr = SIDE.rotation.block
        tl.static_assert(W % BLOCK == 0, "a field of channels is whole blocks")
        o_v = tl.arange(0, o[f].shape[0])[None, :]
        p_m = as_scales(segment, SIDE.rotation.matrix) + o_v % BLOCK * BLOCK
        p_m += o_w % BLOCK
        b_m = tl.load(p_m, mask=o_w // BLOCK == o_v // BLOCK, other=0.0).to(tl.float32)
        b_o = tl.dot(b_m, b_o, input_precision="ieee")
    return b_o


@triton.constexpr_function
def groups_in_rows(x: int, columns: int, side: Side) -> int:
    """How many V groups share the rows of a product with zeros: x, or two in place of one."""
    groups = side.rows // side.scale.group
    return 2 if x == 1 and columns == 8 and groups % 2 == 0 else x


@triton.jit
def weigh(block, g, p, X: tl.constexpr, SIDE: tl.constexpr):
    """Weights with the scales of V groups g .. g+X-1 folded in: [U, C * X] fp16 for each half.

    p: [U, C * X] fp16 for each half of the tokens, all X copies of a column equal
    """
    HALVES: tl.constexpr = SIDE.halves
    U: tl.constexpr = SIDE.columns // SIDE.halves
    C: tl.constexpr = p[0].shape[1] // X
    o_t = tl.arange(0, SIDE.columns)[:, None]
    o_x = tl.arange(0, X)[None, :]
    o_group = (g + o_x) * SIDE.columns
    p_scale = as_scales(block, SIDE.scale.scale) + o_group + o_t
    b_scale = in_halves(tl.load(p_scale), HALVES)
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
        o_t = tl.arange(0, SIDE.columns)[:, None]
        o_y = tl.arange(0, Y)[None, :]
        if SIDE.scale.zero is None:
            b_zero = tl.full([SIDE.columns, Y], SIDE.scale.center, tl.float16)
        else:
            p_zero = as_scales(block, SIDE.scale.zero) + (g + o_y) * SIDE.columns + o_t
            b_zero = tl.load(p_zero)
        for j in tl.static_range(HALVES):
            b_half = tl.trans(in_halves(b_zero, HALVES)[j])[:, None, :]
            b_rows = tl.broadcast_to(b_half, [Y, 16 // Y, U])
            rows = rows + (tl.reshape(b_rows, [16, U]),)
    return rows
