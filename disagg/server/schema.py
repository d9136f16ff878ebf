"""What clients say: OpenAI's dialects of completions and chat, vLLM's additions and ours.

Ours: `codec` (a spec or plan for this request) and `kv` (true: the answer carries the figures of
the hand-off). A null means the default. A field that OpenAI or vLLM know, that would change the
answer and that is not built here is refused by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from disagg.engine.sequence import BOUNDS, Bounds
from disagg.errors import RequestError
from disagg.server import limits

# not built: what is said of each is the only value that is taken, besides null
NEUTRAL: Mapping[str, Any] = {
    name: value
    for value, names in (
        (
            None,
            "allowed_token_ids audio cache_salt chat_template documents function_call",
        ),
        (
            None,
            "guided_choice guided_grammar guided_json guided_regex logprob_token_ids",
        ),
        (
            None,
            "max_completion_tokens messages mm_processor_kwargs prompt prompt_embeds",
        ),
        (
            None,
            "prompt_logprobs reasoning_effort repetition_detection structured_outputs",
        ),
        (None, "truncate_prompt_tokens verbosity web_search_options"),
        (
            False,
            "echo include_stop_str_in_output return_token_ids return_tokens_as_token_ids",
        ),
        (False, "use_beam_search watermarking"),
        (True, "skip_special_tokens spaces_between_special_tokens"),
        (-1, "thinking_token_budget"),
        (0, "top_logprobs"),
        (1, "best_of length_penalty"),
        ("", "suffix"),
        ("none", "tool_choice"),
        ([], "bad_words functions logits_processors tools"),
        (["text"], "modalities"),
        ({}, "ec_transfer_params vllm_xargs"),
        ({"type": "text"}, "response_format"),
    )
    for name in names.split()
}
INSTEAD = {
    "max_completion_tokens": "write max_tokens",
    "reasoning_effort": "if the model's template knows it, it goes into chat_template_kwargs",
}
# known, and the answer is the same whatever they are
HARMLESS = (
    "include_reasoning metadata parallel_tool_calls prediction priority prompt_cache_key "
    "prompt_cache_retention request_id safety_identifier service_tier session_id store "
    "stream_interval user"
)
BOM = b"\xef\xbb\xbf"  # some editors write it before UTF-8
# what an engine is told as the client said it
SAMPLED = (
    "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty "
    "stop_token_ids ignore_eos"
)


def many_prompts(value: Any) -> list[Any]:
    """One prompt or a list of them, as a list: each a text or token ids."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        value = [value]
    for each in value:
        if not isinstance(each, str | list):
            wanted = "a text or a list of token ids, or a list of these, is wanted"
            raise RequestError(f"prompt: {wanted}; not {limits.shown(each)}", "prompt")
    return value


def one_text(value: Any) -> Any:
    """The content of a message as one text; RequestError for parts that are no text."""
    if not isinstance(value, list):
        return value
    for part in value:
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages: {limits.shown(part)} is no part of text", "messages"
            )
    return "\n".join(part["text"] for part in value)


def as_object(value: Any) -> Any:
    """JSON as what it says: templates write it as JSON again."""
    return from_json(value or "{}") if isinstance(value, str | None) else value


def within(bounds: Bounds) -> Any:
    """The engine's bounds of a sampling parameter."""
    return Field(ge=bounds.ge, gt=bounds.gt, le=bounds.le, lt=bounds.lt)


StopString = Annotated[str, Field(max_length=limits.MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopString],
    Field(max_length=limits.MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=limits.MAX_COUNT)]
Likeliest = Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)]
Name = Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]


