"""Shared by the attention kernels: units, query columns, the running softmax, tiles.

Operands are swapped: tokens (of K) and channels (of V) are the rows of a matrix product and queries
its columns, because tensor cores want 16 rows but only 8 columns. A column is a (query, query head)
pair that reads this KV head; the C columns of a program are padded to a power of two.
"""

import triton
import triton.language as tl

# weights are stored times 2**15, so that fp16 holds a flat tail too
P_BIAS = tl.constexpr(15.0)
# the running maximum before any token; finite, so no inf - inf
EMPTY = tl.constexpr(-1e30)


@triton.jit
def find_unit(units_ptr, i_slot):
    """(view, sequence, first tile, end tile, page id of the segment) of a unit of work."""
    p_unit = units_ptr + i_slot * 5
    i_b = tl.load(p_unit + 1)
    start = tl.load(p_unit + 2)
    end = tl.load(p_unit + 3)
    return tl.load(p_unit), i_b, start, end, tl.load(p_unit + 4)


@triton.jit
def column_of(i_head, i_block, queries, SHAPE: tl.constexpr):
    """The columns of a program, [C] each: query m, row among M * Hq of the sequence, not padding.

    The KV head is that of grid axis 0.
    """
    i_column = i_block * SHAPE.columns + tl.arange(0, SHAPE.columns)
    i_m = i_column // SHAPE.group
    i_g = i_column % SHAPE.group
    heads = tl.num_programs(0) * SHAPE.group
    return i_m, i_m * heads + i_head * SHAPE.group + i_g, i_m < queries


@triton.jit
def query_unit(p_q, m_c, scale, D: tl.constexpr):
    """A power of two per column that brings q into [-1, 1], so that q times a scale fits fp16.

    p_q:     [C] pointers to rows of D items
    returns: what q is multiplied by, and the power of two that scores are multiplied by; each [C]
    """
    o_d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    m_q = m_c[:, None] & (o_d < D)
    q = tl.load(p_q[:, None] + o_d, mask=m_q, other=0.0).to(tl.float32)
    scale_log2 = scale * 1.4426950408889634
    top = tl.maximum(tl.max(tl.abs(q), 1) * tl.abs(scale_log2), 1e-30)
    q_unit = tl.exp2(tl.ceil(tl.log2(top)))
    return scale_log2 / q_unit, q_unit


@triton.jit
def empty_softmax(R: tl.constexpr, C: tl.constexpr):
    """Running maximum [C] and sum [R, C] before any token."""
    return tl.full([C], EMPTY, tl.float32), tl.zeros([R, C], tl.float32)


@triton.jit
def softmax_step(s, q_unit, m, l, bias, new_bias, R: tl.constexpr, CAP: tl.constexpr):
    """Take scores of T tokens into the running maximum and sum.

    s, q_unit: [T, C] fp32 and [C]; their product is in log2 units; CAP: as in `Softmax`
    m, l:    [C] and [R, C]; l is summed over R only at the end, and is times 2**bias
    returns: weights p [T, C] times 2**new_bias, what older sums are multiplied by [C], m, l
    """
    if CAP > 0:  # tanh x = 1 - 2 / (1 + exp(2 x)); what is hidden stays so
        b_tanh = 1.0 - 2.0 / (1.0 + tl.exp2(s * q_unit[None, :] * (2.0 / CAP)))
        s = tl.where(s > float("-inf"), b_tanh * (CAP * 1.4426950408889634), s)
        q_unit = tl.full(q_unit.shape, 1.0, tl.float32)
    m_new = tl.maximum(m, tl.max(s, 0) * q_unit)
    decay = tl.exp2(m - m_new + (new_bias - bias))
    p = tl.exp2(s * q_unit[None, :] - (m_new - new_bias)[None, :])
    l = l * decay[None, :] + tl.sum(tl.reshape(p, [s.shape[0] // R, R, s.shape[1]]), 0)
    return p, decay, m_new, l


@triton.jit
def hide(s, o_t, lo, hi):
    """Scores [T, C] of tokens o_t [T]; those outside [lo, hi) of their column become -inf."""
    m_s = (o_t[:, None] >= lo[None, :]) & (o_t[:, None] < hi[None, :])
    return tl.where(m_s, s, float("-inf"))


@triton.jit
def store_lse(p_lse, m, l, bias, m_c):
    """Store log2-sum-exp [C] of a finished softmax; returns the factor that normalises its sums."""
    total = tl.sum(l, 0)
    tl.store(p_lse, m + tl.log2(total) - bias, mask=m_c)
    return tl.where(total > 0, 1.0 / total, 0.0)


@triton.jit
def whole_tiles(lo, hi, start, end, m_c, TILE: tl.constexpr):
    """The tiles within [start, end) that every real column sees whole: these need no mask."""
    far = 1 << 30
    first = tl.cdiv(tl.max(tl.where(m_c, lo, 0), 0), TILE)
    last = tl.min(tl.where(m_c, hi, far), 0) // TILE
    first = tl.minimum(tl.maximum(first, start), end)
    return first, tl.maximum(tl.minimum(last, end), first)


@triton.jit
def load_tile(p, mask, WHOLE: tl.constexpr):
    """A tile of which only a part exists; without a mask where all of it does."""
    if WHOLE:
        return tl.load(p)
    else:
        return tl.load(p, mask=mask, other=0)


@triton.jit
def below(s0, s1):
    """[R, C] and [R, C] -> [2R, C], one below the other. Registers are renamed, nothing moves."""
    s = tl.permute(tl.join(s0, s1), (2, 0, 1))
    return tl.reshape(s, [2 * s0.shape[0], s0.shape[1]])


@triton.jit
def upper_lower(x):
    """[2R, C] -> its upper and its lower [R, C]. Registers are renamed, nothing moves."""
    halves = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]])
    return tl.split(tl.permute(halves, (1, 2, 0)))


@triton.jit
def stack(s, COUNT: tl.constexpr):
    """One, two or four tiles, one below the other."""
    if COUNT == 4:
        return below(below(s[0], s[1]), below(s[2], s[3]))
    elif COUNT == 2:
        return below(s[0], s[1])
    else:
        return s[0]


@triton.jit
def unstack(x, COUNT: tl.constexpr):
    """The two or four tiles that lie one below the other in x."""
    first, second = upper_lower(x)
    if COUNT == 4:
        return upper_lower(first) + upper_lower(second)
    else:
        return first, second


@triton.jit
def as_scales(block, OFFSET: tl.constexpr):
    """The fp16 items at a byte offset of a block."""
    return (block + OFFSET // 2).to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def as_bytes(block, OFFSET: tl.constexpr):
    """The bytes at an offset of a block."""
    return block.to(tl.pointer_type(tl.uint8), bitcast=True) + OFFSET


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
def settle(x):
    """x [rows, columns] in a register layout of its own.

    The compiler then moves it into tensor-core registers once, before the loop. Otherwise it does
    so for every page, through shared memory (Triton 3.9, 2026-11).
    """
    return tl.split(tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], 2]))[0]
