"""`disagg bench decode` and `capacity`: steps of a whole model on pages of each codec.

The model has random weights and a real shape. Contexts are not computed by it: made-up K and V are
encoded and written to pages as a prompt is, which is faster and costs a step the same. Codecs run
by turns in one process, so that a busy machine is busy for all.

Capacity: the sequences that fit in a memory, and their speed; measured, and modelled for Llama 3.1
8B on GPUs by arithmetic alone: bytes that fit, and the time in which the GPU could read weights and
KV, or multiply. That is a bound that no kernel reaches, and every such row says so.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from disagg.bench.inputs import check_device, make_prompt, shape_of, slabs_for
from disagg.bench.result import Row, result_of, tell
from disagg.codecs.contract import Queries
from disagg.codecs.planning import codec_of, parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.engine.arena import make_pool, slab_bytes_for
from disagg.errors import ConfigError
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState, allocate_group
from disagg.model.attention import Batch, Decode
from disagg.model.runner import Runner
from disagg.paged.append import RecordIds, SequenceGrowth, take_records
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt
from disagg.paged.page_tables import plan_step

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 1 << 20,
    "rope_theta": 500000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
NAMES += " head_dim vocab_size"
SHAPE = "num_hidden_layers num_key_value_heads head_dim"
MODELS = {
    name: LLAMA | dict(zip(NAMES.split(), sizes, strict=True))
    for name, sizes in {
        "8b": (4096, 14336, 32, 32, 8, 128, 128256),
        "135m": (576, 1536, 30, 9, 3, 64, 49152),
        "wide": (
            1024,
            2816,
            4,
            32,
            8,
            128,
            4096,
        ),  # the heads of an 8B in few, small layers
        "small": (512, 1408, 4, 8, 2, 64, 4096),
    }.items()
}
RAW = "raw"
CODECS = (RAW, "int8", "kivi:bits=4", "kivi:bits=2", "gear-l:bits=2,backbone=kivi")
# by turns: an 8B and the pages of all codecs fit a GPU of 80 GB
SIZES = {"cpu": ("1x2048", "4x2048"), "cuda": ("1x32768", "16x8192", "32x4096")}
WARM_UP = 4  # steps before the first that counts: kernels are compiled, graphs recorded
SPARE_RECORDS = 10  # of every layout: a page of 128 raw tokens is 8, and what is begun
NOTES = "medians by turns; a step is plan, forward pass and greedy choice, for all sequences"
FITTED = (
    "raw:dtype=fp16",
    "fp8",
    "kivi:bits=4,residual=64",
    DEFAULT_CODEC,
    "banded:bits=2",
)
MODELLED = "8b"
USABLE = 0.9  # of a GPU's memory, for weights and KV
FITTED_NOTES = (
    "measured: steps of all sequences that fit, random weights; modelled: Llama 3.1 8B, bf16 "
    "weights, the larger of reading (weights + KV) and multiplying, which no kernel reaches"
)


@dataclass(frozen=True)
class DecodeOptions:
    """sizes: "sequences x tokens"; steps: of each codec in a round; dtype "": as devices like

    threads: of torch on a CPU; 0: as many as it chooses
    """

    device: str = "cpu"
    model: str = "small"
    dtype: str = ""
    threads: int = 0
    codecs: Sequence[str] = CODECS
    sizes: Sequence[str] = ()
    steps: int = 8
    rounds: int = 3


def run(options: DecodeOptions) -> Row:
    """Every codec at every size; ConfigError for a model, device or size that is none.

    kv_bytes: of a token, pages and tail · plan_ms: of a step, on the host
    ratio:    how many times faster a step is than on raw pages
    own:      share of a step that is not the model's own modules, on a CPU: planning, appending,
              attending, sampling; by turns with steps whose attention does nothing
    faster_from: tokens of each sequence from which a step is faster than on raw pages, if any
    """
    _check(options)
    sizes = [_size(text) for text in options.sizes or SIZES[options.device]]
    if options.threads:
        torch.set_num_threads(options.threads)
    runner = _random_model(options.model, options.device, options.dtype)
    rows = [row for size in sizes for row in _measure(runner, options, *size)]
    for row in rows:
        alike = [
            x for x in rows if x["codec"] == row["codec"] and _count(x) == _count(row)
        ]
        if tokens := faster_from([(_size(x["size"])[1], x["ratio"]) for x in alike]):
            row["faster_from"] = tokens
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    return result_of(rows, NOTES, **gpu)


def _check(options: "DecodeOptions | CapacityOptions") -> None:
    check_device(options.device, "--device cpu measures without one")
    sizes: list[Any] = [MODELS[options.model][name] for name in SHAPE.split()]
    for spec in options.codecs:
        parse_plan(spec, shape_of(*sizes))


def _random_model(model: str, device: str, dtype: str = "") -> Runner:
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        return Runner.random(folder, dtype, device)


def _measure(
    runner: Runner, options: DecodeOptions, count: int, tokens: int
) -> list[Row]:
    """Every codec at one size."""
    size, steps = f"{count}x{tokens}", options.steps * options.rounds
    codecs = [RAW, *(spec for spec in options.codecs if spec != RAW)]
    found = [
        Decoding(runner, spec, count, tokens, WARM_UP + steps)
        for spec in tell(codecs, lambda spec: f"{size}, contexts of {spec}")
    ]
    for _ in tell(
        range(options.rounds), lambda number: f"{size}, steps of round {number + 1}"
    ):
        for decoding in found:
            for _ in range(options.steps):
                decoding.step()
                if options.device == "cpu":
                    decoding.pass_modules()
    if runner.graphs is not None:
        runner.graphs.clear()  # or the next size would have its arenas beside these
    rows: list[Row] = []
    for decoding in found:
        plan_ms, step_ms = decoding.median_ms()
        row = {
            "codec": decoding.plan.spec,
            "model": options.model,
            "dtype": runner.info.dtype,
            "size": size,
            "step_ms": step_ms,
            "plan_ms": plan_ms,
            "tokens_per_s": 1e3 * count / step_ms,
            "kv_bytes": decoding.plan.nbytes(tokens) / tokens,
        }
        if decoding.bare:
            row["own"] = 1 - 1e3 * statistics.median(decoding.bare) / step_ms
        rows.append(row | {"ratio": rows[0]["step_ms"] / step_ms if rows else 1.0})
    return rows


def _size(text: str) -> tuple[int, int]:
    """Sequences and tokens of "4x2048"."""
    with suppress(ValueError):
        count, tokens = map(int, text.split("x"))
        if count > 0 and tokens > 0:
            return count, tokens
    raise ConfigError(
        f"size {text!r} is none; sequences x tokens is wanted, such as 4x2048"
    )


def _count(row: Row) -> int:
    return _size(row["size"])[0]


def faster_from(ratios: Sequence[tuple[int, float]]) -> int | None:
    """The tokens from which a codec is faster, between two measured sizes by a straight line.

    ratios: (tokens, how many times faster) of sizes with as many sequences
    None:   it is not faster at the largest; where it is at the smallest already, that one
    """
    longer, ahead = 0, 0.0
    for tokens, ratio in sorted(ratios, reverse=True):
        if ratio <= 1.0:
            if not longer:
                return None
            return round(tokens + (1.0 - ratio) / (ahead - ratio) * (longer - tokens))
        longer, ahead = tokens, ratio
    return longer or None


class Decoding:
    """Sequences of one codec that decode step by step; the first WARM_UP steps are over."""

    def __init__(
        self, runner: Runner, spec: str, count: int, tokens: int, steps: int
    ) -> None:
        self.plan = parse_plan(spec, runner.shape)
        self.times: list[tuple[float, float]] = []  # seconds of planning, and of all
        self.bare: list[float] = []  # seconds of the same step without attention
        self._runner, self._n = runner, tokens
        slab = slab_bytes_for(
            runner.shape.num_layers, runner.shape.heads, runner.shape.head_dim
        )
        slabs = slabs_for(self.plan, tokens + steps, slab, count, SPARE_RECORDS)
        self._pool, self._arena = make_pool(slabs * slab, slab, runner.device)
        self._states = [
            [allocate_group(group, tokens, self._pool) for group in self.plan.groups]
            for _ in range(count)
        ]
        self._tokens = list(range(count))
        for states in self._states:
            _write_context(runner, self.plan, states, self._arena, tokens)
        for _ in range(WARM_UP):
            self.step()
        self.times.clear()

    def median_ms(self) -> tuple[float, float]:
        """Milliseconds of planning a step, and of all of it."""
        plan, whole = (
            1e3 * statistics.median(x) for x in zip(*self.times, strict=True)
        )
        return plan, whole

    def step(self) -> None:
        """One more token of every sequence."""
        began = time.perf_counter()
        decodes = []
        for index, group in enumerate(self.plan.groups):
            growths = [
                SequenceGrowth(s[index], self._n, 1, row)
                for row, s in enumerate(self._states)
            ]
            fresh = take_records(group, growths, self._pool)
            codec = codec_of(group)
            step = plan_step(codec, group, growths, fresh, self._arena.device)
            decodes.append(Decode(codec, step, whole=True))
        batch = self._batch(decodes)
        planned = time.perf_counter()
        self._tokens = self._runner.forward(batch).max(1).indices.tolist()
        for decode in decodes:
            self._pool.release(decode.step.freed)
        self._n += 1
        self.times.append((planned - began, time.perf_counter() - began))

    def pass_modules(self) -> None:
        """The model's own modules for the tokens of a step; attention gives zeros."""
        began = time.perf_counter()
        self._runner.forward(self._batch([]))
        self.bare.append(time.perf_counter() - began)

    def _batch(self, decodes: Sequence[Decode]) -> Batch:
        count = len(self._tokens)
        positions = [self._n] * count
        return Batch(
            self._tokens, positions, range(count), self._arena, decodes=tuple(decodes)
        )


