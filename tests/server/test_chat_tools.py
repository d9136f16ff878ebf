"""Chats with tools and thoughts over HTTP: the model says what a test wants."""

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from starlette.types import ASGIApp

from disagg.server import answer_format
from tests.model.templates import STYLES
from tests.server.speaking import PLAIN_TEMPLATE, speaking
from tests.server.visits import chat, events, get, refused

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": SCHEMA},
}
TOOLS: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 1000}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
OSLO = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
ROME = OSLO.replace("Oslo", "Rome")
THOUGHT = "<think>\nRain?\n</think>\n\n"


def message_of(app: ASGIApp, **fields: Any) -> dict[str, Any]:
    return chat(app, **TOOLS | fields).json()["choices"][0]["message"]


def gathered(app: ASGIApp, **fields: Any) -> tuple[dict[str, Any], str]:
    """A message as a client puts it together from the chunks of a stream, and its end."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reason = None
    for chunk in events(chat(app, stream=True, **TOOLS | fields).text):
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        reason = choice["finish_reason"] or reason
        assert len({*delta} - {"role", "reasoning_content"}) <= 1
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append(dict(call["function"]))
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                arguments = call["function"]["arguments"]
                message["tool_calls"][-1]["arguments"] += arguments
    assert isinstance(reason, str)
    return message, reason


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls", [])
    functions = [call.get("function", call) for call in calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


def test_a_call_is_told_from_the_text():
    app, _ = speaking(f"I look.{OSLO}")

    choice = chat(app, **TOOLS).json()["choices"][0]

    assert choice["message"]["content"].strip() == "I look."
    assert calls_of(choice["message"]) == [("get_weather", {"city": "Oslo"})]
    assert choice["finish_reason"] == "tool_calls"


def test_content_is_null_where_there_are_only_calls():
    app, _ = speaking(OSLO + ROME)

    message = message_of(app)

    assert message["content"] is None
    assert [arguments["city"] for _, arguments in calls_of(message)] == ["Oslo", "Rome"]


@pytest.mark.parametrize("text", [OSLO, f"I look.{OSLO}{ROME}", THOUGHT + OSLO, "No."])
def test_a_stream_has_the_message_of_a_whole_response(text):
    app, _ = speaking(text)

    message, reason = gathered(app)
    whole = chat(app, **TOOLS).json()["choices"][0]

    assert message["content"].strip() == (whole["message"]["content"] or "").strip()
    assert message["reasoning"] == whole["message"].get("reasoning", "")
    assert calls_of(message) == calls_of(whole["message"])
    assert reason == whole["finish_reason"]


def test_every_choice_has_calls_of_its_own():
    app, _ = speaking(OSLO)

    choices = chat(app, **TOOLS, n=3).json()["choices"]

    ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
    assert len({*ids}) == 3


@pytest.mark.parametrize("cut_at", range(50, len(OSLO) - len("</tool_call>") - 2, 4))
def test_a_cut_call_ends_with_length(cut_at):
    app, _ = speaking(OSLO)

    whole = chat(app, **TOOLS | {"max_tokens": cut_at}).json()["choices"][0]
    message, reason = gathered(app, max_tokens=cut_at)

    assert whole["finish_reason"] == reason == "length"
    for call in message["tool_calls"]:
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["arguments"])


def test_a_stop_string_inside_a_call_is_a_cut():
    app, _ = speaking(OSLO)

    choice = chat(app, **TOOLS, stop=["Os"]).json()["choices"][0]

    assert choice["finish_reason"] == "length"


def test_an_answer_ends_behind_the_only_call_that_a_client_wants():
    app, router = speaking(OSLO + ROME)

    body = chat(app, **TOOLS, parallel_tool_calls=False).json()

    (choice,) = body["choices"]
    assert calls_of(choice["message"]) == [("get_weather", {"city": "Oslo"})]
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] == router.num_taken <= len(OSLO)


def test_thoughts_have_both_of_their_names():
    app, _ = speaking(f"{THOUGHT}No.")

    body = chat(app, max_tokens=1000).json()

    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"]
    assert message["reasoning"].strip() == "Rain?"
    assert message["content"].strip() == "No."
    details = body["usage"]["completion_tokens_details"]
    assert 5 <= details["reasoning_tokens"] <= len(THOUGHT)


def test_a_thought_that_the_prompt_begins_is_one():
    app, _ = speaking("Rain?</think>No.")

    message = message_of(app, reasoning_effort="high")

    assert (message["reasoning"], message["content"]) == ("Rain?", "No.")


def test_a_prompt_that_ends_thoughts_has_none():
    app, router = speaking("No.")

    options = {"enable_thinking": False}
    message = message_of(app, chat_template_kwargs=options)

    assert message["content"] == "No."
    assert "reasoning" not in message
    assert router.prompts[0].endswith("<think></think>")


@pytest.mark.parametrize("limit", [9, 13, 18])
def test_an_answer_that_is_cut_in_a_thought_has_no_content(limit):
    app, _ = speaking(f"{THOUGHT}No.")

    choice = chat(app, max_tokens=limit).json()["choices"][0]

    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


def test_a_stop_string_ends_an_answer_inside_its_thoughts():
    app, _ = speaking(f"{THOUGHT}No.")

    choice = chat(app, max_tokens=1000, stop=["in?"]).json()["choices"][0]

    assert choice["message"]["reasoning"].strip() == "Ra"
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"


def test_thoughts_that_a_client_does_not_want_are_counted_only():
    app, _ = speaking(f"{THOUGHT}No.")
    request = {"max_tokens": 1000, "include_reasoning": False}

    whole = chat(app, **request).json()
    stream = chat(app, **request, stream=True).text

    assert "Rain" not in json.dumps(whole)
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert "Rain" not in stream


def test_usage_in_a_stream_counts_thoughts_too():
    app, _ = speaking(f"{THOUGHT}No.")
    options = {"include_usage": True}

    *_, last = events(
        chat(app, max_tokens=1000, stream=True, stream_options=options).text
    )

    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_its_log_probability(stream):
    app, router = speaking(f"{THOUGHT}I look.{OSLO}")

    response = chat(app, **TOOLS, logprobs=True, stream=stream)

    chunks = events(response.text) if stream else [response.json()]
    lists = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [entry["token"] for each in lists if each for entry in each["content"]]
    assert len(tokens) == len(router.texts[0])
    assert "".join(tokens) == f"{THOUGHT}I look.{OSLO}"


def test_a_call_stays_text_where_none_may_be_called():
    app, router = speaking(OSLO)

    choice = chat(app, **TOOLS, tool_choice="none").json()["choices"][0]

    assert choice["message"]["content"] == OSLO
    assert choice["finish_reason"] == "stop"
    assert "get_weather" in router.prompts[0]


def test_calls_and_thoughts_stay_text_without_parsers():
    app, _ = speaking(THOUGHT + OSLO, tool_parser="none", reasoning_parser="none")

    choice = chat(app, **TOOLS).json()["choices"][0]

    assert choice["message"] == {
        "role": "assistant",
        "content": THOUGHT + OSLO,
        "refusal": None,
    }


def test_a_template_that_shows_no_tools_is_an_error():
    app, _ = speaking(OSLO, template=STYLES["hermes"].source)

    message = refused(chat(app, **TOOLS), 400, "request", "tools")

    assert "does not show tools" in message
    assert chat(app, **TOOLS, tool_choice="none").is_success


def test_calls_that_no_parser_reads_are_an_error():
    app, _ = speaking(OSLO, template=STYLES["tool_use"].source)

    message = refused(chat(app, **TOOLS), 400, "request", "tools")

    assert "--tool-parser" in message


def test_an_effort_that_no_template_reads_is_an_error():
    app, _ = speaking("No.", template=PLAIN_TEMPLATE)

    message = refused(
        chat(app, reasoning_effort="high"), 400, "request", "reasoning_effort"
    )

    assert "does not read it" in message


@pytest.fixture
def num_parsers() -> Iterator[list[int]]:
    """Grows with every parser that is made."""
    made: list[int] = []
    parser = answer_format.AnswerParser

    def counted(*args: Any) -> Any:
        made.append(1)
        return parser(*args)

    with patch.object(answer_format, "AnswerParser", counted):
        yield made


@pytest.mark.parametrize("fields", [{}, {"tools": []}, TOOLS | {"tool_choice": "none"}])
def test_a_chat_without_tools_and_thoughts_has_no_parser(fields, num_parsers):
    app, _ = speaking(OSLO, template=PLAIN_TEMPLATE)

    message = chat(app, **{"max_tokens": 1000} | fields).json()["choices"][0]["message"]

    assert message["content"] == OSLO
    assert not num_parsers

    message_of(app)

    assert len(num_parsers) == 1


def test_ids_of_calls_are_those_that_the_template_takes():
    template = PLAIN_TEMPLATE.replace(
        "<tool_call>",
        "{% if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}<tool_call>",
    )
    app, _ = speaking(OSLO, template=template)

    (call,) = message_of(app)["tool_calls"]

    assert len(call["id"]) == 9


def test_models_name_their_parsers():
    app, _ = speaking("")

    (model,) = get(app, "/v1/models").json()["data"]

    assert (model["tool_parser"], model["reasoning_parser"]) == ("hermes", "think")


def test_a_conversation_goes_on_behind_a_call():
    app, router = speaking("It is raining.")
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "Is it raining?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]

    message = message_of(app, messages=messages)

    assert message["content"] == "It is raining."
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in router.prompts[0]


CHANNELS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"]
CHANNELS += ["<|call|>", "<|return|>"]
# as gpt-oss's, whose answers are messages in channels
HARMONY = """
{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}
{%- for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
{#- its answers: <|channel|>final<|message|> #}"""


def in_channel(header: str, text: str, end: str = "end") -> str:
    return f"⟨<|channel|>⟩{header}⟨<|message|>⟩{text}⟨<|{end}|>⟩"


ANALYSIS = in_channel("analysis", "Two and two.") + "⟨<|start|>⟩assistant"


def test_channels_are_thoughts_and_content():
    app, _ = speaking(
        ANALYSIS + in_channel("final", "Four.", "return"),
        HARMONY,
        special_tokens=CHANNELS,
    )

    message = message_of(app)
    streamed, _ = gathered(app)

    assert (message["reasoning"], message["content"]) == ("Two and two.", "Four.")
    assert (streamed["reasoning"], streamed["content"]) == ("Two and two.", "Four.")


def test_a_channel_to_a_function_is_a_call():
    header = "commentary to=functions.get_weather ⟨<|constrain|>⟩json"
    call = in_channel(header, '{"city": "Oslo"}', "call")
    app, _ = speaking(ANALYSIS + call, HARMONY, special_tokens=CHANNELS)

    message = message_of(app)

    assert calls_of(message) == [("get_weather", {"city": "Oslo"})]
    assert (message["reasoning"], message["content"]) == ("Two and two.", None)


def test_letters_that_look_like_a_special_token_are_letters():
    text = "It writes <|channel|> and <|end|>."
    app, _ = speaking(in_channel("final", text), HARMONY, special_tokens=CHANNELS)

    assert message_of(app)["content"] == text


CLOCK = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", []),
        ("none", []),
        ("required", ["get_weather", "get_time"]),
        (NAMED, ["get_weather"]),
    ],
    ids=["auto", "none", "required", "named"],
)
def test_only_forced_calls_follow_a_grammar(choice, names):
    app, router = speaking(OSLO)

    assert chat(
        app, **TOOLS | {"tools": [WEATHER, CLOCK]}, tool_choice=choice
    ).is_success

    grammar = router.params[0].get("grammar", "")
    present = [name for name in ("get_weather", "get_time") if name in grammar]
    assert present == names


def test_a_schema_that_no_grammar_has_is_refused_with_its_place():
    app, router = speaking(OSLO)
    schema = {"type": "object", "properties": {"city": {"type": "text"}}}
    function = {"name": "get_weather", "parameters": schema}
    request = {"tools": [{"type": "function", "function": function}]}

    response = chat(app, **request, tool_choice="required")

    message = refused(response, 400, "request", "tools")
    assert "get_weather" in message
    assert "/properties/city" in message
    assert not router.prompts


def test_a_forced_call_of_an_unknown_format_is_refused():
    app, _ = speaking(OSLO, tool_parser="none")

    response = chat(app, **TOOLS, tool_choice="required")

    assert "--tool-parser" in refused(response, 400, "request", "tool_choice")


def test_tools_may_reach_a_template_by_a_name_of_its_own():
    template = "{{ xml_tools | default('') }}<tool_call>{{ messages[0].content }}"
    app, _ = speaking(OSLO, template=template)
    options = {"xml_tools": "get_weather"}

    message = message_of(app, chat_template_kwargs=options)

    assert calls_of(message) == [("get_weather", {"city": "Oslo"})]
