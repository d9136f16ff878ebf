"""Bytes of a hand-off of hybrid models: K and V under a codec, and states.

    python -m benchmarks.hybrid_bytes --json --out FILE

By arithmetic from a model's config, as workers compute them; no weights are needed. A small random
model is then handed off between two workers, and the bytes that they count are beside those of the
arithmetic.
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from benchmarks import command
from disagg.bench.result import Row, progress, result_of
from disagg.bench.workers import prompt_of, routed, started_workers, visit
from disagg.cli.bench import Out, show
from disagg.cli.options import Json
from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import DEFAULT_CODEC, Config, ModelConfig, TransferConfig
from disagg.model.capacity import kv_shape
from disagg.model.describe import describe_model
from disagg.transfer.messages import Role
from disagg.transfer.records import Manifest

CONFIGS = Path("tests", "model", "configs.jsonl")
CODECS = ("raw:dtype=fp16", DEFAULT_CODEC)
TOKENS = (1024, 8192, 32768)
DTYPE = "bfloat16"
MIB = 1 << 20
SMALL_MODEL = "qwen3_5_text"  # handed off between workers
SMALL_TOKENS = 300
PUBLISHED = "config.json as published"
DEFAULTS = "defaults of transformers"
NOTES = (
    "MiB; state: of one sequence at any length; percent: of the hand-off that is state"
)


@dataclass(frozen=True)
class Shape:
    """A model of known sizes. kind: its `model_type`; "": a row of configs.jsonl by its name."""

    name: str
    source: str
    kind: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)


def pattern(layers: int, attention: Sequence[int], other: str) -> list[str]:
    """The types of layers, of which a few attend."""
    return ["full_attention" if x in attention else other for x in range(layers)]


MODELS = (
    Shape("Qwen3-Next-80B-A3B", DEFAULTS, "qwen3_next"),
    Shape("Qwen/Qwen3.5-27B", PUBLISHED),
    Shape(
        "Granite-4.0-H-Small",
        "sizes by hand",
        "granitemoehybrid",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "layer_types": pattern(40, (5, 15, 25, 35), "linear_attention"),
        },
    ),
    Shape("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", PUBLISHED),
    Shape(
        "LFM2-8B-A1B",
        "defaults of transformers, layers by hand",
        "lfm2_moe",
        {
            "num_hidden_layers": 24,
            "layer_types": pattern(24, (2, 6, 10, 14, 18, 21), "conv"),
        },
    ),
)


def measure_hybrid_bytes() -> Row:
    """Rows by model, codec and tokens; a hand-off that was counted stands beside them."""
    rows = []
    for model in progress(MODELS, lambda model: model.name):
        shape = shape_of(model)
        for codec in CODECS:
            row = {"model": model.name, "sizes": model.source, "codec": codec}
            for tokens in TOKENS:
                row |= sizes_of(shape, codec, tokens)
            rows.append(row)
    return result_of(rows, NOTES, counted=count_handoff())


def shape_of(model: Shape) -> KVShape:
    """The KV of a model, from its config alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(model)))
        return kv_shape(describe_model(folder, DTYPE))


def config_of(model: Shape) -> dict[str, Any]:
    """The config.json of a model."""
    if not model.kind:
        rows = map(json.loads, CONFIGS.read_text().splitlines())
        configs: dict[str, dict[str, Any]] = {x["name"]: x["config"] for x in rows}
        return configs[model.name]
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config: Any = transformers.CONFIG_MAPPING[model.kind](**model.sizes)
    config.architectures = [names[model.kind]]
    return dict(config.to_dict())


def sizes_of(shape: KVShape, codec: str, tokens: int) -> Row:
    """The sizes of a hand-off in MiB, under names with its tokens."""
    plan = parse_plan(codec, shape)
    total_bytes = Manifest(plan, tokens).total_bytes
    label = f"{tokens // 1024}k"
    return {
        "state": plan.state_bytes / MIB,
        f"kv {label}": (total_bytes - plan.state_bytes) / MIB,
        f"all {label}": total_bytes / MIB,
        f"percent {label}": 100 * plan.state_bytes / total_bytes,
    }


def count_handoff() -> list[Row]:
    """For each codec the bytes of a hand-off as two workers count them, and by arithmetic."""
    from tests.model.tiny import save_readable  # small models are the tests'

    with tempfile.TemporaryDirectory() as folder:
        model = str(save_readable(SMALL_MODEL, Path(folder)))
        prompt = prompt_of(SMALL_TOKENS, 0, model)
        config = Config(
            model=ModelConfig(model), transfer=TransferConfig(min_disagg_tokens=0)
        )
        shape = kv_shape(describe_model(model))
        with started_workers(config, Role.PREFILL, Role.DECODE) as (_, infos):

            async def handoffs() -> list[Row]:
                rows = []
                async with routed(infos) as router:
                    for codec in CODECS:
                        _, kv = await visit(router, prompt, codec)
                        rows.append(counted_row(shape, codec, kv))
                return rows

            return asyncio.run(handoffs())


def counted_row(shape: KVShape, codec: str, kv: Row) -> Row:
    """Bytes of a hand-off that its workers counted, and those of the arithmetic."""
    plan = parse_plan(codec, shape)
    return {
        "model": SMALL_MODEL,
        "codec": codec,
        "tokens": SMALL_TOKENS,
        "payload_bytes": kv["payload_bytes"],
        "arithmetic_bytes": Manifest(plan, SMALL_TOKENS).total_bytes,
        "wire_bytes": kv["wire_bytes"],
        "state_bytes": kv["state_bytes"],
    }


def hybrid_bytes(out: Out = None, as_json: Json = False) -> None:
    """Count the bytes of hand-offs of hybrid models."""
    show(measure_hybrid_bytes(), out, as_json)


if __name__ == "__main__":
    command.main(hybrid_bytes, "hybrid_bytes")
