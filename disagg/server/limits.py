"""How much a client may send: a body, a prompt, stop strings, numbers. No HTTP, no schema.

Every check is cheap and precedes expensive work: a body is counted while it arrives, a text is
measured before it is tokenised.
"""

import reprlib
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any

from disagg.engine.sequence import AS_MANY_AS_FIT
from disagg.errors import PromptTooLongError, RequestError, TooLargeError

MAX_STOPS = 16
MAX_STOP_CHARS = 256  # each token is compared with all prefixes of all stop strings
MAX_COUNT = 2**31 - 1  # of tokens, or of choices among them
MAX_CHOICES = 128  # answers to one request: prompts times n
MAX_NAMED = 1024  # tokens that a request names, and fields of its own
# of a conversation: millions of empty ones block the event loop for seconds
MAX_MESSAGES = 1 << 14
MAX_LOGPROBS = 20  # of the likeliest tokens, besides that of the token itself
MAX_PROMPT_SCORES = 100_000  # log-probabilities of a prompt, which are one message
MAX_SCORES = 3_000_000  # log-probabilities of a whole response; one takes some 30 bytes
MAX_SEED = 2**63  # seeds have 64 bits, as in OpenAI's schema
MAX_NAME_CHARS = 1024  # of a model
MAX_TOOLS = 1024  # OpenAI has 128; agents with several MCP servers send more
MAX_TOOL_NAME_CHARS = 128
MAX_SPEC_CHARS = 16 << 10  # of a codec; a plan may name one for each layer
MAX_SHOWN_CHARS = 60  # of a client's value, in an error message
LONG_TEXT_CHARS = 64 << 10  # longer texts are tokenised one at a time
LONG_BODY_BYTES = 64 << 10  # longer bodies are parsed on another thread, one at a time
LONG_PROMPTS = 16 << 10  # more token ids are checked on another thread

_short = reprlib.Repr()
_short.maxlevel = 2


async def read_body(chunks: AsyncIterable[bytes], max_bytes: int) -> bytearray:
    """Join the chunks of a body; TooLargeError as soon as they exceed `max_bytes`."""
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > max_bytes:
            raise TooLargeError(
                f"the body is too long; expected at most {max_bytes:,} bytes"
            )
        body += chunk
    return body


def shown(value: Any) -> str:
    """A client's value for an error message, on one line and shortened."""
    text = _short.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def check_text(chars: int, context_length: int, longest_token: int, field: str) -> None:
    """PromptTooLongError for a text that is too long for the context with any tokens."""
    max_chars = context_length * longest_token
    if chars > max_chars:
        name = field if field == "prediction" else "prompt"
        raise PromptTooLongError(
            f"the {name} is too long: it has {chars:,} characters; the model's context of "
            f"{context_length} tokens holds at most {max_chars:,}",
            field,
        )


def check_prompt(tokens: int, context_length: int, field: str = "prompt") -> None:
    """RequestError for an empty prompt, PromptTooLongError for one that leaves no room."""
    if tokens == 0:
        raise RequestError("the prompt is empty; expected at least one token", field)
    if tokens >= context_length:
        raise PromptTooLongError(
            f"the prompt is too long: it has {tokens} tokens; the model's context of "
            f"{context_length} holds at most {context_length - 1} and an answer",
            field,
        )


def check_answer_length(
    limit: int | None, least: int, prompt_tokens: int, context_length: int
) -> None:
    """RequestError for an impossible number of tokens to generate.

    limit: max_tokens of the request; -1: as many as fit; None: not set
    least: the least number that is allowed
    """
    if limit is None or limit == AS_MANY_AS_FIT or limit >= least:
        return
    room = context_length - prompt_tokens
    raise RequestError(
        f"max_tokens is {limit}; expected at least {least}, or -1 for as many as fit. The prompt "
        f"has {prompt_tokens} tokens; the context of {context_length} has room for {room} more",
        "max_tokens",
    )


def check_length(tokens: int, context_length: int, field: str) -> None:
    """PromptTooLongError for a list of more token ids than any text of the model has."""
    if tokens > context_length:
        raise PromptTooLongError(
            f"{field} has {tokens:,} ids; the model's context holds at most {context_length:,}",
            field,
        )


def check_ids(ids: Iterable[Any], vocab_size: int, field: str) -> None:
    """RequestError for a field that holds anything but token ids of the model."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(
                f"{field}: {shown(token)} is not a token id; "
                f"expected an integer from 0 to {vocab_size - 1}",
                field,
            )


def check_choices(count: int) -> None:
    """RequestError for more answers than one request may have."""
    if count > MAX_CHOICES:
        raise RequestError(
            f"the request asks for {count} answers, n of each prompt; "
            f"expected at most {MAX_CHOICES}",
            "n",
        )


def count_scores(
    prompt_tokens: int, num_answers: int, sampling: Mapping[str, Any]
) -> int:
    """The log-probabilities of all answers to a prompt; RequestError for too many of a prompt."""
    if "logprobs" not in sampling:
        return 0
    scores_per_token = 1 + sampling["logprobs"]
    prompt_scores = 0
    if sampling.get("prompt_logprobs"):
        prompt_scores = prompt_tokens * scores_per_token
    if prompt_scores > MAX_PROMPT_SCORES:
        raise RequestError(
            f"logprobs: the prompt would have {prompt_scores:,}; "
            f"expected at most {MAX_PROMPT_SCORES:,}",
            "logprobs",
        )
    return num_answers * (prompt_scores + sampling["max_tokens"] * scores_per_token)


def check_scores(count: int) -> None:
    """RequestError for more log-probabilities than one response may have."""
    if count > MAX_SCORES:
        raise RequestError(
            f"logprobs: the response would have up to {count:,}; expected at most {MAX_SCORES:,}: "
            "ask for fewer answers, fewer tokens or fewer of the likeliest tokens",
            "logprobs",
        )
