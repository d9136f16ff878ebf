"""What a grammar costs: the step of streams that follow a JSON schema beside that of plain ones.

    python -m benchmarks.grammars --json --out FILE

One engine answers the same prompts with and without a schema, by turns, without drafts; then with
them, where what the schema forces takes no step of its own. Times are of the processor, of all
threads of the process, from the first token to the last. The first token of a schema that no
process has seen is measured by the clock.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typer import Option

from benchmarks import command
from benchmarks.command import Dtype, Model
from disagg.bench.result import Row, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, Rounds, show, without_none
from disagg.cli.options import Json
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.grammar import json_schema
from disagg.grammar.compiler import GrammarCompiler
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer

NOTES = "processor time of all threads for a step; medians of rounds by turns"
PROMPT = "A list of planets as JSON, each with its name, radius and moons:\n"
FIELDS = 40
ARENA_BYTES = 256 << 20
VALUES: Sequence[dict[str, Any]] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["red", "green", "blue"]},
    {"type": "string", "maxLength": 20},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
)
COLUMNS = ["streams", "tokens", "plain_ms", "ms", "ratio", "drafted_ratio"]


@dataclass(frozen=True)
class GrammarOptions:
    """What to answer, and how.

    answer: tokens of an answer
    draft:  tokens of a draft, where there are any
    """

    model: str | None = None
    codec: str = "banded:bits=3"
    dtype: str = "auto"
    answer: int = 128
    draft: int = 7
    streams: tuple[int, ...] = (1, 16)
    rounds: int = 3
    threads: int = 2


@dataclass(frozen=True)
class Served:
    """Milliseconds of the processor for a token of each stream, and the steps that it took."""

    token_ms: float
    steps: int


def schema(name: str) -> dict[str, Any]:
    """A schema of 40 fields. name: of its first one, so that no cache knows it."""
    names = [name, *(f"field_{number}" for number in range(1, FIELDS))]
    fields = {key: VALUES[i % len(VALUES)] for i, key in enumerate(names)}
    return {
        "type": "object",
        "properties": fields,
        "required": names,
        "additionalProperties": False,
    }


def measure_grammars(options: GrammarOptions) -> Row:
    """Steps at each number of streams, and the first token of a new schema."""
    torch.set_num_threads(options.threads)
    runner = Runner.load(options.model, options.dtype)
    prompt = Tokenizer.load(options.model).encode(PROMPT)
    engine = _engine(runner, draft=0)
    long_list = {"type": "array", "items": schema("first"), "minItems": 1000}
    grammar = json_schema(long_list)
    began = time.perf_counter()
    engine.grammar_compiler.prepare(grammar).result()
    vocabulary_ms = 1e3 * (time.perf_counter() - began)
    compiler = engine.grammar_compiler
    rows = [
        _compare(runner, compiler, prompt, grammar, streams, options)
        for streams in progress([*options.streams], "{} streams".format)
    ]
    first = _first_token(engine, prompt, options)
    first["vocabulary_ms"] = vocabulary_ms
    first["vocabulary"] = runner.info.vocab_size
    return {**result_of(rows, NOTES), "first_token": first}


def _engine(
    runner: Runner, draft: int, compiler: GrammarCompiler | None = None
) -> Engine:
    config = EngineConfig(speculative_tokens=draft, arena_bytes=ARENA_BYTES)
    return Engine(runner, config, grammars=compiler)


def _compare(
    runner: Runner,
    compiler: GrammarCompiler,
    prompt: Sequence[int],
    grammar: str,
    streams: int,
    options: GrammarOptions,
) -> Row:
    plain, bound, drafted = [], [], []
    for _ in range(options.rounds):
        plain.append(_serve(_engine(runner, 0), prompt, "", streams, options))
        engine = _engine(runner, 0, compiler)
        bound.append(_serve(engine, prompt, grammar, streams, options))
        engine = _engine(runner, options.draft, compiler)
        drafted.append(_serve(engine, prompt, grammar, streams, options))
    plain_ms = statistics.median(x.token_ms for x in plain)
    token_ms = statistics.median(x.token_ms for x in bound)
    drafted_ms = statistics.median(x.token_ms for x in drafted)
    return {
        "streams": streams,
        "tokens": options.answer,
        "plain_ms": plain_ms,
        "ms": token_ms,
        "ratio": token_ms / plain_ms,
        "steps": bound[-1].steps,
        "drafted_ms": drafted_ms,
        "drafted_ratio": drafted_ms / plain_ms,
        "drafted_steps": drafted[-1].steps,
    }


def _serve(
    engine: Engine,
    prompt: Sequence[int],
    grammar: str,
    streams: int,
    options: GrammarOptions,
) -> Served:
    """Answers of equal length, from the first token of all to the last."""
    for stream in range(streams):
        params = SamplingParams(
            max_tokens=options.answer,
            temperature=1.0,
            seed=stream,
            ignore_eos=True,
            grammar=grammar,
        )
        request = Request(str(stream), tuple(prompt), params, options.codec)
        engine.submit(Prefill(request))
    counts = dict.fromkeys(map(str, range(streams)), 0)
    while not all(counts.values()):
        _count(engine, counts)
    first = sum(counts.values())
    began = time.process_time()
    steps = 0
    while not engine.idle:
        _count(engine, counts)
        steps += 1
    spent_s = time.process_time() - began
    tokens = (sum(counts.values()) - first) / streams
    return Served(1e3 * spent_s / tokens, steps)


def _count(engine: Engine, counts: dict[str, int]) -> None:
    for token in engine.step().tokens:
        counts[token.rid] += 1


def _first_token(engine: Engine, prompt: Sequence[int], options: GrammarOptions) -> Row:
    """Milliseconds from a request to its first token, with a new schema and without one."""
    plain, bound, built = [], [], []
    for number in range(4 * options.rounds):
        plain.append(_answer_one(engine, prompt, "", options))
        began = time.perf_counter()
        grammar = json_schema(schema(f"new_{number}"))
        built.append(1e3 * (time.perf_counter() - began))
        bound.append(_answer_one(engine, prompt, grammar, options))
    return {
        "plain_ms": statistics.median(plain),
        "ms": statistics.median(bound),
        "door_ms": statistics.median(built),
        "more_ms": statistics.median(bound)
        + statistics.median(built)
        - statistics.median(plain),
    }


def _answer_one(
    engine: Engine, prompt: Sequence[int], grammar: str, options: GrammarOptions
) -> float:
    params = SamplingParams(max_tokens=1, grammar=grammar)
    request = Request("first", tuple(prompt), params, options.codec)
    began = time.perf_counter()
    engine.submit(Prefill(request))
    while not engine.idle:
        engine.step()
    return 1e3 * (time.perf_counter() - began)


def draw(result: Row) -> str:
    """The result as a table."""
    first = result["first_token"]
    more = f"first token of a new schema: {first['more_ms']:.1f} ms more"
    return f"{table(result['rows'], COLUMNS)}\n{more}"


def grammars(
    model: Model = None,
    dtype: Dtype = None,
    answer: int | None = Option(None, min=8, help="Tokens of an answer."),
    rounds: Rounds = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What a grammar costs in a step, and before the first token."""
    fields = without_none(model=model, dtype=dtype, answer=answer, rounds=rounds)
    show(measure_grammars(GrammarOptions(**fields)), out, as_json, draw)


if __name__ == "__main__":
    command.main(grammars, "grammars")
