"""Inputs of benchmarks: synthetic keys and values, shapes and slabs of prompts, pages.

Keys and values have the statistics that the papers rely on:

    K   a few fixed channels of large, nearly uniform magnitude (KIVI figure 2, OTT figure 1a), in
        slowly rotating RoPE pairs; low-rank token structure plus noise; a few tokens small in all
        channels (OTT section 3.1)
    V   no channel pattern, a spread of scale between tokens, small on the outlier tokens
    q   away from the mean key, by `sink`, so that small keys win; towards a few tokens' content

`sink` 0.5 makes content heads, 1.0 and more sink heads. All randomness comes from one generator, so
tensors follow from seed, shape and knobs. Never rank codecs on plain Gaussian tensors, which have
none of these properties.

Layers for attention are prompts written by the code of a worker to records in shuffled order, so
reads are as scattered as in a service. All sequences of a layer have the same tokens.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.codecs.contract import Codec, Queries
from disagg.codecs.exact import exact_format
from disagg.codecs.planning import KVShape
from disagg.errors import CapacityError, ConfigError, PromptTooLongError
from disagg.kernels.ops import attend, prepare, serves_gpu
from disagg.kernels.sealing import NewRows
from disagg.kernels.view import Softmax, WorkPlan
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.slabs import num_slabs_for
from disagg.kv.state import GroupState, allocate_group
from disagg.paged.append import RecordIds, SequenceGrowth
from disagg.paged.compressed_kv import CompressedKV, GrowingArena
from disagg.paged.layer import LayerRecords, PromptChunk, views_of, write_prompt
from disagg.paged.page_tables import PageTable, build_tables, plan_units, upload

SLAB_BYTES = 16 << 20
HUGE_PAGE = 2 << 20  # bytes; numpy asks for such pages
FRESH_BYTES = 64 << 20  # more than malloc ever takes from memory that was used before
LAST_QUERIES = 32  # of a prompt, for codecs that choose tokens by attention
# RoPE pairs after this share of them rotate slowly enough to stay channels
SLOW_PAIRS = 0.86
THETA = 1e4
LAYER = 2  # of the model: some codecs treat the first two as others


def shape_of(layers: int = 32, heads: int = 8, head_dim: int = 128) -> KVShape:
    """The KV shape of a model without windows, in fp16; by default Llama 3.1 8B."""
    return KVShape.uniform(layers, heads, head_dim, "float16")


def check_device(device: str, otherwise: str) -> None:
    """ConfigError for a missing device; `otherwise`: the alternative to suggest."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"there is no CUDA device here; {otherwise}")


def slabs_for(
    plan: Plan,
    tokens: int,
    slab_bytes: int = SLAB_BYTES,
    sequences: int = 1,
    spare: int = 0,
) -> int:
    """The number of slabs that prompts take; PromptTooLongError if a record fits no slab.

    spare: further records of every layout per sequence, to grow into
    """
    counts = plan.records(tokens)
    if spare:
        for group in plan.groups:
            for layout in group.layouts():
                counts[group.record(layout)] += spare
    records = {shape: sequences * count for shape, count in counts.items()}
    try:
        return num_slabs_for(records, slab_bytes)
    except CapacityError as error:
        raise PromptTooLongError(str(error)) from error


