"""The quantisers, in plain torch.

Per group of K (tokens of one channel) or V (channels of one token), x in fp32, saturated to fp16:

    asymmetric   scale = fp16(max((max - min) / (2**bits - 1), max|x| / 1024, 2**-24))
                 zero  = fp16(min / scale + 0)     in code units, never -0; |zero| <= about 1024
                 code  = clamp(round(x / scale - zero), 0, 2**bits - 1)   from the rounded ones
    symmetric    scale = fp16(max|x| / (2**(bits-1) - 1)), code = round(x / scale) + 2**(bits-1)
    float8       scale = max|x| / 448, code = e4m3(x / scale), saturated
    no bits      scale = fp16(S / n), S the sum of the group's n rows; n is a power of two

    fitted       the range is clipped, and the scale stretched so that <x', x> = <x, x> about the
                 mean, which x' keeps: codes of least error shrink, and would flatten attention
       width   = (max - min) * share              share: 1 for 4 bits, fp32(0.66) for 2
       step    = max(width / levels, max|x| / 1024, 2**-24)       levels = 2**bits - 1
       start   = (min + max) * 0.5 - width * 0.5
       u       = (x - start) * (1 / step)
       code    = clamp(round(u), 0, levels)
       mean_u, mean_c = sum(u) / n, sum(code) / n
       whole   = sum(u * u) - sum(u) * mean_u
       along   = sum(u * code) - sum(u) * mean_c
       stretch = clamp(whole / along, 0.5, 2), or 1 where along <= 0
       scale   = fp16(max(step * stretch, 2**-24))
       zero    = fp16((start + step * mean_u) / scale - mean_c)   of the rounded scale

Every operation of `fitted` and of a sum is rounded to fp32 by itself, none is fused, and sums add
row after row to 0, the first row first.

Of the terms of the asymmetric scale, the second makes a constant group exact in fp16 and keeps the
zero in range; the third keeps the scale from vanishing. Rounding is to nearest, ties to even, and
x' = scale * (code + zero).
"""

import torch
from torch import Tensor

from disagg.kernels.formats import ExactFormat, Side, Sparse

LARGEST = 65504.0  # of fp16
ZERO_LIMIT = 1024.0  # fp16 holds every integer up to twice this
SMALLEST_SCALE = 2.0**-24  # the least positive fp16
LARGEST_FLOAT8 = 448.0
SMALLEST_FLOAT8_SCALE = 2.0**-100
SHARES = {2: 0.66, 4: 1.0}  # of the range that codes cover, by bits


def finite(x: Tensor) -> Tensor:
    """x in fp32: NaN becomes 0, numbers beyond fp16 saturate. Never waits for a GPU."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp_(-LARGEST, LARGEST)


def to_fp16(x: Tensor) -> Tensor:
    """x as fp16, saturated at +-65504; NaN becomes 0."""
    return finite(x).half()


def rounded(x: Tensor, fmt: ExactFormat) -> Tensor:
    """K or V in the dtype of raw pages; numbers beyond it saturate."""
    dtype = getattr(torch, fmt.dtype)
    limits = torch.finfo(dtype)
    return x.to(dtype).clamp(limits.min, limits.max)


def quantize(
    x: Tensor,
    group: int,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups of rows.

    x:       [..., rows, columns] fp32, finite
    returns: codes [..., rows, columns] fp32, scales and zeros [..., rows/group, columns] fp16
    """
    levels = (1 << bits) - 1
    groups = x.unflatten(-2, (-1, group))  # [..., rows/group, group, columns]
    low = groups.amin(-2)  # amin and amax: ten times as fast as aminmax
    high = groups.amax(-2)
    step = torch.maximum(
        (high - low) / levels, _largest_magnitude(low, high) / ZERO_LIMIT
    )
    scale = step.clamp_min_(SMALLEST_SCALE).half()
    rounded_scale = scale.float()
    zero = (low / rounded_scale).add_(0.0).half()
    inverse = rounded_scale.reciprocal().unsqueeze(-2)
    minus_zero = -zero.float().unsqueeze(-2)
    codes = torch.addcmul(minus_zero, groups, inverse)
    codes = codes.round_().clamp_(0, levels)
    return codes.flatten(-3, -2), scale, zero


