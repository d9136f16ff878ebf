"""Unpacking: numbers of one byte, times the scale of the block that they are in."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 22  # numbers that are floats of 32 bits at the same time
BYTE_BITS = 8


@dataclass(frozen=True)
class Blocks:
    """Scales of a matrix [R, C]: each holds for a block of it.

    scale: [r, c] fp32
    rows, columns: [R], [C] int64, where in `scale` the scale of a row and a column is
    zeros: [r, c] fp32, numbers that stand for zero; None: 0 does
    """

    scale: Tensor
    rows: Tensor
    columns: Tensor
    zeros: Tensor | None = None

    @classmethod
    def tiled(
        cls,
        scale: Tensor,
        shape: tuple[int, int],
        block: tuple[int, int],
        zeros: Tensor | None = None,
    ) -> "Blocks":
        """Blocks of one size beside each other; those at the end may be cut short."""
        rows, columns = (
            torch.arange(size, device=scale.device) // length
            for size, length in zip(shape, block, strict=True)
        )
        return cls(scale, rows, columns, zeros)

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
                numbers -= self.zeros[rows][:, self.columns]
            out[chunk] = numbers * self.scale[rows][:, self.columns]


def split_bytes(data: Tensor, bits: int) -> Tensor:
    """The numbers of some bits in bytes, lowest bits first: [..., n] to [..., n * 8 / bits] u8."""
    shifts = torch.arange(0, BYTE_BITS, bits, device=data.device, dtype=torch.uint8)
    return ((data[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def split_words(words: Tensor, bits: int) -> Tensor:
    """The numbers of some bits in words: [R, n] i32 to [R, n * 32 / bits] u8."""
    return split_bytes(words.contiguous().view(torch.uint8), bits)


def as_scale(stored: Tensor) -> Tensor:
    """A scale in fp32; one of unsigned bytes is an exponent of 2 (e8m0)."""
    if stored.dtype == torch.uint8:
        return stored.view(torch.float8_e8m0fnu).float()
    return stored.float()


Parts = Mapping[str, Tensor]  # the stored tensors of a packed weight, by their part
