"""What benchmarks are given: made-up keys and values, and the shape and slabs of a prompt.

Keys and values have the statistics that the papers rely on, without a pretrained model:

    K   a few fixed channels of large, nearly uniform magnitude (KIVI figure 2, OTT figure 1a), in
        slowly rotating RoPE pairs; low-rank token structure plus noise; a few tokens small in all
        channels (OTT section 3.1)
    V   no channel pattern, a spread of scale between tokens, small on the outlier tokens
    q   away from the mean key, by `sink`, so that small keys win; towards a few tokens' content

`sink` 0.5 makes content heads, 1.0 and more sink heads. All randomness comes from one generator, so
tensors follow from seed, shape and knobs. On plain Gaussian tensors the premises of the papers
vanish: never rank codecs on them.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from disagg.codecs.planning import KVShape
from disagg.errors import ConfigError, PromptTooLongError
from disagg.page import Kind
from disagg.plan import Plan

DEVICES = ("cpu", "cuda")
SLAB_BYTES = 16 << 20
LAST_QUERIES = 32  # of a prompt, for codecs that choose tokens by attention
SLOW_PAIRS = 0.86  # RoPE pairs behind this share of them rotate slowly enough to stay channels
THETA = 1e4


def shape_of(layers: int = 32, heads: int = 8, head_dim: int = 128) -> KVShape:
    """Of a model without windows, in fp16; the defaults are those of Llama 3.1 8B."""
    return KVShape(layers, heads, head_dim, "float16", (None,) * layers)


def check_device(device: str, otherwise: str) -> None:
    """ConfigError for a device that is unknown or not there; `otherwise`: what needs none."""
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is unknown; known: {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"there is no CUDA device here; {otherwise}")


def fp16_bytes(shape: KVShape, tokens: int) -> int:
    """Exact K and V of so many tokens, of those that windows still see."""
    seen = sum(min(tokens, window or tokens) for window in shape.windows)
    return 2 * 2 * seen * shape.heads * shape.head_dim


def slabs_for(
    plan: Plan, tokens: int, slab_bytes: int = SLAB_BYTES, sequences: int = 1, spare: int = 0
) -> int:
    """How many slabs prompts take; PromptTooLongError where a record does not fit any.

    spare: records of every layout that each sequence has besides, to grow into
    """
    total = 0
    for group in plan.groups:
        inventory = group.inventory(tokens)
        counts = Counter(dict.fromkeys(group.layouts(), spare))
        for kind in Kind:
            if count := inventory.count(kind):
                counts[group.layout(kind)] += count
        for layout, count in (+counts).items():  # those of which there are any
            nbytes = group.record(layout).nbytes
            if nbytes > slab_bytes:
                raise PromptTooLongError(f"a record of {nbytes} bytes; slabs: {slab_bytes}")
            total += -(-sequences * count // (slab_bytes // nbytes))
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
