"""K in bands of columns and in another order, V rotated: the Triton form of reference/hadamard.py.

A unit of work never leaves a segment, so qk.py puts the query into the segment's order once,
band by band. The rotation of V is undone once for a unit: as 64 channels are some fields of rows,
the matrix is one of a field, and sums and differences of fields.
"""

import triton
import triton.language as tl

from disagg.kernels import formats
from disagg.kernels.formats import PageFormat, Side
from disagg.kernels.gpu.encode_tiles import at, finite
from disagg.kernels.gpu.tiles import as_bytes, stack, unstack

HADAMARD_SIZE = tl.constexpr(formats.HADAMARD_SIZE)


@triton.constexpr_function
def side_of(fmt: PageFormat, i: int) -> Side:
    """Band i of K."""
    return fmt.k_sides[i]


@triton.constexpr_function
def first_of_band(fmt: PageFormat, i: int) -> int:
    """The first column of band i of K."""
    return sum(side.columns for side in fmt.k_sides[:i])


@triton.jit
def channels_of(o_c, segment, BAND: tl.constexpr, FMT: tl.constexpr):
    """The channels that columns o_c of a band hold; segment: u8 pointer."""
    if FMT.hadamard is None:
        return o_c
    else:
        p_order = at(segment, FMT.hadamard.order, tl.int16) + first_of_band(FMT, BAND)
        # the order may come from a peer; the number of channels is a power of two
        return tl.load(p_order + o_c).to(tl.int32) & (FMT.head_dim - 1)


@triton.jit
def rotated(x, segment, FMT: tl.constexpr):
    """V [channels, tokens] fp32 as pages hold it; saturated. segment: u8 pointer."""
    D: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[1]
    o_d = tl.arange(0, D)
    bits = tl.load(segment + FMT.hadamard.signs + o_d // 8).to(tl.int32) >> (o_d % 8)
    x *= (1 - 2 * (bits & 1)).to(tl.float32)[:, None]
    for i in tl.static_range(6):
        pairs = tl.reshape(x, [D // (2 << i), 2, 1 << i, T])
        a, b = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), [D, T])
    return finite(x * 0.125)


@triton.jit
def unrotate(segment, o, FMT: tl.constexpr, PRECISION: tl.constexpr):
    """The fields o [W, C] fp32 of V's channels as they were before the rotation.

    A field of HADAMARD_SIZE rows is four tiles: a matrix of its size would fill the registers.
    """
    W: tl.constexpr = FMT.v.rows // FMT.v.fields
    TOGETHER: tl.constexpr = HADAMARD_SIZE // W
    H: tl.constexpr = 16 if TOGETHER == 1 else W
    o_w = tl.arange(0, W)
    o_h = tl.arange(0, H)
    b_same = o_h[:, None] & o_h[None, :]
    b_same ^= b_same >> 4  # the parity of the bits that two numbers below 64 share
    b_same ^= b_same >> 2
    b_same ^= b_same >> 1
    b_h = (1 - 2 * (b_same & 1)).to(tl.float32)
    mixed = ()
    signed = ()
    if TOGETHER == 1:
        for f in tl.static_range(4):
            mixed = mixed + (stack(mix(b_h, unstack(o[f], 4), 4, PRECISION), 4),)
    else:
        mixed = mix(b_h, o, TOGETHER, PRECISION)
    for f in tl.static_range(4):
        o_d = f * W + o_w
        b_bits = tl.load(as_bytes(segment, FMT.hadamard.signs) + o_d // 8).to(tl.int32)
        b_sign = 0.125 - 0.25 * ((b_bits >> (o_d % 8)) & 1).to(tl.float32)
        signed = signed + (mixed[f] * b_sign[:, None],)
    return signed


@triton.jit
def mix(b_h, x, TOGETHER: tl.constexpr, PRECISION: tl.constexpr):
    """Four tiles, each TOGETHER of which are one block of channels, times the matrix of a block;
    b_h is that of a tile."""
    mixed = ()
    for i in tl.static_range(4):
        mixed = mixed + (tl.dot(b_h, x[i], input_precision=PRECISION),)
    a, b, c, d = mixed
    mixed = (a + b, a - b, c + d, c - d)
    if TOGETHER == 4:
        a, b, c, d = mixed
        mixed = (a + c, b + d, a - c, b - d)
    return mixed
