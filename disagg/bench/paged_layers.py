"""Attention inputs of any size for benchmarks: realistic tokens, encoded once and repeated.

The pages of a stretch are stored again and again at addresses of their own, in shuffled order, so
that reading is as scattered as in a service and encoding costs nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.bench.kvgen import Knobs, generate
from disagg.codecs import get_codec
from disagg.codecs.base import Codec, Encoded
from disagg.codecs.kivi import Kivi
from disagg.codecs.paged import PagedCodec
from disagg.codecs.raw import Raw
from disagg.codecs.tables import PageTable
from disagg.kernels.ops import merge, store_blocks
from disagg.kernels.ops_paged import runs_on_gpu
from disagg.page import ARENA_UNIT, SEGMENT_TOKENS, Layout
from disagg.plan import LayerGroup


@dataclass(frozen=True)
class Shape:
    """A decode step of one layer: `batch` sequences of `tokens` tokens, one query each."""

    batch: int
    tokens: int
    heads: int = 8
    per_head: int = 4
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.tokens}"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class PagedLayer:
    """One codec's pages of a shape.

    q: [B, 1, Hq, D] fp32; nbytes: of pages and segments that a step reads
    k, v: [H, stretch, D] fp32 - what the pages of a stretch stand for
    """

    codec: Codec
    group: LayerGroup
    shape: Shape
    arena: Tensor
    table: PageTable
    q: Tensor
    k: Tensor
    v: Tensor
    nbytes: int

    def attend(self) -> Tensor:
        """Attention of every query over all tokens."""
        shape = self.shape
        parts = self.codec.attend(self.q, self.arena, self.table, self.group, 0, shape.scale)
        return merge(parts)

    @property
    def captured(self) -> bool:
        """Whether Triton runs it on a GPU; the torch reference asks the host for lengths."""
        if isinstance(self.codec, PagedCodec):
            group = self.group
            fmt = self.codec.format_of(group.page, group.segment, group.head_dim)
            return runs_on_gpu(fmt, self.q.device)
        return isinstance(self.codec, Kivi | Raw)

    def exact(self) -> Tensor:
        """What `attend` should give, in fp64: [B, 1, Hq, D].

        All sequences hold the same stretch, so often that repeating it changes no average.
        """
        k, v = self.k.double(), self.v.double()
        q = self.q[:, 0].double().unflatten(1, (self.shape.heads, -1))
        scores = torch.einsum("bhgd,hnd->bhgn", q, k) * self.shape.scale
        return torch.einsum("bhgn,hnd->bhgd", scores.softmax(-1), v).flatten(1, 2).unsqueeze(1)


def make_layer(spec: str, shape: Shape, device: torch.device) -> PagedLayer:
    """Encode a stretch on the CPU and store as many copies of it as the shape has."""
    stretch = min(SEGMENT_TOKENS, shape.tokens)
    assert shape.tokens % stretch == 0
    codec = get_codec(spec)
    group = codec.layer_group((0,), shape.heads, shape.head_dim, "float16")
    made = generate(0, Knobs(kv_heads=shape.heads, group=1, n=stretch, head_dim=shape.head_dim))
    encoded = codec.encode(made.k, made.v, 0)
    k, v = codec.decode(encoded, group)
    copies = shape.batch * shape.tokens // stretch
    arena, pages, segments = _store(encoded, group, copies, device)
    width = pages.numel() // shape.batch
    owner = None
    if segments is not None:
        segments = segments.view(shape.batch, -1)
        own = torch.arange(width, device=device) // (SEGMENT_TOKENS // group.page.tokens)
        owner = own.int().expand(shape.batch, width).contiguous()
    source = torch.Generator().manual_seed(1)
    rows = shape.heads * shape.per_head
    q = torch.randn(shape.batch, 1, rows, shape.head_dim, generator=source).to(device)
    lo = torch.zeros(shape.batch, 1, dtype=torch.int32, device=device)
    table = PageTable(
        pages=pages.view(shape.batch, width),
        lo=lo,
        hi=lo + shape.tokens,
        layout=group.page,
        segments=segments,
        owner=owner,
    )
    nbytes = pages.numel() * group.layer_bytes(group.page)
    if segments is not None and group.segment is not None:
        nbytes += segments.numel() * group.layer_bytes(group.segment)
    k, v = k.to(device), v.to(device)
    return PagedLayer(codec, group, shape, arena, table, q, k, v, nbytes)


def _store(
    encoded: Encoded, group: LayerGroup, copies: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(arena, page ids in token order, segment ids) of so many copies of a stretch."""

    def units(layout: Layout) -> int:
        return -(-group.layer_bytes(layout) // ARENA_UNIT)

    source = torch.Generator().manual_seed(0)
    count = encoded.blocks.shape[0]
    stride = units(group.page)
    pages = (torch.randperm(copies * count, generator=source) * stride).int().to(device)
    end = copies * count * stride
    segments = None
    if encoded.segments is not None and group.segment is not None:
        stride = units(group.segment)
        segments = (torch.arange(copies) * stride + end).int().to(device)
        end += copies * stride
    arena = torch.zeros(end * ARENA_UNIT, dtype=torch.uint8, device=device)
    blocks = encoded.blocks.to(device)
    for copy in range(copies):
        store_blocks(arena, blocks, pages[copy * count : (copy + 1) * count], 0)
        if segments is not None and encoded.segments is not None:
            store_blocks(arena, encoded.segments.to(device), segments[copy : copy + 1], 0)
    return arena, pages, segments
