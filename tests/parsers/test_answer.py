"""Answers as models write them, and what becomes of them: thoughts, content, calls."""

import json
import sys

import pytest

from disagg.parsers.parts import Content, Thought
from tests.parsers.answers import Reading, call, calls_of, content_of

WEATHER = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
            "place": {"$ref": "#/$defs/Place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"Place": {"type": "object", "properties": {}}},
    }
}
OSLO = '{"city": "Oslo"}'
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HARMONY = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
SPECIALS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>")

# tool format, reasoning format, text, parts
ANSWERS = {
    "hermes": (
        ("hermes", "think"),
        f"<think>\nRain?\n</think>\n\nI look.\n{HERMES}\n{HERMES}",
        [
            Thought("Rain?"),
            Content("I look."),
            *call(0, "weather", OSLO),
            *call(1, "weather", OSLO),
        ],
    ),
    "arguments-first": (
        ("hermes", "none"),
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>',
        call(0, "weather", OSLO),
    ),
    "arguments-in-a-string": (
        ("hermes", "none"),
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        call(0, "weather", OSLO),
    ),
    "no-arguments": (
        ("hermes", "none"),
        '<tool_call>{"name": "weather"}</tool_call>',
        call(0, "weather", "{}"),
    ),
    "unknown-name": (
        ("hermes", "none"),
        '<tool_call>{"name": "tides", "arguments": {}}</tool_call>',
        call(0, "tides", "{}"),
    ),
    "qwen3_coder": (
        ("qwen3_coder", "think"),
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=wind>\nTrue\n</parameter>\n"
        '<parameter=place>\n{"x": 1}\n</parameter>\n<parameter=note>\nnull\n</parameter>\n'
        "<parameter=other>\n7\n</parameter>\n</function>\n</tool_call>",
        [
            Content("I look."),
            *call(
                0,
                "weather",
                '{"city": "New\\nYork", "days": 3, "wind": true, "place": {"x": 1}, '
                '"note": null, "other": "7"}',
            ),
        ],
    ),
    "not-of-its-type": (
        ("qwen3_coder", "none"),
        "<tool_call><function=weather><parameter=days>a few</parameter></function></tool_call>",
        call(0, "weather", '{"days": "a few"}'),
    ),
    "function-without-end": (
        ("qwen3_coder", "none"),
        "<tool_call><function=weather><parameter=city>Oslo</parameter></tool_call>Ok",
        [*call(0, "weather", OSLO), Content("Ok")],
    ),
    "glm45": (
        ("glm45", "think"),
        "<think>Rain?</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        [
            Thought("Rain?"),
            *call(0, "weather", '{"city": "Oslo", "days": 3}'),
            *call(1, "now", "{}"),
        ],
    ),
    "llama3-bare": (
        ("llama3_json", "none"),
        '{"name": "weather", "parameters": {"city": "Oslo"}}; '
        '{"name": "now", "parameters": {}}',
        [*call(0, "weather", OSLO), *call(1, "now", "{}")],
    ),
    "llama3-python-tag": (
        ("llama3_json", "none"),
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}',
        call(0, "weather", OSLO),
    ),
    "llama3-other-json": (
        ("llama3_json", "none"),
        '{"city": "Oslo"}',
        [Content('{"city": "Oslo"}')],
    ),
    "llama3-only-a-name": (
        ("llama3_json", "none"),
        '{"name": "Ada"}',
        [Content('{"name": "Ada"}')],
    ),
    "mistral-list": (
        ("mistral", "none"),
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}, '
        '{"name": "now", "arguments": {}}]',
        [*call(0, "weather", OSLO), *call(1, "now", "{}")],
    ),
    "mistral-names": (
        ("mistral", "mistral"),
        '[THINK]Rain?[/THINK]I look.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
        "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]later{}",
        [
            Thought("Rain?"),
            Content("I look."),
            *call(0, "weather", OSLO),
            *call(1, "now", "{}"),
            *call(2, "later", "{}"),
        ],
    ),
    "deepseek_v3": (
        ("deepseek_v3", "think"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*call(0, "weather", OSLO), *call(1, "now", "{}")],
    ),
    "deepseek_v31": (
        ("deepseek_v31", "think"),
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [Content("I look."), *call(0, "weather", OSLO)],
    ),
    "deepseek_v32": (
        ("deepseek_v32", "think"),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="day" string="false">[3]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        call(0, "weather", '{"city": "3", "day": [3]}'),
    ),
    "kimi_k2": (
        ("kimi_k2", "think"),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
        call(0, "weather", OSLO),
    ),
    "minimax_m2": (
        ("minimax_m2", "think"),
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        call(0, "weather", OSLO),
    ),
    "harmony-final": (
        ("harmony", "harmony"),
        f"{HARMONY}<|channel|>final<|message|>Four.<|return|>",
        [Thought("Rain?"), Content("Four.")],
    ),
    "harmony-recipient-last": (
        ("harmony", "harmony"),
        f"{HARMONY}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}<|call|>',
        [Thought("Rain?"), *call(0, "weather", OSLO)],
    ),
    "harmony-recipient-first": (
        ("harmony", "harmony"),
        f"{HARMONY} to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Oslo"}<|call|>',
        [Thought("Rain?"), *call(0, "weather", OSLO)],
    ),
    "harmony-preamble": (
        ("harmony", "harmony"),
        f"{HARMONY}<|channel|>analysis<|message|>Wind?<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.now<|message|><|call|>",
        [Thought("Rain?\nWind?"), Content("I look."), *call(0, "now", "{}")],
    ),
    "harmony-without-header": (("harmony", "harmony"), "Four.", [Content("Four.")]),
}


