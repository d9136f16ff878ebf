"""Where encode kernels write: at page ids of an arena, or into blocks that lie in order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT


@dataclass(frozen=True)
class Places:
    """The block of (page i, head) begins at byte ids[i] * unit + base + head * block_bytes.

    data: [bytes] u8, contiguous; ids: [P] i32
    """

    data: Tensor
    ids: Tensor
    unit: int
    base: int


def in_arena(arena: Tensor, pages: Tensor, base: int) -> Places:
    """The pages with these ids; base: byte offset of this layer's layer page inside a page."""
    return Places(arena, pages, ARENA_UNIT, base)


def in_order(blocks: Tensor) -> Places:
    """blocks [P, H, block_bytes] u8, one after another."""
    ids = torch.arange(blocks.shape[0], dtype=torch.int32, device=blocks.device)
    return Places(blocks.view(-1), ids, blocks.shape[1] * blocks.shape[2], 0)
