"""llguidance beside xgrammar: start, a new schema, masks and memory, for one tokenizer.

    pip install xgrammar
    python -m benchmarks.grammar_libraries TOKENIZER_JSON --json --out FILE

Each library has a process of its own. It compiles schemas of 40 fields that it has not seen, then
follows one answer twice, token by token: a mask of the whole vocabulary before each.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
from typer import Argument

from benchmarks import command
from benchmarks.grammars import schema
from disagg.bench.result import Row, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, show
from disagg.cli.options import Json
from disagg.errors import ConfigError
from disagg.grammar.state import GrammarState
from disagg.grammar.vocabulary import Vocabulary
from disagg.model.tokenizer import Tokenizer

NOTES = "medians and 99th percentiles by the clock, one thread; memory besides the tokenizer's"
SCHEMAS = 5
VALUES = ["some words 123", 42, 3.25, True, ["ab", "cd"], "green", "short", {"a": "x"}]
PAGE_BYTES = 4096
COLUMNS = ["library", "vocabulary", "start_ms", "compile_ms", "first_mask_us"]
COLUMNS += ["mask_us", "mask_p99_us", "follow_us", "memory_mb"]

# a mask before each token of an answer, and each token: seconds of both
Walk = Callable[[], tuple[list[float], list[float]]]


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE_BYTES / 1e6


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    began = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - began, result


def schemas() -> list[str]:
    """Schemas that differ in the name of their first field."""
    return [json.dumps(schema(f"field_x{number}")) for number in range(SCHEMAS)]


def answer(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """The tokens of an answer to the last of the schemas."""
    names = json.loads(schemas()[-1])["properties"]
    fields = {name: VALUES[i % len(VALUES)] for i, name in enumerate(names)}
    ids: list[int] = tokenizer.encode(json.dumps(fields), add_special_tokens=False).ids
    return ids


def measure_llguidance(backend: tokenizers.Tokenizer) -> Row:
    """As `disagg.grammar` uses it."""
    size = 1 + max(backend.get_vocab().values())
    tokenizer = Tokenizer(backend)

    def start() -> Vocabulary:
        words = Vocabulary(
            tokenizer.token_bytes(size), tokenizer.special_tokens, tokenizer.encode
        )
        assert words.compiled
        return words

    start_s, words = timed(start)
    compiles, masks = [], []
    for text in schemas():
        compile_s, state = timed(GrammarState.compile, f"start: %json {text}", words)
        compiles.append(compile_s)
        masks.append(timed(state.bits)[0])
    ids = answer(backend)

    def walk() -> tuple[list[float], list[float]]:
        matcher = state.copy()
        bits, follows = [], []
        for count in range(len(ids)):
            bits.append(timed(matcher.bits)[0])
            follows.append(timed(matcher.follow, ids[: count + 1])[0])
        return bits, follows

    return _row("llguidance", size, start_s, compiles, masks, walk)


def measure_xgrammar(backend: tokenizers.Tokenizer) -> Row:
    """With one thread, as the other."""
    try:
        import xgrammar
    except ImportError as error:
        raise ConfigError(f"xgrammar cannot be imported: {error}") from error
    words = backend.get_vocab()
    size = 1 + max(words.values())
    by_id = {number: text for text, number in words.items()}
    vocabulary = [by_id.get(number, "") for number in range(size)]
    kind = xgrammar.VocabType.BYTE_LEVEL
    start_s, info = timed(
        lambda: xgrammar.TokenizerInfo(
            vocabulary, kind, vocab_size=size, stop_token_ids=[0]
        )
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    bitmask = xgrammar.allocate_token_bitmask(1, size)
    compiles, masks = [], []
    for text in schemas():
        compile_s, grammar = timed(compiler.compile_json_schema, text)
        compiles.append(compile_s)
        matcher = xgrammar.GrammarMatcher(grammar)
        masks.append(timed(matcher.fill_next_token_bitmask, bitmask)[0])
    ids = answer(backend)

    def walk() -> tuple[list[float], list[float]]:
        matcher = xgrammar.GrammarMatcher(grammar)
        bits, follows = [], []
        for token in ids:
            bits.append(timed(matcher.fill_next_token_bitmask, bitmask)[0])
            follows.append(timed(matcher.accept_token, token)[0])
        return bits, follows

    return _row("xgrammar", size, start_s, compiles, masks, walk)


def _row(
    library: str,
    size: int,
    start_s: float,
    compiles: list[float],
    first_masks: list[float],
    walk: Walk,
) -> Row:
    walk()
    masks, follows = walk()
    return {
        "library": library,
        "version": version(library),
        "vocabulary": size,
        "start_ms": 1e3 * start_s,
        "compile_ms": 1e3 * statistics.median(compiles),
        "first_mask_us": 1e6 * statistics.median(first_masks),
        "mask_us": 1e6 * statistics.median(masks),
        "mask_p99_us": 1e6 * statistics.quantiles(masks, n=100)[-1],
        "follow_us": 1e6 * statistics.median(follows),
    }


MEASURES = {"llguidance": measure_llguidance, "xgrammar": measure_xgrammar}


def measure_alone(library: str, file: str) -> Row:
    """A library in this process, which has used none before."""
    backend = tokenizers.Tokenizer.from_file(file)
    before_mb = memory_mb()
    row = MEASURES[library](backend)
    return {**row, "memory_mb": memory_mb() - before_mb}


def measure_libraries(file: Path) -> Row:
    """Both libraries, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for library in MEASURES:
        with context.Pool(1) as pool:
            rows.append(pool.apply(measure_alone, (library, str(file))))
    return result_of(rows, NOTES)


def draw(result: Row) -> str:
    """The result as a table."""
    return table(result["rows"], COLUMNS)


def grammar_libraries(
    file: Path = Argument(help="A tokenizer.json."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """llguidance beside xgrammar."""
    show(measure_libraries(file), out, as_json, draw)


if __name__ == "__main__":
    command.main(grammar_libraries, "grammar_libraries")
