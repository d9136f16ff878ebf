"""Attention inputs of any size for benchmarks: realistic tokens, encoded once and repeated.

The pages of a stretch are stored again and again at addresses of their own, in shuffled order, so
that reading is as scattered as in a service and encoding costs nothing. What a sequence has once,
its side record and the tokens kept exact, it has once here too.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from disagg.bench.inputs import make_prompt
from disagg.codecs import get_codec
from disagg.codecs.base import Codec
from disagg.codecs.contract import Encoded, Prompt, Queries
from disagg.codecs.exact import exact_format, slots_format
from disagg.codecs.layer import attend_tables
from disagg.codecs.tables import PageTable, plan_units, upload
from disagg.kernels.formats import FREE
from disagg.kernels.ops import serves_gpu, store_blocks
from disagg.kernels.reference.kept import view_kept
from disagg.kernels.sealing import Target
from disagg.kernels.view import Softmax, Units
from disagg.page import ARENA_UNIT
from disagg.plan import LayerGroup

LAYER = 2  # of the model: some codecs treat the first two as others


@dataclass(frozen=True)
class StepShape:
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

    q:      [B, 1, Hq, D] fp32; nbytes: of pages, segments and side records that a step reads
    k, v:   [H, stretch, D] fp32 - what the pages of a stretch stand for
    counts: [H, stretch] - how often a sequence shows each of these tokens; 0 where it is dropped
    """

    codec: Codec
    group: LayerGroup
    shape: StepShape
    arena: Tensor
    tables: tuple[PageTable, ...]
    units: Units | None
    q: Tensor
    k: Tensor
    v: Tensor
    counts: Tensor
    nbytes: int

    def attend(self) -> Tensor:
        """Attention of every query over all tokens."""
        given = self.arena, self.q, self.tables, Softmax(self.shape.scale), self.units
        return attend_tables(self.codec, self.group, LAYER, *given)

    def error(self) -> float:
        """Of `attend`, relative, against `exact`."""
        exact = self.exact()
        return float((self.attend().double() - exact).norm() / exact.norm())

    @property
    def captured(self) -> bool:
        """Whether Triton runs it on a GPU; the torch reference asks the host for lengths."""
        views = self.codec.views(self.arena, self.tables[0], self.group, LAYER)
        return self.q.is_cuda and all(serves_gpu(view.fmt) for view in views)

    def exact(self) -> Tensor:
        """What `attend` should give, in fp64: [B, 1, Hq, D]; all sequences are alike."""
        k, v = self.k.double(), self.v.double()
        q = self.q[:, 0].double().unflatten(1, (self.shape.heads, -1))
        scores = torch.einsum("bhgd,hnd->bhgn", q, k) * self.shape.scale
        p = (scores + self.counts.double().log().unsqueeze(1)).softmax(-1)
        return torch.einsum("bhgn,hnd->bhgd", p, v).flatten(1, 2).unsqueeze(1)


def make_layer(spec: str, shape: StepShape, device: torch.device) -> PagedLayer:
    """Encode a stretch on the CPU and store as many copies of it as the shape has."""
    codec = get_codec(spec)
    group = codec.layer_group((LAYER,), shape.heads, shape.head_dim, "float16")
    stretch = min(group.segment_tokens, shape.tokens)
    assert shape.tokens % stretch == 0
    made = make_prompt(stretch, shape.heads, shape.head_dim, shape.per_head)
    prompt = Prompt(stretch, made.k, Queries.of(made.q, stretch))
    encoded = codec.encode(made.k, made.v, 0, LAYER, prompt)
    k, v = codec.decode(encoded, group)
    counts = count_tokens(codec, encoded, group, shape.tokens // stretch)
    arena, tables, nbytes = _store(encoded, group, shape, device)
    units = plan_units(group, tables, device)
    tables, units = upload((tables, units), device)
    source = torch.Generator().manual_seed(1)
    rows = shape.heads * shape.per_head
    q = torch.randn(shape.batch, 1, rows, shape.head_dim, generator=source)
    q, k, v, counts = (x.to(device) for x in (q, k, v, counts))
    return PagedLayer(codec, group, shape, arena, tables, units, q, k, v, counts, nbytes)


def count_tokens(codec: Codec, encoded: Encoded, group: LayerGroup, repeats: int) -> Tensor:
    """How often a sequence of so many stretches shows each token: [H, stretch] int64.

    A token kept exact is in the side record, once, and in none of the pages.
    """
    counts = repeats * codec.present(encoded, group).long()
    if encoded.side is not None and encoded.kept is not None and group.side is not None:
        side, raw = slots_format(group.side), exact_format(group.raw)
        kept = view_kept(encoded.side, encoded.kept, side, raw)
        head, slot = (kept.states != FREE).nonzero(as_tuple=True)
        counts[head, kept.positions[head, slot].long()] = 1
    return counts


def _store(
    encoded: Encoded, group: LayerGroup, shape: StepShape, device: torch.device
) -> tuple[Tensor, tuple[PageTable, ...], int]:
    """An arena with all sequences, tables on the host of all that they see, and the bytes."""
    repeats = shape.tokens // (encoded.blocks.shape[0] * group.page.tokens)
    side = None if encoded.side is None else encoded.side.unsqueeze(0)
    kinds = {  # and how often a sequence has it
        "pages": (group.page, encoded.blocks, repeats),
        "segments": (group.segment, encoded.segments, repeats),
        "kept": (group.raw, encoded.kept, 1),
        "sides": (group.side, side, 1),
    }
    source = torch.Generator().manual_seed(0)
    stored: list[tuple[Tensor, Tensor]] = []
    found: dict[str, Any] = {}
    end = nbytes = 0
    for name, (layout, blocks, copies) in kinds.items():
        if layout is None or blocks is None or not blocks.numel():
            continue
        stride = -(-group.layer_bytes(layout) // ARENA_UNIT)
        count = shape.batch * copies * blocks.shape[0]
        places = torch.randperm(count, generator=source) * stride + end
        found[name] = places.int().view(shape.batch, -1)
        stored.append((blocks.to(device), found[name].to(device)))
        end += count * stride
        nbytes += count * group.layer_bytes(layout)
    arena = torch.zeros(end * ARENA_UNIT, dtype=torch.uint8, device=device)
    for there, ids in stored:
        for row in ids.view(-1, there.shape[0]):
            store_blocks(Target(arena, row), there)
    lo = torch.zeros(shape.batch, 1, dtype=torch.int32)
    seen = lo, lo + shape.tokens
    tables = [PageTable(found["pages"], *seen, group.page)]
    if "segments" in found:
        own = torch.arange(found["pages"].shape[1]) // (group.segment_tokens // group.page.tokens)
        owner = own.int().expand(shape.batch, -1).contiguous()
        tables = [replace(tables[0], segments=found["segments"], owner=owner)]
    if "kept" in found:
        kept = PageTable(found["kept"], *seen, group.raw, sides=found["sides"].view(-1))
        tables.append(kept)
    return arena, tuple(tables), nbytes
