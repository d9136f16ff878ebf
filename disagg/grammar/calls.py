"""The grammar of an answer that must call tools, in the form that a model was trained on.

<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
╰─ before_name ──╯       ╰ before_arguments ╯               ╰ behind ╯
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.errors import RequestError, quoted
from disagg.grammar.constraints import check
from disagg.grammar.json_schemas import DEFINITIONS, prepare, schema_text
from disagg.grammar.lark_text import lark_of, lark_text, split_mark
from disagg.parsers.schema_types import parameter_types, parameter_values


@dataclass(frozen=True)
class ParameterForm:
    """How arguments are written one by one, where they are not one JSON object.

    A text stands as it is up to `behind`; anything else is JSON. Where a parameter may be a text or
    something else, a parser takes it for a text, unless `before_json` says otherwise.
    before_json: in place of `before_value`, where notations differ
    """

    before_name: str
    before_value: str
    behind: str
    before_json: str = ""


@dataclass(frozen=True)
class CallNotation:
    """How a model writes calls; special tokens are written as in its tokenizer.

    before_name, before_arguments, behind: of each call
    before_first, between, behind_last:    of all calls; since a grammar is read without going back,
                                           `behind_last` must not begin with `between`
    parameters: None: the arguments are one JSON object
    newer:      that of newer models, which have the special token `sign_of_newer`
    """

    before_name: str
    before_arguments: str
    behind: str
    before_first: str = ""
    between: str = ""
    behind_last: str = ""
    parameters: ParameterForm | None = None
    newer: "CallNotation | None" = None
    sign_of_newer: str = ""


# by the name of the tool parser that reads it
CALL_NOTATIONS: Mapping[str, CallNotation] = {
    "hermes": CallNotation(
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        behind="}\n</tool_call>",
        between="\n",
    ),
    "qwen3_coder": CallNotation(
        before_name="<tool_call>\n<function=",
        before_arguments=">\n",
        behind="</function>\n</tool_call>",
        between="\n",
        parameters=ParameterForm("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "llama3_json": CallNotation(
        before_name='{"name": "',
        before_arguments='", "parameters": ',
        behind="}",
        between="; ",
    ),
    "mistral": CallNotation(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        behind="}",
        before_first="[TOOL_CALLS][",
        between=", ",
        behind_last="]",
        newer=CallNotation(
            before_name="[TOOL_CALLS]", before_arguments="[ARGS]", behind=""
        ),
        sign_of_newer="[ARGS]",
    ),
    "cohere": CallNotation(
        before_name='{"tool_call_id": "0", "tool_name": "',
        before_arguments='", "parameters": ',
        behind="}",
        before_first="<|START_ACTION|>[\n    ",
        between=",\n    ",
        behind_last="\n]<|END_ACTION|>",
    ),
    "granite": CallNotation(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        behind="}",
        before_first="<|tool_call|>[",
        between=", ",
        behind_last="]",
    ),
    "apriel": CallNotation(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        behind="}",
        before_first="<tool_calls>[",
        between=", ",
        behind_last="]</tool_calls>",
    ),
    "nemotron": CallNotation(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        behind="}",
        before_first="<TOOLCALL>[",
        between=", ",
        behind_last="]</TOOLCALL>",
    ),
    "functionary_v31": CallNotation(
        before_name="<function=", before_arguments=">", behind="</function>"
    ),
    "kimi_k2": CallNotation(
        before_name="<|tool_call_begin|>functions.",
        before_arguments=":0<|tool_call_argument_begin|>",
        behind="<|tool_call_end|>",
        before_first="<|tool_calls_section_begin|>",
        behind_last="<|tool_calls_section_end|>",
    ),
    "minimax_m2": CallNotation(
        before_name='<invoke name="',
        before_arguments='">\n',
        behind="</invoke>\n",
        before_first="<minimax:tool_call>\n",
        behind_last="</minimax:tool_call>",
        parameters=ParameterForm('<parameter name="', '">', "</parameter>\n"),
    ),
    "seed_oss": CallNotation(
        before_name="<seed:tool_call>\n<function=",
        before_arguments=">\n",
        behind="</function>\n</seed:tool_call>",
        between="\n",
        parameters=ParameterForm("<parameter=", ">", "</parameter>\n"),
    ),
    "deepseek_v32": CallNotation(
        before_name='<｜DSML｜invoke name="',
        before_arguments='">\n',
        behind="</｜DSML｜invoke>\n",
        before_first="<｜DSML｜function_calls>\n",
        behind_last="</｜DSML｜function_calls>",
        parameters=ParameterForm(
            '<｜DSML｜parameter name="',
            '" string="true">',
            "</｜DSML｜parameter>\n",
            before_json='" string="false">',
        ),
    ),
    "deepseek_v3": CallNotation(
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        behind="\n```<｜tool▁call▁end｜>",
        before_first="<｜tool▁calls▁begin｜>",
        between="\n",
        behind_last="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallNotation(
        before_name="<｜tool▁call▁begin｜>",
        before_arguments="<｜tool▁sep｜>",
        behind="<｜tool▁call▁end｜>",
        before_first="<｜tool▁calls▁begin｜>",
        behind_last="<｜tool▁calls▁end｜>",
    ),
    "glm45": CallNotation(
        before_name="<tool_call>",
        before_arguments="\n",
        behind="</tool_call>",
        between="\n",
        parameters=ParameterForm(
            "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"
        ),
    ),
    "harmony": CallNotation(
        before_name="<|channel|>commentary to=functions.",
        before_arguments=" <|constrain|>json<|message|>",
        behind="<|call|>",
    ),
}


def tool_calls(
    functions: Mapping[str, Mapping[str, Any]],
    form: CallNotation,
    special_tokens: Mapping[str, int],
    *,
    parallel: bool,
) -> str:
    """An answer that is one call, or at least one call.

    functions:      the functions that may be called: the JSON schema of their arguments, by name
    special_tokens: of the tokenizer: ids by how they are written
    parallel:       several calls may follow each other

    RequestError, with the name of the function, for a schema that is not supported. May take a
    hundredth of a second a function, so servers call it in a thread.
    """
    if form.newer is not None and form.sign_of_newer in special_tokens:
        form = form.newer
    if not functions:
        raise RequestError("no function may be called; expected at least one")
    rules: list[str] = []
    for number, (name, parameters) in enumerate(functions.items()):
        try:
            rules += _call_rules(number, name, parameters, form, special_tokens)
        except RequestError as error:
            raise RequestError(f"function {quoted(name)}: {error}") from error
    calls = " | ".join(f"call_{number}" for number in range(len(functions)))
    more = f"({lark_of(form.between, special_tokens)} call)*" if parallel else ""
    before = lark_of(form.before_first, special_tokens)
    behind = lark_of(form.behind_last, special_tokens)
    start = f"start: {before} call {more} {behind}"
    constraint = "\n".join([start, f"call: {calls}", *rules])
    check(constraint)
    return constraint


def _call_rules(
    number: int,
    name: str,
    parameters: Mapping[str, Any],
    form: CallNotation,
    special_tokens: Mapping[str, int],
) -> Iterator[str]:
    """The rules of the calls of one function; the first is `call_NUMBER`."""
    opening = lark_of(form.before_name + name + form.before_arguments, special_tokens)
    closing = lark_of(form.behind, special_tokens)
    parameters = {"type": "object", **parameters}
    if form.parameters is None:
        arguments = f"%json {schema_text(parameters)}"
        yield f"call_{number}: {opening} {arguments} {closing}"
        return
    _check_parameters(parameters)
    required = parameters.get("required", ())
    properties = [
        key
        for key, schema in parameters.get("properties", {}).items()
        if schema is not False  # such a parameter may not be there
    ]
    names = [f"value_{number}_{index}" for index in range(len(properties))]
    values = []
    for rule, key in zip(names, properties, strict=True):
        values.append(rule if key in required else f"{rule}?")
    yield f"call_{number}: {opening} {' '.join(values)} {closing}"
    for rule, key in zip(names, properties, strict=True):
        is_text = _is_text(parameters, key, form.parameters)
        before = form.parameters.before_name + key + _before(is_text, form.parameters)
        if is_text:
            texts = _texts(parameters, key)
            yield from _text_rules(rule, texts, form.parameters, special_tokens)
        else:
            yield from _json_rules(
                rule, parameters, key, form.parameters, special_tokens
            )
        yield f"{rule}: {lark_of(before, special_tokens)} {rule}_end"


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    """RequestError for a schema that is not supported, as where arguments are one JSON object."""
    prepare(parameters)  # finds mistakes in all keywords
    written = ("type", "properties", "required", *DEFINITIONS)
    schema_text({key: parameters[key] for key in written if key in parameters})


def _text_rules(
    rule: str,
    texts: Sequence[str],
    form: ParameterForm,
    special_tokens: Mapping[str, int],
) -> Iterator[str]:
    """The rules of a text and of the mark behind it: `RULE_end`. texts: empty: any text."""
    behind = split_mark(form.behind, special_tokens)
    marks = " ".join(piece.lark for piece in behind)
    if texts:
        options = " | ".join(map(lark_text, texts))
        yield f"{rule}_end: ({options}) {marks}"
    elif behind[0].is_special:
        yield f"{rule}_end: {rule}_text {marks}"
        yield f"{rule}_text: /(?s:.*)/"
    else:
        rest = " ".join(piece.lark for piece in behind[1:])
        yield f"{rule}_end: {rule}_text {rest}"
        yield f"{rule}_text[suffix={behind[0].lark}]: /(?s:.*)/"


def _json_rules(
    rule: str,
    parameters: Mapping[str, Any],
    key: str,
    form: ParameterForm,
    special_tokens: Mapping[str, int],
) -> Iterator[str]:
    """The rule of the JSON of a parameter and of the mark behind it: `RULE_end`."""
    schema = parameters["properties"][key]
    if isinstance(schema, Mapping):
        definitions = {x: parameters[x] for x in DEFINITIONS if x in parameters}
        schema = {**definitions, **schema}
    behind = lark_of(form.behind, special_tokens)
    yield f"{rule}_end: %json {schema_text(schema)} {behind}"


def _texts(parameters: Mapping[str, Any], key: str) -> list[str]:
    """The only texts that a parameter may be written as; empty: any.

    RequestError if its schema lists only values that its parser would take for texts.
    """
    values = parameter_values(parameters, key)
    texts = [value for value in values if isinstance(value, str)]
    if None in values and "null" in parameter_types(parameters, key):
        texts.append("null")
    if values and not texts:
        raise RequestError(
            f"the schema of {quoted(key)} lists {quoted(json.dumps(values))}, which the calls of "
            "this model cannot tell from texts; expected a type that fits"
        )
    return texts


def _is_text(parameters: Mapping[str, Any], key: str, form: ParameterForm) -> bool:
    """Whether a parameter is written as a bare text, so that its parser reads what it says."""
    if form.before_json:
        schema = parameters["properties"][key]
        return isinstance(schema, Mapping) and schema.get("type") == "string"
    return "string" in parameter_types(parameters, key)


def _before(is_text: bool, form: ParameterForm) -> str:
    """What stands between the name of a parameter and its value."""
    if is_text:
        return form.before_value
    return form.before_json or form.before_value
