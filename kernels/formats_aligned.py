"""A page whose fp16 numbers lie in bit planes, so that attention reads no more bits than it needs.

    fp16   s eeeee mm | mmmm | mmmm        high (8) · middle (4) · low (4)

Two neighbours along the last axis share a byte of middle or low, the first one in the low nibble.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlignedFormat:
    """Offsets in a block; K lies channel by channel, V token by token.

    k_high: u8 [D][tokens] · k_middle, k_low: u8 [D][tokens / 2]
    v_high: u8 [tokens][D] · v_middle, v_low: u8 [tokens][D / 2]
    k_top, v_top: u8 [1][D] - the largest exponent field of each channel in this page
    """

    tokens: int
    head_dim: int
    block_bytes: int
    k_high: int
    k_middle: int
    k_low: int
    v_high: int
    v_middle: int
    v_low: int
    k_top: int
    v_top: int
