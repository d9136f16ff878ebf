"""`disagg bench decode`: steps of a whole model on pages of each codec.

The model has random weights and a real shape. Contexts are synthetic K and V, encoded and written
to pages as a prompt is: faster than computing them, and a step costs the same. Codecs take turns in
one process, so that a busy machine slows all of them alike.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disagg.bench.inputs import check_device, make_prompt, shape_of, slabs_for
from disagg.bench.result import Row, progress, result_of
from disagg.codecs.contract import Queries
from disagg.codecs.planning import codec_of, parse_plan
from disagg.engine.arena import make_pool
from disagg.errors import ConfigError
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState, allocate_group
from disagg.model.attention import Batch, Decode
from disagg.model.capacity import slab_bytes_for
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
MODELS: dict[str, dict[str, Any]] = {
    "8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "135m": {
        **LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    # the heads of an 8B in few, small layers
    "wide": {
        **LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 4096,
    },
    "small": {
        **LLAMA,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
    },
}
RAW = "raw"
CODECS = (RAW, "int8", "kivi:bits=4", "kivi:bits=2", "gear-l:bits=2,backbone=kivi")
# by turns: an 8B and the pages of all codecs fit a GPU of 80 GB
SIZES = {"cpu": ("1x2048", "4x2048"), "cuda": ("1x32768", "16x8192", "32x4096")}
WARM_UP = 4  # steps before the first that counts: kernels are compiled, graphs recorded
SPARE_RECORDS = 10  # of every layout: a page of 128 raw tokens is 8, and what is begun
NOTES = "medians by turns; a step is plan, forward pass and greedy choice, for all sequences"


@dataclass(frozen=True)
class DecodeOptions:
    """What to measure.

    sizes:   "sequences x tokens"
    steps:   steps of each codec in a round
    dtype:   dtype of the weights; "": default of the device
    threads: torch threads on a CPU; 0: torch's default
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
    """Every codec at every size; ConfigError for an unknown model, device or size.

    kv_bytes: of a token, pages and tail
    plan_ms:  of a step, on the host
    ratio:    how many times faster a step is than on raw pages
    own:      share of a step outside of the model's modules, on a CPU: planning, appending,
              attending, sampling; measured in turn with steps whose attention does nothing
    faster_from: sequence length from which a step is faster than on raw pages, if any
    """
    check_model(options.model, options.device, options.codecs)
    sizes = [parse_size(text) for text in options.sizes or SIZES[options.device]]
    if options.threads:
        torch.set_num_threads(options.threads)
    runner = random_model(options.model, options.device, options.dtype)
    rows = []
    for num_sequences, tokens in sizes:
        rows += _measure(runner, options, num_sequences, tokens)
    _add_faster_from(rows)
    more = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    return result_of(rows, NOTES, **more)


def check_model(model: str, device: str, codecs: Sequence[str]) -> None:
    """ConfigError unless the device is there and all codecs make plans for the model."""
    check_device(device, "--device cpu measures without one")
    config = MODELS[model]
    shape = shape_of(
        config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
    )
    for spec in codecs:
        parse_plan(spec, shape)


def random_model(model: str, device: str, dtype: str = "") -> Runner:
    """A model with random weights; no dtype: that of the device."""
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        return Runner.random(folder, dtype, device)


def _measure(
    runner: Runner, options: DecodeOptions, num_sequences: int, tokens: int
) -> list[Row]:
    """Every codec at one size."""
    size = f"{num_sequences}x{tokens}"
    num_steps = WARM_UP + options.steps * options.rounds
    codecs = [RAW, *(spec for spec in options.codecs if spec != RAW)]
    all_decoding = []
    for spec in progress(codecs, f"{size}, contexts of {{}}".format):
        all_decoding.append(Decoding(runner, spec, num_sequences, tokens, num_steps))
    for _ in progress(
        range(1, options.rounds + 1), f"{size}, steps of round {{}}".format
    ):
        for decoding in all_decoding:
            for _ in range(options.steps):
                decoding.step()
                if options.device == "cpu":
                    decoding.pass_modules()
    if runner.graphs is not None:
        runner.graphs.clear()  # or the next size would have its arenas beside these
    rows: list[Row] = []
    for decoding in all_decoding:
        plan_ms, step_ms = decoding.median_ms()
        row = {
            "codec": decoding.plan.spec,
            "model": options.model,
            "dtype": runner.info.dtype,
            "size": size,
            "step_ms": step_ms,
            "plan_ms": plan_ms,
            "tokens_per_s": 1e3 * num_sequences / step_ms,
            "kv_bytes": decoding.plan.nbytes(tokens) / tokens,
        }
        if decoding.modules_s:
            row["own"] = 1 - 1e3 * statistics.median(decoding.modules_s) / step_ms
        raw_ms = rows[0]["step_ms"] if rows else step_ms
        row["ratio"] = raw_ms / step_ms
        rows.append(row)
    return rows


def parse_size(text: str) -> tuple[int, int]:
    """Sequences and tokens of "4x2048"."""
    with suppress(ValueError):
        num_sequences, tokens = map(int, text.split("x"))
        if num_sequences > 0 and tokens > 0:
            return num_sequences, tokens
    raise ConfigError(
        f"size {text!r} is none; expected sequences x tokens, such as 4x2048"
    )


