"""Exact K and V in raw pages: the baseline, and the shape of every codec's tail."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.base import Codec, Encoded, require
from disagg.codecs.tables import PageTable
from disagg.kernels.cpu.library import EXACT_ERRORS
from disagg.kernels.formats import RawFormat
from disagg.kernels.ops import attend_raw
from disagg.kernels.parts import Part
from disagg.page import RAW_TOKENS, Layout, make_raw_layout
from disagg.plan import LayerGroup

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Raw(Codec):
    """K and V as the model computed them, or rounded to 16 bits.

    dtype: "model" (as the model computes), "fp16", "bf16" or "fp32"
    error: none with dtype=model; else the rounding to that dtype
    """

    name: ClassVar[str] = "raw"
    page_tokens: ClassVar[int] = RAW_TOKENS
    attend_errors: ClassVar[Mapping[str, float]] = EXACT_ERRORS

    dtype: str = "model"

    def __post_init__(self) -> None:
        known = ["model", *DTYPES]
        require(self.dtype in known, f"raw:dtype is {self.dtype!r}; known: {', '.join(known)}")

    def raw_dtype(self, model_dtype: str) -> str:
        known = model_dtype if model_dtype in DTYPES.values() else "float32"
        return DTYPES.get(self.dtype, known)

    def page_layout(self, head_dim: int) -> Layout:
        return make_raw_layout(self.raw_dtype("float32"), head_dim)

    def layer_group(
        self,
        layers: tuple[int, ...],
        heads: int,
        head_dim: int,
        model_dtype: str,
        window: int | None = None,
    ) -> LayerGroup:
        fixed = Raw(next(k for k, v in DTYPES.items() if v == self.raw_dtype(model_dtype)))
        return super(Raw, fixed).layer_group(layers, heads, head_dim, model_dtype, window)

    def encode(self, k: Tensor, v: Tensor, first: int, layer: int = 0) -> Encoded:
        return Encoded(raw_blocks(k, v))

    def attend(
        self,
        q: Tensor,
        arena: Tensor,
        table: PageTable,
        group: LayerGroup,
        layer: int,
        scale: float,
    ) -> list[Part]:
        return [attend_raw_pages(q, arena, table, group, layer, scale)]

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        stored = getattr(torch, group.raw.plane("k").dtype)
        blocks = encoded.blocks.view(stored).unflatten(-1, (2, RAW_TOKENS, group.head_dim))
        k, v = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3).to(dtype)
        return k, v


def raw_format(layout: Layout) -> RawFormat:
    """What a kernel needs to know of a raw page."""
    k, v = layout.plane("k"), layout.plane("v")
    return RawFormat(k.dtype, k.shape[1], layout.block_bytes, k.offset, v.offset)


def raw_blocks(k: Tensor, v: Tensor) -> Tensor:
    """Raw pages of n tokens: [ceil(n / 16), H, block_bytes] u8, the rest of the last page zero.

    k, v: [H, n, D] in the raw dtype
    """
    heads, n, head_dim = k.shape
    pages = -(-n // RAW_TOKENS)
    blocks = k.new_zeros(pages, heads, 2, RAW_TOKENS * head_dim)
    for index, x in enumerate((k, v)):
        padded = torch.nn.functional.pad(x, (0, 0, 0, pages * RAW_TOKENS - n))
        blocks[:, :, index] = padded.reshape(heads, pages, -1).transpose(0, 1)
    return blocks.view(pages, heads, -1).view(torch.uint8)


def attend_raw_pages(
    q: Tensor, arena: Tensor, table: PageTable, group: LayerGroup, layer: int, scale: float
) -> Part:
    """Attention over raw pages: a tail, or the whole sequence under the raw codec."""
    return attend_raw(
        q,
        arena,
        table.pages,
        table.lo,
        table.hi,
        raw_format(group.raw),
        group.layer_offset(group.raw, layer),
        group.heads,
        scale,
    )
