"""Tokens that are not among the codes of their page: means in their place, and the page's mask.

The Triton form of reference_absent.py. A page that says which of its tokens are there has a bit for
each; the codes of the others stand for the mean of their group, so that they widen no range.
"""

import triton
import triton.language as tl


@triton.jit
def with_group_means(
    x, there, absent, o_t, T_AXIS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """x with the mean of the others of its group in the place of absent tokens.

    x:      [R, C] fp32 with tokens along T_AXIS, where it is `there`
    absent: of the tokens o_t along that axis, in groups of GROUP
    """
    gone = tl.expand_dims(absent, 1 - T_AXIS)
    groups = tl.expand_dims(o_t // GROUP, 1 - T_AXIS)
    for g in tl.static_range(TOKENS // GROUP):
        own = there & (groups == g)
        others = own & (gone == 0)
        count = tl.maximum(tl.sum(others.to(tl.float32), T_AXIS), 1.0)
        mean = tl.div_rn(tl.sum(tl.where(others, x, 0.0), T_AXIS), count)
        x = tl.where(own & (gone != 0), tl.expand_dims(mean, T_AXIS), x)
    return x


@triton.jit
def store_mask(p_mask, p_absent, TOKENS: tl.constexpr):
    """A bit for each token that is there, low bit first; p_absent: [TOKENS] u8; None: all are."""
    tl.static_assert(TOKENS % 8 == 0, "eight tokens share a byte")
    o_t = tl.arange(0, TOKENS)
    bits = tl.full([TOKENS], 1, tl.int32)
    if p_absent is not None:
        bits = (tl.load(p_absent + o_t) == 0).to(tl.int32)
    bits = tl.reshape(bits << (o_t % 8), [TOKENS // 8, 8])
    tl.store(p_mask + tl.arange(0, TOKENS // 8), tl.sum(bits, 1).to(tl.uint8))
