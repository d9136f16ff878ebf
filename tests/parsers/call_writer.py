"""Writes calls as a model of each family does, from the table of formats."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from disagg.parsers.formats import (
    CallSyntax,
    Channels,
    JsonCalls,
    NamedCalls,
    ParameterCalls,
)

Call = tuple[str, Mapping[str, Any]]


def write_calls(syntax: CallSyntax, calls: Sequence[Call]) -> str:
    """The text of some calls that follow each other."""
    match syntax:
        case JsonCalls():
            return _json_calls(syntax, calls)
        case NamedCalls():
            written = "\n".join(_named_call(syntax, *each) for each in calls)
            return f"{syntax.open}{written}{syntax.close}"
        case ParameterCalls():
            written = "\n".join(_parameter_call(syntax, *each) for each in calls)
            return f"{syntax.open}\n{written}\n{syntax.close}"
        case Channels():
            return "".join(_message(syntax, *each) for each in calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_calls(syntax: JsonCalls, calls: Sequence[Call]) -> str:
    objects = [_json({"name": name, "arguments": x}) for name, x in calls]
    if syntax.end:
        return "\n".join(f"{syntax.begin}\n{each}\n{syntax.end}" for each in objects)
    separator = f"{syntax.between} "
    written = separator.join(objects)
    return f"{syntax.begin}[{written}]" if separator == ", " else syntax.begin + written


def _named_call(syntax: NamedCalls, name: str, arguments: Mapping[str, Any]) -> str:
    if "functions" in syntax.name:
        name = f"functions.{name}:7"
    before = "\n".join(syntax.before_arguments)
    behind = "\n".join(syntax.behind)
    return f"{syntax.begin}{name}{before}{_json(arguments)}{behind}"


def _parameter_call(
    syntax: ParameterCalls, name: str, arguments: Mapping[str, Any]
) -> str:
    parameters = [_parameter(syntax, *each) for each in arguments.items()]
    lines = [f"{syntax.begin}{name}{syntax.behind_name}", *parameters, syntax.end]
    return "\n".join(lines)


def _parameter(syntax: ParameterCalls, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else _json(value)
    flag = syntax.string_flag + str(is_text).lower() if syntax.string_flag else ""
    before = f"{syntax.before_key}{key}{flag}{syntax.behind_key}{syntax.before_value}"
    return f"{before}{syntax.margin}{text}{syntax.margin}{syntax.behind_value}"


def _message(syntax: Channels, name: str, arguments: Mapping[str, Any]) -> str:
    header = f"assistant{syntax.channel}commentary to=functions.{name} "
    header += f"{syntax.constrain}json"
    end = syntax.ends[1]
    return f"{syntax.start}{header}{syntax.message}{_json(arguments)}{end}"
