"""What a layer computes between its matrix products, row by row: norms, rotation, gates.

The C library of a CPU makes one pass over memory for each, in fp32, and rounds once. Torch, which
is the spec, makes five to ten. A row's numbers depend on no other row.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from disagg.kernels.cpu import rows as cpu

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [N, D] each


def add_and_norm(
    x: Tensor,
    more: Tensor | None,
    weight: Tensor,
    epsilon: float,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The sum x + factor * more, and the sum over its root mean square, times weight.

    x, more: [N, columns]; more is None where there is nothing to add, and the sum is x then
    """
    summands = [x] if more is None else [x, more]
    are_rows = all(part.shape == (len(x), *weight.shape) for part in summands)
    parts = [*summands, weight]
    if are_rows and all(part.dtype == x.dtype and _is_served(part) for part in parts):
        return cpu.norm(x, more, weight, epsilon, factor)
    if more is not None:
        x = torch.add(x, more, alpha=factor)
    return x, rms_norm(x, weight.shape, weight, epsilon)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding of heads [N, H, D]; x itself is rotated where the library serves.

    It is computed in the dtype of the rotation, and returned in x's.
    """
    cosines, sines = rotation
    half = x.shape[2] // 2
    is_dense = all(_is_dense(part, x) for part in rotation)
    if is_dense and x.stride(1) == x.shape[2] and cpu.is_served(x, half):
        cpu.rotate(x, cosines, sines)
        return x
    swapped = x.roll(half, 2)
    return torch.addcmul(x * cosines[:, None], swapped, sines[:, None]).to(x.dtype)


def gate(x: Tensor) -> Tensor:
    """silu of the first half of the columns [N, 2 C], times the second half: [N, C]."""
    if x.shape[1] % 2 == 0 and cpu.is_served(x, x.shape[1] // 2):
        return cpu.gate(x)
    first, second = x.chunk(2, -1)
    return silu(first) * second


def _is_dense(part: Tensor, x: Tensor) -> bool:
    """Whether a part of a rotation has a row for each of x, of its dtype, without gaps."""
    shape = (len(x), x.shape[2])
    return part.dtype == x.dtype and part.shape == shape and part.is_contiguous()


def _is_served(x: Tensor) -> bool:
    return cpu.is_served(x, x.shape[-1])
