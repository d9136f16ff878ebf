"""Request bodies: OpenAI's completions and chats, with vLLM's additions and ours.

Ours: `codec` (a spec or plan for this request) and `kv` (true: the response carries the hand-off's
figures). A null means the default. A field that OpenAI or vLLM know, that would change the answer
and that is not supported here is refused by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import ErrorDetails

from disagg.engine.sequence import AS_MANY_AS_FIT, BOUNDS, Bounds
from disagg.errors import RequestError
from disagg.server import json_pieces, limits
from disagg.server.messages import ChatMessage
from disagg.server.structured_output import StructuredFields
from disagg.server.tools import AUTO, Tool, ToolChoice, callable_tools, read_tool_choice

# fields that are not supported, by the only value, besides null, that is accepted
NEUTRAL_FIELDS: tuple[tuple[Any, str], ...] = (
    (
        None,
        """
        allowed_token_ids audio cache_salt chat_template documents
        guided_whitespace_pattern logprob_token_ids
        max_completion_tokens messages mm_processor_kwargs prompt prompt_embeds
        prompt_logprobs reasoning_effort repetition_detection
        truncate_prompt_tokens verbosity web_search_options
        """,
    ),
    (
        False,
        """
        echo include_stop_str_in_output return_token_ids return_tokens_as_token_ids
        use_beam_search watermarking
        """,
    ),
    (True, "skip_special_tokens spaces_between_special_tokens"),
    (-1, "thinking_token_budget"),
    (0, "top_logprobs"),
    (1, "best_of length_penalty"),
    ("", "suffix"),
    ("none", "function_call tool_choice"),
    ([], "bad_words functions logits_processors tools"),
    (["text"], "modalities"),
    ({}, "ec_transfer_params vllm_xargs"),
)
NEUTRAL: Mapping[str, Any] = {
    name: value for value, names in NEUTRAL_FIELDS for name in names.split()
}
INSTEAD = {
    "function_call": "write tool_choice",
    "functions": "write tools",
    "max_completion_tokens": "write max_tokens",
}
# accepted with any value: none of them changes the answer
HARMLESS = {
    "guided_decoding_backend",
    "include_reasoning",
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "session_id",
    "store",
    "stream_interval",
    "user",
}
IGNORED = {*NEUTRAL, *HARMLESS}
BOM = b"\xef\xbb\xbf"  # some editors write it before UTF-8
# fields that go to the engine unchanged
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)
# long fields that are not used any more when an answer begins
WITHOUT_TEXTS: Mapping[str, Any] = {
    "prediction": None,
    **{name: field.default for name, field in StructuredFields.model_fields.items()},
}
NO_DEFAULTS: Mapping[str, Any] = {}  # of a model that brings none


def prompt_list(value: Any) -> list[Any]:
    """A prompt or a list of prompts, as a list; each is a text or token ids."""
    is_list = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if is_list else [value]
    for prompt in prompts:
        if not isinstance(prompt, str | list):
            raise RequestError(
                "prompt: expected a text or a list of token ids, or a list of these; "
                f"not {limits.shown(prompt)}",
                "prompt",
            )
    return prompts


def string_list(value: Any) -> Any:
    """One string as a list."""
    return [value] if isinstance(value, str) else value


def predicted_text(value: Any) -> Any:
    """The content of a prediction as one text; RequestError for parts that are not text."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else None
        if not isinstance(text, str):
            raise RequestError(
                f"prediction.content[{index}] is {limits.shown(part)}; "
                'expected {"type": "text", "text": ...}',
                "prediction",
            )
        texts.append(text)
    return "".join(texts)


def within(bounds: Bounds) -> Any:
    """The engine's bounds of a sampling parameter."""
    return Field(ge=bounds.ge, gt=bounds.gt, le=bounds.le, lt=bounds.lt)


StopString = Annotated[str, Field(max_length=limits.MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopString],
    Field(max_length=limits.MAX_STOPS),
    BeforeValidator(string_list),
]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
# negative ones are refused later, with the length of the prompt
Count = Annotated[int, Field(ge=-limits.MAX_COUNT, le=limits.MAX_COUNT)]
NumLogprobs = Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)]
Name = Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]