def quantize_fitted(
    x: Tensor,
    group: int,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quantize`, with a clipped range and a stretched scale: see above."""
    levels = (1 << bits) - 1
    groups = x.unflatten(-2, (-1, group))
    low = groups.amin(-2)
    high = groups.amax(-2)
    width = (high - low) * SHARES[bits]
    step = torch.maximum(width / levels, _largest_magnitude(low, high) / ZERO_LIMIT)
    step = step.clamp_min_(SMALLEST_SCALE)
    start = (low + high) * 0.5 - width * 0.5

    inverse = step.reciprocal().unsqueeze(-2)
    u = (groups - start.unsqueeze(-2)) * inverse
    codes = u.round().clamp_(0, levels)

    sum_u = _sum_rows(u)
    mean_u = sum_u / group
    mean_c = _sum_rows(codes) / group
    whole = _sum_rows(u * u) - sum_u * mean_u
    along = _sum_rows(u * codes) - sum_u * mean_c
    stretch = torch.where(along > 0, (whole / along).clamp(0.5, 2.0), 1.0)
    scale = (step * stretch).clamp_min_(SMALLEST_SCALE).half()
    zero = ((start + step * mean_u) / scale.float() - mean_c).half()
    return codes.flatten(-3, -2), scale, zero


def quantize_side(x: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x [P, H, rows, columns] fp32 as a side stores them.

    returns: codes [P, H, rows, columns] fp32; scales and zeros fp16 [P, H, *side.scale_shape], or
             [H, 1, columns] where the segment holds them
    """
    scale = side.scale
    if scale.shared:
        return _quantize_shared(x, side.bits)
    if not side.bits:
        return _quantize_to_means(x, side.rows)
    if scale.zero is None:
        return _quantize_symmetric(x, side)
    if scale.fitted:
        return quantize_fitted(x, scale.group, side.bits)
    if scale.by == "column":
        return quantize(x, scale.group, side.bits)
    codes, scales, zeros = quantize(x.transpose(-1, -2), scale.group, side.bits)
    return codes.transpose(-1, -2), scales, zeros


def expand(x: Tensor, side: Side) -> Tensor:
    """Scales or zeros [..., *side.scale_shape], one for each number: [..., rows, columns].

    [..., 1, 1] where there is one for all.
    """
    if side.scale.by == "row":
        return x.transpose(-1, -2).repeat_interleave(side.scale.group, -1)
    if side.scale.by == "block":
        return x
    return x.repeat_interleave(side.rows // x.shape[-2], -2)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x [..., rows, columns] fp32, and their scale [..., 1, 1] fp32."""
    largest = x.abs().amax((-1, -2), keepdim=True)
    scale = (largest / LARGEST_FLOAT8).clamp_min(SMALLEST_FLOAT8_SCALE)
    codes = (x / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return codes.to(torch.float8_e4m3fn), scale


def choose_outliers(
    x: Tensor,
    mean: Tensor,
    sparse: Sparse,
) -> Tensor:
    """Rows of the outliers of each column: x [..., rows, columns] -> [..., columns, slots] i64.

    All rows of a column differ. Among equals the choice is torch's.

    mean: from `column_means`
    """
    by_column = x.transpose(-1, -2)
    if not sparse.ends:
        return _largest((by_column - mean).abs(), sparse.slots)
    count = sparse.slots // 2
    largest = _largest(by_column, count)
    without_largest = (-by_column).scatter_(-1, largest, -torch.inf)
    smallest = _largest(without_largest, count)
    return torch.cat([largest, smallest], -1)


def column_means(x: Tensor, shared: bool) -> Tensor:
    """Mean of each column of x [..., rows, columns]: [..., columns, 1].

    shared: the pages share their scales, so the mean is over all of them
    """
    by_column = x.transpose(-1, -2)
    return by_column.mean((0, -1) if shared else -1, keepdim=True)


def with_means(
    x: Tensor,
    mean: Tensor,
    index: Tensor,
) -> Tensor:
    """x with outliers replaced by the mean of their column, so they widen no range."""
    by_column = x.transpose(-1, -2)
    replaced = by_column.scatter(-1, index, mean.expand(index.shape))
    return replaced.transpose(-1, -2)


def with_group_means(
    x: Tensor,
    absent: Tensor,
    group: int,
) -> Tensor:
    """x [H, n, D] fp32 with absent tokens replaced by the mean of the others in their group."""
    groups = x.unflatten(1, (-1, group))  # [H, n/group, group, D]
    present = (~absent).unflatten(1, (-1, group)).unsqueeze(-1)
    count = present.sum(2, keepdim=True).clamp_min(1)
    mean = (groups * present).sum(2, keepdim=True) / count
    return torch.where(present, groups, mean).flatten(1, 2)


def _quantize_shared(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """One group per head and column, over all pages."""
    pages, _, rows, columns = x.shape
    tall = x.transpose(0, 1).reshape(
        -1, pages * rows, columns
    )  # [H, P * rows, columns]
    codes, scales, zeros = quantize(tall, pages * rows, bits)
    by_page = codes.unflatten(1, (pages, rows)).transpose(0, 1)
    return by_page, scales, zeros


def _quantize_to_means(x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """No codes: the scale of a column is its mean."""
    means = to_fp16(_sum_rows(x) / rows).unsqueeze(-2)
    return torch.zeros_like(x), means, torch.ones_like(means)


def _quantize_symmetric(x: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """By row: groups of columns; by column: groups of rows."""
    by_row = side.scale.by == "row"
    if by_row:
        x = x.transpose(-1, -2)
    groups = x.unflatten(-2, (-1, side.scale.group))
    limit = (1 << (side.bits - 1)) - 1
    step = groups.abs().amax(-2) / limit
    scales = step.clamp_min_(SMALLEST_SCALE).half()
    inverse = scales.float().reciprocal_().unsqueeze(-2)
    codes = (groups * inverse).round_().clamp_(-limit, limit)
    codes = codes.add_(limit + 1).flatten(-3, -2)
    if by_row:
        codes = codes.transpose(-1, -2)
    zeros = torch.full_like(scales, float(side.scale.center))
    return codes, scales, zeros


def _largest_magnitude(low: Tensor, high: Tensor) -> Tensor:
    """The largest magnitude of a group, from its ends."""
    return torch.maximum(low.abs(), high.abs())


def _sum_rows(x: Tensor) -> Tensor:
    """[..., rows, columns] -> [..., columns], row after row."""
    first, *rest = x.unbind(-2)
    total = first.clone()
    for row in rest:
        total += row
    return total


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis; one alone needs no sort."""
    if count == 1:
        return x.max(-1, keepdim=True).indices
    return x.topk(count, -1).indices
