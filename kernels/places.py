"""Where encode kernels write: at page ids of an arena, or into blocks that lie in order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT
from disagg.kernels.reference_pages import store_blocks


@dataclass(frozen=True)
class Places:
    """The block of (page i, head) begins at byte pages[i] * unit + base + head * block_bytes.

    arena: [bytes] u8, contiguous; pages: [P] i32 - ids
    base:  offset of a layer page inside a page
    """

    arena: Tensor
    pages: Tensor
    base: int = 0
    unit: int = ARENA_UNIT


def new_blocks(
    count: int, heads: int, block_bytes: int, written: int, device: torch.device
) -> Tensor:
    """Blocks [P, H, block_bytes] u8 to encode into; 0 if planes of `written` bytes leave gaps."""
    make = torch.empty if written == block_bytes else torch.zeros
    return make(count, heads, block_bytes, dtype=torch.uint8, device=device)


def clear_gaps(places: Places, heads: int, block_bytes: int, written: int) -> None:
    """Leave nothing of what was there before between planes that do not fill their block."""
    if places.unit == ARENA_UNIT and written != block_bytes and places.pages.numel():
        count = places.pages.numel()
        zeros = new_blocks(count, heads, block_bytes, 0, places.arena.device)
        store_blocks(places.arena, zeros, places.pages, places.base)


def in_order(blocks: Tensor) -> Places:
    """Blocks [P, H, block_bytes] u8, one page after another."""
    count, heads, block_bytes = blocks.shape
    pages = torch.arange(count, dtype=torch.int32, device=blocks.device)
    return Places(blocks.view(-1), pages, unit=heads * block_bytes)