@pytest.mark.parametrize(
    ("formats", "text", "parts"), ANSWERS.values(), ids=ANSWERS.keys()
)
def test_an_answer_has_its_parts_however_it_is_cut(formats, text, parts):
    reading = Reading(*formats, tools=WEATHER)

    assert reading.whole(text) == parts
    assert reading.pieces(list(text)) == parts
    for cut in range(0, len(text), 2):
        assert reading.pieces([text[:cut], text[cut:]]) == parts


@pytest.mark.parametrize(
    ("formats", "text", "parts"), ANSWERS.values(), ids=ANSWERS.keys()
)
def test_an_answer_that_is_cut_off_ends_no_call_of_its_own(formats, text, parts):
    reading = Reading(*formats, tools=WEATHER)
    whole_calls = calls_of(parts)

    for end in range(0, len(text), 3):
        calls = calls_of(reading.whole(text[:end]))
        assert calls == whole_calls[: len(calls)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>oops</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"city": "Oslo"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}',
        "1 < 2, a <tool",
        "I write <think> in the middle.",
    ],
)
def test_what_is_no_call_is_content(text):
    reading = Reading("hermes", "think")

    assert reading.pieces(list(text)) == [Content(text)]


def test_a_call_behind_a_broken_one_is_read():
    parts = Reading("hermes").whole(f"<tool_call>oops {HERMES}")

    assert parts == [Content("<tool_call>oops"), *call(0, "weather", OSLO)]


def test_arguments_pass_through_as_they_are_written():
    arguments = '{ "a" :1.50,"b":"\\u00e9\\"}</tool_call>" }'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'

    assert Reading("hermes").pieces(list(text)) == call(0, "f", arguments)


def test_only_what_may_begin_a_mark_is_held_back():
    parser = Reading("hermes").parser()

    assert parser.add("a <tool") == (Content("a"),)
    assert parser.add("box>") == (Content(" <toolbox>"),)
    assert parser.add('<tool_call>{"name": "f", "arguments"') == ()
    assert [*parser.add(': {"a": "b')] == call(0, "f", '{"a": "b', is_whole=False)


def test_values_are_streamed_as_they_become_certain():
    parser = Reading("qwen3_coder", tools=WEATHER).parser()
    parser.add("<tool_call><function=weather><parameter=city>\nNew")

    parts = parser.add(" York\n")

    assert [part.text for part in parts] == [" York"]


def test_a_thought_may_begin_in_the_prompt():
    reading = Reading("hermes", "think", prompt="<|im_start|>assistant\n<think>\n")
    closed = Reading("hermes", "think", prompt="<think>\n\n</think>\n\n")

    assert reading.whole("Rain?\n</think>\n\nYes") == [Thought("Rain?"), Content("Yes")]
    assert reading.whole("Rain?") == [Thought("Rain?")]
    assert closed.whole("Yes") == [Content("Yes")]


def test_without_tools_calls_are_content():
    assert Reading("hermes", tools=None).whole(HERMES) == [Content(HERMES)]


