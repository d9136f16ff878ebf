"""The tools of a chat: what clients send, what the template gets, and what is refused."""

import json
from typing import Any

import pytest

from disagg.errors import RequestError
from disagg.server.schema import ChatRequest, CompletionRequest
from disagg.server.tools import new_call_id

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Rain?", "parameters": SCHEMA},
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock.now"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock.now"}}
UNKNOWN = {"type": "function", "function": {"name": "radio"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Is it raining?"}]
    return ChatRequest.read(json.dumps({"messages": messages, **fields}).encode())


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ["get_weather", "clock.now"]),
        ("auto", "auto", ["get_weather", "clock.now"]),
        ("none", "none", []),
        ("required", "required", ["get_weather", "clock.now"]),
        (NAMED, "required", ["clock.now"]),
        (allowed("auto", NAMED), "auto", ["clock.now"]),
        (allowed("required", NAMED), "required", ["clock.now"]),
    ],
    ids=["null", "auto", "none", "required", "named", "some", "one-of-some"],
)
def test_a_choice_says_which_tools_may_be_called(choice, mode, names):
    request = chat(tools=TOOLS, tool_choice=choice)

    assert request.tool_choice.mode == mode
    assert [tool.name for tool in request.callable_tools] == names


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("none", TOOLS),
        ("required", TOOLS),
        (NAMED, TOOLS),
        (allowed("auto", NAMED), [CLOCK]),
    ],
    ids=["none", "required", "named", "allowed"],
)
def test_a_model_sees_all_tools_but_those_not_allowed(choice, shown):
    request = chat(tools=TOOLS, tool_choice=choice)

    assert request.template_options["tools"] == shown


@pytest.mark.parametrize("choice", ["auto", "none", None])
@pytest.mark.parametrize("tools", [[], None])
def test_a_choice_without_tools_means_nothing(tools, choice):
    request = chat(tools=tools, tool_choice=choice)

    assert request.callable_tools == []
    assert "tools" not in request.template_options


def test_a_template_gets_a_tool_as_it_was_sent():
    function = {"strict": None, "parameters": SCHEMA, "name": "f", "x-unit": "°C"}
    sent = {"function": function, "type": "function", "cache_control": {"type": "e"}}

    (definition,) = chat(tools=[sent]).template_options["tools"]

    function.pop("strict")
    assert json.dumps(definition) == json.dumps({**sent, "function": function})


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"tools": [WEATHER, {"type": "web_search"}]},
            r"tools\[1\]\.type is 'web_search'",
            "tools",
        ),
        (
            {"tools": [tool(name="a b")]},
            r"tools\[0\]\.function\.name is 'a b'",
            "tools",
        ),
        ({"tools": [tool(name="")]}, r"tools\[0\]\.function\.name is ''", "tools"),
        ({"tools": [tool(name="x" * 129)]}, r"tools\[0\]\.function\.name", "tools"),
        (
            {"tools": [{"type": "function"}]},
            r"tools\[0\]\.function is required",
            "tools",
        ),
        (
            {"tools": [tool(parameters={"type": "array"})]},
            r"tools\[0\]\.function\.parameters is .*expected a JSON schema",
            "tools",
        ),
        (
            {"tools": [tool(parameters={"properties": ["city"]})]},
            r"tools\[0\]\.function\.parameters",
            "tools",
        ),
        ({"tools": [CLOCK] * 1025}, "at most 1024 items", "tools"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; expected", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice is", "tool_choice"),
        ({"tool_choice": allowed("none", NAMED)}, "allowed_tools is", "tool_choice"),
        ({"tool_choice": allowed("auto")}, "allowed_tools is", "tool_choice"),
        (
            {"tool_choice": allowed("auto", {})},
            "allowed_tools.tools has",
            "tool_choice",
        ),
    ],
)
def test_wrong_tools_are_refused_with_their_place(fields, message, param):
    with pytest.raises(RequestError, match=message) as caught:
        chat(**fields)

    assert caught.value.param == param


@pytest.mark.parametrize("choice", ["required", NAMED, allowed("required", NAMED)])
def test_a_forced_call_needs_tools(choice):
    with pytest.raises(RequestError, match="there are no tools"):
        _ = chat(tool_choice=choice).callable_tools


@pytest.mark.parametrize("choice", [UNKNOWN, allowed("auto", UNKNOWN)])
def test_a_choice_of_an_unknown_tool_is_refused(choice):
    with pytest.raises(RequestError, match="'radio', which is not among the tools"):
        _ = chat(tools=TOOLS, tool_choice=choice).callable_tools


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"functions": [{"name": "f"}]}, "write tools"),
        ({"function_call": {"name": "f"}}, "write tool_choice"),
    ],
)
def test_the_old_names_of_tools_are_refused(fields, instead):
    with pytest.raises(RequestError, match=instead):
        chat(**fields)


def test_the_old_names_of_tools_may_say_that_there_are_none():
    assert chat(functions=[], function_call="none").callable_tools == []


def test_a_completion_has_no_tools():
    body = json.dumps({"prompt": "a", "tools": [WEATHER]}).encode()

    with pytest.raises(RequestError, match="tools="):
        CompletionRequest.read(body)


def test_ids_of_calls_are_new_and_in_the_form_that_templates_take():
    assert len({new_call_id() for _ in range(9)}) == 9
    assert new_call_id().startswith("call_")
    assert len(new_call_id(is_short=True)) == 9
