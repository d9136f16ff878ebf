"""Codecs whose pages are made of pieces: what they share, so that a codec is little but its planes.

A codec of this kind names its planes; `paged_format` turns their names, shapes and offsets into the
numbers that kernels read:

    page      {k,v}_codes   {k,v}_scale {k,v}_zero   {k,v}_low   {k,v}_index {k,v}_delta   valid
    segment   k_scale k_zero (instead of the page's)   {k,v}_basis   {k,v}_rotation

A scale without a zero belongs to symmetric codes.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.base import EMPTY, Codec, Encoded, seed_of
from disagg.codecs.seals import segment_layout
from disagg.codecs.tables import PageTable
from disagg.kernels.formats_paged import LowRank, PagedFormat, Rotation, Scale, Side, Sparse
from disagg.kernels.ops_paged import attend_paged, decode_paged, encode_segments
from disagg.kernels.ops_seal import seal_segments
from disagg.kernels.parts import Part
from disagg.kernels.places import Places
from disagg.kernels.sealing import SealFormat, is_sealable
from disagg.page import SEGMENT_TOKENS, Kind, Layout, make_layout
from disagg.plan import LayerGroup

Planes = list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape


@dataclass(frozen=True)
class PagedCodec(Codec):
    """A codec whose pages are made of pieces.

    k_by, v_by: how scales lie: "column", "row" or "block", see kernels/formats_paged.py
    """

    k_by: ClassVar[str] = "column"
    v_by: ClassVar[str] = "column"

    @abstractmethod
    def page_planes(self, head_dim: int) -> Planes:
        """The planes of a page; ConfigError where the options do not divide `head_dim`."""

    def segment_planes(self, head_dim: int) -> Planes:
        """The planes of a segment, or none."""
        return []

    def page_layout(self, head_dim: int) -> Layout:
        planes = self.page_planes(head_dim)
        return make_layout(self.spec, Kind.PAGE, self.page_tokens, planes)

    def segment_layout(self, head_dim: int) -> Layout | None:
        planes = self.segment_planes(head_dim)
        return make_layout(self.spec, Kind.SEGMENT, SEGMENT_TOKENS, planes) if planes else None

    def format_of(self, page: Layout, segment: Layout | None, head_dim: int) -> PagedFormat:
        """The numbers of a page layout of this codec and its segment."""
        return paged_format(page, segment, head_dim, self.k_by, self.v_by)

    def encode(self, k: Tensor, v: Tensor, first: int, layer: int = 0) -> Encoded:
        fmt, seeds = prompt_format(self, k.shape[2]), segment_seeds(layer, first, k.shape[1])
        return Encoded(*encode_segments(k, v, fmt, seeds, SEGMENT_TOKENS))

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
        fmt, seeds = prompt_format(self, k.shape[2]), segment_seeds(layer, first, k.shape[1])
        return Encoded(EMPTY, seal_segments(k, v, places, fmt, seeds, SEGMENT_TOKENS))

    def seal_format(self, head_dim: int) -> SealFormat | None:
        fmt = flush_format(self, head_dim)
        return fmt if is_sealable(fmt) else None

    def flush(self, k: Tensor, v: Tensor, first: int, layer: int, before: Encoded) -> Encoded:
        fmt, frozen = flush_format(self, k.shape[2]), _only(before.segments)
        seeds = [seed_of(layer, first)]
        found = encode_segments(k, v, fmt, seeds, SEGMENT_TOKENS, frozen)
        return Encoded(*found, flush=True)

    def attend(
        self,
        q: Tensor,
        arena: Tensor,
        table: PageTable,
        group: LayerGroup,
        layer: int,
        scale: float,
    ) -> list[Part]:
        segment = segment_layout(group, table.layout)
        part = attend_paged(
            q,
            arena,
            table.pages,
            table.lo,
            table.hi,
            self.format_of(table.layout, segment, group.head_dim),
            group.layer_offset(table.layout, layer),
            group.heads,
            scale,
            table.segments,
            table.owner,
            group.layer_offset(segment, layer) if segment else 0,
        )
        return [part]

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        page = group.flush_page if encoded.flush and group.flush_page else group.page
        fmt = self.format_of(page, segment_layout(group, page), group.head_dim)
        segments = None
        if encoded.segments is not None:
            per_segment = SEGMENT_TOKENS // page.tokens
            count, device = encoded.blocks.shape[0], encoded.blocks.device
            owner = torch.arange(count, device=device) // per_segment
            segments = encoded.segments[owner.clamp_max(encoded.segments.shape[0] - 1)]
        k, v = decode_paged(encoded.blocks, segments, fmt, dtype)
        return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


@lru_cache
def prompt_format(codec: PagedCodec, head_dim: int) -> PagedFormat:
    """The format of pages of a prompt."""
    page, segment = codec.page_layout(head_dim), codec.segment_layout(head_dim)
    return codec.format_of(page, segment, head_dim)


@lru_cache
def flush_format(codec: PagedCodec, head_dim: int) -> PagedFormat:
    """The format of a page sealed while decoding."""
    page = codec.flush_page_layout(head_dim) or codec.page_layout(head_dim)
    segment = codec.flush_segment_layout(head_dim) or codec.segment_layout(head_dim)
    return codec.format_of(page, segment, head_dim)


def segment_seeds(layer: int, first: int, count: int) -> list[int]:
    """The seeds of the segments of `count` tokens of a prompt."""
    return [seed_of(layer, start) for start in range(first, first + count, SEGMENT_TOKENS)]


def code_planes(bits: int, tokens: int, head_dim: int) -> Planes:
    """The code words of K and V. K [T/planes][D/halves], V [D/planes][T/halves]."""
    planes = min(4, 16 // bits)
    halves = 16 // (planes * bits)
    return [
        ("k_codes", "int16", (tokens // planes, head_dim // halves)),
        ("v_codes", "int16", (head_dim // planes, tokens // halves)),
    ]


@lru_cache(maxsize=1024)
def paged_format(
    page: Layout, segment: Layout | None, head_dim: int, k_by: str, v_by: str
) -> PagedFormat:
    """What a kernel needs to know of pages with these planes."""
    in_page = {plane.name: plane for plane in page.planes}
    in_segment = {plane.name: plane for plane in segment.planes} if segment else {}
    sides = []
    for name, by in (("k", k_by), ("v", v_by)):
        rows, columns = page.tokens, head_dim
        if name == "v":
            rows, columns = columns, rows
        codes = in_page[f"{name}_codes"]
        bits = 8 * codes.nbytes // (rows * columns)
        shared = f"{name}_scale" in in_segment
        there = in_segment if shared else in_page
        scale, zero = there[f"{name}_scale"], there.get(f"{name}_zero")
        split = rows if by == "column" else columns
        low, index = in_page.get(f"{name}_low"), in_page.get(f"{name}_index")
        turn = in_segment.get(f"{name}_rotation")
        sides.append(
            Side(
                rows=rows,
                columns=columns,
                bits=bits,
                codes=codes.offset,
                scale=Scale(
                    by=by,
                    group=split // scale.shape[0],
                    scale=scale.offset,
                    zero=zero.offset if zero else None,
                    center=-(1 << (bits - 1)) if by != "block" else 0,
                    shared=shared,
                ),
                low_rank=LowRank(low.shape[1], low.offset, in_segment[f"{name}_basis"].offset)
                if low
                else None,
                sparse=Sparse(
                    index.shape[1], index.offset, in_page[f"{name}_delta"].offset, name == "v"
                )
                if index
                else None,
                rotation=Rotation(turn.shape[0], turn.offset) if turn else None,
                floating=codes.dtype == "float8_e4m3fn",
            )
        )
    valid = in_page.get("valid")
    return PagedFormat(
        tokens=page.tokens,
        head_dim=head_dim,
        block_bytes=page.block_bytes,
        segment_bytes=segment.block_bytes if segment else 0,
        k=sides[0],
        v=sides[1],
        valid=valid.offset if valid else None,
    )


def _only(segments: Tensor | None) -> Tensor | None:
    """The one segment that a page joins, if there is one."""
    return None if segments is None else segments[0]
