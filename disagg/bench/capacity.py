"""`disagg bench capacity`: the sequences that fit in memory, and their speed.

Both are measured on this machine, and modelled for Llama 3.1 8B on GPUs: the bytes that fit, and
the least time to read weights and KV or to multiply. No kernel reaches this bound; each modelled
row says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.bench.decode import MODELS, WARM_UP, Decoding, check_model, random_model
from disagg.bench.inputs import shape_of
from disagg.bench.result import Row, progress, result_of
from disagg.codecs.planning import parse_plan
from disagg.config import DEFAULT_CODEC

CODECS = (
    "raw:dtype=fp16",
    "fp8",
    "kivi:bits=4,residual=64",
    DEFAULT_CODEC,
    "banded:bits=2",
)
MODELLED = "8b"
USABLE = 0.9  # of a GPU's memory, for weights and KV
WEIGHT_BYTES = 2  # bf16
NOTES = (
    "measured: steps of all sequences that fit, random weights; modelled: Llama 3.1 8B, bf16 "
    "weights, the larger of reading (weights + KV) and multiplying, which no kernel reaches"
)


class Gpu(NamedTuple):
    """Figures of a data sheet: bytes, bytes a second, dense bf16 operations a second."""

    memory: float
    bandwidth: float
    flops: float


GPUS = {"H100 SXM": Gpu(80e9, 3.35e12, 989e12), "H200": Gpu(141e9, 4.8e12, 989e12)}


@dataclass(frozen=True)
class CapacityOptions:
    """What to measure.

    memory_mb: memory for KV, for measured rows
    tokens:    length of each sequence
    most:      limit of measured sequences, if more fit
    """

    device: str = "cpu"
    model: str = "small"
    memory_mb: float = 16
    tokens: int = 2048
    codecs: Sequence[str] = CODECS
    most: int = 64
    steps: int = 8


def measure_capacity(options: CapacityOptions) -> Row:
    """A row for every codec and machine; `ratio` is of tokens a second to the first codec.

    sequences: how many fit
    measured:  how many of them decoded
    kv_mb:     of one sequence
    """
    check_model(options.model, options.device, options.codecs)
    rows = [*_measured(options)]
    for name, gpu in GPUS.items():
        rows += _modelled(options, name, gpu)
    first_codec: dict[str, float] = {}  # tokens a second, by machine
    for row in rows:
        tokens_per_s = first_codec.setdefault(row["machine"], row["tokens_per_s"])
        if tokens_per_s:  # the first one fits
            row["ratio"] = row["tokens_per_s"] / tokens_per_s
    return result_of(rows, NOTES)


def _measured(options: CapacityOptions) -> Iterator[Row]:
    runner = random_model(options.model, options.device)
    machine = f"measured, {options.model} model, {options.memory_mb:g} MB"
    nbytes, fitting = {}, {}
    for spec in options.codecs:
        nbytes[spec] = parse_plan(spec, runner.shape).nbytes(options.tokens)
        fitting[spec] = int(options.memory_mb * 1e6 // nbytes[spec])
    fitting_specs = [spec for spec in options.codecs if fitting[spec]]
    all_decoding = {}
    for spec in progress(fitting_specs, f"{options.memory_mb:g} MB of {{}}".format):
        count = min(fitting[spec], options.most)
        steps = WARM_UP + options.steps
        all_decoding[spec] = Decoding(runner, spec, count, options.tokens, steps)
    for _ in progress(range(options.steps), "step {}".format):
        for decoding in all_decoding.values():
            decoding.step()
    for spec in options.codecs:
        step_s = 0.0
        if spec in all_decoding:
            _, step_ms = all_decoding[spec].median_ms()
            step_s = 1e-3 * step_ms
        count = min(fitting[spec], options.most)
        row = _row(machine, spec, nbytes[spec], fitting[spec], count, step_s)
        yield {**row, "measured": count}


def _modelled(options: CapacityOptions, name: str, gpu: Gpu) -> Iterator[Row]:
    weight_bytes = WEIGHT_BYTES * parameters()
    kv_memory = USABLE * gpu.memory - weight_bytes
    for spec in options.codecs:
        nbytes = parse_plan(spec, shape_of()).nbytes(options.tokens)
        count = max(0, int(kv_memory // nbytes))
        reading_s = (weight_bytes + count * nbytes) / gpu.bandwidth
        multiplying_s = count * 2 * parameters() / gpu.flops
        step_s = max(reading_s, multiplying_s)
        yield _row(f"modelled, 8B on {name}", spec, nbytes, count, count, step_s)


def _row(
    machine: str, spec: str, nbytes: int, fitting: int, count: int, step_s: float
) -> Row:
    """count: sequences of a step, which takes `step_s`."""
    return {
        "machine": machine,
        "codec": spec,
        "kv_mb": nbytes / 1e6,
        "sequences": fitting,
        "measured": 0,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": count / step_s if step_s else 0.0,
    }


def parameters() -> int:
    """Of the modelled model; each is two operations for a token."""
    config = MODELS[MODELLED]
    width, head_dim = config["hidden_size"], config["head_dim"]
    query_and_output = 2 * width * config["num_attention_heads"] * head_dim
    key_and_value = 2 * width * config["num_key_value_heads"] * head_dim
    mlp = 3 * width * config["intermediate_size"]
    layer = query_and_output + key_and_value + mlp
    embeddings = 2 * width * config["vocab_size"]
    return int(embeddings + config["num_hidden_layers"] * layer)
