"""What benchmarks are given: made-up keys and values, shape and slabs of a prompt, pages.

Keys and values have the statistics that the papers rely on, without a pretrained model:

    K   a few fixed channels of large, nearly uniform magnitude (KIVI figure 2, OTT figure 1a), in
        slowly rotating RoPE pairs; low-rank token structure plus noise; a few tokens small in all
        channels (OTT section 3.1)
    V   no channel pattern, a spread of scale between tokens, small on the outlier tokens
    q   away from the mean key, by `sink`, so that small keys win; towards a few tokens' content

`sink` 0.5 makes content heads, 1.0 and more sink heads. All randomness comes from one generator, so
tensors follow from seed, shape and knobs. On plain Gaussian tensors the premises of the papers
vanish: never rank codecs on them.

Layers for attention of any size are realistic tokens, encoded once and repeated. The pages of a
stretch are stored again and again at addresses of their own, in shuffled order, so that reading is
as scattered as in a service and encoding costs nothing. What a sequence has once, its side record
and the tokens kept exact, it has once here too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.codecs.base import Codec
from disagg.codecs.contract import Encoded, Prompt, Queries
from disagg.codecs.exact import exact_format, slots_format
from disagg.codecs.layer import views_of
from disagg.codecs.planning import KVShape
from disagg.codecs.tables import PageTable, plan_units, upload
from disagg.errors import ConfigError, PromptTooLongError
from disagg.kernels.formats import FREE
from disagg.kernels.ops import attend, prepare, serves_gpu, store_blocks
from disagg.kernels.reference.kept import view_kept
from disagg.kernels.sealing import NewRows, Target
from disagg.kernels.view import Softmax, Units
from disagg.page import ARENA_UNIT
from disagg.plan import LayerGroup, Plan

SLAB_BYTES = 16 << 20
LAST_QUERIES = 32  # of a prompt, for codecs that choose tokens by attention
SLOW_PAIRS = 0.86  # RoPE pairs behind this share of them rotate slowly enough to stay channels
THETA = 1e4
LAYER = 2  # of the model: some codecs treat the first two as others


def shape_of(layers: int = 32, heads: int = 8, head_dim: int = 128) -> KVShape:
    """Of a model without windows, in fp16; the defaults are those of Llama 3.1 8B."""
    return KVShape(layers, heads, head_dim, "float16", (None,) * layers)


def check_device(device: str, otherwise: str) -> None:
    """ConfigError for a device that is not there; `otherwise`: what needs none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"there is no CUDA device here; {otherwise}")


