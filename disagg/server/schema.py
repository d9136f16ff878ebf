"""What clients say and hear: the OpenAI completions dialect, and our additions to it.

Ours: `codec` (a spec or plan for this request), `ignore_eos`, and `kv` (true: the answer carries
the figures of the hand-off). A null means the default. A field that OpenAI or vLLM know, that would
change the answer and that is not built here is refused by its name.
"""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from disagg.errors import RequestError
from disagg.server import limits

# not built: what is said of each is the only value that is taken, besides null
NEUTRAL: Mapping[str, Any] = {
    name: value
    for value, names in (
        (
            None,
            "allowed_token_ids cache_salt guided_choice guided_grammar guided_json guided_regex",
        ),
        (None, "logprob_token_ids max_completion_tokens messages prompt_embeds prompt_logprobs"),
        (None, "repetition_detection structured_outputs truncate_prompt_tokens"),
        (False, "echo include_stop_str_in_output logprobs return_token_ids"),
        (False, "return_tokens_as_token_ids use_beam_search watermarking"),
        (True, "add_special_tokens skip_special_tokens spaces_between_special_tokens"),
        (-1, "thinking_token_budget"),
        (0, "frequency_penalty min_p min_tokens presence_penalty top_logprobs"),
        (1, "best_of length_penalty n repetition_penalty"),
        ("", "suffix"),
        ([], "bad_words logits_processors stop_token_ids tools"),
        ({}, "ec_transfer_params kv_transfer_params logit_bias vllm_xargs"),
        ({"type": "text"}, "response_format"),
    )
    for name in names.split()
}
# known, and the answer is the same whatever they are
HARMLESS = {"metadata", "priority", "request_id", "session_id", "store", "stream_interval", "user"}


def one_prompt(value: Any) -> Any:
    """A prompt, or a list of one; RequestError for more of them."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            one = "one is answered at a time: send a request for each"
            raise RequestError(f"prompt: a list of {len(value)} prompts; {one}", "prompt")
        value = value[0]
    if not isinstance(value, str | list):
        raise RequestError("prompt: a text or a list of token ids is wanted", "prompt")
    return value


StopString = Annotated[str, Field(max_length=limits.MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopString],
    Field(max_length=limits.MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, without choices, with the usage."""

    include_usage: bool | None = False


class CompletionRequest(BaseModel):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(extra="allow")

    prompt: Annotated[str | list[Any], BeforeValidator(one_prompt)]
    model: str | None = Field(None, max_length=limits.MAX_NAME_CHARS)
    max_tokens: int = Field(16, ge=1, le=limits.MAX_COUNT)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=limits.MAX_COUNT, description="0 and -1: all")
    seed: int | None = Field(None, ge=-limits.MAX_SEED, lt=limits.MAX_SEED)
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    codec: str | None = Field(None, max_length=limits.MAX_SPEC_CHARS)
    ignore_eos: bool = False
    kv: bool = False

    @classmethod
    def read(cls, body: bytes | bytearray) -> Self:
        """From JSON; RequestError that names the field where there is something wrong."""
        try:
            found = from_json(body)
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise RequestError("the body is JSON, but no object")
        try:
            request = cls.model_validate({k: v for k, v in found.items() if v is not None})
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            param = str(first["loc"][0])
            raise RequestError(f"{param}: {first['msg']}", param) from error
        request._check_extras()
        return request

    @property
    def unknown(self) -> list[str]:
        """The fields that nobody knows."""
        return [x for x in self.model_extra or {} if x not in NEUTRAL and x not in HARMLESS]

    def _check_extras(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and not _same(value, NEUTRAL[name]):
                refused = f"{name}={reprlib.repr(value)} is not supported; leave it out"
                raise RequestError(refused, name)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class PromptDetails(BaseModel):
    """How much of the prompt was known before."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class Choice(BaseModel):
    """A text, or the next piece of one."""

    index: int = 0
    text: str = ""
    logprobs: None = None
    finish_reason: str | None = None


class CompletionBody(BaseModel):
    """An answer, or one chunk of a streamed one. `kv` only where it was asked for."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    kv: dict[str, Any] | None = None

    def chunk(self) -> str:
        """As one server-sent event."""
        return f"data: {self.model_dump_json(exclude=self._absent())}\n\n"

    def body(self) -> dict[str, Any]:
        """As the body of an answer."""
        return self.model_dump(exclude=self._absent())

    def _absent(self) -> set[str]:
        return {name for name in ("usage", "kv") if getattr(self, name) is None}


def error_body(message: str, reason: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The body of an error, as the `openai` client reads it."""
    return {"error": {"message": message, "type": reason, "param": param, "code": status}}