def _write_context(
    runner: Runner,
    plan: Plan,
    states: list[GroupState],
    arena: torch.Tensor,
    tokens: int,
) -> None:
    """Made-up K and V of a prompt, the same in every layer, encoded into the pages of a state."""
    heads = runner.shape.heads
    made = make_prompt(tokens, heads, runner.shape.head_dim, 2)
    k, v, q = (
        x.to(runner.device, getattr(torch, runner.info.dtype))
        for x in (made.k, made.v, made.q)
    )
    queries = Queries.of(q, heads, tokens)
    for group, at in zip(plan.groups, map(RecordIds.of, states), strict=True):
        for layer in group.layers:
            records = LayerRecords(group, layer, arena)
            chunk = PromptChunk(k, v, total=tokens, queries=queries)
            write_prompt(codec_of(group), records, at, chunk)


# -- capacity


class Gpu(NamedTuple):
    """From its data sheet: bytes, bytes a second, dense bf16 operations a second."""

    memory: float
    bandwidth: float
    flops: float


GPUS = {"H100 SXM": Gpu(80e9, 3.35e12, 989e12), "H200": Gpu(141e9, 4.8e12, 989e12)}


@dataclass(frozen=True)
class CapacityOptions:
    """memory_mb: for KV, of the measured rows · tokens: of each sequence · most: sequences that are
    measured, if more fit"""

    device: str = "cpu"
    model: str = "small"
    memory_mb: float = 16
    tokens: int = 2048
    codecs: Sequence[str] = FITTED
    most: int = 64
    steps: int = 8


