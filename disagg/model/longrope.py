"""LongRoPE: the length of a text chooses between two sets of rotary frequencies.

A text of at most `rope_switch` tokens has the short factors, a longer one the long factors in all
its tokens. Rows of one batch belong to texts of different lengths, so both sets rotate every row,
and a mask takes the right one.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"


class LongRows:
    """Which rows of the coming forward pass belong to long texts: `mask`, [1, N, 1] bool."""

    def __init__(self) -> None:
        self.mask = torch.zeros(1, 1, 1, dtype=torch.bool)

    def set(self, flags: Tensor) -> None:
        """flags: [N], on the model's device"""
        self.mask = flags.bool()[None, :, None]


class LongRope(nn.Module):
    """In place of a rotary embedding: the cosines and sines of each row, by its text's length."""

    def __init__(self, rotary: Any, rows: LongRows):
        super().__init__()
        original = rotary.config.rope_parameters["original_max_position_embeddings"]
        device = rotary.inv_freq.device
        factors, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
            rotary.config, device, seq_len=original + 1
        )
        rotary.rope_type = "default"  # without frequencies of its own choice
        self.short = rotary
        self.long = copy.deepcopy(rotary)
        self.long.inv_freq.copy_(factors)
        self._rows = rows

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        short = self.short(x, *args, **kwargs)
        long = self.long(x, *args, **kwargs)
        mask = self._rows.mask
        pairs = zip(long, short, strict=True)
        return tuple(torch.where(mask, *pair) for pair in pairs)


def split_rotary(model: nn.Module, rows: LongRows) -> None:
    """Give every rotary embedding of LongRoPE both sets of frequencies."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if getattr(child, "rope_type", None) == LONGROPE:
                setattr(parent, name, LongRope(child, rows))


def long_rows(
    positions: Sequence[int], prompts: Sequence[tuple[slice, int]], switch: int
) -> list[bool]:
    """Which rows belong to long texts, where only positions are known.

    prompts: the rows of each prompt, and its tokens
    """
    flags = [position >= switch for position in positions]
    for rows, total in prompts:
        if total > switch:
            flags[rows] = [True] * len(flags[rows])
    return flags
