"""Power iteration on a GPU: A B^T fitted to the error of codes and sparse slots of a segment.

One program takes one side of one head and segment, and reads its residual X [n, D] five times:

    the largest number of X, so that nothing overflows
    Q <- orthonormal X^T X Q    twice, from a seeded start
    Z  = X^T X Q;  W: such that X Q W is orthonormal, found from Q^T Z
    A  = X Q W sqrt(n),  B = Z W / sqrt(n)

Programs add nothing to each other's sums, so the same input gives the same bytes. X goes to the
tensor core as fp16; the factors multiplied with it are two fp16 terms each, scaled by a power of
two. The reference takes A from a QR decomposition; A B^T is the same in any basis of A.
"""

import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import PageFormat
from disagg.kernels.gpu.encode_tiles import at
from disagg.kernels.sealing import HEAD_STRIDE, STRETCH_TOKENS, Segmentation, Target

# columns of a factor: ranks are padded to what a tensor core takes
WIDTH = tl.constexpr(16)
WARPS = 8
STRIDE = tl.constexpr(HEAD_STRIDE)
STRETCH = tl.constexpr(STRETCH_TOKENS)
# numbers of a page up to which two pages are loaded ahead, not one
BUFFERED = tl.constexpr(64 * 128)
# share of a squared length below which a column counts as a combination of the others
INDEPENDENT = tl.constexpr(1e-13)
# length of a vector of 256 numbers in [-1, 1]
LONGEST = tl.constexpr(16.0)
# share of the largest squared length that may be rounding errors alone
FAINTEST = tl.constexpr(1e-7)


