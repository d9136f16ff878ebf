"""H2O without its eviction while decoding: the baseline that drops tokens (arXiv:2306.14048)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.contract import Codec, Encoded, Prompt, require
from disagg.codecs.exact import exact_format
from disagg.codecs.quantized import Planes, half_planes
from disagg.errors import RequestError
from disagg.kernels.cpu.library import EXACT_ERRORS
from disagg.kernels.formats import ExactFormat
from disagg.kernels.ops import store_blocks
from disagg.kernels.reference.kept import heaviest_and_recent, weights_received
from disagg.kernels.reference.pages import DenseBlocks, exact_tokens
from disagg.kernels.reference.quantize import to_fp16
from disagg.kernels.sealing import Target
from disagg.kernels.view import Softmax
from disagg.kv.page import FinalAt, Kind, Layout, make_layout
from disagg.kv.plan import LayerGroup

PAGE_TOKENS = 64


@dataclass(frozen=True)
class H2O(Codec):
    """Heavy hitters and recent tokens of a prompt, in fp16; everything decoded later is kept.

    This is prompt compression by H2O's rule, as SnapKV does it: the paper evicts a token in every
    step of decoding too, this evicts once, when the prompt is done. Each KV head keeps a share of
    the sealed tokens: half of it the most recent, half those that got the most attention from the
    last queries of the prompt, added up over its query heads.

    keep:   the share of a prompt that is kept, in 64ths: 16 keep bits a number of all
    error:  none for kept tokens but the rounding to fp16; the others are gone
    cost:   not measured
    source: H2O, arXiv:2306.14048; attention of the last queries (as SnapKV, arXiv:2404.14469)
            instead of all, one set for each KV head, frozen when the prompt is done
    """

    name: ClassVar[str] = "h2o"
    no_sink: ClassVar[str] = "it chooses itself which tokens stay"
    final_at: ClassVar[FinalAt] = FinalAt.PROMPT
    page_tokens: ClassVar[int] = PAGE_TOKENS
    last_queries: ClassVar[int] = 32
    attend_errors: ClassVar[Mapping[str, float]] = EXACT_ERRORS

    keep: float = 0.5

    def __post_init__(self) -> None:
        message = f"h2o:keep is {self.keep}; expected at least 0.03125 and less than 1"
        require(2 / PAGE_TOKENS <= self.keep < 1, message)

    @property
    def slots(self) -> int:
        """Tokens kept of each 64."""
        return round(PAGE_TOKENS * self.keep)

    def page_layout(self, head_dim: int) -> Layout:
        planes = _exact_planes(self.slots, head_dim)
        planes.append(("positions", "int32", (self.slots, 1)))
        return make_layout(self.spec, Kind.PAGE, PAGE_TOKENS, planes)

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        planes = _exact_planes(PAGE_TOKENS, head_dim)
        return make_layout(self.spec, Kind.PAGE, PAGE_TOKENS, planes)

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
        if prompt.queries is None:
            raise RequestError(
                "h2o drops by attention: expected q=, last queries of the prompt"
            )
        heads, n, head_dim = k.shape
        count = n // PAGE_TOKENS
        budget = count * self.slots
        softmax = prompt.queries.softmax or Softmax(head_dim**-0.5)
        weights = weights_received(prompt.queries.last, k, softmax, prompt.total)
        tokens = heaviest_and_recent(weights, budget, budget // 2)  # [H, budget]

        fmt = exact_format(self.page_layout(head_dim))
        blocks = k.new_zeros(count, heads, fmt.block_bytes, dtype=torch.uint8)
        planes = DenseBlocks(blocks)
        for x, offset in ((k, fmt.k), (v, fmt.v)):
            index = tokens.unsqueeze(2).expand(-1, -1, head_dim)
            pages = _by_page(to_fp16(x).gather(1, index), count)
            assert offset is not None
            planes.plane(torch.float16, offset, (fmt.slots, head_dim)).copy_(pages)
        assert fmt.positions is not None
        positions = _by_page(tokens.int().unsqueeze(2), count)
        planes.plane(torch.int32, fmt.positions, (fmt.slots, 1)).copy_(positions)
        if target is not None:
            store_blocks(target, blocks)
        return Encoded(blocks)

    def flush(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        before: Encoded,
        head: int = 0,
    ) -> Encoded:
        """Nothing is dropped while decoding."""
        kv = torch.stack([to_fp16(k), to_fp16(v)], 1)  # [H, 2, T, D], as the planes lie
        return Encoded(kv.flatten(1).view(torch.uint8).unsqueeze(0), flush=True)

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """The tokens that were not dropped; 0 for others, see `present`."""
        fmt = _format_of(encoded, group)
        tokens = _tokens_of(encoded, fmt)
        n = encoded.blocks.shape[0] * fmt.tokens

        def scattered(x: Tensor) -> Tensor:
            full = x.new_zeros(x.shape[0], n, x.shape[2])
            return full.scatter(1, tokens.unsqueeze(2).expand_as(x), x).to(dtype)

        k, v = exact_tokens(encoded.blocks, fmt)
        return scattered(k), scattered(v)

    def present(self, encoded: Encoded, group: LayerGroup) -> Tensor:
        tokens = _tokens_of(encoded, _format_of(encoded, group))
        count, heads = encoded.blocks.shape[:2]
        none = tokens.new_zeros(heads, count * PAGE_TOKENS, dtype=torch.bool)
        return none.scatter(1, tokens, True)


def _format_of(encoded: Encoded, group: LayerGroup) -> ExactFormat:
    return exact_format(group.decode_page if encoded.flush else group.page)


def _by_page(x: Tensor, count: int) -> Tensor:
    """Tokens of all slots of `count` pages: [H, count * slots, ...] -> [count, H, slots, ...]."""
    return x.unflatten(1, (count, -1)).transpose(0, 1)


def _tokens_of(encoded: Encoded, fmt: ExactFormat) -> Tensor:
    """The token, counted from the first of these pages, in each slot: [H, P * slots] i64."""
    blocks = encoded.blocks
    count, heads = blocks.shape[:2]
    if fmt.positions is None:
        tokens = torch.arange(count * fmt.tokens, device=blocks.device)
        return tokens.expand(heads, -1)
    plane = DenseBlocks(blocks).plane(torch.int32, fmt.positions, (fmt.slots, 1))
    return plane.transpose(0, 1).flatten(1).long()


def _exact_planes(slots: int, head_dim: int) -> Planes:
    message = f"h2o wants a head dim of whole 16 channels, not {head_dim}"
    require(head_dim % 16 == 0, message)
    return half_planes(k=(slots, head_dim), v=(slots, head_dim))
