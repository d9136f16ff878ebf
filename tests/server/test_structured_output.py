"""Fields that say what form an answer has, over HTTP; the engine gets one constraint."""

import json
from typing import Any

import pytest

from disagg.server.schema import ChatRequest, CompletionRequest
from tests.grammar.following import is_whole
from tests.server.speaking import PLAIN_TEMPLATE, speaking
from tests.server.visits import chat, post, refused

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TEXT = '{"a": 1}'
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": NAMED},
    "json_object": {"response_format": {"type": "json_object"}},
    "structured json": {"structured_outputs": {"json": SCHEMA}},
    "structured text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "structured object": {"structured_outputs": {"json_object": True}},
    "structured regex": {"structured_outputs": {"regex": r"\{.*\}"}},
    "structured choice": {"structured_outputs": {"choice": ["x", TEXT]}},
    "structured grammar": {"structured_outputs": {"grammar": "start: /[^x]+/"}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_regex": {"guided_regex": r"\{.*\}"},
    "guided_choice": {"guided_choice": [TEXT]},
    "guided_grammar": {"guided_grammar": f"root ::= {json.dumps(TEXT)}"},
}
UNBOUND: dict[str, dict[str, Any]] = {
    "no field": {},
    "text": {"response_format": {"type": "text"}},
    "nulls": {"response_format": None, "structured_outputs": None, "guided_json": None},
    "nothing": {"structured_outputs": {}},
    "a backend": {"guided_decoding_backend": "xgrammar"},
}


@pytest.mark.parametrize("ask", [chat, post], ids=["chat", "completion"])
@pytest.mark.parametrize("name", FORMS)
def test_every_field_becomes_a_constraint(name, ask):
    app, router = speaking(TEXT, PLAIN_TEMPLATE)

    response = ask(app, max_tokens=99, **FORMS[name])

    assert response.status_code == 200, response.text
    assert is_whole(router.params[0]["grammar"], TEXT)
    assert not is_whole(router.params[0]["grammar"], "x!")


def test_a_grammar_that_is_other_json_is_a_mistake_of_the_client():
    app, router = speaking(TEXT, PLAIN_TEMPLATE)
    grammar = '{"grammars": [{"lark_grammar": 5}]}'

    response = chat(app, structured_outputs={"grammar": grammar})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs"
    assert not router.params


@pytest.mark.parametrize("name", UNBOUND)
def test_other_answers_have_no_constraint(name):
    app, router = speaking(TEXT, PLAIN_TEMPLATE)

    assert chat(app, max_tokens=99, **UNBOUND[name]).status_code == 200

    assert "grammar" not in router.params[0]


BAD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"guided_json": {"properties": {"a": {"type": "in"}}}},
        "guided_json: the schema at #/properties/a/type",
        "guided_json",
    ),
    (
        {"response_format": NAMED, "guided_regex": "a"},
        "response_format and guided_regex exclude each other",
        "guided_regex",
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.regex and structured_outputs.choice",
        "structured_outputs",
    ),
    ({"response_format": {"type": "json_schema"}}, '"schema": {', "response_format"),
    ({"response_format": {"type": "xml"}}, "json_schema", "response_format"),
    ({"response_format": [3]}, "expected an object", "response_format"),
    ({"guided_regex": "(a{999}){999}"}, "at most 20,000", "guided_regex"),
    ({"guided_choice": []}, "at least 1 item", "guided_choice"),
    ({"guided_json": "{"}, "expected a JSON schema", "guided_json"),
    ({"structured_outputs": {"grammer": "x"}}, "grammer", "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "tag", "structured_outputs"),
]


@pytest.mark.parametrize("ask", [chat, post], ids=["chat", "completion"])
@pytest.mark.parametrize(("fields", "words", "param"), BAD, ids=[x[1] for x in BAD])
def test_a_mistake_is_refused_with_its_place(fields, words, param, ask):
    app, router = speaking(TEXT, PLAIN_TEMPLATE)

    message = refused(ask(app, **fields), 400, "request", param)

    assert words in message
    assert not router.params


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'


def test_an_answer_with_a_form_may_still_call_a_tool():
    app, router = speaking(TEXT, PLAIN_TEMPLATE)
    form = {"response_format": NAMED, "tools": [WEATHER]}

    assert chat(app, max_tokens=99, **form).status_code == 200

    constraint = router.params[0]["grammar"]
    assert is_whole(constraint, TEXT)
    assert is_whole(constraint, CALL)


def test_a_forced_call_has_no_other_form():
    app, _ = speaking(TEXT, PLAIN_TEMPLATE)
    form = {"response_format": NAMED, "tools": [WEATHER], "tool_choice": "required"}

    message = refused(chat(app, **form), 400, "request", "tool_choice")

    assert "response_format" in message


def test_a_form_begins_behind_the_thought():
    app, router = speaking(f"<think>Hm.</think>\n\n{TEXT}")

    answer = chat(app, max_tokens=99, response_format=NAMED).json()

    constraint = router.params[0]["grammar"]
    assert is_whole(constraint, f"<think>Hm.</think>\n\n{TEXT}")
    assert not is_whole(constraint, "<think>Hm.</think>\n\nyes")
    assert answer["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("form", [CompletionRequest, ChatRequest])
def test_a_request_in_flight_keeps_no_schema(form):
    prompt = {"prompt": "a"} if form is CompletionRequest else {}
    fields = {"guided_json": SCHEMA, **prompt}

    request = form.read(json.dumps(fields).encode()).without_prompts()

    assert request.guided_json is None