def measure_capacity(options: CapacityOptions) -> Row:
    """A row for every codec and machine; `ratio` is of tokens a second to the first codec.

    sequences: that fit · measured: of them, in the steps · kv_mb: of one sequence
    """
    _check(options)
    rows = [*_measured(options)]
    for name, gpu in GPUS.items():
        rows += _modelled(options, name, gpu)
    first = {row["machine"]: row["tokens_per_s"] for row in reversed(rows)}
    for row in rows:
        if of := first[row["machine"]]:  # the first one fits
            row["ratio"] = row["tokens_per_s"] / of
    return result_of(rows, FITTED_NOTES)


def _measured(options: CapacityOptions) -> Iterator[Row]:
    runner, tokens = _random_model(options.model, options.device), options.tokens
    sizes = {
        spec: parse_plan(spec, runner.shape).nbytes(tokens) for spec in options.codecs
    }
    fitting = {
        spec: int(options.memory_mb * 1e6 // nbytes) for spec, nbytes in sizes.items()
    }
    counts = {spec: min(number, options.most) for spec, number in fitting.items()}
    found = {
        spec: Decoding(runner, spec, counts[spec], tokens, WARM_UP + options.steps)
        for spec in tell(
            filter(counts.get, counts), f"{options.memory_mb:g} MB of {{}}".format
        )
    }
    for _ in tell(range(options.steps), "step {}".format):
        for decoding in found.values():
            decoding.step()
    machine = f"measured, {options.model} model, {options.memory_mb:g} MB"
    for spec, nbytes in sizes.items():
        step_s = 1e-3 * found[spec].median_ms()[1] if spec in found else 0.0
        yield _row(machine, spec, nbytes, fitting[spec], counts[spec], step_s)


def _modelled(options: CapacityOptions, name: str, gpu: Gpu) -> Iterator[Row]:
    shape, weights = shape_of(), 2 * parameters()
    for spec in options.codecs:
        nbytes = parse_plan(spec, shape).nbytes(options.tokens)
        count = max(0, int((USABLE * gpu.memory - weights) // nbytes))
        reading = (weights + count * nbytes) / gpu.bandwidth
        step_s = max(reading, count * weights / gpu.flops)
        yield _row(f"modelled, 8B on {name}", spec, nbytes, count, count, step_s)


def _row(
    machine: str, spec: str, nbytes: int, fitting: int, count: int, step_s: float
) -> Row:
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
