"""What a model writes in any format, its client reads, however the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.parsers.formats import TOOL_FORMATS, CallSyntax, ParameterCalls
from tests.parsers.answers import Reading, calls_of, content_of
from tests.parsers.call_writer import Call, write_calls

SYNTAXES = [
    pytest.param(each.name, syntax, id=f"{each.name}-{number}")
    for each in TOOL_FORMATS
    for number, syntax in enumerate(each.syntaxes)
]
MARKS = [
    "</tool_call>",
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|call|>",
    "</function>",
    "<think>",
    '"}}',
    "\\",
]
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
TEXTS = st.lists(st.text(max_size=8) | st.sampled_from(MARKS), max_size=3).map("".join)
SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.none() | TEXTS
SCALARS = SCALARS.filter(lambda value: value not in (float("inf"), float("-inf")))
VALUES = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=2) | st.dictionaries(TEXTS, x, max_size=2)
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3
)
JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema(arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": JSON_TYPES[type(x)]} for key, x in arguments.items()}
    return {"type": "object", "properties": properties}


def can_write(syntax: CallSyntax, calls: list[Call]) -> bool:
    """Bare values cannot have the mark that ends them, and a function has one schema."""
    if not isinstance(syntax, ParameterCalls):
        return True
    names = [name for name, _ in calls]
    has_mark = any(syntax.behind_value in json.dumps(call) for call in calls)
    return len({*names}) == len(names) and not has_mark


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    size = data.draw(st.integers(1, 9))
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


@pytest.mark.parametrize(("tool", "syntax"), SYNTAXES)
@settings(max_examples=8)
@given(calls=CALLS, data=st.data())
def test_calls_are_read_as_they_were_written(tool, syntax, calls, data):
    if not can_write(syntax, calls):
        return
    tools = {name: schema(arguments) for name, arguments in calls}
    text = write_calls(syntax, calls)
    reading = Reading(tool, tools=tools)

    parts = reading.pieces(pieces_of(data, text))

    assert [(name, json.loads(x)) for name, x in calls_of(parts)] == calls
    assert content_of(parts) == ""
    assert parts == reading.whole(text)


@pytest.mark.parametrize("tool", [each.name for each in TOOL_FORMATS])
@settings(max_examples=10)
@given(data=st.data())
def test_no_text_breaks_a_parser(tool, data):
    """Bits of every format in any order: the parts do not depend on the cuts."""
    written = write_calls(
        next(each for each in TOOL_FORMATS if each.name == tool).syntaxes[0],
        [("f", {"a": "b"}), ("g", {})],
    )
    bits = st.sampled_from(written) | st.sampled_from(MARKS) | st.text(max_size=3)
    slices = st.tuples(st.integers(0, len(written)), st.integers(0, len(written)))
    bits |= slices.map(lambda ends: written[slice(*sorted(ends))])
    text = "".join(data.draw(st.lists(bits, max_size=6)))
    reading = Reading(tool, "harmony" if tool == "harmony" else "think")

    parts = reading.whole(text)

    assert reading.pieces(list(text)) == parts