class Body(BaseModel):
    """A JSON object that a client sent. Of fields that are not used only the names are kept."""

    model_config = ConfigDict(extra="allow")

    model: Name | None = None
    _unknown: list[str] = PrivateAttr([])

    @classmethod
    def read(cls, body: bytes | bytearray) -> Self:
        """Parse JSON; RequestError that names the wrong field."""
        try:
            fields = json_pieces.parse(body.removeprefix(BOM), cls.used_fields())
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise RequestError("the body is JSON, but not an object")
        return cls.of(fields)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """A request with these fields; RequestError that names the wrong one."""
        if len(fields) > limits.MAX_NAMED:
            raise RequestError(
                f"the body has {len(fields)} fields; expected at most {limits.MAX_NAMED}"
            )
        fields = {name: value for name, value in fields.items() if value is not None}
        try:
            request = cls.model_validate(fields)
        except ValidationError as error:
            raise refusal(error) from error
        request._drop_extras()
        return request

    @classmethod
    def used_fields(cls) -> Collection[str]:
        """The fields whose values are used."""
        return cls.model_fields

    @property
    def unknown(self) -> list[str]:
        """Fields that neither OpenAI nor vLLM nor this service has."""
        return self._unknown

    def _drop_extras(self) -> None:
        """Forget the fields that are not used; RequestError for one that cannot be ignored."""
        extras = self.model_extra or {}
        for name, value in extras.items():
            if name in NEUTRAL and not same_value(value, NEUTRAL[name]):
                instead = INSTEAD.get(name, "leave it out")
                raise RequestError(
                    f"{name}={limits.shown(value)} is not supported; {instead}", name
                )
        self._unknown = [name for name in extras if name not in IGNORED]
        extras.clear()


class StreamOptions(BaseModel):
    """Where a stream reports its usage.

    include_usage:          in one more chunk at the end, without choices
    continuous_usage_stats: in every chunk, of the answer so far
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class TransferParams(BaseModel):
    """vLLM's `kv_transfer_params`: which worker has the KV of a prompt, or keeps it for another."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: Name | None = None
    remote_block_ids: list[int] | None = None
    remote_host: Name | None = None
    remote_port: int | None = None
    remote_request_id: Name | None = None
    tp_size: int = 1


