"""The bytes that a codec stores, computed from its layouts alone."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from disagg.codecs.registry import codec_names, get_codec
from disagg.kv.plan import LayerGroup

FP16_BYTES = 2
COSTS = Path(__file__).parent / "costs.json"  # what `disagg eval --save-costs` measured


@dataclass(frozen=True)
class CodecRow:
    """One codec at one size, per layer.

    bits_per_element: of a long sequence: page and its share of a segment, no tail
    page_tokens:      tokens of a page
    page_bytes:       a layer page: the blocks of all KV heads
    segment_bytes:    a layer's part of a segment record; 0 where the codec has none
    fp16_pct:         bytes stored for `tokens` tokens, tail included, in percent of fp16
    fp16_pct_mean:    its mean over tokens .. tokens + 63, to even out page boundaries
    ppl_pct, kl:      measured: rise of perplexity, nats a token; None: this spec was not measured
    """

    name: str
    spec: str
    bits_per_element: float
    page_tokens: int
    page_bytes: int
    segment_bytes: int
    fp16_pct: float
    fp16_pct_mean: float
    ppl_pct: float | None
    kl: float | None


def describe(spec: str, heads: int, head_dim: int, tokens: int) -> CodecRow:
    """The row of one codec; UnknownNameError or ConfigError for an invalid spec."""
    codec = get_codec(spec, head_dim)
    group = codec.layer_group((0,), heads, head_dim, "float16")
    cost = measured_costs()["codecs"].get(codec.spec, {})
    spread = [fp16_percent(group, tokens + i) for i in range(64)]
    return CodecRow(
        name=codec.name,
        spec=codec.spec,
        bits_per_element=bits_per_element(group),
        page_tokens=group.page.tokens,
        page_bytes=group.layer_bytes(group.page),
        segment_bytes=group.layer_bytes(group.segment) if group.segment else 0,
        fp16_pct=spread[0],
        fp16_pct_mean=sum(spread) / len(spread),
        ppl_pct=cost.get("ppl_pct"),
        kl=cost.get("kl"),
    )


def describe_all(heads: int, head_dim: int, tokens: int) -> list[CodecRow]:
    """Every registered codec whose defaults fit this head dim, by name."""
    return [describe(name, heads, head_dim, tokens) for name in codec_names(head_dim)]


@cache
def measured_costs() -> dict[str, Any]:
    """Measured loss of quality: `codecs` by canonical spec, and the `model` it was measured on."""
    costs: dict[str, Any] = json.loads(COSTS.read_text())
    return costs


def bits_per_element(group: LayerGroup) -> float:
    """Bits for each value of K and V of a long sequence: pages and segments, no tail."""
    block_bytes = group.page.block_bytes / group.page.tokens
    if group.segment:
        block_bytes += group.segment.block_bytes / group.segment_tokens
    layer_heads = len(group.layers) * group.heads
    return 8 * block_bytes * layer_heads / group.numbers(1)


def fp16_percent(group: LayerGroup, tokens: int) -> float:
    """Stored bytes of one layer, tail included, in percent of the same tokens in fp16."""
    exact = FP16_BYTES * tokens * group.numbers(1) / len(group.layers)
    return 100 * stored_bytes(group, tokens) / exact if exact else 0.0


def stored_bytes(group: LayerGroup, tokens: int) -> int:
    """Bytes of one layer of a prompt: pages, segments, side record and raw pages."""
    counts = group.inventory(tokens).items()
    return sum(count * group.layer_bytes(group.layout(kind)) for kind, count in counts)
