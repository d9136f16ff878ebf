"""The codes of many pages as floats on a CPU, tile by tile, in as few passes as torch can do it.

For each tile: gather the words; mask and convert each field of them. The floats of a tile stay in a
second-level cache until they are multiplied, and a tile is large enough that torch spends its time
in loops and not in calling them.

A field is masked where it stands and converted there, so it comes out 2**shift times too large; its
row of the product is divided by that in the end (`weights_of`):

    4 bit   word & 0x000F   word & 0x00F0   word >> 8 & 0x000F   word >> 8 & 0x00F0
    row     r               rows/4 + r      rows/2 + r           3 rows/4 + r
    weight  1               1/16            1                    1/16

A word of 2-bit codes has one half of the columns in each of its bytes, so the bytes themselves are
masked, and the halves come out column by column in turns (`as_read`). A float of 8 bits becomes the
fp16 of the same sign, exponent field and mantissa: 2**-8 of its value.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from disagg.kernels.formats_paged import Side
from disagg.kernels.reference_pages import plane_view
from disagg.kernels.reference_pieces import ArenaBlocks

TILE_ELEMENTS = 1 << 18
BYTE = 8
FLOAT_WEIGHT = 256.0  # fp16 counts exponents from 15, e4m3 from 7
FLOAT_SHIFT = 7  # from the lowest bit of the mantissa in e4m3 to that in fp16
FLOAT_BITS = -0x4080  # 0xBF80: sign, four bits of exponent, three of mantissa, where fp16 has them


def tiles_by_page(pages: ArenaBlocks, side: Side) -> Iterator[tuple[slice, Tensor]]:
    """Each tile of pages [F, 1] with its codes [f * H, rows, columns], to be used before the next.

    yields: the tile as a slice of F * H blocks
    """
    heads = pages.heads
    for tile, words, codes in _tiles(pages, side):
        _convert(words.flatten(0, 1), side, codes)
        blocks = slice(tile.start * heads, tile.stop * heads)
        yield blocks, codes.view(-1, side.rows, side.columns)


def tiles_side_by_side(pages: ArenaBlocks, side: Side) -> Iterator[tuple[slice, Tensor]]:
    """Each tile of pages [F, 1] with its codes [H, rows, f * columns], to be used before the next.

    yields: the tile as a slice of F pages
    """
    for tile, words, codes in _tiles(pages, side):
        _convert(words.permute(1, 2, 0, 3).contiguous().flatten(2), side, codes)
        yield tile, codes.view(pages.heads, side.rows, -1)


@lru_cache(maxsize=64)
def weights_of(side: Side) -> Tensor:
    """What one of a code stands for in each row, as it is read: [rows] fp32."""
    if side.floating:
        return torch.full((side.rows,), FLOAT_WEIGHT)
    shifts = torch.arange(side.planes) * side.bits % BYTE
    return torch.exp2(-shifts.float()).repeat_interleave(side.rows // side.planes)


def as_read(x: Tensor, side: Side) -> Tensor:
    """x [..., columns] in the order of columns in which codes are read."""
    if side.halves == 1:
        return x
    return x.unflatten(-1, (side.halves, -1)).transpose(-1, -2).flatten(-2)


def _tiles(pages: ArenaBlocks, side: Side) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each tile as a slice of pages, its words, and room for its codes.

    words: [f, H, r, c] - uint8 of 2-bit codes, int8 of floats, else int16
    """
    count, heads = len(pages.ids), pages.heads
    step = max(1, min(count, TILE_ELEMENTS // (heads * side.rows * side.columns)))
    rows, columns, dtype = side.rows // side.planes, side.columns // side.halves, torch.int16
    if side.floating:
        dtype = torch.int8
    elif side.halves > 1:
        columns, dtype = 2 * columns, torch.uint8
    start = pages.base + side.codes
    shape = (rows, columns)
    plane = plane_view(pages.arena, dtype, start, heads, pages.block_bytes, shape)
    page_elements = heads * side.rows * side.columns
    room = torch.empty(step * page_elements)
    for first in range(0, count, step):
        last = min(count, first + step)
        words = plane.index_select(0, pages.ids[first:last, 0])
        yield slice(first, last), words, room[: (last - first) * page_elements]


def _convert(words: Tensor, side: Side, codes: Tensor) -> None:
    """Fields of words [n, r, w], which are overwritten, to fp32 [n, planes, r, w]."""
    if side.floating:
        wide = words.to(torch.int16).bitwise_left_shift_(_number(FLOAT_SHIFT, torch.int16))
        wide.bitwise_and_(_number(FLOAT_BITS, torch.int16))
        codes.view(words.shape).copy_(wide.view(torch.float16))
        return
    parts = codes.view(words.shape[0], side.planes, *words.shape[1:])
    field = torch.empty_like(words)
    for plane in range(side.planes):
        byte, bit = divmod(plane * side.bits, BYTE)
        if byte and not bit:
            words.bitwise_right_shift_(_number(BYTE, words.dtype))
        mask = _number(((1 << side.bits) - 1) << bit, words.dtype)
        parts[:, plane].copy_(torch.bitwise_and(words, mask, out=field))


@lru_cache(maxsize=64)
def _number(value: int, dtype: torch.dtype) -> Tensor:
    """A number as torch wants it; making it anew takes as long as masking a thousand words."""
    return torch.tensor(value, dtype=dtype)