def slabs_for(
    plan: Plan, tokens: int, slab_bytes: int = SLAB_BYTES, sequences: int = 1, spare: int = 0
) -> int:
    """How many slabs prompts take; PromptTooLongError where a record does not fit any.

    spare: records of every layout that each sequence has besides, to grow into
    """
    counts, total = plan.records(tokens), 0
    counts.update(spare * [group.record(x) for group in plan.groups for x in group.layouts()])
    for shape, count in counts.items():
        if shape.nbytes > slab_bytes:
            raise PromptTooLongError(f"a record of {shape.nbytes} bytes; slabs: {slab_bytes}")
        total += -(-sequences * count // (slab_bytes // shape.nbytes))
    return total


@dataclass(frozen=True)
class Knobs:
    """What a made layer looks like.

    kv_heads, group: KV heads, and query heads for each; n: tokens; num_queries: of the last ones
    loud, loudness:  large channels of K for each head, and their magnitude
    outliers:        tokens with small keys and values; the first token is always one
    sink:            how far queries point away from the mean key
    """

    kv_heads: int = 4
    group: int = 2
    n: int = 300
    head_dim: int = 128
    num_queries: int = 1
    loud: int = 3
    loudness: float = 10.0
    outliers: int = 2
    rank: int = 12
    noise: float = 0.45
    sink: float = 0.5


@dataclass(frozen=True)
class Layer:
    """q [Hq, num_queries, D], k, v [H, n, D], all fp16 after RoPE; outliers: token positions."""

    q: Tensor
    k: Tensor
    v: Tensor
    outliers: Tensor


def generate(seed: int, knobs: Knobs | None = None) -> Layer:
    """One layer. The order of the draws is part of the result."""
    x = knobs or Knobs()
    source = torch.Generator().manual_seed(seed)
    k = _keys(x, source)
    first = torch.zeros(1, dtype=torch.int64)
    others = 1 + torch.randperm(x.n - 1, generator=source)[: x.outliers - 1]
    outliers = torch.cat([first, others])
    for token in outliers.tolist():
        k[:, token] = 0.06 * k[:, token] + 0.25 * _normal(source, x.kv_heads, x.head_dim)
    v = _values(x, source)
    v[:, outliers] *= 0.05
    q = _queries(x, source, k)
    positions = torch.arange(x.n)
    turned_q = _rope(q, positions[x.n - x.num_queries :])
    return Layer(turned_q.half(), _rope(k, positions).half(), v.half(), outliers)


@lru_cache(maxsize=1)
def make_prompt(tokens: int, heads: int, head_dim: int, group: int = 1) -> Layer:
    """One layer of a prompt and its last queries, of which `group` heads share a KV head."""
    queries = min(LAST_QUERIES, tokens)
    knobs = Knobs(kv_heads=heads, group=group, n=tokens, head_dim=head_dim, num_queries=queries)
    return generate(0, knobs)


def _keys(x: Knobs, source: torch.Generator) -> Tensor:
    heads, dim, half = x.kv_heads, x.head_dim, x.head_dim // 2
    spread = torch.exp(0.4 * _normal(source, heads, 1, dim))
    mean = 0.5 * _normal(source, heads, 1, dim)
    spectrum = torch.exp(-torch.arange(x.rank) / 4.0) * 2.0
    left = _normal(source, heads, x.n, x.rank)
    right = _normal(source, heads, x.rank, dim) / math.sqrt(x.rank)
    k = mean + spread * ((left * spectrum) @ right + x.noise * _normal(source, heads, x.n, dim))
    slow = min(int(SLOW_PAIRS * half), half - x.loud)
    for head in range(heads):
        channels = slow + torch.randperm(half - slow, generator=source)[: x.loud]
        channels = channels + half * (torch.rand(x.loud, generator=source) < 0.5).long()
        sign = torch.where(torch.rand(x.loud, generator=source) < 0.5, -1.0, 1.0)
        size = x.loudness * (0.7 + 0.6 * torch.rand(x.loud, generator=source))
        k[head][:, channels] = sign * size * (1 + 0.08 * _normal(source, x.n, x.loud))
    return k


def _values(x: Knobs, source: torch.Generator) -> Tensor:
    scale = 0.5 * torch.exp(0.35 * _normal(source, x.kv_heads, x.n, 1))
    left = _normal(source, x.kv_heads, x.n, x.rank)
    right = _normal(source, x.kv_heads, x.rank, x.head_dim)
    noise = 0.6 * _normal(source, x.kv_heads, x.n, x.head_dim)
    return scale * (left @ right / math.sqrt(x.rank) * 0.8 + noise)


def _queries(x: Knobs, source: torch.Generator, k: Tensor) -> Tensor:
    """[Hq, num_queries, D] before RoPE."""
    found = []
    length = math.sqrt(x.head_dim)
    for head in range(x.kv_heads):
        mean = k[head].mean(0)
        chosen = torch.randint(x.n, (x.group, x.num_queries), generator=source)
        for member in range(x.group):
            away = -x.sink * mean / mean.norm()
            content = k[head][chosen[member]] - mean
            content = 0.9 * content / content.norm(dim=-1, keepdim=True)
            noise = 0.35 * _normal(source, x.num_queries, x.head_dim) / length
            found.append(length * (away[None] + content + noise))
    return torch.stack(found)


def _rope(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequency = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None] * frequency[None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source)


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
        views = views_of(self.codec, self.group, LAYER, self.arena, self.tables)
        return attend(self.q, views, Softmax(self.shape.scale), self.units)

    def layer_call(self) -> Callable[[], Tensor]:
        """The same as [B, Hq, D], as a decode step calls it for each layer: on a CPU one call of
        the C library, prepared for all layers at once."""
        group, softmax = self.group, Softmax(self.shape.scale)
        views = views_of(self.codec, group, LAYER, self.arena, self.tables)
        none = torch.zeros(self.shape.batch, dtype=torch.int32)
        fmt, base = exact_format(group.raw), group.layer_offset(group.raw, LAYER)
        calls = prepare(self.arena, NewRows(none, none, fmt, base), views, self.q)
        if calls is None:
            return lambda: self.attend()[:, 0]
        q = self.q[:, 0].transpose(0, 1)
        new = q.new_empty(self.shape.heads, self.shape.batch, self.shape.head_dim)
        return lambda: calls.run(0, q, new, new, True, softmax)

    def error(self) -> float:
        """Of `attend`, relative, against `exact`."""
        exact = self.exact()
        return float((self.attend().double() - exact).norm() / exact.norm())

    @property
    def captured(self) -> bool:
        """Whether Triton runs it on a GPU; the torch reference asks the host for lengths."""
        views = views_of(self.codec, self.group, LAYER, self.arena, self.tables[:1])
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
    prompt = Prompt(stretch, made.k, Queries.of(made.q, shape.heads, stretch))
    encoded = codec.encode(made.k, made.v, 0, LAYER, prompt, None)
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
    zeros = np.zeros(end * ARENA_UNIT, np.uint8)  # in huge pages, as the arena of a service
    arena = torch.from_numpy(zeros).to(device)
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
