"""Low-rank products by power iteration, and the rotation of a segment; torch, any device.

Both depend only on their input and an integer seed, so bytes are reproducible.
"""

import torch
from torch import Tensor

LOOPS = 3
# least ratio to the largest singular value that a rotation keeps
SMALLEST_RATIO = 1e-2
# least singular value: below it fp16 has too few digits for T_S to be invertible
FAINTEST = 1e-11
MASK = 0xFFFFFFFF


def low_rank(
    x: Tensor,
    rank: int,
    seeds: Tensor,
) -> tuple[Tensor, Tensor]:
    """Factors with x ~ A B^T, by three rounds of power iteration.

    x:       [H, n, D] fp32
    seeds:   [H] i64 - of the random start of each head
    returns: A [H, n, rank], B [H, D, rank] fp32; A has orthogonal columns of length sqrt(n), so no
             entry of B is above the root mean square of its channel
    error:   |x - A B^T| <= |x| in the Frobenius norm: it is a projection
    source:  GEAR, arXiv:2403.05527, Algorithm 2
    """
    _, n, head_dim = x.shape
    x_t = x.transpose(1, 2)  # [H, D, n]
    uniform = seeded_uniform(seeds, head_dim * rank)
    b = uniform.view(-1, head_dim, rank).to(x.device)
    a = x @ b  # [H, n, rank]
    for _ in range(LOOPS - 2):
        b = x_t @ a
        a = x @ _unit(b)
    b = torch.linalg.qr(x_t @ a).Q
    a = torch.linalg.qr(x @ b).Q
    length = float(n) ** 0.5
    return a * length, x_t @ a / length


def rotation(x: Tensor, block: int) -> Tensor:
    """T_S of the gauge-balanced two-tensor decomposition X = T_L T_S of blocks of channels.

    x:       [H, n, D] fp32
    returns: [H, block, block] fp16, invertible; T_S = L^(1/2) V^T with X = U L V^T
    source:  DecoQuant, arXiv:2405.12591, with its second bond of `block` channels
    """
    rows = x.double().flatten(1).unflatten(1, (-1, block))  # [H, n * D / block, block]
    gram = rows.transpose(1, 2) @ rows
    squares, vectors = torch.linalg.eigh(gram)
    values = squares.clamp_min(0).sqrt()  # [H, block], singular values
    floor = values.amax(1, keepdim=True) * SMALLEST_RATIO
    raised = torch.maximum(values, floor)
    values = torch.where(floor > FAINTEST, raised, torch.ones_like(values))
    matrix = values.sqrt().unsqueeze(2) * vectors.transpose(1, 2)
    return matrix.half()


def unrotate(x: Tensor, matrix: Tensor) -> Tensor:
    """T_L with T_L T_S = x for every block of channels: x [H, n, D] -> [H, n, D] fp32."""
    inverse = torch.linalg.inv(matrix.double()).to(x.dtype)
    blocks = x.unflatten(2, (-1, matrix.shape[-1]))  # [H, n, D / block, block]
    return (blocks @ inverse.unsqueeze(1)).flatten(2)


def seeded_uniform(seeds: Tensor, count: int) -> Tensor:
    """[len(seeds), count] fp32 in [0, 1): a hash of seed and index, the same on every machine."""
    index = torch.arange(count, device=seeds.device)
    x = (seeds.unsqueeze(1) * 0x9E3779B9 + index) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    x = x ^ (x >> 16)
    return (x >> 8).float() / (1 << 24)


def _unit(b: Tensor) -> Tensor:
    """b scaled so that a power iteration cannot overflow."""
    largest = b.abs().amax((1, 2), keepdim=True)
    return b / largest.clamp_min(1e-30)