class Body(BaseModel):
    """A JSON object that a client sent."""

    model_config = ConfigDict(extra="allow")

    model: Name | None = None

    @classmethod
    def read(cls, body: bytes | bytearray) -> Self:
        """From JSON; RequestError that names the field where there is something wrong."""
        try:
            found = from_json(body.removeprefix(BOM))
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise RequestError("the body is JSON, but no object")
        if len(found) > limits.MAX_NAMED:
            raise RequestError(
                f"the body has {len(found)} fields; {limits.MAX_NAMED} are read"
            )
        try:
            request = cls.model_validate(
                {k: v for k, v in found.items() if v is not None}
            )
        except ValidationError as error:
            raise refusal(error) from error
        request._check_extras()
        return request

    @property
    def unknown(self) -> list[str]:
        """The fields that nobody knows."""
        known = {*NEUTRAL, *HARMLESS.split()}
        return [name for name in self.model_extra or {} if name not in known]

    def _check_extras(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and not _same(value, NEUTRAL[name]):
                instead = INSTEAD.get(name, "leave it out")
                refused = f"{name}={limits.shown(value)} is not supported; {instead}"
                raise RequestError(refused, name)


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, without choices, with the usage.

    continuous_usage_stats: every chunk has the usage so far
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class TransferParams(BaseModel):
    """vLLM's `kv_transfer_params`: who has the KV of a prompt, or that somebody will want it."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: Name | None = None
    remote_block_ids: list[int] | None = None
    remote_host: Name | None = None
    remote_port: int | None = None
    remote_request_id: Name | None = None
    tp_size: int = 1


class GenerationRequest(Body, ABC):
    """What both dialects have."""

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

    @property
    def wanted(self) -> int | None:
        """How many tokens are wanted; None: as many as the context holds."""
        return self.max_tokens

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told with each; None: no log-probabilities."""

    def sampling(self, room: int) -> dict[str, Any]:
        """What the engine is told of the request, but for its seed; for `room` tokens at most."""
        if self.wanted is not None and self.min_tokens > self.wanted:
            least = f"min_tokens is {self.min_tokens}; at most max_tokens, {self.wanted}, is wanted"
            raise RequestError(least, "min_tokens")
        most = room if self.wanted is None else min(room, max(1, self.wanted))
        told = {name: getattr(self, name) for name in SAMPLED.split()}
        told |= {"max_tokens": most, "min_tokens": min(self.min_tokens, most)}
        told |= {"top_k": max(0, self.top_k)}
        told |= {"logit_bias": list(self.logit_bias.items())}
        return told | ({} if self.likeliest is None else {"logprobs": self.likeliest})


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        list[Any], BeforeValidator(many_prompts), Field(max_length=limits.MAX_CHOICES)
    ]
    max_tokens: int = Field(
        16, ge=0, le=limits.MAX_COUNT, description="0: with echo alone"
    )
    logprobs: Likeliest | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def sampling(self, room: int) -> dict[str, Any]:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens: 0 tokens are an answer with echo alone", "max_tokens"
            )
        scored = (
            {"prompt_logprobs": True} if self.echo and self.logprobs is not None else {}
        )
        return super().sampling(room) | scored


class Part(BaseModel):
    """Of a conversation; templates may know more of it."""

    model_config = ConfigDict(extra="allow")


class FunctionCall(Part):
    """What an assistant called, and with what."""

    arguments: Annotated[dict[str, Any], BeforeValidator(as_object)] = {}


class ToolCall(Part):
    """A call of an assistant."""

    function: FunctionCall


class ChatMessage(Part):
    """One message."""

    role: Name
    content: Annotated[str | None, BeforeValidator(one_text)] = None
    tool_calls: list[ToolCall] | None = None

    @property
    def turn(self) -> dict[str, Any]:
        """As templates know it: they ask whether a field is there, and count the calls."""
        turn = {"content": ""} | self.model_dump(exclude_unset=True, exclude_none=True)
        if not self.tool_calls:
            turn.pop("tool_calls", None)
        return turn


class Conversation(Body):
    """Messages, and how the template of the model shall write them."""

    messages: list[ChatMessage] = Field([], max_length=limits.MAX_MESSAGES)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages as templates know them; an assistant's may be without content."""
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                told = f"messages[{index}].content is required of role {limits.shown(message.role)}"
                raise RequestError(told, "messages")
        return [message.turn for message in self.messages]

    @property
    def template_options(self) -> dict[str, Any]:
        """What is said to the template beside them; `chat_template_kwargs` has the last word."""
        goes_on = self.continue_final_message
        begins = {"add_generation_prompt": self.add_generation_prompt and not goes_on}
        return begins | {"continue_final_message": goes_on} | self.chat_template_kwargs


class ChatRequest(GenerationRequest, Conversation):
    """The body of POST /v1/chat/completions."""

    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Likeliest = 0

    @property
    def wanted(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs without logprobs=true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(Conversation):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    tokens: list[Any]


def refusal(error: ValidationError) -> RequestError:
    """The first of what is wrong: where, the value seen, what would be right."""
    first = error.errors(include_url=False, include_context=False)[0]
    steps = [
        f"[{x}]" if isinstance(x, int) else f".{x}"
        for x in first["loc"]
        if x != "[key]"
    ]
    path = "".join(steps).removeprefix(".")[: limits.MAX_SHOWN_CHARS] or "the body"
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param)
    told = first["msg"] if first["type"] != "model_type" else "an object is wanted"
    return RequestError(f"{path} is {limits.shown(first['input'])}: {told}", param)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
