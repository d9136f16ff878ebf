"""The quantisers of pages made of pieces, in plain torch.

    asymmetric   as in reference_encode.py: scale and zero of a group, constant groups exact
    symmetric    scale = fp16(max|x| / (2**(bits-1) - 1)), code = round(x / scale) + 2**(bits-1)
    float8       scale = max|x| / 448, code = e4m3(x / scale), saturated

Rounding is to nearest, ties to even.
"""

import torch
from torch import Tensor

from disagg.kernels.formats_paged import Side
from disagg.kernels.reference_encode import SMALLEST_SCALE, quantize

LARGEST_FLOAT8 = 448.0
SMALLEST_FLOAT8_SCALE = 2.0**-100


def quantize_side(x: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x [P, H, rows, columns] fp32 as a side stores them.

    returns: codes [P, H, rows, columns] fp32; scales and zeros fp16 [P, H, *side.scale_shape], or
             [H, 1, columns] where the segment holds them
    """
    if side.scale.shared:
        return _quantize_shared(x, side.bits)
    if side.scale.zero is None:
        return _quantize_symmetric(x, side)
    if side.scale.by == "column":
        return quantize(x, side.scale.group, side.bits)
    codes, scales, zeros = quantize(x.transpose(-1, -2), side.scale.group, side.bits)
    return codes.transpose(-1, -2), scales, zeros


def expand(x: Tensor, side: Side) -> Tensor:
    """Scales or zeros as `quantize_side` returns them, one for each number, in fp32."""
    x = x.float()
    if side.scale.by == "row":
        return x.transpose(-1, -2).repeat_interleave(side.scale.group, -1)
    group = side.rows if side.scale.shared else side.scale.group
    return x.repeat_interleave(group, -2)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x [..., rows, columns] fp32, and their scale [..., 1, 1] fp32."""
    scale = x.abs().amax((-1, -2), keepdim=True) / LARGEST_FLOAT8
    scale = scale.clamp_min(SMALLEST_FLOAT8_SCALE)
    return float8_codes(x, scale), scale


def float8_codes(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3 of x / scale, saturated at +-448."""
    return (x / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)


def _quantize_shared(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """One group for each head and column, over all pages."""
    pages, _, rows, columns = x.shape
    tall = x.transpose(0, 1).reshape(-1, pages * rows, columns)
    codes, scales, zeros = quantize(tall, pages * rows, bits)
    return codes.unflatten(1, (pages, rows)).transpose(0, 1), scales, zeros


def _quantize_symmetric(x: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """By row: groups of columns; by column: groups of rows."""
    lying = side.scale.by == "row"
    groups = (x.transpose(-1, -2) if lying else x).unflatten(-2, (-1, side.scale.group))
    limit = (1 << (side.bits - 1)) - 1
    scales = (groups.abs().amax(-2) / limit).clamp_min_(SMALLEST_SCALE).half()
    inverse = scales.float().reciprocal_().unsqueeze(-2)
    codes = (groups * inverse).round_().clamp_(-limit, limit).add_(limit + 1).flatten(-3, -2)
    zeros = torch.full_like(scales, float(side.scale.center))
    return codes.transpose(-1, -2) if lying else codes, scales, zeros
