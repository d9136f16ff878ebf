"""Conversations in all forms that clients send, through templates of all styles."""

import json
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from disagg.errors import ModelError, RequestError
from disagg.model import chat
from disagg.model.chat import ChatTemplate
from disagg.server.schema import ChatRequest
from tests.model.templates import STYLES, Style

WORDS = {"bos_token": "<s>", "eos_token": "</s>"}
Message = dict[str, Any]
USER: Message = {"role": "user", "content": "Is it raining?"}
ANSWER: Message = {"role": "assistant", "content": "It is."}
SYSTEM: Message = {"role": "system", "content": "Be kind."}
DEVELOPER: Message = {"role": "developer", "content": "Be brief."}
BOTH: Message = {"role": "system", "content": "Be kind.\n\nBe brief."}
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "rain"}
CUT = '{"city": "Os'
OSLO = {"city": "Oslo", "unit": "°C"}


def called(*arguments: Any, **fields: Any) -> Message:
    """An assistant's message with a call for each value of arguments."""
    calls = [
        {
            "id": "call00001",
            "function": {"name": "get_weather", "arguments": value},
            "type": "function",
        }
        for value in arguments
    ]
    return {"role": "assistant", **fields, "tool_calls": calls}


def sent(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# what a client sends, and the messages that its author would have written for the template
CONVERSATIONS: dict[str, tuple[list[Message], list[Message]]] = {
    "one turn": ([USER], [USER]),
    "system": ([SYSTEM, USER], [SYSTEM, USER]),
    "developer": ([DEVELOPER, USER], [DEVELOPER, USER]),
    "system-and-developer": ([SYSTEM, DEVELOPER, USER], [SYSTEM, DEVELOPER, USER]),
    "late-developer": ([SYSTEM, USER, ANSWER, DEVELOPER, USER],) * 2,
    "three-turns": ([USER, ANSWER, USER], [USER, ANSWER, USER]),
    "two-users": ([USER, USER], [USER, USER]),
    "parts": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Is it"},
                    {"type": "input_text", "text": "raining?"},
                    {"type": "text", "text": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": []},
        ],
        [
            {"role": "user", "content": "Is it\nraining?\n"},
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": ""},
        ],
    ),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "Clouds."}, USER],) * 2,
    "nulls": (
        [
            USER,
            {
                **ANSWER,
                "audio": None,
                "function_call": None,
                "refusal": None,
                "tool_calls": [],
            },
            USER,
        ],
        [USER, ANSWER, USER],
    ),
    "call-null": (
        [USER, called(sent(OSLO), content=None), RESULT],
        [USER, called(OSLO), RESULT],
    ),
    "call-empty": (
        [USER, called(sent(OSLO), content=""), RESULT],
        [USER, called(OSLO), RESULT],
    ),
    "call-and-words": (
        [USER, called(sent(OSLO), content="I look."), RESULT],
        [USER, called(OSLO, content="I look."), RESULT],
    ),
    "two-calls": (
        [USER, called(sent(OSLO), "null", content=[]), RESULT, RESULT, ANSWER, USER],
        [USER, called(OSLO, {}), RESULT, RESULT, ANSWER, USER],
    ),
    "cut-arguments": ([USER, called(CUT), RESULT], [USER, called(CUT), RESULT]),
    "null-result": (
        [USER, called("", content=None), {**RESULT, "content": None}],
        [USER, called({}), {**RESULT, "content": ""}],
    ),
}


def meant(messages: list[Message], style: Style) -> list[Message]:
    """Messages in the form that the author of a template had in mind."""
    if not style.developer:
        messages = with_instructions(messages)
    return [in_style(message, style) for message in messages]


def with_instructions(messages: list[Message]) -> list[Message]:
    others = [message for message in messages if message not in (SYSTEM, DEVELOPER)]
    if DEVELOPER not in messages:
        return messages
    if SYSTEM not in messages:
        return [{**DEVELOPER, "role": "system"}, *others]
    return [BOTH, *others]


def in_style(message: Message, style: Style) -> Message:
    message = {"content": style.empty, **message}
    if style.thought and "reasoning_content" in message:
        message[style.thought] = message["reasoning_content"]
    if "tool_calls" in message:
        message["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": in_form(call["function"]["arguments"], style),
                },
            }
            for call in message["tool_calls"]
        ]
    if style.as_parts:
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message


def in_form(arguments: Any, style: Style) -> Any:
    if isinstance(arguments, str):
        return {"arguments": arguments} if style.wraps else arguments
    return sent(arguments) if style.as_text else arguments


PLAIN = PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **WORDS
)


def written_by_transformers(messages: list[Message], source: str) -> str | None:
    """The prompt; None if the template refuses the conversation."""
    try:
        if any(message["content"] is None for message in messages):
            # `apply_chat_template` drops nulls, which this template asks for
            texts, _ = render_jinja_template(
                [messages], chat_template=source, add_generation_prompt=True, **WORDS
            )
            return texts[0]
        return PLAIN.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
    except Exception:
        return None


def written_by_us(messages: list[Message], source: str) -> str | None:
    body = json.dumps({"messages": messages}).encode()
    request = ChatRequest.read(body)
    template = ChatTemplate(source, WORDS)
    try:
        return template.render(request.turns, **request.template_options)
    except RequestError:
        return None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", STYLES)