@triton.jit(do_not_specialize=["seed", "head"])
def low_rank_kernel(
    x_ptr, bytes_ptr, pages_ptr, segments_ptr, n, segment_tokens, unit, base, seed, head,
    FMT: tl.constexpr,
):  # fmt: skip
    """A of all pages of a segment, and its B, of one side and head; a page may be a segment.

    x_ptr:     [2, H, n, D] fp16; seed: of the first segment; head: the model's number of the first
    bytes_ptr, pages_ptr, unit, base: where blocks lie; segments_ptr: [S, H, segment bytes] u8
    """
    T: tl.constexpr = FMT.tokens
    D: tl.constexpr = FMT.head_dim
    RANK: tl.constexpr = FMT.k.low_rank.rank
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    STAGES: tl.constexpr = 3 if T * D_PAD <= BUFFERED else 2
    tl.static_assert(RANK <= WIDTH, "a factor has 16 columns at most")
    tl.static_assert(D <= 256, "a column of a factor has 256 numbers at most")
    i_segment = tl.program_id(0)
    i_head = tl.program_id(1)
    i_side = tl.program_id(2)
    heads = tl.num_programs(1)
    o_d = tl.arange(0, D_PAD)
    o_r = tl.arange(0, WIDTH)
    o_t = tl.arange(0, T)
    m_b = (o_d < D)[:, None] & (o_r < RANK)[None, :]
    o_b = o_d[:, None] * RANK + o_r[None, :]
    start = i_segment * segment_tokens
    length = tl.minimum(segment_tokens, n - start)
    p_x = x_ptr + ((i_side * heads + i_head).to(tl.int64) * n + start) * D
    seed = seed_of(
        seed + i_segment * (segment_tokens // STRETCH), head + i_head, i_side
    )
    # no row of X times a vector of length 1 is above this
    most = power_above(loudest(p_x, length, FMT)) * LONGEST
    q = tl.where(m_b, uniform(seed, o_b), 0.0) / LONGEST
    for _ in tl.static_range(2):
        z = squared_product(p_x, q, most, length, FMT)
        q = orthonormal(z / power_above(z), RANK)
    z = squared_product(p_x, q, most, length, FMT)
    q, b = factors(q, z, tl.sqrt(length.to(tl.float32)), RANK)
    offset = base + i_head.to(tl.int64) * FMT.block_bytes
    if FMT.k.low_rank.shared:
        i_record = (i_segment * heads + i_head).to(tl.int64)
        home = segments_ptr + i_record * FMT.segment_bytes
    else:
        home = bytes_ptr + tl.load(pages_ptr + i_segment).to(tl.int64) * unit + offset
    home += tl.where(i_side == 0, FMT.k.low_rank.b, FMT.v.low_rank.b)
    tl.store(at(home, 0, tl.float16) + o_b, b.to(tl.float16), mask=m_b)

    q_most = power_above(q)
    offset += tl.where(i_side == 0, FMT.k.low_rank.a, FMT.v.low_rank.a)
    for i in tl.range(0, length // T, num_stages=STAGES):
        a = times(load_rows(p_x, i, FMT), q, q_most)
        page = tl.load(pages_ptr + start // T + i).to(tl.int64) * unit + offset
        p_a = at(bytes_ptr + page, 0, tl.float16) + o_t[:, None] * RANK + o_r[None, :]
        tl.store(p_a, a.to(tl.float16), mask=(o_r < RANK)[None, :])


@triton.jit
def fit_page(x_t, o_d, m_d, seed, RANK: tl.constexpr):
    """A [T, 16] and B [D_PAD, 16] in fp32 of a segment of one page, as in low_rank_kernel.

    x_t [D_PAD, T] fp16 is in registers. o_d: its channels; m_d: those that exist.

    x_t is a second operand in both orders: as a first one of 64 rows or more it would go to the
    tensor memory of Blackwell, where the sum over two terms has no layout (Triton 3.6).
    """
    o_r = tl.arange(0, WIDTH)[None, :]
    x = tl.trans(x_t)
    most = power_above(x_t.to(tl.float32)) * LONGEST
    m_q = m_d[:, None] & (o_r < RANK)
    q = tl.where(m_q, uniform(seed, o_d[:, None] * RANK + o_r), 0.0)
    q /= LONGEST
    for _ in range(2):
        z = transposed_times(x, transposed_times(x_t, q, 1.0), most)
        q = orthonormal(z / power_above(z), RANK)
    z = transposed_times(x, transposed_times(x_t, q, 1.0), most)
    q, b = factors(q, z, x_t.shape[1] ** 0.5, RANK)
    return transposed_times(x_t, q, power_above(q)), b


@triton.jit
def seed_of(seed, i_head, i_side):
    """The seed of a side and a head of the model, in a segment with this seed."""
    return (seed.to(tl.int64) * STRIDE + i_head) * 2 + i_side


@triton.jit
def uniform(seed, index):
    """Numbers in [0, 1), the bits of reference/lowrank.seeded_uniform."""
    x = seed.to(tl.uint32) * 0x9E3779B9 + index.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def load_rows(p_x, i, FMT: tl.constexpr):
    """The tokens of page i: [T, D] fp16."""
    D: tl.constexpr = FMT.head_dim
    o_d = tl.arange(0, triton.next_power_of_2(D))[None, :]
    o_t = i * FMT.tokens + tl.arange(0, FMT.tokens)[:, None]
    return tl.load(p_x + o_t * D + o_d, mask=o_d < D, other=0.0)


@triton.jit
def loudest(p_x, length, FMT: tl.constexpr):
    """The largest magnitudes of X by place in a page: [T, D] fp32."""
    b_top = tl.abs(load_rows(p_x, 0, FMT))
    STAGES: tl.constexpr = 3 if b_top.shape[0] * b_top.shape[1] <= BUFFERED else 2
    for i in tl.range(1, length // FMT.tokens, num_stages=STAGES):
        b_top = tl.maximum(b_top, tl.abs(load_rows(p_x, i, FMT)))
    return b_top.to(tl.float32)


@triton.jit
def squared_product(p_x, q, most, length, FMT: tl.constexpr):
    """X^T (X q): [D, 16] fp32. Columns of q are not longer than 1, numbers of X q below `most`."""
    z = tl.zeros(q.shape, tl.float32)
    STAGES: tl.constexpr = 3 if FMT.tokens * q.shape[0] <= BUFFERED else 2
    for i in tl.range(0, length // FMT.tokens, num_stages=STAGES):
        x = load_rows(p_x, i, FMT)
        z += times(tl.trans(x), times(x, q, 1.0), most)
    return z


@triton.jit
def times(x, y, most):
    """x @ y of fp16 x and fp32 y, whose numbers are below `most`, a power of two."""
    high, low = two_terms(y, most)
    terms = tl.reshape(tl.join(high, low), [y.shape[0], 2 * y.shape[1]])
    product = tl.reshape(tl.dot(x, terms), [x.shape[0], y.shape[1], 2])
    return tl.sum(product, 2) * most


@triton.jit
def transposed_times(x, y, most):
    """x^T @ y, as `times`, with x as the second operand.

    Then a warp has its columns, and nothing is in the registers twice (Triton 3.9).
    """
    high, low = two_terms(tl.trans(y), most)
    return tl.trans(tl.dot(low, x, tl.dot(high, x)) * most)


@triton.jit
def two_terms(y, most):
    """Two fp16 terms whose sum is y / most to 24 bits below 1."""
    y = y * (1.0 / most)
    high = y.to(tl.float16)
    return high, (y - high.to(tl.float32)).to(tl.float16)


@triton.jit
def power_above(x):
    """A power of two at or above all numbers of x, and not far above the largest."""
    top = tl.max(tl.max(tl.abs(x), 1), 0)
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(top, 1e-30))))


@triton.jit
def orthonormal(b, RANK: tl.constexpr):
    """Orthonormal columns that span those of b [D, 16]; a dependent column becomes 0."""
    o_r = tl.arange(0, WIDTH)[None, :]
    q = tl.zeros(b.shape, tl.float32)
    for j in range(RANK):
        x = tl.sum(tl.where(o_r == j, b, 0.0), 1)
        size = tl.sum(x * x, 0)
        # the second pass removes what rounding left of the first
        for _ in tl.static_range(2):
            x -= tl.sum(q * tl.sum(q * x[:, None], 0)[None, :], 1)
        rest = tl.sum(x * x, 0)
        x *= tl.where(rest > size * INDEPENDENT, tl.rsqrt(tl.maximum(rest, 1e-30)), 0.0)
        q = tl.where(o_r == j, x[:, None], q)
    return q


@triton.jit
def factors(q, z, size, RANK: tl.constexpr):
    """Q W size and Z W / size [D, 16], where z = X^T X q, and X Q W has orthonormal columns.

    A column that is a combination of the others is 0.

    Column by column: a thread would hold whole rows and columns of a product in fp32.
    """
    o_r = tl.arange(0, WIDTH)
    gram = tl.zeros([WIDTH, WIDTH], tl.float32)
    for j in range(RANK):
        column = tl.sum(tl.where((o_r == j)[None, :], q, 0.0), 1)
        m_row = (o_r == j)[:, None]
        gram = tl.where(m_row, tl.sum(column[:, None] * z, 0)[None, :], gram)
    floor = tl.maximum(tl.max(tl.max(gram, 1), 0) * FAINTEST, 1e-30)
    w = tl.zeros(gram.shape, tl.float32)
    a = tl.zeros(q.shape, tl.float32)
    b = tl.zeros(z.shape, tl.float32)
    for j in range(RANK):
        x = (o_r == j).to(tl.float32)
        for _ in tl.static_range(2):
            image = tl.sum(gram * x[None, :], 1)
            x -= tl.sum(w * tl.sum(w * image[:, None], 0)[None, :], 1)
        rest = tl.sum(x * tl.sum(gram * x[None, :], 1), 0)
        x *= tl.where(rest > floor, tl.rsqrt(tl.maximum(rest, floor)), 0.0)
        w = tl.where((o_r == j)[None, :], x[:, None], w)
        a = tl.where((o_r == j)[None, :], tl.sum(q * x[None, :], 1)[:, None], a)
        b = tl.where((o_r == j)[None, :], tl.sum(z * x[None, :], 1)[:, None], b)
    return a * size, b / size


def encode_low_rank(
    missing: Tensor,
    target: Target,
    segments: Tensor,
    fmt: PageFormat,
    cut: Segmentation,
) -> None:
    """Write A of every page and B of every segment.

    missing: [2, H, n, D] fp16 of K and V; segments: [S, H, segment_bytes] u8
    """
    heads, n = missing.shape[1:3]
    tokens = fmt.tokens if fmt.has_own_basis else cut.tokens
    low_rank_kernel[(triton.cdiv(n, tokens), heads, 2)](
        missing, target.arena, target.pages, segments, n, tokens, target.unit, target.base,
        cut.seed, cut.head, fmt, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
