"""Exact K and V in raw pages: the baseline, and the shape of every codec's tail."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.contract import Codec, Encoded, Prompt, one_of
from disagg.codecs.exact import exact_format, raw_blocks
from disagg.kernels.cpu.library import EXACT_ERRORS
from disagg.kernels.ops import store_blocks
from disagg.kernels.reference.pages import exact_tokens
from disagg.kernels.sealing import Target
from disagg.kv.page import RAW_TOKENS, Layout, make_raw_layout
from disagg.kv.plan import LayerGroup

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Raw(Codec):
    """K and V as the model computed them, or rounded to 16 bits.

    dtype: "model" (as the model computes), "fp16", "bf16" or "fp32"
    error: none with dtype=model; else the rounding to that dtype
    cost:  dtype=fp16: 16.00 bits, -0.0 %, KL 0.0000
    """

    name: ClassVar[str] = "raw"
    no_sink: ClassVar[str] = "all of its tokens are exact"
    page_tokens: ClassVar[int] = RAW_TOKENS
    attend_errors: ClassVar[Mapping[str, float]] = EXACT_ERRORS

    dtype: str = one_of("model", ("model", *DTYPES))

    def raw_dtype(self, model_dtype: str) -> str:
        if self.dtype != "model":
            return DTYPES[self.dtype]
        return model_dtype if model_dtype in DTYPES.values() else "float32"

    def page_layout(self, head_dim: int) -> Layout:
        return make_raw_layout(self.raw_dtype("float32"), head_dim)

    def layer_group(
        self,
        layers: tuple[int, ...],
        heads: int,
        head_dim: int,
        model_dtype: str,
        window: int | None = None,
        latent: int | None = None,
    ) -> LayerGroup:
        raw_dtype = self.raw_dtype(model_dtype)
        (option,) = (name for name, dtype in DTYPES.items() if dtype == raw_dtype)
        codec = Raw(option)
        return super(Raw, codec).layer_group(
            layers, heads, head_dim, model_dtype, window, latent
        )

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
        blocks = raw_blocks(k, v)
        if target is not None:
            store_blocks(target, blocks)
        return Encoded(blocks)

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        k, v = exact_tokens(encoded.blocks, exact_format(group.raw))
        return k.to(dtype), v.to(dtype)
