"""The formats that chat templates call for."""

import pytest

from disagg.errors import UnknownNameError
from disagg.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormats

TEMPLATES = {  # excerpts
    "<tool_call>{{ call | tojson }}</tool_call>": "hermes",
    "<tool_call>\n<function=' + name + '>\n<parameter=": "qwen3_coder",
    "<tool_call>{{ name }}<arg_key>": "glm45",
    "<|python_tag|>": "llama3_json",
    '{"name": function name, "parameters": dictionary}': "llama3_json",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁calls▁begin｜>{{ name }}```json": "deepseek_v3",
    "<｜tool▁calls▁begin｜>{{ name }}": "deepseek_v31",
    "{% set dsml = '｜DSML｜' %}": "deepseek_v32",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|start|>assistant<|channel|>": "harmony",
    "<seed:tool_call>\n<function=f>\n<parameter=": "seed_oss",
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_the_template_tells_the_format_of_calls(template, name):
    tool = AnswerFormats.choose(template).tool

    assert tool is not None
    assert tool.name == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>') }}", "think"),
        ("[THINK]", "mistral"),
        ("<|channel|>analysis", "harmony"),
        ("<seed:think>", "seed_oss"),
    ],
)
def test_the_template_tells_the_format_of_thoughts(template, name):
    reasoning = AnswerFormats.choose(template).reasoning

    assert reasoning is not None
    assert reasoning.name == name


def test_a_plain_template_has_no_formats():
    assert AnswerFormats.choose("{{ messages }}") == AnswerFormats()


def test_a_name_overrides_the_template():
    formats = AnswerFormats.choose("<tool_call>", tool="mistral", reasoning="none")

    assert formats.tool is not None
    assert formats.tool.name == "mistral"
    assert formats.reasoning is None


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(UnknownNameError, match=r"tool parser 'hermse'.*auto.*hermes"):
        AnswerFormats.choose("", tool="hermse")
    with pytest.raises(UnknownNameError, match=r"reasoning parser.*think"):
        AnswerFormats.choose("", reasoning="thinking")


@pytest.mark.parametrize("formats", [TOOL_FORMATS, REASONING_FORMATS])
def test_names_are_unique(formats):
    names = [each.name for each in formats]

    assert len({*names}) == len(names)
