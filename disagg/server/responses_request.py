"""The body of POST /v1/responses, and the chat that it stands for.

    {"input": [...], "instructions": ..., "text": {"format": ...}, "max_output_tokens": ...}
    {"messages": [...], "response_format": ..., "max_completion_tokens": ...}

Nothing is stored, so fields that refer to an earlier response are refused. vLLM's and our fields
mean the same as in a chat.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr

from disagg.errors import DisaggError, RequestError
from disagg.server import limits
from disagg.server.responses_input import messages_of
from disagg.server.responses_tools import FunctionTools, chat_choice
from disagg.server.schema import Body, ChatRequest, Name, NumLogprobs, same_value

# fields of a chat that have another form here
CONVERTED_FIELDS = {
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
    "stream_options",
    "tool_choice",
    "tools",
    "top_logprobs",
}
# the others mean the same
CHAT_FIELDS = {*ChatRequest.model_fields} - CONVERTED_FIELDS
# what errors begin with: places in a chat, and here
PLACES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
# fields that are not supported, and what to do instead
REFUSED_FIELDS = {
    "background": "leave it out: a response is only sent to the client that waits for it",
    "conversation": "send its items as input: nothing is stored here",
    "logprobs": "write top_logprobs",
    "max_completion_tokens": "write max_output_tokens",
    "max_tokens": "write max_output_tokens",
    "messages": "write input",
    "n": "send the request n times",
    "previous_response_id": "send its items as input: nothing is stored here",
    "prompt": "write instructions and input",
    "reasoning_effort": "write reasoning.effort",
    "response_format": "write text.format",
    "verbosity": "write text.verbosity",
}
# values of theirs that are accepted besides null
NEUTRAL_VALUES = {"background": False, "n": 1}
# accepted with any value: none of them changes the answer
IGNORED_FIELDS = {"client_metadata", "stream_options"}
INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
JSON_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def input_items(value: Any) -> Any:
    """The input, if it is of one of the two kinds; RequestError otherwise."""
    if not isinstance(value, str | list):
        raise RequestError(
            f"input is {limits.shown(value)}; expected a text or a list of items",
            "input",
        )
    if isinstance(value, list) and len(value) > limits.MAX_MESSAGES:
        raise RequestError(
            f"input has {len(value):,} items; expected at most {limits.MAX_MESSAGES:,}",
            "input",
        )
    return value


def includable(value: Any) -> Any:
    """An element of `include`; RequestError for one that OpenAI does not have."""
    if value in INCLUDABLE:
        return value
    names = ", ".join(INCLUDABLE)
    raise RequestError(
        f"include has {limits.shown(value)}; expected some of {names}", "include"
    )


class ReasoningOptions(BaseModel):
    """How much the model thinks. summary: accepted, but no summaries are written."""

    effort: Name | None = None
    summary: Name | None = None

    @property
    def template_options(self) -> dict[str, Any]:
        """The effort for the chat template. Many templates do not read it, which is no error."""
        if self.effort is None:
            return {}
        if self.effort == "none":
            return {"reasoning_effort": self.effort, "enable_thinking": False}
        return {"reasoning_effort": self.effort}


class TextOptions(BaseModel):
    """The form of the answer. verbosity: accepted; models have no such option."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def echo(self) -> dict[str, Any]:
        """As the response repeats it."""
        verbosity = {"verbosity": self.verbosity} if self.verbosity else {}
        return {"format": self._format, **verbosity}

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The `response_format` of a chat; None: any text."""
        sent = self._format
        match sent.get("type"):
            case "text":
                return None
            case "json_object":
                return {"type": "json_object"}
            case "json_schema":
                schema = {
                    name: sent[name] for name in JSON_SCHEMA_FIELDS if name in sent
                }
                return {"type": "json_schema", "json_schema": schema}
        raise RequestError(
            f"text.format is {limits.shown(sent)}; "
            "expected the type text, json_object or json_schema",
            "text",
        )

    @property
    def _format(self) -> dict[str, Any]:
        return self.format or {"type": "text"}


class ResponsesRequest(Body):
    """The body of POST /v1/responses.

    store, truncation, service_tier: accepted; the response says what applied instead
    max_tool_calls: of tools that the service runs, which are none
    """

    input: Annotated[str | list[Any], BeforeValidator(input_items)]
    instructions: str | None = None
    tools: list[Any] = Field([], max_length=limits.MAX_TOOLS)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    max_output_tokens: int | None = Field(None, ge=1, le=limits.MAX_COUNT)
    top_logprobs: NumLogprobs = 0
    include: list[Annotated[Any, BeforeValidator(includable)]] = Field([])
    metadata: dict[str, Any] = Field({})
    store: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    service_tier: Name | None = None
    max_tool_calls: int | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    _chat: ChatRequest = PrivateAttr()
    _functions: FunctionTools = PrivateAttr()
    _chat_fields: dict[str, Any] = PrivateAttr({})

    @classmethod
    def read(cls, body: bytes | bytearray) -> Self:
        """Parse JSON; RequestError that names the wrong field."""
        request = super().read(body)
        request._functions = FunctionTools.of(request.tools)
        try:
            request._chat = ChatRequest.of(request._fields_of_chat())
        except DisaggError as error:
            translate(error)
            raise
        return request

    @classmethod
    def used_fields(cls) -> Collection[str]:
        """The fields whose values are used."""
        return {*super().used_fields(), *CHAT_FIELDS}

    @property
    def chat(self) -> ChatRequest:
        """The chat that this request stands for."""
        return self._chat

    @property
    def functions(self) -> FunctionTools:
        """The tools that the model is shown."""
        return self._functions

    @property
    def seals_thoughts(self) -> bool:
        """Whether thoughts come as `encrypted_content` too, which clients send back."""
        return "reasoning.encrypted_content" in self.include

    def echo(self) -> dict[str, Any]:
        """The fields that the response repeats, besides those of sampling."""
        return {
            "instructions": self.instructions,
            "tools": self.functions.echo,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": self.reasoning.model_dump(),
            "text": self.text.echo,
            "max_output_tokens": self.max_output_tokens,
            "top_logprobs": self.top_logprobs,
            "metadata": self.metadata,
            "max_tool_calls": self.max_tool_calls,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }

    def _fields_of_chat(self) -> dict[str, Any]:
        has_logprobs = "message.output_text.logprobs" in self.include
        messages = messages_of(self.input, self.instructions)
        if not messages:
            raise RequestError("input is empty; expected at least one item", "input")
        return {
            **self._chat_fields,
            "model": self.model,
            "messages": messages,
            "tools": self.functions.chat,
            "tool_choice": chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.response_format,
            "chat_template_kwargs": self._template_options(),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": has_logprobs or self.top_logprobs > 0,
            "top_logprobs": self.top_logprobs,
        }

    def _template_options(self) -> Any:
        """Those of the client win; what is no object is refused as that of a chat is."""
        options = self._chat_fields.get("chat_template_kwargs", {})
        if not isinstance(options, dict):
            return options
        return {**self.reasoning.template_options, **options}

    def _drop_extras(self) -> None:
        extras = self.model_extra or {}
        for name in CHAT_FIELDS:
            if name in extras:
                self._chat_fields[name] = extras.pop(name)
        for name, instead in REFUSED_FIELDS.items():
            value = extras.pop(name, None)
            if value is not None and not same_value(value, NEUTRAL_VALUES.get(name)):
                raise RequestError(
                    f"{name}={limits.shown(value)} is not supported; {instead}", name
                )
        for name in IGNORED_FIELDS:
            extras.pop(name, None)
        super()._drop_extras()


def translate(error: DisaggError) -> None:
    """Let an error about the chat name the fields of this dialect."""
    error.param = sent_as(error.param)
    message = str(error)
    for place, own_place in PLACES.items():
        if message.startswith(place):
            error.args = (own_place + message.removeprefix(place),)
            return


def sent_as(param: str | None) -> str | None:
    """What a client of /v1/responses calls a field of the chat."""
    place = PLACES.get(param or "", param)
    return place and place.partition(".")[0]
