"""Tokens that a head keeps exact, and tokens that it does not drop, as the other rooms call them.

Run by device: on a GPU everything here is Triton, for queries of fp32. Shapes and units are stated
in reference_kept.py and reference_dropped.py.
"""

from importlib import import_module

import torch
from torch import Tensor

from disagg.kernels import reference_dropped, reference_kept
from disagg.kernels.formats import RawFormat
from disagg.kernels.parts import Part
from disagg.kernels.reference_dropped import DroppedFormat
from disagg.kernels.reference_kept import Kept, KeptFormat


def keep_outliers(kept: Kept, k: Tensor, v: Tensor, count: int, first: int) -> Tensor:
    """Let new tokens compete and keep the winners: [H, n] bool. See reference_kept."""
    if k.shape != v.shape or k.dim() != 3 or k.dtype != v.dtype or not k.is_floating_point():
        raise ValueError(f"k is {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype}")
    run = reference_kept.keep_outliers
    if k.is_cuda and k.shape[1] and k.stride(2) == v.stride(2) == 1:
        run = import_module("disagg.kernels.compete").keep_outliers
    return run(kept, k, v, count, first)


def attend_kept(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    sides: Tensor,
    lo: Tensor,
    hi: Tensor,
    raw: RawFormat,
    fmt: KeptFormat,
    raw_base: int,
    side_base: int,
    heads: int,
    scale: float,
) -> Part:
    """Attention over kept tokens: a part, for `ops.merge`. See reference_kept."""
    run = reference_kept.attend_kept
    if q.is_cuda and q.dtype == torch.float32:
        run = import_module("disagg.kernels.paged_exact").attend_kept
    return run(q, arena, pages, sides, lo, hi, raw, fmt, raw_base, side_base, heads, scale)


def attend_dropped(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: DroppedFormat,
    base: int,
    heads: int,
    scale: float,
) -> Part:
    """Attention over what was not dropped: a part, for `ops.merge`. See the reference."""
    run = reference_dropped.attend_dropped
    if q.is_cuda and q.dtype == torch.float32:
        run = import_module("disagg.kernels.paged_exact").attend_dropped
    return run(q, arena, pages, lo, hi, fmt, base, heads, scale)
