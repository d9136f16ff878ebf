"""Forced calls: the grammar of each notation allows what its parser reads."""

import json

import pytest

from disagg.errors import RequestError
from disagg.grammar.calls import CALL_NOTATIONS, tool_calls
from disagg.parsers.formats import TOOL_FORMATS
from tests.grammar.following import is_whole
from tests.parsers.answers import Reading, calls_of, content_of

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
NOTATIONS = [
    *(pytest.param(name, form, id=name) for name, form in CALL_NOTATIONS.items()),
    *(
        pytest.param(name, form.newer, id=f"{name}-newer")
        for name, form in CALL_NOTATIONS.items()
        if form.newer is not None
    ),
]
CALLS = [("weather", {"city": "Oslo", "days": 2}), ("now", {})]
CITIES = {
    "nullable": {"type": ["string", "null"]},
    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "listed": {"enum": ["Oslo", "Rome"]},
    "constant": {"const": "Oslo"},
    "named": {"$ref": "#/$defs/City"},
    "any": {},
}


def write_calls(form, calls):
    """Some calls in a notation."""
    written = [
        form.before_name + name + form.before_arguments + write(form, arguments)
        for name, arguments in calls
    ]
    texts = [each + form.behind for each in written]
    return form.before_first + form.between.join(texts) + form.behind_last


def write(form, arguments):
    """Arguments, of which those that are no text are JSON."""
    if form.parameters is None:
        return json.dumps(arguments)
    return "".join(
        parameter(form.parameters, *each, is_text=isinstance(each[1], str))
        for each in arguments.items()
    )


def parameter(form, key, value, *, is_text):
    before = form.before_value if is_text else form.before_json or form.before_value
    written = value if is_text else json.dumps(value)
    return form.before_name + key + before + written + form.behind


@pytest.mark.parametrize(("name", "form"), NOTATIONS)
def test_calls_in_a_notation_are_allowed_and_read(name, form):
    text = write_calls(form, CALLS)

    constraint = tool_calls(FUNCTIONS, form, {}, parallel=True)
    parts = Reading(name, tools=FUNCTIONS).whole(text)

    assert is_whole(constraint, text)
    assert [(called, json.loads(x)) for called, x in calls_of(parts)] == CALLS
    assert content_of(parts) == ""


@pytest.mark.parametrize(
    "name", [x for x in CALL_NOTATIONS if CALL_NOTATIONS[x].parameters]
)
@pytest.mark.parametrize("schema", CITIES.values(), ids=CITIES)
def test_a_text_is_read_as_the_grammar_writes_it(name, schema):
    form = CALL_NOTATIONS[name]
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    functions = {
        "weather": {
            "type": "object",
            "properties": {"city": schema},
            "required": ["city"],
            "$defs": {"City": city},
        }
    }
    before, behind = write_calls(form, [("weather", {})]).split(form.behind, 1)
    texts = [
        before
        + parameter(form.parameters, "city", "Oslo", is_text=x)
        + form.behind
        + behind
        for x in (True, False)
    ]

    constraint = tool_calls(functions, form, {}, parallel=False)
    allowed = [text for text in texts if is_whole(constraint, text)]

    read = [calls_of(Reading(name, tools=functions).whole(text)) for text in allowed]
    assert [("weather", '{"city": "Oslo"}')] in read


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


def weather_of(city):
    """A function whose parameter has a schema."""
    return {"weather": {"properties": {"city": city}, "required": ["city"]}}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v32", "glm45"])
@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/$defs/City"}, {"not": {}}, {"anyOf": []}, False],
    ids=["no-such-definition", "not", "no-option", "never"],
)
def test_every_notation_refuses_what_a_schema_may_not_have(name, schema):
    with pytest.raises(RequestError, match="'weather': the schema at #"):
        tool_calls(weather_of(schema), CALL_NOTATIONS[name], SPECIAL, parallel=False)


QWEN_CITY = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"enum": ["Oslo"], "anyOf": [{"type": "string"}]}, "Oslo", "Rome"),
        ({"allOf": [{"const": "Oslo"}, {"title": "City"}]}, "Oslo", "Rome"),
        ({"type": ["integer", "string"], "enum": [1, "Oslo"]}, "Oslo", "1"),
        ({"type": ["string", "null"], "enum": ["Oslo", None]}, "null", "None"),
    ],
)
def test_a_bare_text_is_one_of_those_that_its_schema_lists(schema, right, wrong):
    form = CALL_NOTATIONS["qwen3_coder"]

    constraint = tool_calls(weather_of(schema), form, {}, parallel=False)

    assert is_whole(constraint, QWEN_CITY % right)
    assert not is_whole(constraint, QWEN_CITY % wrong)


def test_values_that_would_be_read_as_texts_are_refused():
    functions = weather_of({"type": ["integer", "string"], "enum": [1]})

    with pytest.raises(RequestError, match="cannot tell from texts"):
        tool_calls(functions, CALL_NOTATIONS["qwen3_coder"], {}, parallel=False)


def test_a_parameter_that_may_not_be_there_is_not_written():
    functions = {"weather": {"properties": {"city": False}}}

    constraint = tool_calls(
        functions, CALL_NOTATIONS["qwen3_coder"], {}, parallel=False
    )

    assert not is_whole(constraint, QWEN_CITY % "Oslo")


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
