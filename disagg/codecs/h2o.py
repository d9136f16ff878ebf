"""H2O: tokens that got little attention are dropped, the baseline (arXiv:2306.14048)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.base import Codec, Encoded, require
from disagg.codecs.paged import Planes
from disagg.codecs.tables import PageTable
from disagg.errors import RequestError
from disagg.kernels.cpu.library import EXACT_ERRORS
from disagg.kernels.ops_kept import attend_dropped
from disagg.kernels.parts import Part
from disagg.kernels.reference_aligned import to_fp16
from disagg.kernels.reference_dropped import (
    DroppedFormat,
    heaviest_and_recent,
    weights_received,
)
from disagg.kernels.reference_pieces import DenseBlocks
from disagg.kernels.sealing import SealFormat
from disagg.page import FinalAt, Kind, Layout, make_layout
from disagg.plan import LayerGroup

PAGE_TOKENS = 64


@dataclass(frozen=True)
class H2O(Codec):
    """Heavy hitters and recent tokens of a prompt, in fp16; everything decoded later is kept.

    Each KV head keeps a share of the sealed tokens: half of it the most recent, half those that got
    the most attention from the last queries of the prompt, added up over its query heads.

    keep:   the share of a prompt that is kept, in 64ths
    error:  none for kept tokens but the rounding to fp16; the others are gone
    source: H2O, arXiv:2306.14048; attention of the last queries (as SnapKV, arXiv:2404.14469)
            instead of all, one set for each KV head, frozen when the prompt is done
    """

    name: ClassVar[str] = "h2o"
    final_at: ClassVar[FinalAt] = FinalAt.PROMPT
    page_tokens: ClassVar[int] = PAGE_TOKENS
    attend_errors: ClassVar[Mapping[str, float]] = EXACT_ERRORS

    keep: float = 0.5

    def __post_init__(self) -> None:
        valid = 2 / PAGE_TOKENS <= self.keep < 1
        require(valid, f"h2o:keep is {self.keep}; at least 0.03125 and less than 1 is wanted")

    @property
    def slots(self) -> int:
        """Tokens kept of each 64."""
        return round(PAGE_TOKENS * self.keep)

    def page_layout(self, head_dim: int) -> Layout:
        planes: Planes = [("positions", "int32", (self.slots, 1))]
        return make_layout(
            self.spec, Kind.PAGE, PAGE_TOKENS, _exact_planes(self.slots, head_dim) + planes
        )

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        return make_layout(self.spec, Kind.PAGE, PAGE_TOKENS, _exact_planes(PAGE_TOKENS, head_dim))

    def encode(self, k: Tensor, v: Tensor, first: int, layer: int = 0) -> Encoded:
        raise RequestError("h2o drops by attention: the last queries of the prompt are wanted, q=")

    def encode_prompt(
        self, k: Tensor, v: Tensor, first: int, layer: int, q: Tensor | None, total: int
    ) -> Encoded:
        if q is None:
            return self.encode(k, v, first, layer)
        heads, n, head_dim = k.shape
        count = n // PAGE_TOKENS
        weights = weights_received(q, k, head_dim**-0.5, total)
        kept = heaviest_and_recent(weights, count * self.slots, count * self.slots // 2)
        fmt = dropped_format(self.page_layout(head_dim))
        blocks = torch.zeros(count, heads, fmt.block_bytes, dtype=torch.uint8, device=k.device)
        planes, shape = DenseBlocks(blocks), (fmt.slots, head_dim)
        for x, offset in ((k, fmt.k), (v, fmt.v)):
            chosen = to_fp16(x).gather(1, kept.unsqueeze(2).expand(-1, -1, head_dim))
            by_page = chosen.unflatten(1, (count, fmt.slots)).transpose(0, 1)
            planes.plane(torch.float16, offset, shape).copy_(by_page)
        places = kept.int().unflatten(1, (count, fmt.slots, 1)).transpose(0, 1)
        assert fmt.positions is not None
        planes.plane(torch.int32, fmt.positions, (fmt.slots, 1)).copy_(places)
        return Encoded(blocks)

    def seal_format(self, head_dim: int) -> SealFormat | None:
        return flush_format(self, head_dim)

    def attend(
        self,
        q: Tensor,
        arena: Tensor,
        table: PageTable,
        group: LayerGroup,
        layer: int,
        scale: float,
    ) -> list[Part]:
        part = attend_dropped(
            q,
            arena,
            table.pages,
            table.lo,
            table.hi,
            dropped_format(table.layout),
            group.layer_offset(table.layout, layer),
            group.heads,
            scale,
        )
        return [part]

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Kept tokens; 0 where a token was dropped, see `present`."""
        layout = group.flush_page if encoded.flush and group.flush_page else group.page
        fmt, planes = dropped_format(layout), DenseBlocks(encoded.blocks)
        shape, places = (fmt.slots, group.head_dim), self._places(encoded, fmt)
        found = []
        for offset in (fmt.k, fmt.v):
            x = planes.plane(torch.float16, offset, shape).transpose(0, 1).flatten(1, 2).to(dtype)
            full = x.new_zeros(x.shape[0], encoded.blocks.shape[0] * fmt.tokens, x.shape[2])
            found.append(full.scatter(1, places.unsqueeze(2).expand_as(x), x))
        return found[0], found[1]

    def present(self, encoded: Encoded, group: LayerGroup) -> Tensor:
        layout = group.flush_page if encoded.flush and group.flush_page else group.page
        fmt = dropped_format(layout)
        places = self._places(encoded, fmt)
        count, heads = encoded.blocks.shape[:2]
        nobody = torch.zeros(heads, count * fmt.tokens, dtype=torch.bool, device=places.device)
        return nobody.scatter(1, places, True)

    def _places(self, encoded: Encoded, fmt: DroppedFormat) -> Tensor:
        """The token, counted from the first of these pages, in each slot: [H, P * slots] i64."""
        count, heads = encoded.blocks.shape[:2]
        if fmt.positions is None:
            place = torch.arange(count * fmt.tokens, device=encoded.blocks.device)
            return place.expand(heads, -1)
        plane = DenseBlocks(encoded.blocks).plane(torch.int32, fmt.positions, (fmt.slots, 1))
        return plane.transpose(0, 1).flatten(1).long()


@lru_cache
def flush_format(codec: H2O, head_dim: int) -> DroppedFormat:
    """What a kernel needs to know of a page sealed while decoding, where nothing is dropped."""
    layout = codec.flush_page_layout(head_dim)
    assert layout is not None
    return dropped_format(layout)


@lru_cache
def dropped_format(layout: Layout) -> DroppedFormat:
    """What a kernel needs to know of a page of kept tokens."""
    k, v = layout.plane("k"), layout.plane("v")
    places = [plane.offset for plane in layout.planes if plane.name == "positions"]
    return DroppedFormat(
        tokens=layout.tokens,
        slots=k.shape[0],
        head_dim=k.shape[1],
        block_bytes=layout.block_bytes,
        k=k.offset,
        v=v.offset,
        positions=places[0] if places else None,
    )


def _exact_planes(slots: int, head_dim: int) -> Planes:
    require(head_dim % 16 == 0, f"h2o wants a head dim of whole 16 channels, not {head_dim}")
    return [("k", "float16", (slots, head_dim)), ("v", "float16", (slots, head_dim))]
