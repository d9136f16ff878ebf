"""Builders of constraints, and their check: what a client may ask for, as one text.

Each builder returns the text of `SamplingParams.grammar`. It may take a tenth of a second, most of
it without Python's lock, so servers call it in a thread. RequestError, with the place, for what
cannot be a constraint.
"""

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from disagg.errors import RequestError
from disagg.grammar.json_schemas import prepare, schema_text
from disagg.grammar.lark_text import lark_of, lark_text, split_mark
from disagg.grammar.limits import MAX_CONSTRAINT_CHARS, error_of
from disagg.grammar.repeats import check_pattern, check_terminals

MAX_CHOICES = 10_000
JSON_MARK = "%json"
RULE_OF_EBNF = "::="
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
BODY = "body"  # the rule behind a thought


def json_schema(schema: Any) -> str:
    """JSON that a schema allows, its properties in the order of the schema.

    RequestError with the JSON pointer of what is wrong or not supported.
    """
    return _sized(f"start: {JSON_MARK} {schema_text(schema)}")


def json_object() -> str:
    """Any JSON object."""
    return json_schema(ANY_OBJECT)


def regex(pattern: str) -> str:
    """A text that a regular expression matches as a whole; it has Rust's notation."""
    _check_text("the regular expression", pattern)
    check_pattern(pattern)
    grammar = json.loads(LLMatcher.grammar_from_regex(pattern))
    constraint = _sized(grammar["grammars"][0]["lark_grammar"])
    return _compiled(constraint, "the regular expression")


def choice(options: Collection[str]) -> str:
    """One of several texts."""
    if isinstance(options, str) or not isinstance(options, Collection):
        raise RequestError(
            f"a choice is {reprlib.repr(options)}; expected a list of texts"
        )
    for option in options:
        _check_text("a text of the choice", option)
    if not 0 < len(options) <= MAX_CHOICES or not all(options):
        raise RequestError(
            f"a choice has {len(options)} texts; expected 1 to {MAX_CHOICES}, none empty"
        )
    return _sized("start: " + " | ".join(map(lark_text, options)))


def lark(grammar: str) -> str:
    """A text of a grammar in Lark's notation, or in the EBNF of llama.cpp, which is GBNF."""
    _check_text("the grammar", grammar)
    _sized(grammar)
    if RULE_OF_EBNF in grammar:
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # of a kind that llguidance does not export
            raise RequestError(f"the grammar cannot be read: {error}") from error
    check(grammar)
    return grammar


def behind_thought(
    constraint: str,
    begin: str,
    end: str,
    special_tokens: Mapping[str, int],
    is_open: bool,
) -> str:
    """A free thought, and then what a constraint allows, perhaps after two line ends.

    begin, end: the marks of a thought, such as "<think>" and "</think>"; special tokens in them are
                such tokens
    is_open:    the prompt ends in a thought, so that the answer begins in it. Else the answer may
                begin with one, or be without
    """
    marks = split_mark(end, special_tokens)
    opening = lark_of(begin, special_tokens)
    rest = " ".join(piece.lark for piece in marks[1:])
    if marks[0].is_special:
        rules = [f"thought: FREE {marks[0].lark} {rest}", "FREE: /(?s:.*)/"]
    else:
        free = f"free[suffix={marks[0].lark}]: /(?s:.*)/"
        rules = [f"thought: free {rest}", free]
    start = "thought" if is_open else f"({opening} thought)?"
    outer = "\n".join([f"start: {start} /\\n{{0,2}}/ @{BODY}", *rules])
    return _compiled(_nested(outer, {BODY: constraint}), "the grammar behind a thought")


def behind(mark: str, constraint: str, special_tokens: Mapping[str, int]) -> str:
    """A mark, in which special tokens are such tokens, and then what a constraint allows."""
    return _nested(
        f"start: {lark_of(mark, special_tokens)} @marked", {"marked": constraint}
    )


def either(first: str, second: str) -> str:
    """What one of two constraints allows."""
    return _nested("start: @first | @second", {"first": first, "second": second})


def _nested(outer: str, inner: Mapping[str, str]) -> str:
    """A Lark grammar that names others as `@NAME`."""
    grammars: list[dict[str, str]] = [{"lark_grammar": outer}]
    for name, constraint in inner.items():
        first, *others = _grammars(constraint)
        grammars += [{"name": name, **first}, *others]
    return json.dumps({"grammars": grammars})


def check(constraint: str) -> None:
    """RequestError for a constraint that no engine can follow, or that costs too much.

    Whether a model has the special tokens that it names is found out by an engine.
    """
    _sized(constraint)
    for grammar in _grammars(constraint):
        check_terminals(_without_schemas(grammar["lark_grammar"]))
    _compiled(constraint, "the grammar")


def _check_text(what: str, value: Any) -> None:
    """RequestError for what is no text, or one that is no UTF-8."""
    if not isinstance(value, str):
        raise RequestError(f"{what} is {reprlib.repr(value)}; expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is no UTF-8 at character {error.start}: a lone surrogate"
        ) from error


def _sized(constraint: str) -> str:
    if len(constraint) > MAX_CONSTRAINT_CHARS:
        raise RequestError(
            f"the grammar has {len(constraint):,} characters; expected at most "
            f"{MAX_CONSTRAINT_CHARS:,}"
        )
    return constraint


def _compiled(constraint: str, what: str) -> str:
    """The constraint, unless llguidance cannot follow it."""
    error = error_of(constraint)
    if error:
        raise RequestError(f"{what} is not supported: {error}")
    return constraint


def _grammars(constraint: str) -> list[dict[str, str]]:
    """The Lark grammars of a constraint, the first of which it begins with."""
    if not constraint.lstrip().startswith("{"):
        return [{"lark_grammar": constraint}]
    try:
        grammars = json.loads(constraint)["grammars"]
    except (ValueError, KeyError, TypeError, RecursionError):
        grammars = None
    if not isinstance(grammars, list) or not all(map(_is_lark, grammars)):
        raise RequestError(
            'the grammar is JSON, but not {"grammars": [{"lark_grammar": ...}]}'
        )
    return grammars


def _is_lark(grammar: Any) -> bool:
    return isinstance(grammar, dict) and isinstance(grammar.get("lark_grammar"), str)


def _without_schemas(grammar: str) -> str:
    """A Lark grammar without its JSON schemas; RequestError for a mistake in one of them."""
    pieces = grammar.split(JSON_MARK)
    rest = [pieces[0]]
    for piece in pieces[1:]:
        text = piece.lstrip()
        try:
            schema, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the grammar has a {JSON_MARK} without a schema behind it: {error}"
            ) from error
        prepare(schema)
        rest.append(text[end:])
    return "".join(rest)