@dataclass(frozen=True)
class Knobs:
    """Statistics of a synthetic layer.

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
    knobs = knobs or Knobs()
    source = torch.Generator().manual_seed(seed)
    k = _keys(knobs, source)
    first = torch.zeros(1, dtype=torch.int64)
    others = 1 + torch.randperm(knobs.n - 1, generator=source)[: knobs.outliers - 1]
    outliers = torch.cat([first, others])
    for token in outliers.tolist():
        noise = 0.25 * _normal(source, knobs.kv_heads, knobs.head_dim)
        k[:, token] = 0.06 * k[:, token] + noise
    v = _values(knobs, source)
    v[:, outliers] *= 0.05
    q = _queries(knobs, source, k)
    positions = torch.arange(knobs.n)
    return Layer(
        q=_rope(q, positions[knobs.n - knobs.num_queries :]).half(),
        k=_rope(k, positions).half(),
        v=v.half(),
        outliers=outliers,
    )


@lru_cache(maxsize=1)
def make_prompt(tokens: int, heads: int, head_dim: int, group: int = 1) -> Layer:
    """One layer of a prompt and its last queries, of which `group` heads share a KV head."""
    queries = min(LAST_QUERIES, tokens)
    knobs = Knobs(
        kv_heads=heads, group=group, n=tokens, head_dim=head_dim, num_queries=queries
    )
    return generate(0, knobs)


def _keys(knobs: Knobs, source: torch.Generator) -> Tensor:
    heads, n, dim = knobs.kv_heads, knobs.n, knobs.head_dim
    half = dim // 2
    spread = torch.exp(0.4 * _normal(source, heads, 1, dim))
    mean = 0.5 * _normal(source, heads, 1, dim)
    spectrum = torch.exp(-torch.arange(knobs.rank) / 4.0) * 2.0
    tokens = _normal(source, heads, n, knobs.rank)
    directions = _normal(source, heads, knobs.rank, dim) / math.sqrt(knobs.rank)
    low_rank = (tokens * spectrum) @ directions
    noise = knobs.noise * _normal(source, heads, n, dim)
    k = mean + spread * (low_rank + noise)
    slow = min(int(SLOW_PAIRS * half), half - knobs.loud)
    for head in range(heads):
        channels = slow + torch.randperm(half - slow, generator=source)[: knobs.loud]
        in_second_half = torch.rand(knobs.loud, generator=source) < 0.5
        channels = channels + half * in_second_half.long()
        is_negative = torch.rand(knobs.loud, generator=source) < 0.5
        sign = torch.where(is_negative, -1.0, 1.0)
        size = 0.7 + 0.6 * torch.rand(knobs.loud, generator=source)
        size = knobs.loudness * size
        change = 1 + 0.08 * _normal(source, n, knobs.loud)
        k[head][:, channels] = sign * size * change
    return k


def _values(knobs: Knobs, source: torch.Generator) -> Tensor:
    heads, n, dim = knobs.kv_heads, knobs.n, knobs.head_dim
    scale = 0.5 * torch.exp(0.35 * _normal(source, heads, n, 1))
    tokens = _normal(source, heads, n, knobs.rank)
    directions = _normal(source, heads, knobs.rank, dim)
    low_rank = tokens @ directions / math.sqrt(knobs.rank) * 0.8
    noise = 0.6 * _normal(source, heads, n, dim)
    return scale * (low_rank + noise)


def _queries(knobs: Knobs, source: torch.Generator, k: Tensor) -> Tensor:
    """[Hq, num_queries, D] before RoPE."""
    queries = []
    length = math.sqrt(knobs.head_dim)
    for head in range(knobs.kv_heads):
        mean = k[head].mean(0)
        tokens = torch.randint(
            knobs.n, (knobs.group, knobs.num_queries), generator=source
        )
        for member in range(knobs.group):
            away = -knobs.sink * mean / mean.norm()
            content = k[head][tokens[member]] - mean
            content = 0.9 * content / content.norm(dim=-1, keepdim=True)
            noise = 0.35 * _normal(source, knobs.num_queries, knobs.head_dim) / length
            queries.append(length * (away[None] + content + noise))
    return torch.stack(queries)


def _rope(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequency = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None] * frequency[None]
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=source)


@dataclass(frozen=True)
class StepShape:
    """A decode step of one layer: `batch` sequences of `tokens` tokens, one query each.

    latent: channels of K that are V too; None: V is stored
    """

    batch: int
    tokens: int
    heads: int = 8
    per_head: int = 4
    head_dim: int = 128
    latent: int | None = None

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.tokens}"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class PagedLayer:
    """The pages of one codec for a shape, without tails.

    nbytes:  bytes of pages, segments and side records that a step reads
    q:       [B, 1, Hq, D] fp32
    k, v:    [H, tokens, D] fp32 - the decoded pages of each sequence
    present: [H, tokens] bool - tokens that the codec has not dropped
    """

    codec: Codec
    group: LayerGroup
    shape: StepShape
    arena: Tensor
    tables: tuple[PageTable, ...]
    units: WorkPlan | None
    q: Tensor
    k: Tensor
    v: Tensor
    present: Tensor
    nbytes: int

    def attend(self) -> Tensor:
        """Attention of every query over all tokens."""
        views = views_of(self.group, LAYER, self.arena, self.tables)
        return attend(self.q, views, Softmax(self.shape.scale), self.units)

    def layer_call(self) -> Callable[[], Tensor]:
        """`attend` as [B, Hq, D], called as a decode step calls it.

        On a CPU that is one call of the C library, prepared for all layers at once.
        """
        shape = self.shape
        views = views_of(self.group, LAYER, self.arena, self.tables)
        no_row = torch.zeros(shape.batch, dtype=torch.int32)
        rows = NewRows(
            no_row,
            no_row,
            exact_format(self.group.raw),
            self.group.layer_offset(self.group.raw, LAYER),
        )
        calls = prepare(self.arena, rows, views, self.q)
        if calls is None:
            return lambda: self.attend()[:, 0]
        softmax = Softmax(shape.scale)
        q = self.q[:, 0].transpose(0, 1)
        k = q.new_empty(shape.heads, shape.batch, shape.head_dim)
        v = k[..., : shape.latent]
        return lambda: calls.run(0, q, k, v, True, softmax)

    def error(self) -> float:
        """The relative error of `attend` against `exact`."""
        exact = self.exact()
        return float((self.attend().double() - exact).norm() / exact.norm())

    @property
    def captured(self) -> bool:
        """Whether it runs as a CUDA graph; the torch reference cannot, as it reads lengths."""
        views = views_of(self.group, LAYER, self.arena, self.tables[:1])
        return self.q.is_cuda and all(
            serves_gpu(view.fmt, self.q.device) for view in views
        )

    def exact(self) -> Tensor:
        """The exact result of `attend`, in fp64: [B, 1, Hq, D]."""
        k = self.k.double()
        v = self.v.double()
        q = self.q[:, 0].double().unflatten(1, (self.shape.heads, -1))
        scores = torch.einsum("bhgd,hnd->bhgn", q, k) * self.shape.scale
        scores = scores.masked_fill(~self.present.unsqueeze(1), -torch.inf)
        p = scores.softmax(-1)
        return torch.einsum("bhgn,hnd->bhgd", p, v).flatten(1, 2).unsqueeze(1)


def make_layer(spec: str, shape: StepShape, device: torch.device) -> PagedLayer:
    """Write a prompt for each sequence, with all tokens of the shape in pages."""
    codec = get_codec(spec)
    group = codec.layer_group(
        (LAYER,), shape.heads, shape.head_dim, "float16", latent=shape.latent
    )
    n = group.sink + shape.tokens + group.residual
    prompt = make_prompt(n, shape.heads, shape.head_dim, shape.per_head)
    arena = GrowingArena(device)
    states = _scattered(group, n, shape.batch, arena)
    _write_prompts(codec, group, states, arena, prompt, n)
    cache = CompressedKV(codec, group, states[0], arena, num_tokens=n)
    paged = slice(group.sink, group.sink + shape.tokens)
    k, v = cache.reconstruct()
    growths = [SequenceGrowth(state, n - 1, 1, row) for row, state in enumerate(states)]
    tables = build_tables(codec, group, growths, 1, torch.device("cpu"))
    if states[0].tail:
        tables = tables[:-1]
    nbytes = sum(_bytes_of(group, table) for table in tables)
    tables, units = upload((tables, plan_units(group, tables, device)), device)
    return PagedLayer(
        codec=codec,
        group=group,
        shape=shape,
        arena=arena.bytes,
        tables=tables,
        units=units,
        q=_step_queries(shape).to(device),
        k=k[:, paged],
        v=v[:, paged],
        present=cache.present()[:, paged],
        nbytes=nbytes,
    )


def _write_prompts(
    codec: Codec,
    group: LayerGroup,
    states: Sequence[GroupState],
    arena: GrowingArena,
    prompt: Layer,
    n: int,
) -> None:
    """The same prompt for every sequence."""
    device = arena.bytes.device
    q, k, v = prompt.q.to(device), prompt.k.to(device), prompt.v.to(device)
    queries = Queries.of(q, group.heads, n)
    records = LayerRecords(group, LAYER, arena.bytes)
    if group.latent is not None:
        v = k[..., : group.latent]
    chunk = PromptChunk(k, v, total=n, queries=queries)
    for state in states:
        at = upload(RecordIds.of(state), device)
        write_prompt(codec, records, at, chunk)
    if device.type == "cpu":
        arena.bytes = in_huge_pages(arena.bytes)


def _step_queries(shape: StepShape) -> Tensor:
    """[B, 1, Hq, D] fp32."""
    source = torch.Generator().manual_seed(1)
    query_heads = shape.heads * shape.per_head
    return torch.randn(shape.batch, 1, query_heads, shape.head_dim, generator=source)


def in_huge_pages(x: Tensor) -> Tensor:
    """A copy of x in huge pages, if Linux has them, like the arena of a service.

    It starts at a huge page, in fresh memory.
    """
    memory = np.empty(x.nbytes + FRESH_BYTES, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    copy = torch.from_numpy(memory[start : start + x.nbytes])
    return copy.view(x.dtype).view(x.shape).copy_(x)


def _scattered(
    group: LayerGroup, n: int, count: int, arena: GrowingArena
) -> list[GroupState]:
    """Records for sequences of n tokens, shuffled within each kind."""
    ids = []
    for _ in range(count):
        ids += allocate_group(group, n, arena).ids()
    random.Random(0).shuffle(ids)
    arena.release(ids)
    return [allocate_group(group, n, arena) for _ in range(count)]


def _bytes_of(group: LayerGroup, table: PageTable) -> int:
    """Bytes that attention reads of one layer, for equal sequences."""
    nbytes = table.pages.numel() * group.layer_bytes(table.layout)
    if group.segment is not None and table.segments is not None:
        nbytes += table.segments.numel() * group.layer_bytes(group.segment)
    if group.side is not None and table.sides is not None:
        nbytes += table.sides.numel() * group.layer_bytes(group.side)
    return nbytes
