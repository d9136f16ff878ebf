"""Forced calls: the grammar of each notation allows what its parser reads."""

import json

import pytest

from disagg.errors import RequestError
from disagg.grammar.calls import CALL_NOTATIONS, tool_calls
from disagg.parsers.formats import TOOL_FORMATS
from tests.grammar.following import is_whole

FUNCTIONS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
ARGUMENTS = json.dumps({"city": "Oslo", "days": 2, "unit": "C"})
SPECIAL = {"[TOOL_CALLS]": 256, "<|channel|>": 257, "<|call|>": 258}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s"
    "<|call|>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_in_the_notation_of_a_model_is_allowed(name):
    text = WRITTEN[name].replace("%s", ARGUMENTS)
    form = CALL_NOTATIONS[name]

    one = tool_calls(FUNCTIONS, form, SPECIAL, parallel=False)

    assert is_whole(one, text, SPECIAL)
    assert not is_whole(one, text.replace("weather", "w"), SPECIAL)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "llama3_json"])
@pytest.mark.parametrize("parallel", [False, True])
def test_several_calls_need_leave(name, parallel):
    form = CALL_NOTATIONS[name]
    call = WRITTEN[name].replace("%s", ARGUMENTS)

    constraint = tool_calls(FUNCTIONS, form, {}, parallel=parallel)

    assert is_whole(constraint, call + form.between + call) == parallel


@pytest.mark.parametrize(
    "wrong", ['{"city": 3}', '{"days": 2}', '{"city": "a", "x": 1}']
)
def test_arguments_follow_their_schema(wrong):
    constraint = tool_calls(FUNCTIONS, CALL_NOTATIONS["hermes"], {}, parallel=False)

    assert not is_whole(constraint, WRITTEN["hermes"].replace("%s", wrong))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_bad_schema_names_its_function(name):
    functions = {"good": {}, "bad": {"properties": {"x": {"type": "in"}}}}

    with pytest.raises(RequestError, match="'bad': the schema at #/properties/x/type"):
        tool_calls(functions, CALL_NOTATIONS[name], {}, parallel=True)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_every_tool_parser_has_a_notation(form):
    functions = {"weather": FUNCTIONS["weather"]}

    constraint = tool_calls(functions, CALL_NOTATIONS[form.name], {}, parallel=True)

    assert "weather" in constraint


def test_newer_models_have_a_newer_notation():
    special = {"[TOOL_CALLS]": 256, "[ARGS]": 257}
    constraint = tool_calls(
        FUNCTIONS, CALL_NOTATIONS["mistral"], special, parallel=False
    )

    assert is_whole(constraint, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", special)
