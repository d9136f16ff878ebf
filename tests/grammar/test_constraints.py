"""What clients may ask for, and how mistakes are reported."""

import json
import re
from typing import Any

import pytest

from disagg.errors import RequestError
from disagg.grammar import choice, json_object, json_schema, lark, regex
from disagg.grammar.constraints import behind, behind_thought, check, either
from disagg.grammar.limits import MAX_CONSTRAINT_CHARS
from disagg.grammar.repeats import num_states
from tests.grammar.following import is_whole

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
SPECIAL = {"<think>": 256, "</think>": 257}


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (json_schema(CITY), '{"name": "Oslo", "size": 3}', '{"size": 3}'),
        (json_schema({"type": "string", "format": "phone"}), '"1-2"', "1"),
        (json_schema(True), "[1, null]", "[1 2]"),
        (json_object(), '{"a": [1]}', "[1]"),
        (regex("a/[0-9]{2}"), "a/12", "a/1"),
        (choice(["yes", 'no "\n']), 'no "\n', "yep"),
        (lark("start: A+\nA: /[ab]/"), "abba", "abc"),
        (lark('root ::= "a" [0-9]+'), "a42", "42"),
        (either(choice(["x"]), json_object()), '{"a": 1}', "y"),
    ],
    ids=lambda x: x[:24],
)
def test_a_constraint_allows_what_it_says(constraint, right, wrong):
    assert is_whole(constraint, right)
    assert not is_whole(constraint, wrong)


NO_TEXTS: list[tuple[Any, Any, str]] = [
    (regex, 5, "the regular expression is 5; expected a text"),
    (regex, "a\ud800", "the regular expression is no UTF-8 at character 1"),
    (lark, 5, "the grammar is 5; expected a text"),
    (lark, 'start: "\ud800"', "the grammar is no UTF-8"),
    (choice, "yes", "a choice is 'yes'; expected a list of texts"),
    (choice, None, "a choice is None"),
    (choice, [1], "a text of the choice is 1"),
    (choice, ["a", "\udfff"], "a text of the choice is no UTF-8 at character 0"),
]


@pytest.mark.parametrize(("build", "value", "message"), NO_TEXTS)
def test_what_is_no_text_is_refused(build, value, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        build(value)


@pytest.mark.parametrize(
    "grammars",
    [
        5,
        {"lark_grammar": "start:"},
        ["lark_grammar"],
        [["lark_grammar"]],
        [{"lark_grammar": 5}],
        [{"lark_grammar": None}],
    ],
)
def test_json_that_is_no_grammar_is_refused(grammars):
    with pytest.raises(RequestError, match="the grammar is JSON, but not"):
        lark(json.dumps({"grammars": grammars}))


MISTAKES: list[tuple[Any, str, str]] = [
    ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type", "one of string"),
    ({"properties": {"a/b": {"not": {}}}}, "#/properties/a~1b", "not"),
    ([], "#", "an object or a boolean"),
    ({"items": 5}, "#/items", "a schema"),
    ({"anyOf": {}}, "#/anyOf", "a list of schemas"),
    ({"required": "a"}, "#/required", "a list of names"),
    ({"enum": []}, "#/enum", "at least one value"),
    ({"$defs": {"x": {"minimum": "3"}}}, "#/$defs/x/minimum", "a number"),
    ({"items": {"minLength": -1}}, "#/items/minLength", "an integer from 0"),
    ({"items": {"pattern": "("}}, "#/items", "unclosed group"),
    ({"items": {"pattern": "(a{999}){999}"}}, "#/items", "at most 20,000"),
    ({"multipleOf": 1000003}, "#/multipleOf", "to 10000"),
    ({"items": {"$ref": "#/$defs/y"}}, "#/items", "does not exist"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#", "oneOf"),
]


@pytest.mark.parametrize(
    ("schema", "pointer", "words"), MISTAKES, ids=[words for *_, words in MISTAKES]
)
def test_a_mistake_in_a_schema_is_reported_with_its_place(schema, pointer, words):
    with pytest.raises(RequestError) as error:
        json_schema(schema)

    message = str(error.value)
    assert f"the schema at {pointer} is" in message or message.endswith(pointer)
    assert words in message


def test_a_schema_that_nests_too_deeply_is_refused_at_once():
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"items": schema}

    with pytest.raises(RequestError, match="too large at #/items"):
        json_schema(schema)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: regex("(?=a)b"), "look-ahead"),
        (lambda: regex("((a{100}){100}){100}"), "1,000,000 times"),
        (lambda: choice([]), "0 texts"),
        (lambda: choice([""]), "none empty"),
        (lambda: lark('start: "a" b'), "unknown name"),
        (lambda: lark('root ::= "a" [0-9+'), "cannot be read"),
        (lambda: lark("start: A\nA: B{999}\nB: /a{999}/"), "terminal 'A'"),
        (lambda: lark('start: %json {"multipleOf": 1000003}'), "#/multipleOf"),
        (lambda: lark("start: %json x"), "without a schema"),
        (lambda: check("{}"), "lark_grammar"),
        (lambda: check("x" * (MAX_CONSTRAINT_CHARS + 1)), "characters"),
    ],
)
def test_what_no_engine_could_follow_is_refused(build, words):
    with pytest.raises(RequestError, match=words):
        build()


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("abc", 1),
        ("a{3}b{5}", 5),
        ("(a{3}b){5,7}", 21),
        ("((a{2}){3}){4}", 24),
        (r"\(a{3}\){5}", 5),
        ("[(]{3}){9}", 9),
        ("(a{2,}b{,9}){3}", 27),
    ],
)
def test_nested_repeats_multiply(pattern, states):
    assert num_states(pattern) == states


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize(
    ("is_open", "answer", "is_right"),
    [
        (True, "Rain?</think>\n\nyes", True),
        (True, "yes", False),
        (False, "<think>no <b>, or</think>no", True),
        (False, "yes", True),
        (False, "<think>hm</think>perhaps", False),
    ],
)
def test_a_constraint_begins_behind_a_thought(special, is_open, answer, is_right):
    body = either(choice(["yes"]), choice(["no"]))
    constraint = behind_thought(body, "<think>", "</think>", special, is_open)

    assert is_whole(constraint, answer, special) == is_right


def test_a_mark_of_special_tokens_is_no_text():
    constraint = behind("</think>final ", choice(["yes"]), SPECIAL)

    assert is_whole(constraint, "</think>final yes", SPECIAL)
    assert not is_whole(constraint, "final yes", SPECIAL)


def test_all_texts_of_a_constraint_are_valid_json():
    """They travel in `SamplingParams.grammar`, perhaps nested."""
    nested = json.loads(either(json_object(), either(choice(["a"]), choice(["b"]))))

    names = [grammar.get("name") for grammar in nested["grammars"]]

    assert len(names) == 5