class Prediction(BaseModel):
    """OpenAI's predicted output: a text that the answer may repeat, whole or in text parts."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(predicted_text)]


class GenerationRequest(StructuredFields, Body, ABC):
    """The fields that completions and chats share."""

    n: int = Field(1, ge=1, le=limits.MAX_CHOICES)
    max_tokens: Count | None = None
    min_tokens: int = Field(0, ge=0, le=limits.MAX_COUNT)
    temperature: Annotated[float, within(BOUNDS["temperature"])] = Field(
        1.0, allow_inf_nan=False
    )
    top_p: Annotated[float, within(BOUNDS["top_p"])] = 1.0
    top_k: int = Field(0, ge=-1, le=limits.MAX_COUNT, description="0 and -1: all")
    min_p: Annotated[float, within(BOUNDS["min_p"])] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[TokenId, Bias] = Field({}, max_length=limits.MAX_NAMED)
    seed: int | None = Field(None, ge=-limits.MAX_SEED, lt=limits.MAX_SEED)
    stop: Stops = []
    stop_token_ids: list[TokenId] = Field([], max_length=limits.MAX_NAMED)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    codec: str | None = Field(None, min_length=1, max_length=limits.MAX_SPEC_CHARS)
    kv: bool = False
    kv_transfer_params: TransferParams = TransferParams()
    prediction: Prediction | None = None

    @property
    def max_answer_tokens(self) -> int | None:
        """How many tokens to generate; -1: as many as fit; None: the request does not set it."""
        return self.max_tokens

    @property
    def least_answer_tokens(self) -> int:
        """The least number of tokens that a client may ask for."""
        return 1

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each; None: no log-probabilities."""

    @abstractmethod
    def without_prompts(self) -> Self:
        """The request as it is kept while it is answered: its texts are token ids by then."""

    def with_stop_tokens(self, special_tokens: Mapping[str, int]) -> Self:
        """The request with stop strings that are a special token in `stop_token_ids` instead.

        Special tokens have no text, so as strings they would never match. The same characters in
        ordinary tokens are not what the client means.
        """
        ids = [special_tokens[stop] for stop in self.stop if stop in special_tokens]
        if not ids:
            return self
        strings = [stop for stop in self.stop if stop not in special_tokens]
        return self.model_copy(
            update={"stop": strings, "stop_token_ids": [*self.stop_token_ids, *ids]}
        )

    def end_tokens(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end an answer, for a model that ends its texts with `eos_ids`."""
        if self.ignore_eos:
            return frozenset(self.stop_token_ids)
        return frozenset((*self.stop_token_ids, *eos_ids))

    def sampling(
        self, room: int, defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> dict[str, Any]:
        """The engine's sampling parameters, except the seed.

        room:     tokens of an answer that the context has room for
        defaults: of the model, for fields that the request does not set
        """
        params = {name: self._choose(name, defaults) for name in SAMPLING_FIELDS}
        params["max_tokens"] = self._answer_tokens(room, defaults)
        params["min_tokens"] = min(self.min_tokens, params["max_tokens"])
        params["top_k"] = max(0, params["top_k"])
        params["logit_bias"] = list(self.logit_bias.items())
        if self.num_logprobs is not None:
            params["logprobs"] = self.num_logprobs
        return params

    def _choose(self, name: str, defaults: Mapping[str, Any]) -> Any:
        """The value of a field: the request's, else the model's default, else OpenAI's."""
        own = getattr(self, name)
        return own if name in self.model_fields_set else defaults.get(name, own)

    def _answer_tokens(self, room: int, defaults: Mapping[str, Any]) -> int:
        """How many tokens to generate, within the room for them."""
        limit = self.max_answer_tokens
        if limit is None:
            limit = max(self.min_tokens, defaults.get("max_tokens", room))
        if limit == AS_MANY_AS_FIT:
            return room
        if self.min_tokens > limit:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; expected at most max_tokens, {limit}",
                "min_tokens",
            )
        return min(room, max(1, limit))


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        list[Any], BeforeValidator(prompt_list), Field(max_length=limits.MAX_CHOICES)
    ]
    max_tokens: Count = 16
    logprobs: NumLogprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def least_answer_tokens(self) -> int:
        return 0 if self.echo else 1

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def without_prompts(self) -> Self:
        return self.model_copy(update={"prompt": [], **WITHOUT_TEXTS})

    def sampling(
        self, room: int, defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> dict[str, Any]:
        params = super().sampling(room, defaults)
        if self.echo and self.logprobs is not None:
            params["prompt_logprobs"] = True
        return params


class Conversation(Body):
    """Messages, and options for the model's chat template."""

    messages: list[ChatMessage] = Field([], max_length=limits.MAX_MESSAGES)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Tool] = Field([], max_length=limits.MAX_TOOLS)
    tool_choice: Annotated[ToolChoice, BeforeValidator(read_tool_choice)] = AUTO
    reasoning_effort: Name | None = None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that an answer may call; RequestError for a choice that names an unknown one.

        A choice that forces a call needs tools.
        """
        return callable_tools(self.tools, self.tool_choice)

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """The tools that the template shows to the model, as the client sent them."""
        shown = self.callable_tools if self.tool_choice.is_subset else self.tools
        return [tool.definition for tool in shown]

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages for the template; RequestError for one that cannot be used."""
        return [
            message.turn(f"messages[{index}]")
            for index, message in enumerate(self.messages)
        ]

    @property
    def template_options(self) -> dict[str, Any]:
        """Arguments of the template besides the messages; `chat_template_kwargs` wins."""
        continues = self.continue_final_message
        options: dict[str, Any] = {
            "add_generation_prompt": self.add_generation_prompt and not continues,
            "continue_final_message": continues,
        }
        tools = self.prompt_tools
        if tools:
            options["tools"] = tools
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        return {**options, **self.chat_template_kwargs}


class ChatRequest(GenerationRequest, Conversation):
    """The body of POST /v1/chat/completions.

    parallel_tool_calls: false: an answer ends behind its first call
    include_reasoning:   false: the response does not have the model's thoughts
    """

    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @property
    def max_answer_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def without_prompts(self) -> Self:
        large: dict[str, Any] = {
            "messages": [],
            "tools": [],
            "chat_template_kwargs": {},
            **WITHOUT_TEXTS,
        }
        return self.model_copy(update=large)

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs=true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(Conversation):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    tokens: list[Any]


def refusal(error: ValidationError) -> RequestError:
    """The first error: where, the value, and what is expected."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = str(first["loc"][0]) if first["loc"] else None
    path = _path(first)
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param)
    message = first["msg"]
    if first["type"] == "model_type":
        message = "expected an object"
    return RequestError(f"{path} is {limits.shown(first['input'])}: {message}", param)


def _path(error: ErrorDetails) -> str:
    """Where a value stands in the body, such as "messages[0].role"."""
    path = ""
    for step in error["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":
            path += f".{step}"
    return path.removeprefix(".")[: limits.MAX_SHOWN_CHARS] or "the body"


def same_value(value: Any, neutral: Any) -> bool:
    """Equal, where 0 is not False and 1 is not True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
