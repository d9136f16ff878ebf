"""Quantising one side of one block in registers; shared by encode.py and append.py.

A side is a matrix whose rows are cut into fields and whose columns are cut into halves; each part
is padded to a power of two, so that packing is a plain sum over fields and halves and nothing is
shuffled. Padding is masked. The arithmetic is that of reference/quantize.py, operation by
operation, so the bytes are the same.
"""

import triton
import triton.language as tl

from disagg.kernels.reference import quantize

LARGEST = tl.constexpr(65504.0)  # of fp16
SMALLEST_SCALE = tl.constexpr(2.0**-24)
SHARES = quantize.SHARES
# 1.5 * 2**23: adding and subtracting it rounds half to even
ROUND = tl.constexpr(12582912.0)


@triton.jit
def axis_of(SIZE: tl.constexpr, PARTS: tl.constexpr, block=0, BLOCKS: tl.constexpr = 1):
    """Indices of SIZE items in PARTS equal parts, each padded, and whether they exist.

    Of each part those of one of BLOCKS blocks.
    """
    PART: tl.constexpr = SIZE // PARTS
    PAD: tl.constexpr = PART // BLOCKS if BLOCKS > 1 else triton.next_power_of_2(PART)
    tl.static_assert(PART * PARTS == SIZE, "fields and halves divide a side")
    o = tl.arange(0, PARTS * PAD)
    within = o % PAD
    if BLOCKS > 1:  # else the compiler would know less of where it begins
        within += block * PAD
    return o // PAD * PART + within, within < PART


@triton.constexpr_function
def is_padded(part: int) -> bool:
    """Whether a part of an axis is padded."""
    return part & (part - 1) != 0


