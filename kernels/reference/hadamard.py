"""Channels of K reordered, channels of V rotated, as `HadamardRotation` describes.

Both are exact in fp32 up to rounding and cost attention nothing per token: they are undone on
queries and outputs, never on K and V.
"""

import torch
from torch import Tensor

from disagg.kernels.formats import HADAMARD_SIZE, HadamardRotation
from disagg.kernels.reference.pages import Blocks


def read_order(
    blocks: Blocks,
    rotation: HadamardRotation,
    head_dim: int,
) -> Tensor:
    """The channel of each column of K: [..., head_dim] i64.

    Of each number only the low bits count, so that one from a peer is never out of range.
    """
    order = blocks.plane(torch.int16, rotation.order, (1, head_dim))
    return order.squeeze(-2).long() & (head_dim - 1)


def read_signs(
    blocks: Blocks,
    rotation: HadamardRotation,
    head_dim: int,
) -> Tensor:
    """The signs of V's channels: [..., head_dim] fp32, 1 or -1."""
    is_negative = blocks.bits(rotation.signs, head_dim)
    return 1.0 - 2.0 * is_negative.float()


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """x [..., head_dim] as pages hold it: H (s * x) / 8, for each HADAMARD_SIZE channels."""
    return _hadamard(x * signs)


def unrotate(y: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotate`: s * (H y) / 8."""
    return _hadamard(y) * signs.to(y.dtype)


def _hadamard(x: Tensor) -> Tensor:
    """H x / 8 for each HADAMARD_SIZE channels, by butterflies of growing distance."""
    blocks = x.unflatten(-1, (-1, HADAMARD_SIZE))
    distance = 1
    while distance < HADAMARD_SIZE:
        pairs = blocks.unflatten(-1, (-1, 2, distance))
        a, b = pairs.unbind(-2)
        blocks = torch.stack([a + b, a - b], -2).flatten(-3)
        distance *= 2
    return blocks.flatten(-2) * HADAMARD_SIZE**-0.5