def _add_faster_from(rows: Sequence[Row]) -> None:
    """By codec and number of sequences."""
    ratios: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in rows:
        num_sequences, tokens = parse_size(row["size"])
        by_tokens = ratios.setdefault((row["codec"], num_sequences), [])
        by_tokens.append((tokens, row["ratio"]))
    for row in rows:
        num_sequences, _ = parse_size(row["size"])
        tokens_from = faster_from(ratios[row["codec"], num_sequences])
        if tokens_from:
            row["faster_from"] = tokens_from


def faster_from(ratios: Sequence[tuple[int, float]]) -> int | None:
    """The sequence length from which a codec is faster, interpolated between measured sizes.

    That is the smallest size if the codec is faster there; None if it is slower at the largest.

    ratios: (tokens, how many times faster) of sizes with equally many sequences
    """
    faster_tokens, faster_ratio = 0, 0.0
    for tokens, ratio in sorted(ratios, reverse=True):
        if ratio <= 1.0:
            if not faster_tokens:
                return None
            share = (1.0 - ratio) / (faster_ratio - ratio)
            return round(tokens + share * (faster_tokens - tokens))
        faster_tokens, faster_ratio = tokens, ratio
    return faster_tokens or None


class Decoding:
    """Sequences of one codec that decode step by step, warmed up.

    times:     seconds of planning a step, and of all of it
    modules_s: seconds of the same step without attention
    """

    def __init__(
        self, runner: Runner, spec: str, num_sequences: int, tokens: int, steps: int
    ) -> None:
        self.plan = parse_plan(spec, runner.shape)
        self.times: list[tuple[float, float]] = []
        self.modules_s: list[float] = []
        self._runner = runner
        self._n = tokens
        arena_bytes = num_sequences * self.plan.nbytes(tokens + steps)
        slab_bytes = slab_bytes_for(runner.shape, [self.plan], arena_bytes, tokens)
        slabs = slabs_for(
            self.plan, tokens + steps, slab_bytes, num_sequences, SPARE_RECORDS
        )
        pool, arena = make_pool(slabs * slab_bytes, slab_bytes, runner.device)
        self._pool, self._arena = pool, arena
        self._states = [
            [allocate_group(group, tokens, pool) for group in self.plan.groups]
            for _ in range(num_sequences)
        ]
        self._tokens = list(range(num_sequences))
        for states in self._states:
            _write_context(runner, self.plan, states, arena, tokens)
        for _ in range(WARM_UP):
            self.step()
        self.times.clear()

    def median_ms(self) -> tuple[float, float]:
        """Milliseconds of planning a step, and of all of it."""
        plan_s = statistics.median(plan_s for plan_s, _ in self.times)
        step_s = statistics.median(step_s for _, step_s in self.times)
        return 1e3 * plan_s, 1e3 * step_s

    def step(self) -> None:
        """One more token of every sequence."""
        began = time.perf_counter()
        decodes = []
        for index, group in enumerate(self.plan.groups):
            growths = [
                SequenceGrowth(states[index], self._n, 1, row)
                for row, states in enumerate(self._states)
            ]
            new_records = take_records(group, growths, self._pool)
            codec = codec_of(group)
            step = plan_step(codec, group, growths, new_records, self._arena.device)
            decodes.append(Decode(codec, step, whole=True))
        batch = self._batch(decodes)
        planned = time.perf_counter()
        self._tokens = self._runner.forward(batch).max(1).indices.tolist()
        for decode in decodes:
            self._pool.release(decode.step.freed)
        self._n += 1
        self.times.append((planned - began, time.perf_counter() - began))

    def pass_modules(self) -> None:
        """Run only the model's modules for the tokens of a step; attention returns zeros."""
        began = time.perf_counter()
        self._runner.forward(self._batch([]))
        self.modules_s.append(time.perf_counter() - began)

    def _batch(self, decodes: Sequence[Decode]) -> Batch:
        count = len(self._tokens)
        positions = [self._n] * count
        return Batch(
            self._tokens, positions, range(count), self._arena, decodes=tuple(decodes)
        )


def _write_context(
    runner: Runner,
    plan: Plan,
    states: Sequence[GroupState],
    arena: torch.Tensor,
    tokens: int,
) -> None:
    """Made-up K and V of a prompt, the same in every layer, encoded into the pages of a state."""
    dtype = getattr(torch, runner.info.dtype)
    for group, state in zip(plan.groups, states, strict=True):
        prompt = make_prompt(tokens, group.heads, group.head_dim, 2)
        k = prompt.k.to(runner.device, dtype)
        v = prompt.v.to(runner.device, dtype)
        q = prompt.q.to(runner.device, dtype)
        queries = Queries.of(q, group.heads, tokens)
        codec, at = codec_of(group), RecordIds.of(state)
        for layer in group.layers:
            records = LayerRecords(group, layer, arena)
            chunk = PromptChunk(k, v, total=tokens, queries=queries)
            write_prompt(codec, records, at, chunk)
