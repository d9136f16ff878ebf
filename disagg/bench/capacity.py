"""`disagg bench capacity`: sequences that fit in a memory under each codec, and their speed.

Measured on this machine by turns, with a model of random weights; and modelled for Llama 3.1 8B on
GPUs by arithmetic alone: bytes that fit, and the time in which the GPU could read weights and KV,
or multiply. That is a bound that no kernel reaches, and every such row says so.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.bench.decode import MODELS, NAMES, WARM_UP, Decoding
from disagg.bench.inputs import check_device, shape_of
from disagg.bench.result import Row, result_of, tell
from disagg.codecs.planning import parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.errors import ConfigError
from disagg.model.runner import Runner

RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", "kivi:bits=4,residual=64", DEFAULT_CODEC, "banded:bits=2")
MODELLED = "8b"
USABLE = 0.9  # of a GPU's memory, for weights and KV
NOTES = (
    "measured: steps of all sequences that fit, random weights; modelled: Llama 3.1 8B, bf16 "
    "weights, the larger of reading (weights + KV) and multiplying, which no kernel reaches"
)


@dataclass(frozen=True)
class Gpu:
    """From its data sheet: bytes, bytes a second, dense bf16 operations a second."""

    name: str
    memory: float
    bandwidth: float
    flops: float


GPUS = (Gpu("H100 SXM", 80e9, 3.35e12, 989e12), Gpu("H200", 141e9, 4.8e12, 989e12))


@dataclass(frozen=True)
class CapacityOptions:
    """memory_mb: for KV, of the measured rows · tokens: of each sequence · most: sequences that are
    measured, if more fit"""

    device: str = "cpu"
    model: str = "small"
    memory_mb: float = 16
    tokens: int = 2048
    codecs: Sequence[str] = CODECS
    most: int = 64
    steps: int = 8


def measure_capacity(options: CapacityOptions) -> Row:
    """A row for every codec and machine; `ratio` is of tokens a second to the first codec.

    sequences: that fit · measured: of them, in the steps · kv_mb: of one sequence
    """
    if options.model not in MODELS:
        raise ConfigError(f"model {options.model!r} is unknown; known: {', '.join(MODELS)}")
    check_device(options.device, "--device cpu measures without one")
    rows = [*_measured(options)]
    for gpu in GPUS:
        rows += _modelled(options, gpu)
    first = {row["machine"]: row["tokens_per_s"] for row in reversed(rows)}
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / first[row["machine"]] if row["sequences"] else 0.0
    return result_of(rows, NOTES)


def _measured(options: CapacityOptions) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[options.model]))
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        runner = Runner.random(folder, dtype, options.device)
    found: list[tuple[str, int, Decoding | None]] = []
    for spec in tell(options.codecs, f"{options.memory_mb:g} MB of {{}}".format):
        nbytes = parse_plan(spec, runner.shape).nbytes(options.tokens)
        count, steps = int(options.memory_mb * 1e6 // nbytes), WARM_UP + options.steps
        asked = spec, min(count, options.most), options.tokens, steps
        found.append((spec, nbytes, Decoding(runner, *asked) if count else None))
    for _ in tell(range(WARM_UP + options.steps), "step {}".format):
        for _, _, decoding in found:
            if decoding:
                decoding.step()
    machine = f"measured, {options.model} model, {options.memory_mb:g} MB"
    for spec, nbytes, decoding in found:
        times = [total for _, total in decoding.times[WARM_UP:]] if decoding else [0.0]
        fitting = int(options.memory_mb * 1e6 // nbytes)
        most = min(fitting, options.most)
        yield _row(machine, spec, nbytes, fitting, most, statistics.median(times))


def _modelled(options: CapacityOptions, gpu: Gpu) -> Iterator[Row]:
    shape, weights = shape_of(), 2 * parameters()
    for spec in options.codecs:
        nbytes = parse_plan(spec, shape).nbytes(options.tokens)
        count = max(0, int((USABLE * gpu.memory - weights) // nbytes))
        reading = (weights + count * nbytes) / gpu.bandwidth
        step_s = max(reading, count * weights / gpu.flops)
        yield _row(f"modelled, 8B on {gpu.name}", spec, nbytes, count, count, step_s)


def _row(machine: str, spec: str, nbytes: int, fitting: int, count: int, step_s: float) -> Row:
    return {
        "machine": machine,
        "codec": spec,
        "kv_mb": nbytes / 1e6,
        "sequences": fitting,
        "measured": count if machine.startswith("measured") else 0,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": count / step_s if step_s else 0.0,
    }


def parameters() -> int:
    """Of the modelled model, each two operations for a token."""
    sizes: list[Any] = [MODELS[MODELLED][name] for name in NAMES.split()]
    width, inner, layers, heads, kv_heads, dim, words = sizes
    layer = width * (2 * heads * dim + 2 * kv_heads * dim + 3 * inner)
    return int(2 * words * width + layers * layer)
