"""Pages in plain torch: code words, planes of blocks, and blocks at their addresses in the arena.

A plane is read through `ArenaBlocks`, from pages at their addresses, or `DenseBlocks`, from bytes
in order. Nothing here computes; attention is in codes.py and exact.py, sealing in encode.py.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT, ExactFormat, Side, parts_of_word
from disagg.kernels.sealing import Target

WORD = torch.int64  # records are copied in words: torch copies bytes one by one


class Blocks(ABC):
    """Blocks of equal layout, of pages, segments or side records; planes are [..., *shape]."""

    @abstractmethod
    def plane(
        self,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, int],
    ) -> Tensor:
        """One plane of every block, of the dtype that is stored."""

    def words(self, side: Side) -> Tensor:
        """The stored codes of a side: int16 words, or floats."""
        if side.floating:
            shape = (side.rows, side.columns)
            return self.plane(torch.float8_e4m3fn, side.codes, shape)
        shape = (side.rows // side.fields, side.columns // side.halves)
        return self.plane(torch.int16, side.codes, shape)

    def codes(self, side: Side, dtype: torch.dtype) -> Tensor:
        """[..., rows, columns] of dtype."""
        words = self.words(side)
        if side.floating:
            return words.to(dtype)
        return unpack_words(words, side.bits, dtype)

    def scales(self, side: Side, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales and zeros [..., *side.scale_shape] of dtype.

        Read them from the segment where the side's scales are shared.
        """
        scale = side.scale
        stored = torch.float32 if scale.by == "block" else torch.float16
        scales = self.plane(stored, scale.scale, side.scale_shape).to(dtype)
        if scale.zero is None:
            center = scales.new_tensor(float(scale.center))
            return scales, center.expand_as(scales)
        zeros = self.plane(stored, scale.zero, side.scale_shape).to(dtype)
        return scales, zeros

    def sparse(self, side: Side, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows (int64) and deltas (dtype) of the sparse slots: both [..., columns, slots]."""
        assert side.sparse is not None
        shape = (side.columns, side.sparse.slots)
        index = self.plane(torch.uint8, side.sparse.index, shape)
        delta = self.plane(torch.float16, side.sparse.delta, shape)
        return index.long(), delta.to(dtype)

    def exact(self, fmt: ExactFormat) -> tuple[Tensor, Tensor]:
        """K and V as they are stored: both [..., slots, head_dim]; V of latents is part of K."""
        dtype = getattr(torch, fmt.dtype)
        shape = (fmt.slots, fmt.head_dim)
        k = self.plane(dtype, fmt.k, shape)
        if fmt.v is None:
            return k, k[..., : fmt.latent]
        return k, self.plane(dtype, fmt.v, shape)

    def bits(self, offset: int, count: int) -> Tensor:
        """A bit for each token or channel: [..., count] bool."""
        packed = self.plane(torch.uint8, offset, (count // 8, 1))
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
        bits = (packed >> shifts) & 1  # [..., count / 8, 8]
        return bits.bool().flatten(-2)


@dataclass(frozen=True)
class ArenaBlocks(Blocks):
    """The blocks of one layer of records `ids` [B, P] in an arena; planes are [B, H, P, ...]."""

    arena: Tensor
    ids: Tensor
    base: int
    heads: int
    block_bytes: int

    def plane(
        self,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, int],
    ) -> Tensor:
        of_all_pages = plane_view(self, dtype, offset, shape)
        of_records = of_all_pages.index_select(0, self.ids.flatten())
        return of_records.unflatten(0, self.ids.shape).transpose(1, 2)

    def select(self, columns: slice) -> "ArenaBlocks":
        """The blocks of these record columns."""
        return replace(self, ids=self.ids[:, columns])


@dataclass(frozen=True)
class DenseBlocks(Blocks):
    """Blocks [..., block_bytes] u8 in order; planes are views and can be written to."""

    blocks: Tensor

    def plane(
        self,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, int],
    ) -> Tensor:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        plane = self.blocks[..., offset : offset + nbytes]
        return plane.view(dtype).unflatten(-1, shape)


def plane_view(
    blocks: ArenaBlocks,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, int],
) -> Tensor:
    """One plane of every page id that fits the arena: [page ids, heads, *shape], a view."""
    size = dtype.itemsize
    start = blocks.base + offset
    last_head = start + (blocks.heads - 1) * blocks.block_bytes
    end = last_head + shape[0] * shape[1] * size
    count = (blocks.arena.numel() - end) // ARENA_UNIT + 1
    return blocks.arena.view(dtype).as_strided(
        size=(count, blocks.heads, *shape),
        stride=(ARENA_UNIT // size, blocks.block_bytes // size, shape[1], 1),
        storage_offset=start // size,
    )


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., rows, columns] of whole numbers -> int16 words, as `Side` draws them."""
    fields, halves = parts_of_word(bits)
    by_field = codes.unflatten(-2, (fields, -1))
    words = by_field[..., 0, :, :].clone()
    for field in range(1, fields):
        words.add_(by_field[..., field, :, :], alpha=float(1 << (field * bits)))
    by_half = words.unflatten(-1, (halves, -1))
    words = by_half[..., 0, :]
    for half in range(1, halves):
        words.add_(by_half[..., half, :], alpha=float(1 << (8 * half)))
    # at most 65535, which wraps to the int16 of the same bits
    return words.int().short()


def unpack_words(
    words: Tensor,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The codes of words [..., rows/fields, columns/halves]: [..., rows, columns] of dtype."""
    fields, halves = parts_of_word(bits)
    rows, columns = words.shape[-2:]
    shape = (*words.shape[:-2], fields, rows, halves, columns)
    codes = torch.empty(shape, dtype=dtype, device=words.device)
    shifted = torch.empty_like(words)
    for field in range(fields):
        for half in range(halves):
            shift = field * bits + 8 * half
            torch.bitwise_right_shift(words, shift, out=shifted)
            shifted.bitwise_and_((1 << bits) - 1)
            codes[..., field, :, half, :] = shifted
    return codes.flatten(-2).flatten(-3, -2)


def pack_bits(x: Tensor) -> Tensor:
    """x [..., count] bool, low bit first: [..., count / 8] u8."""
    by_byte = x.unflatten(-1, (-1, 8))
    weights = 1 << torch.arange(8, device=x.device)
    return (by_byte * weights).sum(-1).to(torch.uint8)


def gather_raw(
    arena: Tensor,
    pages: Tensor,
    fmt: ExactFormat,
    base: int,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """The tokens of pages [B, P] i32 in order: k, v [B, heads, P * slots, D] of the raw dtype.

    Of latents, v is their channels of k.
    """
    blocks = ArenaBlocks(arena, pages, base, heads, fmt.block_bytes)
    k, v = blocks.exact(fmt)  # [B, H, P, slots, D]
    return k.flatten(2, 3), v.flatten(2, 3)


def exact_tokens(blocks: Tensor, fmt: ExactFormat) -> tuple[Tensor, Tensor]:
    """The tokens in the slots of blocks [P, H, block_bytes] u8: k, v [H, P * slots, D].

    Of latents, v is their channels of k.
    """
    k, v = DenseBlocks(blocks).exact(fmt)  # [P, H, slots, D]
    return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


def store_blocks(target: Target, blocks: Tensor) -> None:
    """Copy blocks [P, H, block_bytes] u8 to their pages."""
    if not blocks.numel():
        return
    records = _records(target.arena, target.base, blocks[0].numel())
    words = blocks.flatten(1).contiguous().view(WORD)
    records.index_copy_(0, target.pages.long(), words)


def load_blocks(
    arena: Tensor,
    pages: Tensor,
    base: int,
    heads: int,
    block_bytes: int,
) -> Tensor:
    """The blocks of pages [P] i32: [P, heads, block_bytes] u8."""
    records = _records(arena, base, heads * block_bytes)
    words = records.index_select(0, pages)
    return words.view(torch.uint8).view(-1, heads, block_bytes)


def _records(
    arena: Tensor,
    base: int,
    size: int,
) -> Tensor:
    """`size` bytes at `base` of every page: [page ids, size / 8] of WORD, a view of the arena."""
    count = (arena.numel() - base - size) // ARENA_UNIT + 1
    rows = arena.as_strided((count, size), (ARENA_UNIT, 1), base)
    return rows.view(WORD)
