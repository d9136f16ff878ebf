"""Weights of 8 and 4 bits on a CPU: speed and quality beside the weights as stored.

    python -m benchmarks.weights --json --out FILE

Speed: a decode step behind prompts of 512 tokens and the forward pass of such a prompt, on a model
and on one layer of an 8B with random weights. All weights take turns in one process; times are of
the processor.

Quality: the tokens of a text, each predicted from all before it, in one pass with exact attention.
Layers of any size are rounded, since those of a small model would not be. int4 is measured with
each of its kernels: that for few tokens, and those for many.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor
from typer import Option

from benchmarks import command
from disagg.bench.decode import Decoding
from disagg.bench.result import Row, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.eval.texts import PYTHON, cut_rows, read_text
from disagg.model import quantized_linear
from disagg.model.attention import Batch, Chunk
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer

NOTES = "speed: medians by turns, processor time; quality: against stored weights in float32"
CODEC = "raw"
CONTEXT = 512  # tokens of a prompt
LAYER = "one layer of an 8B"
LAYER_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
SPEED_COLUMNS = ["model", "weights", "layers", "tokens", "ms", "ratio"]
QUALITY_COLUMNS = ["model", "weights", "kernel", "perplexity", "kl", "top1_pct"]


@dataclass(frozen=True)
class Variant:
    """Weights and the dtype of the model.

    any_size: layers of any size are rounded
    max_rows: tokens up to which int4 has its kernel for few; None: as served
    """

    dtype: str = "bfloat16"
    weights: str | None = None
    any_size: bool = False
    max_rows: float | None = None

    @property
    def kernel(self) -> str:
        """The kernel that int4 always takes, in words; empty: as served."""
        if self.max_rows is None:
            return ""
        return "few tokens" if self.max_rows else "many tokens"

    def __str__(self) -> str:
        name = self.weights or self.dtype
        return f"{name}, any size" if self.any_size else name


@dataclass(frozen=True)
class WeightsOptions:
    """What to measure.

    sequences: of a decode step
    rows:      of a text, of `CONTEXT` tokens
    """

    model: str = "smollm2"
    sequences: Sequence[int] = (1, 2, 4, 16)
    steps: int = 15
    rows: int = 8
    threads: int = 1


SPEED_OF_MODEL = (
    Variant(),
    Variant("float32"),
    Variant(weights="int4"),
    Variant(weights="int8", any_size=True),
)
SPEED_OF_LAYER = (
    Variant(),
    Variant("float32"),
    Variant(weights="int4"),
    Variant(weights="int8"),
)
QUALITY = (
    Variant(),
    Variant(weights="int8", any_size=True),
    Variant(weights="int4", any_size=True, max_rows=math.inf),
    Variant(weights="int4", any_size=True, max_rows=0),
)


@contextmanager
def _settings_of(variant: Variant) -> Iterator[None]:
    """The module rounds the layers of a variant, and multiplies by its kernel."""
    with ExitStack() as stack:
        if variant.any_size:
            every = dict.fromkeys(quantized_linear.LEAST_NUMBERS, 0)
            stack.enter_context(patch.dict(quantized_linear.LEAST_NUMBERS, every))
        if variant.max_rows is not None:
            for name in ("MAX_ROWS", "MAX_ROWS_BESIDE_INT8"):
                change = patch.object(quantized_linear, name, variant.max_rows)
                stack.enter_context(change)
        yield


def load(model: str | None, variant: Variant) -> Runner:
    """A model with the weights of a variant."""
    with _settings_of(variant):
        return Runner.load(model, variant.dtype, weights=variant.weights)


def load_layer(variant: Variant) -> Runner:
    """One layer of an 8B with random weights."""
    with TemporaryDirectory() as folder, _settings_of(variant):
        (Path(folder) / "config.json").write_text(json.dumps(LAYER_CONFIG))
        return Runner.random(folder, variant.dtype, weights=variant.weights)


def measure_speed(
    model: str, runners: Mapping[Variant, Runner], options: WeightsOptions
) -> list[Row]:
    """Milliseconds of decode steps and of a prompt, and their ratio to the first variant."""
    rows = []
    for count in options.sequences:
        decodings = {
            variant: Decoding(runner, CODEC, count, CONTEXT, 2 * options.steps)
            for variant, runner in runners.items()
        }
        calls = {variant: decoding.step for variant, decoding in decodings.items()}
        times = _times(calls, options.steps)
        rows += _speed_rows(model, f"{count} decoded", runners, times)
    prompts = {
        variant: lambda runner=runner: _logits(runner, range(CONTEXT), [CONTEXT - 1])
        for variant, runner in runners.items()
    }
    times = _times(prompts, max(3, options.steps // 3))
    return rows + _speed_rows(model, f"{CONTEXT} of a prompt", runners, times)


def _times(calls: Mapping, count: int) -> dict[Variant, float]:
    """Median milliseconds of calls that take turns."""
    times: dict[Variant, list[float]] = {variant: [] for variant in calls}
    for turn in range(count + 1):
        for variant, call in calls.items():
            began = time.process_time()
            call()
            if turn:  # the first compiles
                times[variant].append(time.process_time() - began)
    return {variant: 1e3 * statistics.median(x) for variant, x in times.items()}


def _speed_rows(
    model: str, tokens: str, runners: Mapping[Variant, Runner], times: Mapping
) -> list[Row]:
    first = next(iter(times.values()))
    return [
        {
            "model": model,
            "weights": str(variant),
            "layers": runners[variant].weights,
            "tokens": tokens,
            "ms": milliseconds,
            "ratio": first / milliseconds,
        }
        for variant, milliseconds in times.items()
    ]


def measure_quality(model: str | None, options: WeightsOptions) -> list[Row]:
    """Perplexity of a text under each variant, and KL from stored weights in float32."""
    tokenizer = Tokenizer.load(model)
    _, text = read_text(PYTHON)
    texts = cut_rows(text, tokenizer, CONTEXT, options.rows)
    exact = [_logp(Runner.load(model, "float32"), tokens) for tokens in texts]
    rows = [_quality_row(model, "float32", "", texts, exact, exact)]
    for variant in progress(QUALITY, str):
        runner = load(model, variant)
        logp = [_logp(runner, tokens) for tokens in texts]
        rows.append(
            _quality_row(model, str(variant), variant.kernel, texts, exact, logp)
        )
    return rows


def _quality_row(
    model: str | None,
    weights: str,
    kernel: str,
    texts: Sequence[Sequence[int]],
    exact: Sequence[Tensor],
    logp: Sequence[Tensor],
) -> Row:
    targets = [torch.tensor(tokens[1:])[:, None] for tokens in texts]
    pairs = zip(logp, targets, strict=True)
    nll = [-x[:-1].gather(1, target).mean() for x, target in pairs]
    pairs = zip(exact, logp, strict=True)
    kl = [(x.exp() * (x - y)).sum(1).mean() for x, y in pairs]
    pairs = zip(exact, logp, strict=True)
    same = [(x.argmax(1) == y.argmax(1)).float().mean() for x, y in pairs]
    return {
        "model": model or "default",
        "weights": weights,
        "kernel": kernel,
        "perplexity": math.exp(statistics.mean(map(float, nll))),
        "kl": statistics.mean(map(float, kl)),
        "top1_pct": 100 * statistics.mean(map(float, same)),
    }


def _logp(runner: Runner, tokens: Sequence[int]) -> Tensor:
    """The logarithms of the probabilities behind every token of a text: [N, V]."""
    return _logits(runner, tokens, range(len(tokens))).log_softmax(1)


def _logits(runner: Runner, tokens: Sequence[int], outputs: Sequence[int]) -> Tensor:
    count = len(tokens)
    chunk = Chunk(0, count, 0, runner.workspace(count), lambda *_: None)
    batch = Batch(tokens, range(count), outputs, torch.empty(0), (chunk,))
    return runner.forward(batch)


def measure_weights(options: WeightsOptions) -> Row:
    """Speed of a model and of a layer, and quality of two models."""
    torch.set_num_threads(options.threads)
    layers = {variant: load_layer(variant) for variant in SPEED_OF_LAYER}
    rows = measure_speed(LAYER, layers, options)
    del layers
    runners = {variant: load(options.model, variant) for variant in SPEED_OF_MODEL}
    rows += measure_speed(options.model, runners, options)
    del runners
    quality = measure_quality(options.model, options) + measure_quality(None, options)
    return result_of(rows, NOTES, quality=quality)


def draw(result: Row) -> str:
    """Two tables."""
    speed = table(result["rows"], SPEED_COLUMNS)
    return f"{speed}\n\n{table(result['quality'], QUALITY_COLUMNS)}"


def weights(
    model: str | None = Option(None, help="A model with layers large enough for int4."),
    steps: int | None = Option(None, min=1, help="Steps of each size."),
    rows: int | None = Option(None, min=1, help="Rows of text for quality."),
    threads: int | None = Option(None, min=1, help="Threads of torch."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Weights of 8 and 4 bits on a CPU, beside the weights as stored."""
    fields = without_none(model=model, steps=steps, rows=rows, threads=threads)
    show(measure_weights(WeightsOptions(**fields)), out, as_json, draw)


if __name__ == "__main__":
    command.main(weights, "weights")
