"""The body of /v1/responses, and the chat that it stands for."""

import json

import pytest

from disagg.errors import RequestError
from disagg.server.responses_request import ResponsesRequest

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    "strict": False,
}
SHOWN_LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": LOOK["parameters"],
}


def read(**fields) -> ResponsesRequest:
    body = {"input": "hi"} | fields
    return ResponsesRequest.read(json.dumps(body).encode())


def shown_tools(request: ResponsesRequest) -> list:
    return [tool["function"] for tool in request.chat.prompt_tools]


def test_all_twelve_fields_of_codex_are_accepted():
    request = read(
        client_metadata={"x-codex-installation-id": "1"},
        include=["reasoning.encrypted_content"],
        input=[{"type": "message", "role": "user", "content": "hi"}],
        instructions="Be brief.",
        model="default",
        parallel_tool_calls=False,
        prompt_cache_key="1",
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        tool_choice="auto",
        tools=[LOOK, {"type": "web_search", "external_web_access": False}],
    )

    chat = request.chat
    assert [message.role for message in chat.messages] == ["system", "user"]
    assert chat.template_options["reasoning_effort"] == "medium"
    assert chat.stream
    assert not chat.parallel_tool_calls
    assert shown_tools(request) == [SHOWN_LOOK]
    assert request.unknown == []


def test_tools_that_nobody_runs_are_not_in_the_response():
    kinds = ["web_search", "web_search_preview_2025_03_11", "image_generation"]

    request = read(tools=[LOOK, *({"type": kind} for kind in kinds)])

    assert request.echo()["tools"] == [LOOK]


def test_functions_in_a_namespace_are_functions_with_both_names():
    namespace = {"type": "namespace", "name": "eyes", "tools": [LOOK]}

    request = read(tools=[namespace])

    assert shown_tools(request) == [SHOWN_LOOK | {"name": "eyes__look"}]
    assert request.functions.names == {"eyes__look": ("eyes", "look")}
    assert request.echo()["tools"] == [namespace]


CHOICES = [
    ("none", "none", ()),
    ("required", "required", ()),
    ({"type": "function", "name": "look"}, "required", ("look",)),
    (
        {"type": "allowed_tools", "tools": [{"type": "function", "name": "look"}]},
        "auto",
        ("look",),
    ),
]


@pytest.mark.parametrize(("sent", "mode", "names"), CHOICES)
def test_a_choice_is_that_of_a_chat(sent, mode, names):
    choice = read(tools=[LOOK], tool_choice=sent).chat.tool_choice

    assert (choice.mode, choice.names) == (mode, names)


def test_fields_of_sampling_are_those_of_a_chat():
    chat = read(temperature=0.5, top_k=3, seed=7, codec="raw", kv=True, stop="x").chat

    assert (chat.temperature, chat.top_k, chat.seed) == (0.5, 3, 7)
    assert (chat.codec, chat.kv, chat.stop) == ("raw", True, ["x"])


EFFORTS = [
    ({}, {}),
    ({"effort": "low"}, {"reasoning_effort": "low"}),
    ({"effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
]


@pytest.mark.parametrize(("reasoning", "options"), EFFORTS)
def test_the_template_reads_the_effort(reasoning, options):
    assert read(reasoning=reasoning).chat.chat_template_kwargs == options


def test_template_options_of_the_client_win():
    own = {"reasoning_effort": "high"}

    chat = read(reasoning={"effort": "low"}, chat_template_kwargs=own).chat

    assert chat.chat_template_kwargs == own


def test_the_length_is_that_of_an_answer_with_its_thoughts():
    assert read(max_output_tokens=9).chat.max_answer_tokens == 9
    assert read().chat.max_answer_tokens is None


@pytest.mark.parametrize(
    "fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}]
)
def test_log_probabilities_come_where_they_are_included(fields):
    expected = fields.get("top_logprobs", 0)

    assert read(**fields).chat.num_logprobs == expected
    assert read().chat.num_logprobs is None


def test_the_format_is_that_of_a_chat():
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}

    chat = read(text={"format": form}).chat

    assert chat.structured_field == "response_format"
    assert chat.response_format.json_schema.fields == {"type": "object"}


def test_nulls_and_neutral_values_are_accepted():
    read(
        background=False,
        conversation=None,
        max_tool_calls=3,
        metadata={"a": "b"},
        n=1,
        previous_response_id=None,
        prompt=None,
        reasoning=None,
        safety_identifier="me",
        service_tier="auto",
        stream_options={"include_obfuscation": False},
        text={"format": {"type": "text"}, "verbosity": "low"},
        tools=None,
        truncation="auto",
        user="me",
    )


WRONG = [
    ({"input": 5}, "input", "input is 5"),
    ({"input": []}, "input", "expected at least one item"),
    ({"background": True}, "background", "background=True is not supported"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "chat_template_kwargs is 5"),
    ({"conversation": "x"}, "conversation", "nothing is stored here"),
    ({"include": ["all"]}, "include", "include has 'all'"),
    ({"logprobs": True}, "logprobs", "write top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"max_tokens": 5}, "max_tokens", "write max_output_tokens"),
    ({"messages": [{}]}, "messages", "write input"),
    ({"n": 2}, "n", "n=2 is not supported"),
    ({"previous_response_id": "x"}, "previous_response_id", "nothing is stored here"),
    ({"reasoning": 5}, "reasoning", "reasoning is 5"),
    ({"stop": 5}, "stop", "stop is 5"),
    ({"temperature": "x"}, "temperature", "temperature is 'x'"),
    ({"text": {"format": {"type": "x"}}}, "text", "text.format is {'type': 'x'}"),
    ({"text": {"verbosity": "x"}}, "text", "text.verbosity is 'x'"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text",
        "text.format.schema is required",
    ),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice is"),
    ({"tools": [5]}, "tools", "tools[0] is 5"),
    ({"tools": [LOOK, {"type": "custom"}]}, "tools", "tools[1].type='custom'"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].name is None"),
    ({"tools": [LOOK | {"parameters": 5}]}, "tools", "tools[0].parameters is 5"),
    ({"tools": [{"type": "namespace"}]}, "tools", "tools[0] is"),
    ({"truncation": "x"}, "truncation", "truncation is 'x'"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_a_wrong_field_is_named(fields, param, message):
    with pytest.raises(RequestError) as raised:
        read(**fields)

    assert message in str(raised.value)
    assert raised.value.param == param
