"""The messages of a chat, as they reach the model's template."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.server.schema import ChatRequest

CALL = {
    "index": None,
    "id": "1",
    "function": {"name": "f", "arguments": "{"},
    "type": "function",
}
EMPTY_FIELDS = {
    "content": None,
    "refusal": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}


def turn(message):
    body = json.dumps({"messages": [message]}).encode()
    (message,) = ChatRequest.read(body).turns
    return message


@pytest.mark.parametrize(
    "fields", [{}, {"content": None}, {"content": []}, EMPTY_FIELDS, {"tool_calls": []}]
)
def test_an_assistant_who_says_nothing_has_no_other_field(fields):
    assert turn({"role": "assistant", **fields}) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_tool_without_result_says_nothing(role):
    assert turn({"role": role, "content": None}) == {"role": role, "content": ""}


@pytest.mark.parametrize(("content", "text"), [(None, None), ("", ""), ([], "")])
def test_a_message_that_calls_tools_keeps_its_null(content, text):
    message = turn({"role": "assistant", "content": content, "tool_calls": [CALL]})

    assert message["content"] == text
    assert "content" in message


def test_a_message_has_its_fields_in_their_order():
    sent = {"tool_calls": [CALL], "x": {"b": 1, "a": None}, "role": "assistant"}

    message = turn(sent | {"content": "a", "name": "n"})

    assert json.dumps(message) == json.dumps(sent | {"content": "a", "name": "n"})


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "text", "text": "a"}, "a"),
        ({"type": "input_text", "text": "a"}, "a"),
        ({"type": "output_text", "text": "a", "annotations": []}, "a"),
        ({"type": "refusal", "refusal": "no"}, "no"),
        ({"type": "text", "text": None}, ""),
        ({"text": "a"}, "a"),
    ],
)
def test_parts_that_are_text_are_joined_by_lines(part, text):
    parts = [part, {"type": "text", "text": "b"}]

    message = turn({"role": "user", "content": parts})

    assert message["content"] == f"{text}\nb"


def test_a_refusal_is_what_an_assistant_said():
    message = turn({"role": "assistant", "content": None, "refusal": "No."})

    assert message["content"] == "No."


ARGUMENTS = st.recursive(
    st.none() | st.integers() | st.text() | st.just('{"a": '),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


@given(ARGUMENTS, st.none() | st.text(max_size=3))
def test_no_arguments_are_refused(arguments, content):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}

    message = turn({"role": "assistant", "content": content, "tool_calls": [call]})

    assert message["tool_calls"] == [call]