def test_without_formats_an_answer_passes_at_once():
    parser = Reading().parser()

    assert parser.add("<think> \n") == (Content("<think> \n"),)
    assert parser.finish() == ()


def test_special_tokens_are_not_their_letters():
    text = f"{HARMONY}<|channel|>commentary to=functions.f<|message|>"
    text += '{"a": "'
    reading = Reading("harmony", "harmony", specials=SPECIALS)

    parts = reading.whole(reading.shown(text) + '<|end|>"}' + reading.shown("<|call|>"))
    spelled = reading.whole(text)

    assert parts == [Thought("Rain?"), *call(0, "f", '{"a": "<|end|>"}')]
    assert spelled == [Content(text)]


def test_a_special_token_without_a_role_is_shown_by_its_letters():
    reading = Reading("hermes", specials=["</tool_call>"])

    assert reading.whole(reading.shown("a</tool_call>")) == [Content("a</tool_call>")]


def test_a_special_token_inside_a_string_cuts_the_call():
    reading = Reading("kimi_k2", specials=["<|tool_call_end|>", "<|tool_call_begin|>"])
    text = '<|tool_call_begin|>functions.f:0 {"a": "b<|tool_call_end|>Ok'

    parts = reading.whole(reading.shown(text))

    assert parts == [*call(0, "f", '{"a": "b', is_whole=False), Content("Ok")]


def test_a_call_as_a_special_token_ends_a_thought():
    section = "<|tool_calls_section_begin|>"
    reading = Reading("kimi_k2", "think", prompt="<think>", specials=[section])
    text = f"Rain?{section}<|tool_call_begin|>functions.f:0 {{}}"

    parts = reading.whole(reading.shown(text))

    assert parts == [Thought("Rain?"), *call(0, "f", "{}")]


def test_tokens_between_the_marks_of_a_thought_are_counted():
    tokens = ["<think>", "\n", "Rain", "", "?", "</think>", "Yes"]
    parser = Reading("none", "think").parser()
    for token in tokens:
        parser.add(token)
    parser.finish()

    assert parser.num_thought_tokens == 4


def test_letters_of_the_mark_behind_a_thought_are_not_counted():
    parser = Reading("none", "think").parser()

    for token in ["<think>", "H", "m", ".", *"</think>", "Y"]:
        parser.add(token)

    assert parser.num_thought_tokens == 3


def test_letters_that_only_began_like_a_mark_are_counted():
    parser = Reading("none", "think").parser()

    for token in ["<think>", *"a</thick", *"</th"]:
        parser.add(token)
    parser.finish()

    assert parser.num_thought_tokens == 12


def test_the_first_token_of_a_thought_that_the_prompt_began_is_counted():
    parser = Reading("none", "think", prompt="<think>\n").parser()
    for token in ["Rain", "?", "</think>", "Yes"]:
        parser.add(token)

    assert parser.num_thought_tokens == 2


@pytest.mark.parametrize(
    ("formats", "bit"),
    [
        (("hermes", "think"), "<tool_call>"),
        (("hermes", "think"), '<tool_call>{"arguments": {'),
        (("hermes", "think"), " <"),
        (("glm45", "think"), "<tool_call>f<arg_key>"),
        (("mistral", "none"), "[TOOL_CALLS]a"),
        (("llama3_json", "none"), '{"parameters": ['),
        (("harmony", "harmony"), "<|channel|>analysis"),
        (("qwen3_coder", "none"), "<function=f><parameter=a>\n"),
    ],
)
def test_work_grows_with_the_text_alone(formats, bit):
    """Function calls are counted, character for character."""
    short, long = (calls_made(formats, (bit * size)[:size]) for size in (500, 1000))

    assert long < 2.3 * short


def calls_made(formats: tuple[str, str], text: str) -> int:
    count = 0

    def add_call(*_event: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(add_call)
    try:
        Reading(*formats).pieces(text)
    finally:
        sys.setprofile(before)
    return count


def test_deep_arguments_are_no_recursion():
    arguments = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    named = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    early = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'

    assert Reading("hermes").whole(named) == call(0, "f", arguments)
    assert content_of(Reading("hermes").whole(early)) == early


def test_bare_numbers_are_json():
    text = "<tool_call><function=weather><parameter=days>NaN</parameter></function></tool_call>"

    ((_, arguments),) = calls_of(Reading("qwen3_coder", tools=WEATHER).whole(text))

    assert json.loads(arguments) == {"days": "NaN"}
