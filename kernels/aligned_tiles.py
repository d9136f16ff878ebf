"""Bit planes in registers: how many bits a number needs, and reading no more than these.

A level says how much of a number is read: 0 all 16 bits, 1 the first 12, 2 the first 8. What is not
read counts as 100...0. reference_aligned.py has the rule; formats_aligned.py draws the planes.
"""

import triton
import triton.language as tl

FEW = tl.constexpr(4)  # drops from which on 12 bits will do
FEWER = tl.constexpr(8)  # and 8
GUARD = tl.constexpr(13)  # the bias of an exponent less one for magnitudes and one for a product


@triton.jit
def exponents(x):
    """The exponent field of fp32 x as fp16, saturated; 0 for zero and subnormal numbers."""
    x = tl.minimum(tl.abs(x), 65504.0).to(tl.float16)
    return x.to(tl.int16, bitcast=True).to(tl.int32) >> 10


@triton.jit
def level_of(drop):
    """How much is read of a number whose last bit lies `drop` bits above its share."""
    return (drop >= FEW).to(tl.int32) + (drop >= FEWER).to(tl.int32)


@triton.jit
def split_by_level(x, level):
    """fp32 x as three fp16 tiles that add up to it, one for each level."""
    x = x.to(tl.float16)
    none = tl.zeros(x.shape, tl.float16)
    return (
        tl.where(level == 0, x, none),
        tl.where(level == 1, x, none),
        tl.where(level == 2, x, none),
    )


@triton.jit
def read_rows(
    block, any_8, any_12, any_16, COLUMNS: tl.constexpr,
    HIGH: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Rows [R, COLUMNS padded] of fp16 at each level; a row's plane is read only where it is used.

    block:   u8 pointer to the block of a page; its planes begin at HIGH, MIDDLE and LOW
    any_...: [R] whether any query reads the first 8, 12 and 16 bits of a row, or more
    """
    tl.static_assert(COLUMNS % 2 == 0, "two neighbours share a byte")
    PAD: tl.constexpr = triton.next_power_of_2(COLUMNS)
    o_r = tl.arange(0, any_8.shape[0])[:, None]
    o_c, o_h = tl.arange(0, PAD)[None, :], tl.arange(0, PAD // 2)[None, :]
    m_c, m_h = o_c < COLUMNS, o_h < COLUMNS // 2
    high = tl.load(block + HIGH + o_r * COLUMNS + o_c, mask=any_8[:, None] & m_c, other=0)
    p_half = block + o_r * (COLUMNS // 2) + o_h
    middle = tl.load(p_half + MIDDLE, mask=any_12[:, None] & m_h, other=0).to(tl.int16)
    low = tl.load(p_half + LOW, mask=any_16[:, None] & m_h, other=0).to(tl.int16)
    word = high.to(tl.int16) << 8
    longer = word | neighbours(middle) << 4
    whole = longer | neighbours(low)
    return as_fp16(whole), as_fp16(longer | 8), as_fp16(word | 0x80)


@triton.jit
def neighbours(packed):
    """Bytes [R, C / 2] of two nibbles, the first one low -> [R, C]."""
    both = tl.join(packed & 15, packed >> 4)
    return tl.reshape(both, [packed.shape[0], 2 * packed.shape[1]])


@triton.jit
def as_fp16(words):
    return words.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def add_product(x, y, total):
    """total + x[0]^T y[0] + x[1]^T y[1] + x[2]^T y[2]; x [R, A] fp16, y [R, C] fp16."""
    for i in tl.static_range(3):
        total = tl.dot(tl.trans(x[i]), y[i], total)
    return total
