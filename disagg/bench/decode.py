"""`disagg bench decode`: how long does a step of a whole model take on pages of each codec?

    python -m disagg.bench.decode --device cpu
    python -m disagg.bench.decode --device cuda --model 8b --size 32x8192 --json

The model has random weights and a real shape. Contexts are not computed by it: made-up K and V are
encoded and written to pages as a prompt is, which is faster and costs a step the same. Codecs run
by turns in one process, so that a busy machine is busy for all.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from disagg.bench.decoding import Decoding
from disagg.bench.kernels import table, write
from disagg.bench.provenance import result_of
from disagg.errors import ConfigError
from disagg.model.runner import Runner

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 1 << 20,
    "rope_theta": 500000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
MODELS = {
    "8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    "small": LLAMA
    | {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096},
}
RAW = "raw"
CODECS = (RAW, "int8", "kivi:bits=4", "kivi:bits=2", "gear-l:bits=2,backbone=kivi")
SIZES = {"cpu": ("1x2048", "4x2048"), "cuda": ("1x32768", "32x8192", "64x4096")}
WARM_UP = 4  # steps before the first that counts: kernels are compiled, graphs recorded
NOTES = "medians by turns; a step is plan, forward pass and greedy choice, for all sequences"


@dataclass(frozen=True)
class Options:
    """sizes: "sequences x tokens"; steps: of each codec in a round"""

    device: str = "cpu"
    model: str = "small"
    codecs: Sequence[str] = CODECS
    sizes: Sequence[str] = ()
    steps: int = 8
    rounds: int = 3


@dataclass(frozen=True)
class Speed:
    """One codec at one size.

    kv_bytes: of a token, pages and tail · plan_ms: of a step, on the host
    ratio:    how many times faster a step is than on raw pages
    """

    codec: str
    model: str
    size: str
    step_ms: float
    plan_ms: float
    tokens_per_s: float
    kv_bytes: float
    ratio: float


def measure(options: Options) -> list[Speed]:
    """Every codec at every size; ConfigError for a model or size that is none."""
    if options.model not in MODELS:
        raise ConfigError(f"model {options.model!r} is unknown; known: {', '.join(MODELS)}")
    if options.device not in SIZES:
        raise ConfigError(f"device {options.device!r} is unknown; known: {', '.join(SIZES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; --device cpu measures without one")
    sizes = [_size(text) for text in options.sizes or SIZES[options.device]]
    codecs = (RAW, *(spec for spec in options.codecs if spec != RAW))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[options.model]))
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        runner = Runner.random(folder, dtype, options.device)
    return [x for size in sizes for x in _measure_size(runner, options, codecs, *size)]


def _measure_size(
    runner: Runner, options: Options, codecs: Sequence[str], count: int, tokens: int
) -> list[Speed]:
    steps = WARM_UP + options.steps * options.rounds
    found = [Decoding(runner, spec, count, tokens, steps) for spec in codecs]
    for decoding in found:
        for _ in range(WARM_UP):
            decoding.step()
        decoding.times.clear()
    for _ in range(options.rounds):
        for decoding in found:
            for _ in range(options.steps):
                decoding.step()
    rows: list[Speed] = []
    for decoding in found:
        plan_ms, step_ms = (1e3 * statistics.median(x) for x in zip(*decoding.times, strict=True))
        speed = Speed(
            codec=decoding.plan.spec,
            model=options.model,
            size=f"{count}x{tokens}",
            step_ms=step_ms,
            plan_ms=plan_ms,
            tokens_per_s=1e3 * count / step_ms,
            kv_bytes=decoding.plan.nbytes(tokens) / tokens,
            ratio=1.0,
        )
        rows.append(replace(speed, ratio=rows[0].step_ms / step_ms) if rows else speed)
    return rows


def _size(text: str) -> tuple[int, int]:
    """Sequences and tokens of "4x2048"."""
    with suppress(ValueError):
        count, tokens = map(int, text.split("x"))
        if count > 0 and tokens > 0:
            return count, tokens
    raise ConfigError(f"size {text!r} is none; sequences x tokens is wanted, such as 4x2048")


def run(options: Options) -> dict[str, Any]:
    """The result as a JSON object."""
    result = result_of("disagg.bench.decode", measure(options), NOTES)
    if options.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS), default="small")
    parser.add_argument("--codec", action="append", help="may be repeated")
    parser.add_argument("--size", action="append", default=[], help="sequences x tokens: 4x2048")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    result = run(Options(asked.device, asked.model, asked.codec or CODECS, asked.size))
    if asked.out:
        write(result, asked.out)
    print(json.dumps(result) if asked.json else table(result["rows"]))


if __name__ == "__main__":
    main()
