"""Codes in int16 words, at any width: the word of formats.py, and its form for 8 bits.

    2 bit   4 planes of rows, 2 halves of columns
    4 bit   4 planes of rows
    8 bit   2 planes of rows

A plane or half that is not named is one.
"""

import torch
from torch import Tensor

WORD_BITS = 16


def word_shape(bits: int, rows: int, columns: int) -> tuple[int, int]:
    """Words that hold [rows, columns] codes."""
    planes, halves = _split(bits)
    return rows // planes, columns // halves


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., rows, columns] of whole numbers -> int16 words. Inverse of `unpack_words`."""
    planes, halves = _split(bits)
    by_plane = codes.unflatten(-2, (planes, -1))
    words = by_plane[..., 0, :, :].clone()
    for plane in range(1, planes):
        words.add_(by_plane[..., plane, :, :], alpha=float(1 << (plane * bits)))
    by_half = words.unflatten(-1, (halves, -1))
    words = by_half[..., 0, :]
    for half in range(1, halves):
        words.add_(by_half[..., half, :], alpha=float(1 << (8 * half)))
    return words.int().short()  # at most 65535, which wraps to the int16 of the same bits


def unpack_words(words: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The codes of words [..., rows/planes, columns/halves]: [..., rows, columns] of dtype."""
    planes, halves = _split(bits)
    rows, columns = words.shape[-2:]
    shape = (*words.shape[:-2], planes, rows, halves, columns)
    codes = torch.empty(shape, dtype=dtype, device=words.device)
    field = torch.empty_like(words)
    for plane in range(planes):
        for half in range(halves):
            torch.bitwise_right_shift(words, plane * bits + 8 * half, out=field)
            codes[..., plane, :, half, :] = field.bitwise_and_((1 << bits) - 1)
    return codes.flatten(-2).flatten(-3, -2)


def _split(bits: int) -> tuple[int, int]:
    planes = min(4, WORD_BITS // bits)
    return planes, WORD_BITS // (planes * bits)
