"""How many JSON schemas are supported, and whether all answers that follow them are valid.

    python -m benchmarks.grammar_coverage FOLDER --json --out FILE

FOLDER holds JSON files: a schema each, as in JSONSchemaBench, or JSON Schema's own test suite,
`[{"schema": ..., "tests": [...]}]`, where a test has `data` and `valid`. The answers are random
walks along the masks, with a liking for what ends a text; `jsonschema` validates them. An
instance that is valid has to be allowed, but for the order of its properties.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from typer import Argument, Option

from benchmarks import command
from disagg.bench.result import Row, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.errors import RequestError
from disagg.grammar import json_schema
from disagg.grammar.state import GrammarState
from disagg.grammar.vocabulary import Vocabulary

NOTES = "random walks of bytes along the masks; instances of the tests, as compact JSON"
MOST_BYTES = 3000  # of an answer; longer ones are cut, and not validated
ENDINGS = b'"}]'
PLAIN = [*b'"{}[]:,', *b"0123456789", *b"abcdefghijklmnopqrstuvwxyz -.TZ"]
COLUMNS = ["part", "schemas", "supported", "answers", "valid", "cut", "instances"]


@dataclass(frozen=True)
class CoverageOptions:
    """Which schemas, and how many answers to each.

    most: schemas of each part
    """

    folder: Path
    most: int = 200
    answers: int = 2
    seed: int = 0


def measure_coverage(options: CoverageOptions) -> Row:
    """A row for each part: a folder of JSONSchemaBench, or the test suite."""
    words = Vocabulary([bytes([i]) for i in range(256)], {}, lambda x: x.encode())
    rows = []
    parts = sorted({path.parent for path in options.folder.rglob("*.json")})
    for part in progress(parts, str):
        files = sorted(part.glob("*.json"))
        cases = [case for file in files for case in _cases(file)]
        random.Random(options.seed).shuffle(cases)
        counts = Counter[str]()
        reasons = Counter[str]()
        for case in cases[: options.most]:
            _measure(case, words, options, counts, reasons)
        name = str(part.relative_to(options.folder.parent))
        common = dict(reasons.most_common(8))
        rows.append({"part": name, **counts, "refused_for": common})
    return result_of(rows, NOTES)


def _cases(file: Path) -> Iterator[dict[str, Any]]:
    content = json.loads(file.read_text())
    if isinstance(content, list):
        yield from content
    else:
        yield content if "tests" in content else {"schema": content}


def _measure(
    case: dict[str, Any],
    words: Vocabulary,
    options: CoverageOptions,
    counts: Counter[str],
    reasons: Counter[str],
) -> None:
    """Count one schema, its answers and its instances."""
    counts["schemas"] += 1
    try:
        start = GrammarState.compile(json_schema(case["schema"]), words)
    except RequestError as error:
        reasons[_reason(str(error))] += 1
        return
    counts["supported"] += 1
    validator = jsonschema.validators.validator_for(
        case["schema"], jsonschema.Draft202012Validator
    )(case["schema"])
    for number in range(options.answers):
        text = _walk(start.copy(), words, random.Random(number))
        counts["answers"] += 1
        if text is None:
            counts["cut"] += 1
        else:
            counts[_verdict(validator, text)] += 1
    for test in case.get("tests", []):
        counts["instances"] += 1
        if _allows(start.copy(), test["data"]) == test["valid"]:
            counts["agree"] += 1
        elif test["valid"]:
            counts["valid_but_refused"] += 1
        else:
            counts["invalid_but_allowed"] += 1


def _reason(message: str) -> str:
    """An error without the place."""
    return message.partition(": ")[2][:60] or message[:60]


def _walk(state: GrammarState, words: Vocabulary, draw: random.Random) -> str | None:
    """A text of a grammar; None: it became too long, or too complex."""
    tokens: list[int] = []
    try:
        while len(tokens) < MOST_BYTES:
            state.follow(tokens)
            bits = state.bits()
            allowed = [i for i in range(256) if bits[i // 32] >> i % 32 & 1]
            may_end = bits[words.end // 32] >> words.end % 32 & 1
            if may_end and (not allowed or draw.random() < 0.5):
                return bytes(tokens).decode()
            tokens.append(_next(allowed, draw))
    except RequestError:
        return None
    return None


def _next(allowed: list[int], draw: random.Random) -> int:
    """A byte, rather one that ends something than another, and rather a plain one."""
    ends = [token for token in allowed if token in ENDINGS]
    if ends and draw.random() < 0.3:
        return draw.choice(ends)
    plain = [token for token in allowed if token in PLAIN]
    return draw.choice(plain if plain and draw.random() < 0.98 else allowed)


def _verdict(validator: Any, text: str) -> str:
    """ "unchecked" where `jsonschema` cannot read a schema: Python has other expressions."""
    try:
        answer = json.loads(text)
    except ValueError:
        return "invalid"
    try:
        return "valid" if validator.is_valid(answer) else "invalid"
    except Exception:  # of re, of referencing
        return "unchecked"


def _allows(state: GrammarState, instance: Any) -> bool:
    """Whether a grammar allows an instance as the text of an answer."""
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    try:
        state.follow(list(text.encode()))
    except (RequestError, UnicodeEncodeError):
        return False
    return state.may_end


def draw(result: Row) -> str:
    """The result as a table."""
    rows = [{**dict.fromkeys(COLUMNS, 0), **row} for row in result["rows"]]
    return table(rows, COLUMNS)


def grammar_coverage(
    folder: Path = Argument(help="Where the schemas are."),
    most: int | None = Option(None, min=1, help="Schemas of each part."),
    answers: int | None = Option(None, min=1, help="Answers to each schema."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How many JSON schemas are supported, and how many answers are valid."""
    fields = without_none(most=most, answers=answers)
    options = CoverageOptions(folder, **fields)
    show(measure_coverage(options), out, as_json, draw)


if __name__ == "__main__":
    command.main(grammar_coverage, "grammar_coverage")
