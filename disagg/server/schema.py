"""What clients say and hear: the OpenAI completions dialect, and our additions to it.

Ours: `codec` (a spec or plan for this request), `ignore_eos`, and `kv` (true: the answer carries
the figures of the hand-off). Fields nobody knows are ignored with a warning; fields that OpenAI
knows and that would change the answer here are refused.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from disagg.errors import RequestError

log = logging.getLogger(__name__)

# what OpenAI knows and this server does not do: only the value that changes nothing is accepted
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "suffix": None,
    "logit_bias": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "user": ...,  # changes nothing, whatever it is
}

TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, without choices, with the usage."""

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(extra="allow")

    prompt: str | list[TokenId]
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    codec: str | None = None
    ignore_eos: bool = False
    kv: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check_extras(self) -> None:
        """RequestError for a field that we know and do not do; a warning for one nobody knows."""
        for name, value in (self.model_extra or {}).items():
            if name not in NEUTRAL:
                log.warning("field %r of a completion request is unknown and ignored", name)
            elif value not in (None, NEUTRAL[name]) and NEUTRAL[name] is not ...:
                raise RequestError(f"{name}={value!r} is not supported; leave it out")


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


class Completion(BaseModel):
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
