"""Power iteration for a low-rank product, and the rotation of a segment; plain torch, any device.

Both depend on nothing but their input and a seed made of numbers, so bytes are reproducible.
"""

import torch
from torch import Tensor

LOOPS = 3
SMALLEST_RATIO = (
    1e-2  # of the least to the largest singular value that a rotation keeps apart
)
FAINTEST = (
    1e-11  # of the least one: of less, fp16 has too few digits for T_S to be invertible
)
MASK = 0xFFFFFFFF


def low_rank(x: Tensor, rank: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Factors with x ~ A B^T, by three rounds of power iteration.

    x:       [H, n, D] fp32; seeds: [H] i64 - of the random start of each head
    returns: A [H, n, rank], B [H, D, rank] fp32; A has orthogonal columns of length sqrt(n), so no
             entry of B is above the root mean square of its channel
    error:   |x - A B^T| <= |x| in the Frobenius norm: it is a projection
    source:  GEAR, arXiv:2403.05527, Algorithm 2
    """
    n, head_dim = x.shape[1:]
    b = seeded_uniform(seeds, head_dim * rank).view(-1, head_dim, rank).to(x.device)
    a = x @ b
    for _ in range(LOOPS - 2):
        b = x.transpose(1, 2) @ a
        a = x @ _unit(b)
    b = torch.linalg.qr(x.transpose(1, 2) @ a).Q
    a = torch.linalg.qr(x @ b).Q
    length = float(n) ** 0.5
    return a * length, x.transpose(1, 2) @ a / length


def rotation(x: Tensor, block: int) -> Tensor:
    """T_S of the gauge-balanced two-tensor decomposition X = T_L T_S of blocks of channels.

    x:       [H, n, D] fp32
    returns: [H, block, block] fp16, invertible; T_S = L^(1/2) V^T with X = U L V^T
    source:  DecoQuant, arXiv:2405.12591, with its second bond of `block` channels
    """
    rows = x.double().flatten(1).unflatten(1, (-1, block))
    squares, vectors = torch.linalg.eigh(rows.transpose(1, 2) @ rows)
    values = squares.clamp_min(0).sqrt()
    floor = values.amax(1, keepdim=True) * SMALLEST_RATIO
    values = torch.where(
        floor > FAINTEST, torch.maximum(values, floor), torch.ones_like(values)
    )
    return (values.sqrt().unsqueeze(2) * vectors.transpose(1, 2)).half()


def unrotate(x: Tensor, matrix: Tensor) -> Tensor:
    """T_L with T_L T_S = x for every block of channels: x [H, n, D] -> [H, n, D] fp32."""
    inverse = torch.linalg.inv(matrix.double()).to(x.dtype)
    return (x.unflatten(2, (-1, matrix.shape[-1])) @ inverse.unsqueeze(1)).flatten(2)


def seeded_uniform(seeds: Tensor, count: int) -> Tensor:
    """[len(seeds), count] fp32 in [0, 1): a hash of seed and index, the same on every machine."""
    x = (
        seeds.unsqueeze(1) * 0x9E3779B9 + torch.arange(count, device=seeds.device)
    ) & MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    x ^= x >> 16
    return (x >> 8).float() / (1 << 24)


def _unit(b: Tensor) -> Tensor:
    """b scaled so that a power iteration cannot overflow."""
    return b / b.abs().amax((1, 2), keepdim=True).clamp_min(1e-30)
