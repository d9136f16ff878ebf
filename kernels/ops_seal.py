"""Sealing pages where they belong: encoders whose blocks go straight to addresses in an arena.

The arguments and the bytes are those of encode_* in ops.py and ops_paged.py. Kernels and the C
library write to the addresses; blocks of the torch reference are made first and then stored.
"""

from importlib import import_module

import torch
from torch import Tensor

from disagg.kernels import ops, ops_paged
from disagg.kernels.cpu.encode import is_encoded, seal_pages
from disagg.kernels.formats import QuantFormat
from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.formats_paged import PagedFormat, as_paged, is_encodable
from disagg.kernels.places import Places


def seal_quantized(k: Tensor, v: Tensor, places: Places, fmt: QuantFormat) -> None:
    """As `ops.encode_quantized`."""
    _check(k, v, places, fmt.tokens, fmt.head_dim)
    if k.is_cuda:
        tokens = max(1, k.shape[1])
        import_module("disagg.kernels.encode").seal_segments(
            k, v, places, as_paged(fmt), [0], tokens
        )
    elif is_encoded(as_paged(fmt), k):
        seal_pages(k, v, places, as_paged(fmt), fmt.tokens)
    else:
        _store(places, ops.encode_quantized(k, v, fmt))


def seal_segments(
    k: Tensor,
    v: Tensor,
    places: Places,
    fmt: PagedFormat,
    seeds: list[int],
    tokens: int,
    absent: Tensor | None = None,
) -> Tensor | None:
    """As `ops_paged.encode_segments`; the segments [S, H, bytes], which are small, or None."""
    _check(k, v, places, fmt.tokens, fmt.head_dim)
    if fmt.segment_bytes and len(seeds) != max(1, -(-k.shape[1] // tokens)):
        raise ValueError(f"{len(seeds)} seeds for {k.shape[1]} tokens in segments of {tokens}")
    if k.is_cuda and is_encodable(fmt):
        ops_paged.check_absent(absent, k, fmt)
        found: Tensor | None = import_module("disagg.kernels.encode").seal_segments(
            k, v, places, fmt, seeds, tokens, absent=absent
        )
        return found
    if is_encoded(fmt, k) and absent is None:
        return seal_pages(k, v, places, fmt, tokens)
    blocks, segments = ops_paged.encode_segments(k, v, fmt, seeds, tokens, absent=absent)
    _store(places, blocks)
    return segments


def seal_aligned(k: Tensor, v: Tensor, places: Places, fmt: AlignedFormat) -> None:
    """As `ops_paged.encode_aligned`."""
    _check(k, v, places, fmt.tokens, fmt.head_dim)
    if k.is_cuda:
        import_module("disagg.kernels.encode_aligned").seal_aligned(k, v, places, fmt)
    else:
        _store(places, ops_paged.encode_aligned(k, v, fmt))


def _store(places: Places, blocks: Tensor) -> None:
    ops.store_blocks(places.arena, blocks, places.pages, places.base)


def _check(k: Tensor, v: Tensor, places: Places, tokens: int, head_dim: int) -> None:
    if not (k.is_floating_point() and v.is_floating_point()):
        raise TypeError(f"k and v are {k.dtype} and {v.dtype}; a float dtype is wanted")
    if k.shape != v.shape or k.dim() != 3 or k.shape[2] != head_dim or k.shape[1] % tokens:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; "
            f"[H, a multiple of {tokens}, {head_dim}] is wanted"
        )
    arena, pages = places.arena, places.pages
    if arena.dtype != torch.uint8 or pages.dtype != torch.int32:
        raise TypeError(f"the arena is {arena.dtype}, the pages {pages.dtype}; u8 and i32 wanted")
    if tuple(pages.shape) != (k.shape[1] // tokens,):
        raise ValueError(f"pages is {tuple(pages.shape)} for {k.shape[1]} tokens")
    if arena.device != k.device or pages.device != k.device or v.device != k.device:
        raise ValueError(f"k is on {k.device}, another argument on another device")
