"""KIVI: keys quantised per channel, values per token (arXiv:2402.02750)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.base import EMPTY, Codec, Encoded, require
from disagg.codecs.tables import PageTable
from disagg.kernels.formats import QuantFormat
from disagg.kernels.formats_paged import as_paged
from disagg.kernels.ops import attend_quantized, decode_quantized, encode_quantized
from disagg.kernels.ops_seal import seal_quantized
from disagg.kernels.parts import Part
from disagg.kernels.places import Places
from disagg.kernels.sealing import SealFormat
from disagg.page import Kind, Layout, make_layout
from disagg.plan import LayerGroup


@dataclass(frozen=True)
class Kivi(Codec):
    """Asymmetric round-to-nearest; K in groups of tokens per channel, V in groups of channels.

    bits:     2 or 4
    group:    32 or 64 - tokens that share a scale of K, and channels that share a scale of V
    residual: R, exact tokens always kept; the tail holds R .. R+63
    error:    |x' - x| <= s/2 + 2**-11 (|x| + s * 2**bits) + 2**(bits-25) per group, where s is its
              scale fp16(max(range / (2**bits - 1), max|x| / 1024, 2**-24))
    source:   KIVI, arXiv:2402.02750, Algorithm 1, with one fill level for K and V: a page is sealed
              when R + 64 exact tokens are there, so both keep at least R
    """

    name: ClassVar[str] = "kivi"

    bits: int = 2
    group: int = 64
    residual: int = 128

    def __post_init__(self) -> None:
        require(self.bits in (2, 4), f"kivi:bits is {self.bits}; 2 and 4 are known")
        require(self.group in (32, 64), f"kivi:group is {self.group}; 32 and 64 are known")
        valid = self.residual >= 0 and self.residual % 16 == 0
        require(valid, f"kivi:residual is {self.residual}; a multiple of 16 tokens is wanted")

    @property
    def tail_tokens(self) -> int:
        return self.residual

    def page_layout(self, head_dim: int) -> Layout:
        divides = head_dim % self.group == 0 and head_dim % 16 == 0
        require(divides, f"kivi:group={self.group} does not divide the head dim {head_dim}")
        tokens, halves = self.page_tokens, 4 // self.bits
        k_scales = (tokens // self.group, head_dim)
        v_scales = (head_dim // self.group, tokens)
        planes = [
            ("k_codes", "int16", (tokens // 4, head_dim // halves)),
            ("v_codes", "int16", (head_dim // 4, tokens // halves)),
            ("k_scale", "float16", k_scales),
            ("k_zero", "float16", k_scales),
            ("v_scale", "float16", v_scales),
            ("v_zero", "float16", v_scales),
        ]
        return make_layout(self.spec, Kind.PAGE, tokens, planes)

    def encode(self, k: Tensor, v: Tensor, first: int, layer: int = 0) -> Encoded:
        return Encoded(encode_quantized(k, v, quant_format(self, k.shape[2])))

    def encode_into(
        self,
        places: Places,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        q: Tensor | None,
        total: int,
    ) -> Encoded:
        seal_quantized(k, v, places, quant_format(self, k.shape[2]))
        return Encoded(EMPTY)

    def seal_format(self, head_dim: int) -> SealFormat | None:
        return as_paged(quant_format(self, head_dim))

    def attend(
        self,
        q: Tensor,
        arena: Tensor,
        table: PageTable,
        group: LayerGroup,
        layer: int,
        scale: float,
    ) -> list[Part]:
        part = attend_quantized(
            q,
            arena,
            table.pages,
            table.lo,
            table.hi,
            quant_format(self, group.head_dim),
            group.layer_offset(group.page, layer),
            group.heads,
            scale,
        )
        return [part]

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        k, v = decode_quantized(encoded.blocks, quant_format(self, group.head_dim), dtype)
        return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


@lru_cache
def quant_format(codec: Kivi, head_dim: int) -> QuantFormat:
    """What a kernel needs to know of a KIVI page."""
    layout = codec.page_layout(head_dim)
    offsets = {plane.name: plane.offset for plane in layout.planes}
    return QuantFormat(
        bits=codec.bits,
        tokens=layout.tokens,
        head_dim=head_dim,
        k_group=codec.group,
        v_group=codec.group,
        block_bytes=layout.block_bytes,
        **offsets,
    )
