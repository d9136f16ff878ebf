"""The common part of codecs with quantised pages: each only declares its planes.

A codec of this kind names its planes; `page_format` turns their names, shapes and offsets into the
numbers that kernels read:

    page      {k,v}_codes   {k,v}_scale {k,v}_zero   {k,v}_low   {k,v}_index {k,v}_delta   valid
    segment   k_scale k_zero (instead of the page's)   {k,v}_basis   {k,v}_rotation

A scale without a zero belongs to symmetric codes. A page sealed while decoding may hold the planes
of a segment too.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from disagg.codecs.contract import (
    Codec,
    Encoded,
    Prompt,
    latent_of,
    one_of,
    require,
    seed_of,
)
from disagg.kernels import ops
from disagg.kernels.formats import (
    BlockRotation,
    LowRank,
    PageFormat,
    Scale,
    Side,
    Sparse,
    parts_of_word,
)
from disagg.kernels.sealing import Segmentation, Target
from disagg.kv.page import (
    SEGMENT_TOKENS,
    Kind,
    Layout,
    Plane,
    make_latent_layout,
    make_layout,
)
from disagg.kv.plan import LayerGroup

Planes = list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape
SINKS = (0, 64)


@dataclass(frozen=True)
class QuantizedCodec(Codec):
    """A codec whose pages hold codes, scales and corrections.

    k_by, v_by:     how scales lie: "column", "row" or "block", see kernels/formats.py
    segment_tokens: tokens that share a segment, if the codec has segments
    """

    k_by: ClassVar[str] = "column"
    v_by: ClassVar[str] = "column"
    segment_tokens: ClassVar[int] = SEGMENT_TOKENS

    @abstractmethod
    def page_planes(self, head_dim: int) -> Planes:
        """The planes of a page; ConfigError where the options do not divide `head_dim`."""

    def segment_planes(self, head_dim: int) -> Planes:
        """The planes of a segment, or none."""
        return []

    def parts(self, head_dim: int, option: str = "group") -> int:
        """How many groups of channels a head has; an option says their size."""
        size: int = getattr(self, option)
        message = f"{self.name}:{option}={size} does not divide the head dim {head_dim}"
        require(head_dim % size == 0, message)
        return head_dim // size

    def page_layout(self, head_dim: int) -> Layout:
        message = f"{self.name} packs 16 channels; the head dim is {head_dim}, which raw holds"
        require(head_dim % 16 == 0, message)
        planes = self.page_planes(head_dim)
        return make_layout(self.spec, Kind.PAGE, self.page_tokens, planes)

    def segment_layout(self, head_dim: int) -> Layout | None:
        planes = self.segment_planes(head_dim)
        if not planes:
            return None
        return make_layout(self.spec, Kind.SEGMENT, self.segment_tokens, planes)

    def format_of(
        self, page: Layout, segment: Layout | None, head_dim: int
    ) -> PageFormat:
        return page_format(page, segment, head_dim, self.k_by, self.v_by)

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
        fmt = prompt_format(self, k.shape[2], latent_of(k, v))
        cut = Segmentation(self.segment_tokens, seed_of(layer, first), head=head)
        stored_v = v if fmt.v else None
        blocks, segments = ops.encode(k, stored_v, fmt, cut, target=target)
        return Encoded(blocks, segments)

    def seal_format(self, group: LayerGroup) -> PageFormat | None:
        fmt = flush_format(self, group.head_dim, group.latent)
        return fmt if fmt.is_sealable else None

    def flush(
        self,
        k: Tensor,
        v: Tensor,
        first: int,
        layer: int,
        before: Encoded,
        head: int = 0,
    ) -> Encoded:
        fmt = flush_format(self, k.shape[2], latent_of(k, v))
        frozen = None if before.segments is None else before.segments[0]
        cut = Segmentation(self.segment_tokens, seed_of(layer, first), frozen, head)
        stored_v = v if fmt.v else None
        blocks, segments = ops.encode(k, stored_v, fmt, cut)
        return Encoded(blocks, segments, flush=True)

    def decode(
        self, encoded: Encoded, group: LayerGroup, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        page = group.decode_page if encoded.flush else group.page
        fmt = self.format_of(page, group.segment_of(page), group.head_dim)
        segments = None
        if encoded.segments is not None:
            per_segment = self.segment_tokens // page.tokens
            count, device = encoded.blocks.shape[0], encoded.blocks.device
            owner = torch.arange(count, device=device) // per_segment
            segments = encoded.segments[owner.clamp_max(encoded.segments.shape[0] - 1)]
        k, v = ops.decode(encoded.blocks, segments, fmt, dtype)
        return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class SinkCodec(QuantizedCodec):
    """A codec whose first tokens may stay exact, in front of its pages.

    sink: 0 or 64 - first tokens that stay exact: attention depends on them, and they would widen
          the ranges of the first page
    """

    sink: int = one_of(0, SINKS)

    @property
    def sink_tokens(self) -> int:
        return self.sink


@lru_cache
def prompt_format(
    codec: QuantizedCodec, head_dim: int, latent: int | None = None
) -> PageFormat:
    """The format of pages of a prompt."""
    page, segment = codec.page_layout(head_dim), codec.segment_layout(head_dim)
    if latent is not None:
        page = make_latent_layout(page, latent)
    return codec.format_of(page, segment, head_dim)


@lru_cache
def flush_format(
    codec: QuantizedCodec, head_dim: int, latent: int | None = None
) -> PageFormat:
    """The format of a page sealed while decoding."""
    page = codec.flush_page_layout(head_dim)
    if page is None:
        return prompt_format(codec, head_dim, latent)
    if latent is not None:
        page = make_latent_layout(page, latent)
    return codec.format_of(page, None, head_dim)


def code_planes(bits: int, tokens: int, head_dim: int) -> Planes:
    """The code words of K and V, as kernels/formats.py draws them."""
    fields, halves = parts_of_word(bits)
    return [
        ("k_codes", "int16", (tokens // fields, head_dim // halves)),
        ("v_codes", "int16", (head_dim // fields, tokens // halves)),
    ]


def half_planes(**shapes: tuple[int, ...]) -> Planes:
    """Planes of fp16: scales, zeros and factors, by name."""
    return [(name, "float16", shape) for name, shape in shapes.items()]


@lru_cache(maxsize=1024)
def page_format(
    page: Layout, segment: Layout | None, head_dim: int, k_by: str, v_by: str
) -> PageFormat:
    """The format in which kernels read pages with these planes."""
    valid = [plane.offset for plane in page.planes if plane.name == "valid"]
    has_values = page.latent is None
    return PageFormat(
        tokens=page.tokens,
        head_dim=head_dim,
        block_bytes=page.block_bytes,
        segment_bytes=segment.block_bytes if segment else 0,
        k=_side(page, segment, "k", page.tokens, head_dim, k_by),
        v=_side(page, segment, "v", head_dim, page.tokens, v_by)
        if has_values
        else None,
        valid=valid[0] if valid else None,
        latent=page.latent,
    )


def _side(
    page: Layout, segment: Layout | None, name: str, rows: int, columns: int, by: str
) -> Side:
    """K or V: the planes whose names begin with `name`."""
    in_page = _planes_of(page, name)
    in_segment = _planes_of(segment, name) if segment else {}
    codes = in_page["codes"]
    bits = 8 * codes.nbytes // (rows * columns)
    are_scales_shared = "scale" in in_segment
    scales = in_segment if are_scales_shared else in_page
    scale = scales["scale"]
    zero = scales.get("zero")
    rotation = in_segment.get("rotation")
    return Side(
        rows=rows,
        columns=columns,
        bits=bits,
        codes=codes.offset,
        scale=Scale(
            by=by,
            group=(rows if by == "column" else columns) // scale.shape[0],
            scale=scale.offset,
            zero=zero.offset if zero else None,
            center=0 if by == "block" else -(1 << (bits - 1)),
            shared=are_scales_shared,
        ),
        low_rank=_low_rank(in_page, in_segment),
        sparse=_sparse(in_page, ends=name == "v"),
        rotation=BlockRotation(rotation.shape[0], rotation.offset)
        if rotation
        else None,
        floating=codes.dtype == "float8_e4m3fn",
    )


def _planes_of(layout: Layout, name: str) -> dict[str, Plane]:
    """The planes of K or V, without the prefix of their names."""
    prefix = f"{name}_"
    planes = (plane for plane in layout.planes if plane.name.startswith(prefix))
    return {plane.name.removeprefix(prefix): plane for plane in planes}


def _low_rank(
    in_page: dict[str, Plane], in_segment: dict[str, Plane]
) -> LowRank | None:
    low = in_page.get("low")
    if low is None:
        return None
    basis = in_page.get("basis") or in_segment["basis"]
    return LowRank(low.shape[1], low.offset, basis.offset, "basis" in in_segment)


def _sparse(in_page: dict[str, Plane], ends: bool) -> Sparse | None:
    index = in_page.get("index")
    if index is None:
        return None
    return Sparse(index.shape[1], index.offset, in_page["delta"].offset, ends)
