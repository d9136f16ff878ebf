"""Encoders on a CPU: the bytes of reference/encode.py, written in C to where pages belong.

KIVI, per-token, int8, fp8, KCVT: every format of codes and scales alone. The torch reference
encodes low rank, sparse slots and rotations.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from disagg.kernels.cpu.attend import MAX_DIM, MAX_TOKENS, readable
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
    return not k.is_cuda and backend() != TORCH and _is_supported(fmt)


def seal_pages(
    k: Tensor,
    v: Tensor | None,
    target: Target,
    fmt: PageFormat,
    cut: Segmentation,
) -> Tensor | None:
    """Write the pages of k, v [H, n, D] to where they belong; no token is absent.

    v is None where pages hold a latent.

    returns: segments [S, H, segment_bytes] u8, or None where there are none
    """
    k, v = _readable(k, k if v is None else v)
    heads, n, _ = k.shape
    segments = cut.begin(n, heads, fmt, k.device) if fmt.segment_bytes else None
    if not n:
        return segments
    pages = target.pages.contiguous()
    job = EncodingC(
        format=ctypes.addressof(format_of(fmt)),
        k=address(k),
        v=address(v),
        k_head=k.stride(0),
        k_token=k.stride(1),
        v_head=v.stride(0),
        v_token=v.stride(1),
        type=TYPES[k.dtype],
        tokens=n,
        heads=heads,
        blocks=address(target.arena),
        segments=address(segments),
        pages=address(pages),
        base=target.base,
        unit=target.unit,
        segment_tokens=cut.tokens,
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
    job = SquaresC(
        q=address(q),
        sums=address(sums),
        q_head=q.stride(0),
        q_token=q.stride(1),
        type=TYPES[q.dtype],
        tokens=tokens,
        begun=begun,
        heads=heads,
        width=count // heads,
        head_dim=head_dim,
    )
    call("disagg_sum_squares", job)
    return sums


def _readable(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of one dtype that the library reads, channels adjacent."""
    dtype = k.dtype
    if v.dtype != dtype or dtype not in TYPES:
        dtype = torch.float32
    return readable(k, dtype), readable(v, dtype)


@lru_cache(maxsize=256)
def _is_supported(fmt: PageFormat) -> bool:
    if fmt.head_dim % 16 or fmt.head_dim > MAX_DIM:
        return False
    if fmt.tokens % 32 or fmt.tokens > MAX_TOKENS:
        return False
    if fmt.v is not None and fmt.v.scale.shared:
        return False
    return all(map(_is_supported_side, fmt.sides))


def _is_supported_side(side: Side) -> bool:
    if side.low_rank or side.sparse or side.rotation:
        return False
    return side.floating == (side.scale.by == "block")