@triton.jit
def finite(x):
    """x in fp32; numbers beyond fp16 saturate, NaN becomes 0."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)


@triton.jit
def at(block, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Items of DTYPE at a byte offset of a block; block: u8 pointer."""
    return (block + OFFSET).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def group_scale(x, own, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """Scale and zero, fp16, of the numbers of x that are `own`, along an axis."""
    low = tl.min(tl.where(own, x, LARGEST), AXIS)
    high = tl.max(tl.where(own, x, -LARGEST), AXIS)
    largest = tl.maximum(tl.abs(low), tl.abs(high))
    if SIDE.scale.zero is None:
        LIMIT: tl.constexpr = (1 << (SIDE.bits - 1)) - 1
        step = tl.maximum(tl.div_rn(largest, LIMIT * 1.0), SMALLEST_SCALE)
        scale = step.to(tl.float16)
        zero = tl.full(scale.shape, SIDE.scale.center, tl.float16)
    else:
        LEVELS: tl.constexpr = (1 << SIDE.bits) - 1
        scale = tl.maximum(tl.div_rn(high - low, LEVELS * 1.0), largest * (1.0 / 1024))
        scale = tl.maximum(scale, SMALLEST_SCALE).to(tl.float16)
        zero = (tl.div_rn(low, scale.to(tl.float32)) + 0.0).to(tl.float16)
    return scale, zero


@triton.jit
def sum_rows(x):
    """[COUNT, G, C] -> [COUNT, C], row after row as the reference adds."""
    o_r = tl.arange(0, x.shape[1])[None, :, None]
    total = tl.zeros([x.shape[0], x.shape[2]], tl.float32)
    for r in range(x.shape[1]):
        total += tl.sum(tl.where(o_r == r, x, 0.0), 1)
    return total


@triton.jit
def fitted_codes(x, SIDE: tl.constexpr):
    """Codes [COUNT, G, C] in int32 of groups x, and their fp16 scales and zeros [COUNT, C].

    The range is clipped and stretched; reference/quantize.py says how.
    """
    LEVELS: tl.constexpr = (1 << SIDE.bits) - 1
    SHARE: tl.constexpr = share_of(SIDE.bits)
    low = tl.min(x, 1)
    high = tl.max(x, 1)
    width = (high - low) * SHARE
    largest = tl.maximum(tl.abs(low), tl.abs(high)) * (1.0 / 1024)
    step = tl.maximum(
        tl.maximum(tl.div_rn(width, LEVELS * 1.0), largest), SMALLEST_SCALE
    )
    start = (low + high) * 0.5 - width * 0.5
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    u = (x - start[:, None, :]) * inverse[:, None, :]
    code = tl.minimum(tl.maximum(u, 0.0), LEVELS * 1.0) + ROUND
    whole = code.to(tl.int32, bitcast=True) & LEVELS
    code = code - ROUND
    sum_u = sum_rows(u)
    sum_c = sum_rows(code)
    # of a power of two both are exact; but a division may be approximate (Triton 3.6)
    mean_u = sum_u * (1.0 / SIDE.scale.group)
    mean_c = sum_c * (1.0 / SIDE.scale.group)
    spread = sum_rows(u * u) - sum_u * mean_u
    along = sum_rows(u * code) - sum_u * mean_c
    ratio = tl.div_rn(spread, tl.where(along > 0, along, 1.0))
    stretch = tl.where(along > 0, tl.minimum(tl.maximum(ratio, 0.5), 2.0), 1.0)
    scale = tl.maximum(step * stretch, SMALLEST_SCALE).to(tl.float16)
    zero = tl.div_rn(start + step * mean_u, scale.to(tl.float32)) - mean_c
    return whole, scale, zero.to(tl.float16)


@triton.constexpr_function
def share_of(bits: int) -> float:
    """The share of the range that codes of this width cover."""
    return SHARES[bits]


@triton.jit
def codes_with(x, scale, zero, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """Codes of x, and the numbers in fp32 that they stand for.

    Adding ROUND leaves the rounded number in the last bits, so nothing is converted.
    """
    scale = tl.expand_dims(scale.to(tl.float32), AXIS)
    zero = tl.expand_dims(zero.to(tl.float32), AXIS)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    if SIDE.scale.zero is None:
        LIMIT: tl.constexpr = (1 << (SIDE.bits - 1)) - 1
        code = tl.minimum(tl.maximum(x * inverse, -LIMIT * 1.0), LIMIT * 1.0) + ROUND
        whole = code.to(tl.int32, bitcast=True) + (LIMIT + 1)
        code = (code - ROUND) + (LIMIT + 1)
    else:
        LEVELS: tl.constexpr = (1 << SIDE.bits) - 1
        code = tl.fma(x, inverse, -zero)
        code = tl.minimum(tl.maximum(code, 0.0), LEVELS * 1.0) + ROUND
        whole = code.to(tl.int32, bitcast=True)
        code = code - ROUND
    return whole & ((1 << SIDE.bits) - 1), (code + zero) * scale


@triton.jit
def encode_tile(
    x, m_x, row, column, m_r, m_c, block, segment, SIDE: tl.constexpr, top=None
):
    """Write one side of a block, or a part of it; returns the error of codes and slots [R, C].

    x:       finite numbers in fp32, 0 where m_x is not set
    row, column: [R], [C] indices of the side; m_r, m_c: which of them exist, m_x: both [R, C]
    segment: has the scales of the page, where these are shared
    top:     of float8, the largest magnitude of the side, where x is a part of it
    """
    if SIDE.floating:
        if top is None:
            top = tl.max(tl.max(tl.where(m_x, tl.abs(x), 0.0), 1), 0)
        store_float8(x, m_x, row, column, block, top, SIDE)
        missing = x
    elif SIDE.bits == 0:
        mean = finite(sum_rows(x[None, :, :]) * (1.0 / SIDE.rows)).to(tl.float16)
        tl.store(at(block, SIDE.scale.scale, tl.float16) + column[None, :], mean)
        missing = x
    else:
        means = x
        if SIDE.sparse is not None:
            picks, means = choose_outliers(x, m_x, SIDE)
        codes, decoded = quantize_tile(
            means, m_x, row, column, m_r, m_c, block, segment, SIDE
        )
        store_words(block, codes, row, column, SIDE)
        missing = x - decoded
        if SIDE.sparse is not None:
            missing = store_outliers(block, missing, picks, column, m_c, SIDE)
    return missing


@triton.jit
def quantize_tile(x, m_x, row, column, m_r, m_c, block, segment, SIDE: tl.constexpr):
    """Codes of x [R, C] in int32 and the numbers that they decode to; stores scales and zeros.

    block, segment: u8 pointers to the block of the page, and of the segment whose scales hold
    """
    AXIS: tl.constexpr = 0 if SIDE.scale.by == "column" else 1
    LENGTH: tl.constexpr = SIDE.rows if SIDE.scale.by == "column" else SIDE.columns
    if SIDE.scale.shared:
        p_scale = at(segment, SIDE.scale.scale, tl.float16) + column
        scale = tl.load(p_scale, mask=m_c, other=1.0)
        p_zero = at(segment, SIDE.scale.zero, tl.float16) + column
        zero = tl.load(p_zero, mask=m_c, other=0.0)
        code, decoded = codes_with(x, scale, zero, 0, SIDE)
        code = tl.where(m_x, code, 0)
    elif is_padded(SIDE.rows // SIDE.fields) or is_padded(SIDE.columns // SIDE.halves):
        code = tl.zeros(x.shape, tl.int32)
        decoded = tl.zeros(x.shape, tl.float32)
        place = row[:, None]
        lane = column
        m_lane = m_c
        if AXIS == 1:
            place = column[None, :]
            lane = row
            m_lane = m_r
        for g in tl.static_range(LENGTH // SIDE.scale.group):
            own = m_x & (place // SIDE.scale.group == g)
            scale, zero = group_scale(x, own, AXIS, SIDE)
            store_scales(block, scale, zero, g, lane, m_lane, SIDE)
            own_code, own_decoded = codes_with(x, scale, zero, AXIS, SIDE)
            code = tl.where(own, own_code, code)
            decoded = tl.where(own, own_decoded, decoded)
    elif SIDE.scale.fitted:
        COUNT: tl.constexpr = SIDE.rows // SIDE.scale.group
        groups = tl.reshape(x, [COUNT, SIDE.scale.group, x.shape[1]])
        code, scale, zero = fitted_codes(groups, SIDE)
        o_g = tl.arange(0, COUNT)[:, None]
        lane = column[None, :]
        store_scales(block, scale, zero, o_g, lane, lane >= 0, SIDE)
        code = tl.reshape(code, x.shape)
        decoded = x
    else:
        COUNT: tl.constexpr = LENGTH // SIDE.scale.group
        o_g = tl.arange(0, COUNT)
        if AXIS == 0:
            groups = tl.reshape(x, [COUNT, SIDE.scale.group, x.shape[1]])
            g = o_g[:, None]
            lane = column[None, :]
        else:
            groups = tl.reshape(x, [SIDE.rows, COUNT, SIDE.scale.group])
            g = o_g[None, :]
            lane = row[:, None]
        everything = tl.full(groups.shape, 1, tl.int1)
        scale, zero = group_scale(groups, everything, AXIS + 1, SIDE)
        store_scales(block, scale, zero, g, lane, lane >= 0, SIDE)
        code, decoded = codes_with(groups, scale, zero, AXIS + 1, SIDE)
        code = tl.reshape(code, x.shape)
        decoded = tl.reshape(decoded, x.shape)
    return code, decoded


@triton.jit
def store_scales(block, scale, zero, g, lane, m_lane, SIDE: tl.constexpr):
    """Scales and zeros of groups g; block: u8 pointer."""
    LANES: tl.constexpr = SIDE.columns if SIDE.scale.by == "column" else SIDE.rows
    o_scale = g * LANES + lane
    tl.store(at(block, SIDE.scale.scale, tl.float16) + o_scale, scale, mask=m_lane)
    if SIDE.scale.zero is not None:
        tl.store(at(block, SIDE.scale.zero, tl.float16) + o_scale, zero, mask=m_lane)


@triton.jit
def store_words(block, codes, row, column, SIDE: tl.constexpr):
    """Store codes [fields * R, halves * U], 0 in padding, as words [R, U]; or those of a block."""
    R: tl.constexpr = SIDE.rows // SIDE.fields
    U: tl.constexpr = SIDE.columns // SIDE.halves
    R_PAD: tl.constexpr = codes.shape[0] // SIDE.fields
    U_PAD: tl.constexpr = codes.shape[1] // SIDE.halves
    fields = codes << (row // R * SIDE.bits)[:, None] << (column // U * 8)[None, :]
    fields = tl.reshape(fields, [SIDE.fields, R_PAD, SIDE.halves, U_PAD])
    words = tl.sum(tl.sum(fields, 2), 0)
    w_r = tl.min(tl.reshape(row, [SIDE.fields, R_PAD]), 0)[:, None]
    w_u = tl.min(tl.reshape(column, [SIDE.halves, U_PAD]), 0)[None, :]
    p_words = at(block, SIDE.codes, tl.int16) + w_r * U + w_u
    tl.store(p_words, words.to(tl.int16), mask=(w_r < R) & (w_u < U))


@triton.jit
def float8_bits(x):
    """The e4m3 byte of x in [-448, 448], ties to even, by integers: any chip can.

    A normal number loses 20 bits of mantissa and 120 of its exponent. A smaller one is a multiple
    of 2**-9, which is what the last bit of a number near 2**14 is worth.
    """
    bits = x.to(tl.int32, bitcast=True)
    small = tl.abs(x)
    normal = ((bits & 0x7FFFFFFF) + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
    subnormal = (small + 16384.0).to(tl.int32, bitcast=True) & 15
    return tl.where(small < 0.015625, subnormal, normal) | (bits >> 24 & 0x80)


@triton.jit
def store_float8(x, m_x, row, column, block, top, SIDE: tl.constexpr):
    """Store x [R, C] over one scale, as bytes [rows][columns]; top: largest magnitude of the side.

    The scale is fp32, padded with zeros to 16 bytes, where the next plane begins.
    """
    scale = tl.maximum(tl.div_rn(top, 448.0), 2.0**-100)
    o_scale = tl.arange(0, 4)
    p_scale = at(block, SIDE.scale.scale, tl.float32) + o_scale
    tl.store(p_scale, tl.where(o_scale == 0, scale, 0.0))
    x = tl.div_rn(x, tl.zeros(x.shape, tl.float32) + scale)
    codes = float8_bits(tl.minimum(tl.maximum(x, -448.0), 448.0)).to(tl.uint8)
    p_codes = block + SIDE.codes + row[:, None] * SIDE.columns + column[None, :]
    tl.store(p_codes, codes, mask=m_x)


@triton.jit
def choose_outliers(x, m_x, SIDE: tl.constexpr):
    """Rows (of the padded ones) of the outliers of each column, and x without them.

    The first is chosen of equals.

    returns: for each slot [C] i32; x with the mean of its column in the place of outliers
    """
    SLOTS: tl.constexpr = SIDE.sparse.slots
    mean = tl.div_rn(tl.sum(tl.where(m_x, x, 0.0), 0), SIDE.rows * 1.0)[None, :]
    o_r = tl.arange(0, x.shape[0])[:, None]
    rest = m_x
    picks = ()
    for i in tl.static_range(SLOTS):
        if not SIDE.sparse.ends:
            distance = tl.abs(x - mean)
        elif i < SLOTS // 2:
            distance = x
        else:
            distance = -x
        pick = tl.argmax(tl.where(rest, distance, float("-inf")), 0)
        rest = rest & (o_r != pick[None, :])
        picks = picks + (pick,)
    return picks, tl.where(rest, x, mean)


@triton.jit
def store_outliers(block, missing, picks, column, m_c, SIDE: tl.constexpr):
    """Store the error at `picks` in sparse slots; returns the rest of it."""
    SLOTS: tl.constexpr = SIDE.sparse.slots
    R: tl.constexpr = SIDE.rows // SIDE.fields
    R_PAD: tl.constexpr = triton.next_power_of_2(R)
    o_r = tl.arange(0, missing.shape[0])[:, None]
    for i in tl.static_range(SLOTS):
        hit = o_r == picks[i][None, :]
        delta = tl.sum(tl.where(hit, missing, 0.0), 0)
        delta = tl.minimum(tl.maximum(delta, -LARGEST), LARGEST).to(tl.float16)
        slot = column * SLOTS + i
        index = (picks[i] // R_PAD * R + picks[i] % R_PAD).to(tl.uint8)
        tl.store(block + SIDE.sparse.index + slot, index, mask=m_c)
        tl.store(at(block, SIDE.sparse.delta, tl.float16) + slot, delta, mask=m_c)
        missing = tl.where(hit, 0.0, missing)
    return missing


@triton.jit
def store_mask(p_mask, p_absent, TOKENS: tl.constexpr):
    """A bit for each token that is present, low bit first.

    p_absent: [TOKENS] u8; None: all are present
    """
    tl.static_assert(TOKENS % 8 == 0, "eight tokens share a byte")
    o_t = tl.arange(0, TOKENS)
    bits = tl.full([TOKENS], 1, tl.int32)
    if p_absent is not None:
        bits = (tl.load(p_absent + o_t) == 0).to(tl.int32)
    bits = tl.reshape(bits << (o_t % 8), [TOKENS // 8, 8])
    tl.store(p_mask + tl.arange(0, TOKENS // 8), tl.sum(bits, 1).to(tl.uint8))
