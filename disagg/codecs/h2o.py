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
        valid = 2 / PAGE_TOKENS <= self.keep < 1
        require(
            valid,
            f"h2o:keep is {self.keep}; at least 0.03125 and less than 1 is wanted",
        )

    @property
    def slots(self) -> int:
        """Tokens kept of each 64."""
        return round(PAGE_TOKENS * self.keep)

    def page_layout(self, head_dim: int) -> Layout:
        planes = _exact_planes(self.slots, head_dim)
        planes.append(("positions", "int32", (self.slots, 1)))
        return make_layout(self.spec, Kind.PAGE, PAGE_TOKENS, planes)

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        return make_layout(
            self.spec, Kind.PAGE, PAGE_TOKENS, _exact_planes(PAGE_TOKENS, head_dim)
        )

    def encode(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        prompt: Prompt,
        target: Target | None,
    ) -> Encoded:
        if prompt.queries is None:
            raise RequestError(
                "h2o drops by attention: q=, last queries of the prompt, is wanted"
            )
        heads, n, head_dim = k.shape
        count = n // PAGE_TOKENS
        softmax = prompt.queries.softmax or Softmax(head_dim**-0.5)
        weights = weights_received(prompt.queries.last, k, softmax, prompt.total)
        kept = heaviest_and_recent(weights, count * self.slots, count * self.slots // 2)
        fmt = exact_format(self.page_layout(head_dim))
        blocks = torch.zeros(
            count, heads, fmt.block_bytes, dtype=torch.uint8, device=k.device
        )
        planes, shape = DenseBlocks(blocks), (fmt.slots, head_dim)
        for x, offset in ((k, fmt.k), (v, fmt.v)):
            chosen = to_fp16(x).gather(1, kept.unsqueeze(2).expand(-1, -1, head_dim))
            by_page = chosen.unflatten(1, (count, fmt.slots)).transpose(0, 1)
            planes.plane(torch.float16, offset, shape).copy_(by_page)
        places = kept.int().unflatten(1, (count, fmt.slots, 1)).transpose(0, 1)
        assert fmt.positions is not None
        planes.plane(torch.int32, fmt.positions, (fmt.slots, 1)).copy_(places)
        if target is not None:
            store_blocks(target, blocks)
        return Encoded(blocks)

    def flush(
        self, k: Tensor, v: Tensor, first: int, layer: int, before: Encoded
    ) -> Encoded:
        """All of it: nothing is dropped while decoding."""
        both = torch.stack(
            [to_fp16(k), to_fp16(v)], 1
        )  # [H, 2, T, D], the order of the planes
        return Encoded(both.flatten(1).view(torch.uint8).unsqueeze(0), flush=True)

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Kept tokens; 0 where a token was dropped, see `present`."""
        fmt = _format_of(encoded, group)
        places, found = _places(encoded, fmt), []
        for x in exact_tokens(encoded.blocks, fmt):
            full = x.new_zeros(
                x.shape[0], encoded.blocks.shape[0] * fmt.tokens, x.shape[2]
            )
            found.append(full.scatter(1, places.unsqueeze(2).expand_as(x), x).to(dtype))
        return found[0], found[1]

    def present(self, encoded: Encoded, group: LayerGroup) -> Tensor:
        places = _places(encoded, _format_of(encoded, group))
        count, heads = encoded.blocks.shape[:2]
        nobody = torch.zeros(
            heads, count * PAGE_TOKENS, dtype=torch.bool, device=places.device
        )
        return nobody.scatter(1, places, True)


def _format_of(encoded: Encoded, group: LayerGroup) -> ExactFormat:
    return exact_format(group.decode_page if encoded.flush else group.page)


def _places(encoded: Encoded, fmt: ExactFormat) -> Tensor:
    """The token, counted from the first of these pages, in each slot: [H, P * slots] i64."""
    count, heads = encoded.blocks.shape[:2]
    if fmt.positions is None:
        return torch.arange(count * fmt.tokens, device=encoded.blocks.device).expand(
            heads, -1
        )
    plane = DenseBlocks(encoded.blocks).plane(
        torch.int32, fmt.positions, (fmt.slots, 1)
    )
    return plane.transpose(0, 1).flatten(1).long()


def _exact_planes(slots: int, head_dim: int) -> Planes:
    require(
        head_dim % 16 == 0, f"h2o wants a head dim of whole 16 channels, not {head_dim}"
    )
    return half_planes(k=(slots, head_dim), v=(slots, head_dim))
