"""The tools of a chat: their definitions, and which of them an answer may or must call. No HTTP.

tool_choice          the answer                          tools in the prompt
"none"               is text                             all, as in vLLM
"auto"               is text, or calls tools, or both    all
"required"           calls at least one                  all
one function         calls this one, once                all
"allowed_tools"      as "auto" or "required"             the allowed ones alone
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from disagg.errors import RequestError
from disagg.server import limits


def object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments, which are an object; an error otherwise."""
    has_type = schema.get("type", "object") == "object"
    if not has_type or not isinstance(schema.get("properties", {}), dict):
        raise PydanticCustomError(
            "schema", 'expected a JSON schema with "type": "object" and "properties"'
        )
    return schema


# OpenAI allows letters, digits, _ and -; names of MCP servers have dots, colons and slashes too
FunctionName = Annotated[
    str, Field(pattern=r"^[\w.:/-]+$", max_length=limits.MAX_TOOL_NAME_CHARS)
]


class Function(BaseModel):
    """A function that a model may call. parameters: None: it has none."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(object_schema)] | None = None


class Tool(BaseModel):
    """A tool of a chat. Templates may use more fields than these."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function
    _sent: Mapping[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tool = handler(value)
        tool._sent = value
        return tool

    @property
    def name(self) -> str:
        """Of its function."""
        return self.function.name

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""
        no_parameters = {"type": "object", "properties": {}}
        return self.function.parameters or no_parameters

    @property
    def definition(self) -> dict[str, Any]:
        """The tool for the template: the fields that were sent, in their order, without nulls."""
        function = _without_nulls(self._sent["function"])
        return {**_without_nulls(self._sent), "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may or must call.

    mode:     "none", "auto" or "required"
    names:    the functions that it may call; empty: every one
    is_named: it calls one function, which the client named
    """

    mode: str
    names: tuple[str, ...] = ()
    is_named: bool = False

    @property
    def is_subset(self) -> bool:
        """Whether the model sees only the tools that it may call."""
        return bool(self.names) and not self.is_named


AUTO = ToolChoice("auto")


def read_tool_choice(value: Any) -> ToolChoice:
    """A `tool_choice` in any of OpenAI's forms; RequestError for anything else."""
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", (name,), is_named=True)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed_tools(allowed)
    raise RequestError(
        f'tool_choice is {limits.shown(value)}; expected "none", "auto", "required", or '
        '{"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that an answer may call, in their order.

    RequestError for a choice that names a tool that there is not, or forces a call without tools.
    """
    if choice.mode == "none":
        return []
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice forces a call, but there are no tools", "tools")
    names = {tool.name for tool in tools}
    for name in choice.names:
        if name not in names:
            raise RequestError(
                f"tool_choice names {limits.shown(name)}, which is not among the tools",
                "tool_choice",
            )
    return [tool for tool in tools if not choice.names or tool.name in choice.names]


def _allowed_tools(allowed: Mapping[str, Any]) -> ToolChoice:
    mode = allowed.get("mode", "auto")
    match allowed.get("tools"):
        case [_, *_] as tools if mode in ("auto", "required"):
            names = tuple(_allowed_name(tool) for tool in tools)
            return ToolChoice(mode, names)
    raise RequestError(
        f"tool_choice.allowed_tools is {limits.shown(allowed)}; "
        'expected "mode": "auto" or "required", and "tools"',
        "tool_choice",
    )


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise RequestError(
        f"tool_choice.allowed_tools.tools has {limits.shown(tool)}; "
        'expected {"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def _without_nulls(sent: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sent.items() if value is not None}


def new_call_id(is_short: bool = False) -> str:
    """A name for a call. is_short: of nine letters and digits, which Mistral's templates need."""
    random = uuid.uuid4().hex
    return random[:9] if is_short else f"call_{random}"
