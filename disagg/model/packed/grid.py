"""Unpacking: numbers of one byte times the scale of their block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18  # numbers that are converted to fp32 at a time
BYTE_BITS = 8


@dataclass(frozen=True)
class ScaleGrid:
    """Scales of a matrix [R, C], one for each block.

    scale: [r, c] fp32
    rows:  [R] int64, the row of `scale` for each row
    width: columns of a block; those of the last may be fewer
    order: [C] int64, the column of `scale` for each column; None: those of a block are neighbours
    zeros: [r, c] fp32, numbers that stand for zero; None: 0 does
    """

    scale: Tensor
    rows: Tensor
    width: int
    order: Tensor | None = None
    zeros: Tensor | None = None

    @classmethod
    def tiled(
        cls,
        scale: Tensor,
        rows: int,
        block: tuple[int, int],
        zeros: Tensor | None = None,
    ) -> "ScaleGrid":
        """Blocks of one height and width side by side; those at the ends may be cut short."""
        height, width = block
        places = torch.arange(rows, device=scale.device) // height
        return cls(scale, places, width, zeros=zeros)

    def apply(self, codes: Tensor, out: Tensor, table: Tensor | None = None) -> None:
        """Write (number - zero) * scale, computed in fp32, into `out`.

        codes: [R, C] of one byte, the numbers, or their places in `table`
        out:   [R, C] of the model's dtype
        """
        step = max(1, CHUNK // codes.shape[1])
        for start in range(0, codes.shape[0], step):
            chunk = slice(start, start + step)
            numbers = (
                codes[chunk].float() if table is None else table[codes[chunk].int()]
            )
            rows = self.rows[chunk]
            if self.zeros is not None:
                numbers -= self._spread(self.zeros[rows], codes.shape[1])
            out[chunk] = numbers.mul_(self._spread(self.scale[rows], codes.shape[1]))

    def _spread(self, values: Tensor, columns: int) -> Tensor:
        """The values of blocks [n, c], repeated for each column: [n, C]."""
        if self.order is not None:
            return values[:, self.order]
        wide = values[..., None].expand(*values.shape, self.width)
        return wide.reshape(len(values), -1)[:, :columns]


def split_bytes(data: Tensor, bits: int) -> Tensor:
    """Numbers of 2, 4 or 8 bits from bytes, lowest first: [..., n] to [..., n * 8 / bits] u8."""
    per_byte = BYTE_BITS // bits
    numbers = data.new_empty(*data.shape[:-1], data.shape[-1] * per_byte)
    for i in range(per_byte):
        numbers[..., i::per_byte] = (data >> (bits * i)) & ((1 << bits) - 1)
    return numbers


def split_words(words: Tensor, bits: int) -> Tensor:
    """Numbers of 2, 4 or 8 bits from words: [R, n] i32 to [R, n * 32 / bits] u8."""
    return split_bytes(words.contiguous().view(torch.uint8), bits)


def as_scale(stored: Tensor) -> Tensor:
    """A scale in fp32. Unsigned bytes are exponents of 2 (e8m0)."""
    if stored.dtype == torch.uint8:
        return stored.view(torch.float8_e8m0fnu).float()
    return stored.float()


Parts = Mapping[str, Tensor]  # the stored tensors of a packed weight, by their part
