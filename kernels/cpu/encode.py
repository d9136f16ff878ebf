"""Encoders on a CPU: the bytes of reference/encode.py, in C, straight to where pages belong.

KIVI, per-token, int8, fp8, KCVT and what else is codes and scales. Low rank, sparse slots and
rotations are left to the torch reference.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from disagg.kernels.cpu.attend import MAX_DIM, MAX_TOKENS
from disagg.kernels.cpu.library import (
    TORCH,
    TYPES,
    EncodingC,
    SquaresC,
    address,
    backend,
    call,
    format_of,
)
from disagg.kernels.formats import RAW_SLOTS, PageFormat, Side
from disagg.kernels.reference import encode as reference
from disagg.kernels.sealing import Segmentation, Target


def is_encoded(fmt: PageFormat, k: Tensor) -> bool:
    """Whether the library seals pages of this format."""
    return not k.is_cuda and backend() != TORCH and _is_known(fmt)


def seal_pages(
    k: Tensor, v: Tensor, target: Target, fmt: PageFormat, cut: Segmentation
) -> Tensor | None:
    """Write the pages of k, v [H, n, D] to where they belong; all their tokens are there.

    returns: segments [S, H, segment_bytes] u8, or None where there are none
    """
    k, v = _readable(k, v)
    heads, n, _ = k.shape
    segments = cut.begin(n, heads, fmt, k.device) if fmt.segment_bytes else None
    if n:
        pages = target.pages.contiguous()
        job = EncodingC(
            *(ctypes.addressof(format_of(fmt)), address(k), address(v)),
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(
                TYPES[k.dtype],
                n,
                heads,
                address(target.arena),
                address(segments),
                address(pages),
            ),
            *(target.base, target.unit, cut.tokens),
        )
        call("disagg_encode", job)
    return segments


def sum_squares(q: Tensor, heads: int, begun: int) -> Tensor:
    """As the reference, to the bit."""
    if backend() == TORCH or q.shape[2] % 16:
        return reference.sum_squares(q, heads, begun)
    q, _ = _readable(q, q)
    count, tokens, head_dim = q.shape
    units = -(-(begun + tokens) // RAW_SLOTS)
    sums = q.new_empty(units, heads, head_dim, dtype=torch.float64)
    sizes = (
        q.stride(0),
        q.stride(1),
        TYPES[q.dtype],
        tokens,
        begun,
        heads,
        count // heads,
        head_dim,
    )
    call("disagg_sum_squares", SquaresC(address(q), address(sums), *sizes))
    return sums


def _readable(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of one dtype that the library reads, channels side by side."""
    if k.dtype != v.dtype or k.dtype not in TYPES:
        k, v = k.float(), v.float()
    return tuple(x if x.stride(2) == 1 else x.contiguous() for x in (k, v))  # type: ignore[return-value]


@lru_cache(maxsize=256)
def _is_known(fmt: PageFormat) -> bool:
    if (
        fmt.head_dim % 16
        or fmt.head_dim > MAX_DIM
        or fmt.tokens % 32
        or fmt.tokens > MAX_TOKENS
    ):
        return False
    sides = (*fmt.k_sides, fmt.v)
    return not fmt.v.scale.shared and all(map(_is_known_side, sides))


def _is_known_side(side: Side) -> bool:
    if side.low_rank or side.sparse or side.rotation:
        return False
    return side.floating == (side.scale.by == "block")
