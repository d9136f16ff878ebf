"""Pages of exact K and V: their formats, and writing raw pages."""

from functools import lru_cache

import torch
from torch import Tensor

from disagg.kernels.formats import RAW_SLOTS, ExactFormat, SlotsFormat
from disagg.kernels.reference.quantize import LARGEST
from disagg.kv.page import RAW_TOKENS, Layout
from disagg.kv.plan import LayerGroup

assert RAW_TOKENS == RAW_SLOTS  # kernels know no page.py


@lru_cache(maxsize=1024)
def exact_format(layout: Layout, side: Layout | None = None) -> ExactFormat:
    """The format of raw pages, or of pages that hold only some tokens, with their positions.

    side: the side record that says which tokens the raw pages hold; None: tokens in order
    """
    planes = {plane.name: plane for plane in layout.planes}
    k, positions = planes["k"], planes.get("positions")
    return ExactFormat(
        dtype=k.dtype,
        head_dim=k.shape[1],
        block_bytes=layout.block_bytes,
        k=k.offset,
        v=planes["v"].offset if "v" in planes else None,
        slots=k.shape[0],
        tokens=layout.tokens,
        positions=positions.offset if positions else None,
        side=slots_format(side) if side else None,
        latent=layout.latent,
    )


def largest_number(group: LayerGroup) -> float:
    """The largest |K| or |V|; pages saturate beyond it. Scales and zeros of codes are fp16."""
    if group.page == group.raw:
        return torch.finfo(getattr(torch, exact_format(group.raw).dtype)).max
    return LARGEST


def slots_format(side: Layout) -> SlotsFormat:
    """The format in which kernels read a side record."""
    offsets = {plane.name: plane.offset for plane in side.planes}
    return SlotsFormat(side.plane("states").shape[0], side.block_bytes, **offsets)


def raw_blocks(k: Tensor, v: Tensor) -> Tensor:
    """Raw pages of n tokens: [ceil(n / 16), H, block_bytes] u8, the rest of the last page zero.

    k, v: [H, n, D] in the raw dtype; of latents, v is their channels of k
    """
    n = k.shape[1]
    num_pages = -(-n // RAW_TOKENS)
    sides = [k, v] if v.shape == k.shape else [k]
    kv = torch.stack(sides, 1)  # [H, 1 or 2, n, D]
    kv = torch.nn.functional.pad(kv, (0, 0, 0, -n % RAW_TOKENS))
    pages = kv.unflatten(2, (num_pages, RAW_TOKENS))  # [H, 1 or 2, P, T, D]
    return pages.permute(2, 0, 1, 3, 4).flatten(2).view(torch.uint8)
