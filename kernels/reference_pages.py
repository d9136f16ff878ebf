"""Reading and writing pages at their addresses in the arena, in plain torch, on any device."""

import torch
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT, RawFormat


def append_raw(
    arena: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    slots: Tensor,
    fmt: RawFormat,
    base: int,
) -> None:
    """Write one token per row into raw pages.

    k, v:  [N, H, D] of the raw dtype
    pages: [N] i32 - page id; slots: [N] i32 - which of its tokens
    """
    for offset, x in ((fmt.k, k), (fmt.v, v)):
        plane = _raw_plane(arena, fmt, base + offset, k.shape[1])
        plane[pages.long(), :, slots.long()] = x


def gather_raw(
    arena: Tensor, pages: Tensor, fmt: RawFormat, base: int, heads: int
) -> tuple[Tensor, Tensor]:
    """The tokens of raw pages in order: k, v [B, heads, P * tokens, D] of the raw dtype."""
    found = []
    for offset in (fmt.k, fmt.v):
        plane = _raw_plane(arena, fmt, base + offset, heads)
        rows = plane.index_select(0, pages.flatten()).unflatten(0, pages.shape)
        found.append(rows.transpose(1, 2).flatten(2, 3))
    return found[0], found[1]


def store_blocks(arena: Tensor, blocks: Tensor, pages: Tensor, base: int) -> None:
    """Copy blocks [P, H, block_bytes] u8 to where page ids [P] i32 say."""
    _records(arena, base, blocks[0].numel()).index_copy_(0, pages.long(), blocks.flatten(1))


def load_blocks(arena: Tensor, pages: Tensor, base: int, heads: int, block_bytes: int) -> Tensor:
    """The blocks of pages [P] i32: [P, heads, block_bytes] u8."""
    found = _records(arena, base, heads * block_bytes).index_select(0, pages)
    return found.view(-1, heads, block_bytes)


def plane_view(
    arena: Tensor, dtype: torch.dtype, offset: int, heads: int, stride: int, shape: tuple[int, int]
) -> Tensor:
    """One plane of every page: [page ids, heads, *shape], a view of the arena."""
    size = dtype.itemsize
    last = offset + (heads - 1) * stride + shape[0] * shape[1] * size
    count = (arena.numel() - last) // ARENA_UNIT + 1
    return arena.view(dtype).as_strided(
        (count, heads, *shape), (ARENA_UNIT // size, stride // size, shape[1], 1), offset // size
    )


def _raw_plane(arena: Tensor, fmt: RawFormat, offset: int, heads: int) -> Tensor:
    shape = (fmt.tokens, fmt.head_dim)
    return plane_view(arena, getattr(torch, fmt.dtype), offset, heads, fmt.block_bytes, shape)


def _records(arena: Tensor, base: int, size: int) -> Tensor:
    """`size` bytes at `base` of every page: [page ids, size], a view of the arena."""
    count = (arena.numel() - base - size) // ARENA_UNIT + 1
    return arena.as_strided((count, size), (ARENA_UNIT, 1), base)
