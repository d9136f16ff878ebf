"""Channels of K in another order, channels of V mixed: what `HadamardRotation` says.

Both are exact in fp32 up to rounding, cost attention nothing per token, and are undone on queries
and outputs: K is never put back in order, V never turned back.
"""

import torch
from torch import Tensor

from disagg.kernels.formats import TURN, HadamardRotation
from disagg.kernels.reference.pages import Blocks


def read_order(blocks: Blocks, turn: HadamardRotation, head_dim: int) -> Tensor:
    """The channel of each column of K: [..., head_dim] i64."""
    return blocks.plane(torch.int16, turn.order, (1, head_dim)).squeeze(-2).long()


def read_signs(blocks: Blocks, turn: HadamardRotation, head_dim: int) -> Tensor:
    """The signs of V's channels: [..., head_dim] fp32, 1 or -1."""
    return 1.0 - 2.0 * blocks.bits(turn.signs, head_dim).float()


def turn(x: Tensor, signs: Tensor) -> Tensor:
    """x [..., head_dim] as pages hold it: H (s * x) / 8, each TURN channels by themselves."""
    return _hadamard(x * signs)


def turn_back(y: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `turn`: s * (H y) / 8."""
    return _hadamard(y) * signs.to(y.dtype)


def _hadamard(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, TURN))
    half = 1
    while half < TURN:
        pairs = blocks.unflatten(-1, (-1, 2, half))
        a, b = pairs.unbind(-2)
        blocks = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return blocks.flatten(-2) * TURN**-0.5
