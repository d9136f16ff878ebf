"""Decode steps by our forward pass of Llama-like models, beside the modules of transformers.

    python -m benchmarks.forward --json --out FILE

Both have the same packed weights, tokens and pages, and take turns in one process. Times are of the
processor, all threads together, so that a busy machine changes them little. Then both answer the
same prompts greedily: how many tokens are equal, and how far the logits are apart.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from typer import Option

from benchmarks import command
from disagg.bench.decode import Decoding, parse_size
from disagg.bench.result import Row, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.model.attention import Batch, Chunk
from disagg.model.describe import ModelInfo, describe_model
from disagg.model.forward import ModuleForward
from disagg.model.linear import pack_linears
from disagg.model.runner import Runner
from disagg.model.weights import load_model

NOTES = "medians by turns, processor time; a step is plan, forward pass and choice"
PROMPT_TOKENS = 64
COLUMNS = ["dtype", "size", "module_step_ms", "step_ms", "ratio"]
COLUMNS += ["module_forward_ms", "forward_ms", "forward_ratio"]


@dataclass(frozen=True)
class ForwardOptions:
    """What to measure: steps of one model, by dtype and size.

    sizes: "sequences x tokens"
    steps: of each forward pass and size
    answers, answer: how many prompts are answered, with how many tokens
    """

    model: str = "smollm2"
    codec: str = "banded:bits=3"
    dtypes: Sequence[str] = ("float32", "bfloat16")
    sizes: Sequence[str] = ("1x512", "4x512", "16x512")
    steps: int = 32
    threads: int = 2
    answers: int = 10
    answer: int = 500


def measure_forward(options: ForwardOptions) -> Row:
    """Every dtype and size: milliseconds of a step by both, and of the modules alone."""
    torch.set_num_threads(options.threads)
    rows = []
    equality: Row = {}
    for dtype in options.dtypes:
        info = describe_model(options.model, dtype)
        ours = Runner.load(options.model, dtype)
        theirs = module_runner(info)
        for size in progress(options.sizes, f"{dtype}, {{}}".format):
            rows.append(_measure(ours, theirs, options, size))
        if dtype == "float32":
            equality = compare_answers(ours, theirs, options)
    return result_of(rows, NOTES, **equality)


def module_runner(info: ModelInfo) -> Runner:
    """A model that computes by its modules, with packed weights."""
    model = load_model(info, "cpu").eval().requires_grad_(False)
    forward = ModuleForward(model)
    pack_linears(forward)
    return Runner(model, info, "modules", forward=forward)


def _measure(ours: Runner, theirs: Runner, options: ForwardOptions, size: str) -> Row:
    num_sequences, tokens = parse_size(size)
    decodings = [
        Decoding(runner, options.codec, num_sequences, tokens, 2 * options.steps)
        for runner in (ours, theirs)
    ]
    step_s: list[list[float]] = [[], []]
    modules_s: list[list[float]] = [[], []]
    for _ in range(options.steps):
        for index, decoding in enumerate(decodings):
            step_s[index].append(_processor_seconds(decoding.step))
            modules_s[index].append(_processor_seconds(decoding.pass_modules))
    step_ms = [1e3 * statistics.median(times) for times in step_s]
    modules_ms = [1e3 * statistics.median(times) for times in modules_s]
    return {
        "dtype": ours.info.dtype,
        "size": size,
        "step_ms": step_ms[0],
        "module_step_ms": step_ms[1],
        "ratio": step_ms[1] / step_ms[0],
        "forward_ms": modules_ms[0],
        "module_forward_ms": modules_ms[1],
        "forward_ratio": modules_ms[1] / modules_ms[0],
    }


def _processor_seconds(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def compare_answers(ours: Runner, theirs: Runner, options: ForwardOptions) -> Row:
    """Greedy answers of both to the same random prompts.

    tokens, equal_tokens: of all answers; those before the first difference of an answer
    logit_error: largest difference of a logit, in parts of the largest; both read their answers
    """
    generator = torch.Generator().manual_seed(0)
    shape = (options.answers, PROMPT_TOKENS)
    prompts = torch.randint(ours.info.vocab_size, shape, generator=generator).tolist()
    answers = [_greedy(runner, prompts, options.answer) for runner in (ours, theirs)]
    equal_tokens = 0
    errors = []
    for prompt, own, other in zip(prompts, *answers, strict=True):
        pairs = zip(own, other, strict=True)
        equal_tokens += len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        logits, expected = (_logits(x, prompt + other) for x in (ours, theirs))
        errors.append(float((logits - expected).abs().max() / expected.abs().max()))
    tokens = options.answers * options.answer
    return {
        "tokens": tokens,
        "equal_tokens": equal_tokens,
        "logit_error": max(errors),
    }


def _greedy(
    runner: Runner, prompts: Sequence[list[int]], count: int
) -> list[list[int]]:
    """The best next tokens, one after another, on exact pages."""
    engine = Engine(runner, EngineConfig())
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        rid = str(index)
        answers[rid] = []
        engine.submit(Prefill(Request(rid, tuple(prompt), params, "raw")))
    while not engine.idle:
        for token in engine.step().tokens:
            answers[token.rid].append(token.token)
    return [*answers.values()]


@torch.inference_mode()
def _logits(runner: Runner, tokens: Sequence[int]) -> torch.Tensor:
    """The logits of all tokens of a text: [N, V]."""
    count = len(tokens)
    chunk = Chunk(0, count, 0, runner.workspace(count), lambda *_: None)
    rows = range(count)
    return runner.forward(Batch(tokens, rows, rows, torch.empty(0), (chunk,)))


def draw(result: Row) -> str:
    """The result as a table, and a line on the answers."""
    steps = table(result["rows"], COLUMNS)
    if "tokens" not in result:
        return steps
    equal, tokens = result["equal_tokens"], result["tokens"]
    error = result["logit_error"]
    return (
        f"{steps}\n\n{equal} of {tokens} greedy tokens equal, logits within {error:.1e}"
    )


def forward(
    model: str | None = Option(None, help="A Llama-like model."),
    steps: int | None = Option(None, min=1, help="Steps of each size."),
    threads: int | None = Option(None, min=1, help="Threads of torch."),
    size: list[str] | None = Option(None, help="Sequences x tokens."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Decode steps by our forward pass, beside the modules of transformers."""
    sizes = tuple(size) if size else None
    fields = without_none(model=model, steps=steps, threads=threads, sizes=sizes)
    show(measure_forward(ForwardOptions(**fields)), out, as_json, draw)


if __name__ == "__main__":
    command.main(forward, "forward")