def test_a_prompt_is_the_one_that_its_author_meant(name, conversation):
    style = STYLES[name]
    messages, plain = CONVERSATIONS[conversation]
    expected = written_by_transformers(meant(plain, style), style.source)

    text = written_by_us(messages, style.source)

    assert text == expected


def prompt(name: str, *messages: Message) -> str:
    """What the template of a style writes for a conversation."""
    text = written_by_us(list(messages), STYLES[name].source)
    assert text is not None
    return text


@pytest.mark.parametrize("content", [None, "", []], ids=repr)
@pytest.mark.parametrize("name", ["hermes", "xml", "glm", "llama", "r1", "v3"])
def test_a_call_of_an_earlier_turn_is_never_lost(name, content):
    text = prompt(name, USER, called(sent(OSLO), content=content), RESULT)

    assert "get_weather" in text
    assert "Oslo" in text
    assert "None" not in text


def test_a_template_that_takes_text_gets_the_text_of_the_client():
    spaced = '{"city" :"Oslo"}'

    text = prompt("r1", USER, called(spaced, content=None), RESULT)

    assert f"get_weather\n{spaced}</s>" in text


def test_a_template_that_takes_text_gets_the_json_of_an_object():
    text = prompt("v3", USER, called(OSLO), RESULT)

    assert 'get_weather\n{"city": "Oslo", "unit": "°C"}</s>' in text


@pytest.mark.parametrize("arguments", [CUT, '["Oslo"]', '"Oslo"', "Oslo", ["Oslo"]])
@pytest.mark.parametrize("name", ["hermes", "xml", "glm", "llama", "v3"])
def test_arguments_that_are_no_object_do_not_end_a_conversation(name, arguments):
    text = prompt(name, USER, called(arguments), RESULT)

    assert "Os" in text.partition("get_weather")[2]


@pytest.mark.parametrize("arguments", ["null", "", " null ", None, "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    text = prompt("hermes", USER, called(arguments), RESULT)

    assert '"arguments": {}}</tool_call>' in text


def test_a_call_has_its_fields_in_the_order_of_the_client():
    text = prompt("mistral", USER, called(sent(OSLO)), RESULT)

    assert '[CALLS]{"name": "get_weather", "arguments": {"city": "Oslo",' in text


def test_a_developer_joins_the_first_system_message():
    late = {"role": "system", "content": "Be late."}

    text = prompt("chatml", DEVELOPER, SYSTEM, USER, ANSWER, DEVELOPER, USER, late)

    first, *_ = text.partition("<|user|>")
    assert first == "<|system|>Be brief.\n\nBe kind.\n\nBe brief.\n"
    assert text.count("<|system|>") == 2
    assert "developer" not in text


def test_a_template_that_knows_developers_gets_them():
    text = prompt("developers", SYSTEM, DEVELOPER, USER)

    assert text.startswith("<s><|system|>Be kind.<|developer|>Be brief.<|user|>")


def test_a_template_that_refuses_instructions_refuses_those_of_a_developer():
    template = ChatTemplate(STYLES["gemma"].source, WORDS)

    with pytest.raises(RequestError, match="System role not supported"):
        template.render([DEVELOPER, USER])


def test_a_template_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(chat, "TRIAL_S", 0.01)
    loops = "{% for a in range(999) %}{% for b in range(500) %}{% endfor %}{% endfor %}"

    with pytest.raises(ModelError, match=r"short conversations within 0\.01 s"):
        ChatTemplate(loops, WORDS)


THOUGHTS = """
{%- for m in messages %}<|{{ m.role }}|>
    {%- if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}
{%- endfor %}"""
# as gpt-oss's: it takes thoughts beside a call, but not with text between them
REFUSES_BOTH = """
{%- for m in messages %}<|{{ m.role }}|>
    {%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
    {{- m.thinking or '' }}{{ m.content }}
    {%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_a_template_by_the_name_that_it_reads(name):
    text = written_by_us([USER, {**ANSWER, name: "Clouds."}, USER], THOUGHTS)

    assert text is not None
    assert "<think>Clouds.</think>It is." in text


def test_thoughts_that_a_template_refuses_beside_a_text_and_a_call_are_left_out():
    message = called(sent(OSLO), content="I look.", reasoning_content="Clouds.")

    text = written_by_us([USER, message, RESULT], REFUSES_BOTH)

    assert text is not None
    assert "I look." in text
    assert "Clouds." not in text


def test_a_template_tells_whether_it_shows_tools():
    templates = {
        name: ChatTemplate(STYLES[name].source, WORDS)
        for name in ("tool_use", "hermes")
    }

    assert templates["tool_use"].writes_tools
    assert not templates["hermes"].writes_tools


def test_a_template_tells_which_ids_of_calls_it_takes():
    templates = {
        name: ChatTemplate(STYLES[name].source, WORDS) for name in ("mistral", "v3")
    }

    assert templates["mistral"].short_call_ids
    assert not templates["v3"].short_call_ids


def test_a_template_tells_which_options_it_reads():
    template = ChatTemplate("{% if enable_thinking is false %}a{% endif %}", WORDS)

    assert template.reads("enable_thinking")
    assert not template.reads("reasoning_effort")
