"""The pieces of a page, each as a few lines of torch: codes, scales, low rank, sparse slots, mask.

A piece is read through `ArenaBlocks`, from pages at their addresses, or `DenseBlocks`, from bytes
in order; then it is applied to a vector x [..., columns, N], never multiplied out.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from disagg.kernels.formats_paged import Scale, Side
from disagg.kernels.reference_pages import plane_view
from disagg.kernels.reference_words import unpack_words, word_shape


class Blocks(Protocol):
    """Blocks of equal layout, of pages or of segments."""

    def plane(self, dtype: torch.dtype, offset: int, shape: tuple[int, int]) -> Tensor:
        """One plane of every block: [..., *shape] of dtype."""


@dataclass(frozen=True)
class ArenaBlocks:
    """The blocks of one layer of records `ids` [B, P] in an arena; planes are [B, H, P, ...]."""

    arena: Tensor
    ids: Tensor
    base: int
    heads: int
    block_bytes: int

    def plane(self, dtype: torch.dtype, offset: int, shape: tuple[int, int]) -> Tensor:
        view = plane_view(
            self.arena, dtype, self.base + offset, self.heads, self.block_bytes, shape
        )
        found = view.index_select(0, self.ids.flatten()).unflatten(0, self.ids.shape)
        return found.transpose(1, 2)

    def part(self, columns: slice) -> "ArenaBlocks":
        """The blocks of some of the record columns."""
        ids = self.ids[:, columns]
        return ArenaBlocks(self.arena, ids, self.base, self.heads, self.block_bytes)


@dataclass(frozen=True)
class DenseBlocks:
    """Blocks [..., block_bytes] u8 in order; planes are views and can be written to."""

    blocks: Tensor

    def plane(self, dtype: torch.dtype, offset: int, shape: tuple[int, int]) -> Tensor:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        return self.blocks[..., offset : offset + nbytes].view(dtype).unflatten(-1, shape)


def read_codes(blocks: Blocks, side: Side, dtype: torch.dtype) -> Tensor:
    """[..., rows, columns] of dtype."""
    if side.floating:
        return blocks.plane(torch.float8_e4m3fn, side.codes, (side.rows, side.columns)).to(dtype)
    shape = word_shape(side.bits, side.rows, side.columns)
    return unpack_words(blocks.plane(torch.int16, side.codes, shape), side.bits, dtype)


def read_scales(blocks: Blocks, side: Side, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zeros [..., *side.scale_shape] of dtype; `blocks` of the segment if shared."""
    stored = torch.float32 if side.scale.by == "block" else torch.float16
    scales = blocks.plane(stored, side.scale.scale, side.scale_shape).to(dtype)
    if side.scale.zero is None:
        return scales, scales.new_tensor(float(side.scale.center)).expand_as(scales)
    return scales, blocks.plane(stored, side.scale.zero, side.scale_shape).to(dtype)


def read_factor(blocks: Blocks, offset: int, length: int, rank: int, dtype: torch.dtype) -> Tensor:
    """A or B of a low-rank piece: [..., length, rank] of dtype."""
    return blocks.plane(torch.float16, offset, (length, rank)).to(dtype)


def read_sparse(blocks: Blocks, side: Side, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows (int64) and deltas (dtype) of the sparse slots: both [..., columns, slots]."""
    assert side.sparse is not None
    shape = (side.columns, side.sparse.slots)
    index = blocks.plane(torch.uint8, side.sparse.index, shape).long()
    return index, blocks.plane(torch.float16, side.sparse.delta, shape).to(dtype)


def read_valid(blocks: Blocks, offset: int, tokens: int) -> Tensor:
    """Which tokens are there: [..., tokens] bool."""
    packed = blocks.plane(torch.uint8, offset, (tokens // 8, 1))
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed >> bits) & 1).bool().flatten(-2)


def contract(codes: Tensor, scales: Tensor, zeros: Tensor, kind: Scale, x: Tensor) -> Tensor:
    """Sum over columns of scale * (code + zero) * x, never forming scale * (code + zero).

    codes:         [..., rows, columns]
    scales, zeros: [..., *side.scale_shape]
    x:             [..., columns, N]
    returns:       [..., rows, N]
    """
    if kind.by == "column":
        groups, rows = scales.shape[-2], codes.shape[-2]
        folded = scales.unsqueeze(-1) * x.unsqueeze(-3)  # [..., groups, columns, N]
        bias = zeros.unsqueeze(-2) @ folded
        return (codes.unflatten(-2, (groups, rows // groups)) @ folded + bias).flatten(-3, -2)
    groups, columns = scales.shape[-2], codes.shape[-1]
    parts = x.unflatten(-2, (groups, columns // groups))  # [..., groups, group, N]
    grouped = codes.unflatten(-1, (groups, columns // groups)).transpose(-3, -2)
    sums = grouped @ parts + zeros.unsqueeze(-1) * parts.sum(-2, keepdim=True)
    return (sums * scales.unsqueeze(-1)).sum(-3)


def add_sparse(out: Tensor, index: Tensor, delta: Tensor, x: Tensor) -> None:
    """out [..., rows, N] += delta * x at the rows `index` [..., columns, slots] of each column."""
    terms = (delta.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-3, -2)  # [..., columns * slots, N]
    rows = index.flatten(-2).unsqueeze(-1).expand_as(terms)
    out.scatter_add_(-2, rows, terms)


def rotate_query(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., D, N] -> T_S x, block by block of channels; matrix T_S [..., block, block]."""
    blocks = x.unflatten(-2, (-1, matrix.shape[-1]))
    return (matrix.unsqueeze(-3) @ blocks).flatten(-3, -2)


def rotate_back(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., D, N] -> T_S^T x, block by block of channels."""
    return rotate_query(x, matrix.transpose(-1, -2))
