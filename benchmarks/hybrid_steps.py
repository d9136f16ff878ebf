"""Decode steps of hybrid models beside a batch of the same model in transformers.

    python -m benchmarks.hybrid_steps --json --out FILE

Both sides have the same random weights in fp32 and one thread, and take turns in one process, step
by step. Ours is a whole step of an engine: schedule, plan, forward pass, sampling, for as many
sequences; theirs is a forward pass with a cache and the best token of each row. The tokens of both
are compared. malloc keeps freed memory, as in a worker. On a machine that others use, compare
processor time.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging
from typer import Option

from benchmarks import command
from disagg.bench.result import Row, progress, result_of
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.errors import UnknownNameError
from disagg.model.runner import Runner
from disagg.transfer.rpc import tune_malloc

SHARED: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# eight layers each, of real sizes: two attend, six keep a state
MODELS: dict[str, dict[str, Any]] = {
    # of Qwen3.5-0.8B
    "qwen3_5_text": {
        "intermediate_size": 3584,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    # of Bamba, with fewer heads
    "bamba": {
        "intermediate_size": 2816,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "attn_layer_indices": [3, 7],
    },
}
WARM_UP = 4  # steps
ARENA_BYTES = 1 << 30
NOTES = (
    "medians of steps by turns; cpu: processor time of the process; ratio: ours by theirs; "
    "tokens: of both sides, equal: of them"
)


@dataclass(frozen=True)
class HybridStepsOptions:
    """Models and sizes. prompt: tokens before the first step, of each sequence."""

    models: Sequence[str] = tuple(MODELS)
    sequences: int = 16
    prompt: int = 64
    steps: int = 60


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by the clock, and of processor time."""

    wall_s: float
    cpu_s: float


def measure_hybrid_steps(options: HybridStepsOptions) -> Row:
    """A row for every model."""
    for name in options.models:
        if name not in MODELS:
            raise UnknownNameError.of("model", name, MODELS)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    rows = [_measure(name, options) for name in progress(options.models, str)]
    return result_of(rows, NOTES, options=asdict(options))


def _measure(name: str, options: HybridStepsOptions) -> Row:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**SHARED, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    shape = (options.sequences, options.prompt)
    prompts = torch.randint(0, SHARED["vocab_size"], shape, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        runner = Runner.load(folder)
    ours = OurSteps(runner, prompts.tolist(), WARM_UP + options.steps + 1)
    theirs = DenseSteps(model, prompts)
    our_times, their_times = [], []
    for _ in range(WARM_UP + options.steps):
        our_times.append(timed(ours.step))
        their_times.append(timed(theirs.step))
    pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
    equal = sum(a == b for pair in pairs for a, b in zip(*pair, strict=True))
    return {
        "model": name,
        "architecture": type(model).__name__,
        "state_bytes": runner.shape.state_bytes,
        "sequences": options.sequences,
        **compare(our_times[WARM_UP:], their_times[WARM_UP:]),
        "tokens": len(pairs) * options.sequences,
        "equal": equal,
    }


def compare(ours: Sequence[StepTime], theirs: Sequence[StepTime]) -> Row:
    """Medians of both in milliseconds, and their ratios."""
    row: Row = {}
    for kind in ("wall", "cpu"):
        our_s = median(getattr(x, f"{kind}_s") for x in ours)
        their_s = median(getattr(x, f"{kind}_s") for x in theirs)
        row[f"{kind}_ms"] = 1e3 * our_s
        row[f"dense_{kind}_ms"] = 1e3 * their_s
        row[f"{kind}_ratio"] = our_s / their_s
    return row


def timed(step: Callable[[], None]) -> StepTime:
    """How long a step takes."""
    began, began_cpu = time.perf_counter(), time.process_time()
    step()
    return StepTime(time.perf_counter() - began, time.process_time() - began_cpu)


class OurSteps:
    """Sequences in an engine, their prompts computed.

    tokens: of each step, in the order of the prompts
    """

    def __init__(
        self, runner: Runner, prompts: Sequence[Sequence[int]], max_tokens: int
    ):
        config = EngineConfig(max_sequences=len(prompts), arena_bytes=ARENA_BYTES)
        self._engine = Engine(runner, config)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            request = Request(str(number), tuple(prompt), params, "raw")
            self._engine.submit(Prefill(request))
        self._by_step: list[dict[int, int]] = [{} for _ in range(max_tokens)]
        while len(self._by_step[0]) < len(prompts):
            self.step()

    @property
    def tokens(self) -> list[list[int]]:
        steps = [tokens for tokens in self._by_step if tokens]
        return [[tokens[number] for number in sorted(tokens)] for tokens in steps]

    def step(self) -> None:
        for token in self._engine.step().tokens:
            self._by_step[token.index][int(token.rid)] = token.token


class DenseSteps:
    """A batch in transformers, its prompts computed. tokens: of each step"""

    def __init__(self, model: PreTrainedModel, prompts: torch.Tensor):
        self._model = model
        self._cache: Any = None
        self._next_ids = prompts
        self._length = 0
        self.tokens: list[list[int]] = []
        self.step()

    @torch.inference_mode()
    def step(self) -> None:
        end = self._length + self._next_ids.shape[1]
        # by itself Bamba counts positions from a layer without K and V (transformers 5.24)
        positions = torch.arange(self._length, end)[None].expand_as(self._next_ids)
        output = self._model(
            input_ids=self._next_ids,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._length = end
        self._cache = output.past_key_values
        self._next_ids = output.logits[:, -1:].argmax(-1)
        self.tokens.append(self._next_ids.flatten().tolist())


def hybrid_steps(
    model: list[str] | None = Option(
        None, "--model", help=f"{', '.join(MODELS)}; may be repeated; default: all."
    ),
    sequences: int = Option(16, min=1, help="Sequences in a step."),
    prompt: int = Option(64, min=1, help="Tokens of each before the first step."),
    steps: int = Option(60, min=1, help="Steps of each side."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time decode steps of hybrid models beside a dense batch in transformers."""
    tune_malloc()
    fields = without_none(models=model)
    options = HybridStepsOptions(
        sequences=sequences, prompt=prompt, steps=steps, **fields
    )
    show(measure_hybrid_steps(options), out, as_json)


if __name__ == "__main__":
    command.main(hybrid_steps, "hybrid_steps")
