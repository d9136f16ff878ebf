"""The tools of POST /v1/responses, and the tools of the chat that it stands for.

{"type": "function", "name": "f", ...}                {"type": "function", "function": {...}}
{"type": "namespace", "name": "n", "tools": [f]}      a function "n__f"
{"type": "web_search"}, {"type": "image_generation"}  none: the model is not shown them
anything else                                         refused by its type
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from disagg.errors import RequestError
from disagg.server import limits
from disagg.server.responses_input import function_name
from disagg.server.schema import refusal
from disagg.server.tools import Tool

# tools that OpenAI's servers run and that Codex offers unasked
UNUSED_TOOLS = ("web_search", "image_generation")
SHOWN_FIELDS = ("name", "description", "parameters")  # of a function, to the model
NO_VALUES = {"description": None, "parameters": None, "strict": None}
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class FunctionTools:
    """The function tools of a request.

    used:   those that the model is shown, as the client sent them
    chat:   the same as tools of a chat
    names:  namespace and name of each function in a namespace, by the name that the model knows
    """

    used: list[Mapping[str, Any]] = field(default_factory=list)
    chat: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Any]) -> "FunctionTools":
        """Read `tools`; RequestError for one that is not supported."""
        functions = cls()
        for index, tool in enumerate(tools):
            functions._add(tool, f"tools[{index}]")
        return functions

    def _add(self, tool: Any, place: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            self.used.append(tool)
            self._add_function(tool, "", place)
        elif kind == "namespace":
            self.used.append(tool)
            for index, inner in enumerate(_namespace_tools(tool, place)):
                self._add_inner(inner, tool["name"], f"{place}.tools[{index}]")
        elif not (isinstance(kind, str) and kind.startswith(UNUSED_TOOLS)):
            raise _unsupported(tool, kind, place)

    def _add_inner(self, tool: Any, namespace: str, place: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise _unsupported(tool, kind, place)
        self._add_function(tool, namespace, place)

    def _add_function(
        self, tool: Mapping[str, Any], namespace: str, place: str
    ) -> None:
        name = tool.get("name")
        if not isinstance(name, str):
            raise _error(f"{place}.name is {limits.shown(name)}; expected a text")
        function = {field: tool[field] for field in SHOWN_FIELDS if field in tool}
        if namespace:
            function["name"] = function_name(namespace, name)
            self.names[function["name"]] = (namespace, name)
        chat_tool = {"type": "function", "function": function}
        _check(chat_tool, place)
        self.chat.append(chat_tool)

    @property
    def echo(self) -> list[Mapping[str, Any]]:
        """The tools as the response repeats them: functions with all their fields."""
        return [
            {**NO_VALUES, **tool} if tool["type"] == "function" else tool
            for tool in self.used
        ]


def chat_choice(choice: Any) -> Any:
    """The `tool_choice` of a chat; RequestError for a tool that is not a function."""
    match choice:
        case str():
            return choice
        case {"type": "function"}:
            return _chat_function(choice)
        case {"type": "allowed_tools", "tools": list(tools)}:
            mode = choice.get("mode", "auto")
            allowed = {"mode": mode, "tools": [_chat_function(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    raise _wrong_choice(choice)


def _chat_function(choice: Any) -> dict[str, Any]:
    match choice:
        case {"type": "function", "name": str(name)}:
            function = {"name": function_name(choice.get("namespace"), name)}
            return {"type": "function", "function": function}
    raise _wrong_choice(choice)


def _check(chat_tool: Mapping[str, Any], place: str) -> None:
    """RequestError for a function that a chat would refuse."""
    try:
        Tool.model_validate(chat_tool)
    except ValidationError as error:
        message = str(refusal(error)).removeprefix("function.")
        raise _error(f"{place}.{message}") from error


def _namespace_tools(tool: Mapping[str, Any], place: str) -> Iterator[Any]:
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        raise _error(
            f"{place} is {limits.shown(tool)}; expected a namespace with a name and tools"
        )
    return iter(tools)


def _wrong_choice(choice: Any) -> RequestError:
    choices = ", ".join(CHOICES)
    return RequestError(
        f"tool_choice is {limits.shown(choice)}; expected one of {choices}, or "
        '{"type": "function", "name": ...}',
        "tool_choice",
    )


def _unsupported(tool: Any, kind: Any, place: str) -> RequestError:
    if kind is None:
        return _error(
            f"{place} is {limits.shown(tool)}; expected an object with a type"
        )
    return _error(
        f"{place}.type={limits.shown(kind)} is not supported: this service runs no tools; "
        'declare it as {"type": "function", "name": ..., "parameters": ...}'
    )


def _error(message: str) -> RequestError:
    return RequestError(message, "tools")
