"""AlignedKV: fp16 in bit planes, of which attention reads only what it needs (arXiv:2409.16546)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.contract import Codec, Encoded, Prompt, require
from disagg.kernels import ops
from disagg.kernels.cpu.library import EXACT_ERRORS
from disagg.kernels.formats import AlignedFormat
from disagg.kernels.reference.aligned import read_planes
from disagg.kernels.reference.pages import DenseBlocks
from disagg.kernels.sealing import Target
from disagg.kv.page import Kind, Layout, make_layout
from disagg.kv.plan import LayerGroup


@dataclass(frozen=True)
class AlignedKV(Codec):
    """All bits are stored; attention reads only those that change the sum.

    It saves memory traffic in attention, not memory, and no time without a kernel of its own: on a
    CPU torch computes it, at 0.02 to 0.04 times the speed of exact attention. The planes of a page
    lie one after another, so the coarse ones can be sent first.

    error:  none stored for fp16 (else the rounding to fp16, saturated at +-65504); attention is off
            by about 2**-10, for each query head by itself
    cost:   not measured
    source: AlignedKV, arXiv:2409.16546; thresholds 4 and 8, 8 | 4 | 4 bits
    """

    name: ClassVar[str] = "alignedkv"
    no_sink: ClassVar[str] = "it stores all bits of every token"
    attend_errors: ClassVar[Mapping[str, float]] = dict.fromkeys(EXACT_ERRORS, 2**-7)

    def page_layout(self, head_dim: int) -> Layout:
        require(
            head_dim % 16 == 0,
            f"alignedkv pairs 16 channels; the head dim is {head_dim}",
        )
        tokens, half = self.page_tokens, self.page_tokens // 2
        planes = [
            ("k_top", "uint8", (1, head_dim)),
            ("v_top", "uint8", (1, head_dim)),
            ("k_high", "uint8", (head_dim, tokens)),
            ("v_high", "uint8", (tokens, head_dim)),
            ("k_middle", "uint8", (head_dim, half)),
            ("v_middle", "uint8", (tokens, head_dim // 2)),
            ("k_low", "uint8", (head_dim, half)),
            ("v_low", "uint8", (tokens, head_dim // 2)),
        ]
        return make_layout(self.spec, Kind.PAGE, tokens, planes)

    def encode(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        prompt: Prompt,
        target: Target | None,
        head: int = 0,
    ) -> Encoded:
        fmt = aligned_format(self.page_layout(k.shape[2]), k.shape[2])
        return Encoded(ops.encode(k, v, fmt, target=target)[0])

    def format_of(
        self, page: Layout, segment: Layout | None, head_dim: int
    ) -> AlignedFormat:
        return aligned_format(page, head_dim)

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        fmt = aligned_format(group.page, group.head_dim)
        blocks = DenseBlocks(encoded.blocks)
        k = read_planes(blocks, fmt, "k", 16).transpose(2, 3)  # [P, H, T, D]
        v = read_planes(blocks, fmt, "v", 16)
        k, v = (x.to(dtype).transpose(0, 1).flatten(1, 2) for x in (k, v))
        return k, v


@lru_cache
def aligned_format(page: Layout, head_dim: int) -> AlignedFormat:
    """The format in which kernels read an AlignedKV page."""
    offsets = {plane.name: plane.offset for plane in page.planes}
    return AlignedFormat(page.tokens, head_dim, page.block_bytes, **offsets)
