"""Tokens that a head keeps exact, as the other rooms call them: run by device.

Shapes and units are stated in reference_kept.py. On a GPU everything here runs in Triton; attention
over kept tokens itself is the reference's.
"""

from importlib import import_module

from torch import Tensor

from disagg.kernels import reference_kept
from disagg.kernels.reference import Partial
from disagg.kernels.reference_kept import Kept


def keep_outliers(kept: Kept, k: Tensor, v: Tensor, count: int, first: int) -> Tensor:
    """Let new tokens compete and keep the winners: [H, n] bool. See reference_kept."""
    if k.shape != v.shape or k.dim() != 3 or k.dtype != v.dtype or not k.is_floating_point():
        raise ValueError(f"k is {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype}")
    run = reference_kept.keep_outliers
    if k.is_cuda and k.shape[1] and k.stride(2) == v.stride(2) == 1:
        run = import_module("disagg.kernels.compete").keep_outliers
    return run(kept, k, v, count, first)


def join(parts: list[Partial]) -> Partial:
    """Attention over the union of disjoint token sets, still a partial. See reference_kept.join."""
    if parts[0][0].is_cuda and all(x.is_contiguous() for part in parts for x in part):
        found: Partial = import_module("disagg.kernels.paged_attention").join(parts)
        return found
    return reference_kept.join(parts)
