"""OpenAI's response objects: completions and chats, whole or as server-sent events. No HTTP."""

import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from disagg.errors import CancelledError, DisaggError, reason_of
from disagg.model.tokenizer import Tokenizer
from disagg.server.output_text import Logprobs, Score, TextDelta

if TYPE_CHECKING:  # errors need this module before pydantic is imported
    from disagg.server.reader import Generation, ServedModel

DONE = "data: [DONE]\n\n"

IndexedDelta = tuple[int, TextDelta]  # the index is that of the choice


class CompletionChoices:
    """The choices of a response to POST /v1/completions, by index."""

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._text_offsets: Counter[int] = Counter()  # by choice

    def openings(self, num_choices: int) -> list[dict[str, Any]]:
        """The choices of chunks before all text: none for completions."""
        return []

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The next part of a choice."""
        logprobs = self._logprobs(index, delta.scores) if delta.scores else None
        return {
            "index": index,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": logprobs,
        }

    def whole(self, index: int, text: TextDelta) -> dict[str, Any]:
        """A complete choice."""
        return self.chunk(index, text)

    def _logprobs(self, index: int, scores: Sequence[Score]) -> dict[str, list]:
        """Parallel lists with one element per token."""
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token, logprobs in scores:
            if logprobs is None:
                token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                token_logprobs.append(logprobs[0])
                top_logprobs.append(self._top_logprobs(token, logprobs))
        return {
            "tokens": [self._tokenizer.spell(token) for token, _ in scores],
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": [self._text_offset(index, token) for token, _ in scores],
        }

    def _text_offset(self, index: int, token: int) -> int:
        """Where the next token of a choice begins; inside a character: where that one begins."""
        starts = [byte & 0xC0 != 0x80 for byte in self._tokenizer.bytes_of(token)]
        offset = self._text_offsets[index]
        self._text_offsets[index] += starts.count(True)
        begins_inside = starts[:1] == [False]
        return max(0, offset - 1) if begins_inside else offset

    def _top_logprobs(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """By text, including the token itself; tokens with one text share the highest value."""
        logprob, likeliest = logprobs
        by_text: dict[str, float] = {}
        for candidate, value in (*likeliest, (token, logprob)):
            by_text.setdefault(self._tokenizer.spell(candidate), value)
        return by_text


class ChatChoices:
    """The choices of a response to POST /v1/chat/completions, by index."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def openings(self, num_choices: int) -> list[dict[str, Any]]:
        """The role, in one chunk for each choice and in order.

        The `openai` clients keep a list of choices that grows at its end, and count the
        log-probabilities of a first chunk twice.
        """
        return [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(num_choices)
        ]

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The next part of a choice."""
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.scores),
            "finish_reason": delta.finish_reason,
        }

    def whole(self, index: int, text: TextDelta) -> dict[str, Any]:
        """A complete choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text.text, "refusal": None},
            "logprobs": self._logprobs(text.scores),
            "finish_reason": text.finish_reason,
        }

    def _logprobs(self, scores: Sequence[Score]) -> dict[str, Any] | None:
        if not scores:
            return None
        content = []
        for token, logprobs in scores:
            assert (
                logprobs is not None
            )  # only `echo`, which chats do not have, scores a prompt
            logprob, likeliest = logprobs
            top_logprobs = [self._token(*candidate) for candidate in likeliest]
            content.append(
                {**self._token(token, logprob), "top_logprobs": top_logprobs}
            )
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.spell(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.bytes_of(token)),
        }


class GenerationResponse:
    """The response to one request, written from the deltas of its choices."""

    def __init__(
        self,
        choices: CompletionChoices | ChatChoices,
        generation: "Generation",
        served: "ServedModel",
    ):
        self._choices = choices
        self._request = generation.request
        self._prompts = generation.prompts
        self._codec = self._request.codec or served.codec
        self._last: dict[int, TextDelta] = {}  # by choice
        self._outcome: str | None = CancelledError.reason  # None: it is complete
        self._head = {
            "id": f"{choices.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }

    async def first(self, deltas: AsyncGenerator[IndexedDelta]) -> IndexedDelta:
        """The first delta; an error that precedes it can still choose the HTTP status."""
        try:
            return await anext(deltas)
        except Exception as error:
            self._outcome = reason_of(error)
            raise

    async def events(
        self, first: IndexedDelta, deltas: AsyncGenerator[IndexedDelta]
    ) -> AsyncIterator[str]:
        """Server-sent events. The last one is "[DONE]"; an error in mid-stream is an event too."""
        try:
            async with aclosing(deltas):
                for opening in self._choices.openings(self._request.n):
                    yield self._chunk_event(opening)
                indexed: IndexedDelta | None = first
                while indexed is not None:
                    index, delta = indexed
                    self._last[index] = delta
                    if delta.text or delta.scores or delta.finish_reason:
                        choice = self._choices.chunk(index, delta)
                        yield self._chunk_event(self._with_kv(choice, delta))
                    indexed = await anext(deltas, None)
        except DisaggError as error:
            self._outcome = error.reason
            yield event(
                error_body(str(error), error.reason, error.http_status, error.param)
            )
        else:
            self._outcome = None
            if self._request.stream_options.include_usage:
                yield event(
                    {**self._chunk_head(), "choices": [], "usage": self._usage()}
                )
        yield DONE

    async def whole(self, deltas: AsyncGenerator[IndexedDelta]) -> dict[str, Any]:
        """The response as one body."""
        parts_of: dict[int, list[TextDelta]] = {}
        try:
            async with aclosing(deltas):
                async for index, delta in deltas:
                    parts_of.setdefault(index, []).append(delta)
        except Exception as error:
            self._outcome = reason_of(error)
            raise
        self._outcome = None

        choices = []
        for index, parts in sorted(parts_of.items()):
            last = parts[-1]
            self._last[index] = last
            text = replace(
                last,
                text="".join(part.text for part in parts),
                scores=tuple(score for part in parts for score in part.scores),
            )
            choices.append(self._with_kv(self._choices.whole(index, text), text))
        return {
            **self._head,
            "object": self._choices.whole_object,
            "choices": choices,
            "usage": self._usage(),
        }

    def log_fields(self) -> dict[str, Any]:
        """Fields of the log line of a finished request."""
        usage = self._usage()
        # with codec auto the router chooses, and the figures of the hand-off name the codec
        kvs = [delta.kv for delta in self._last.values()]
        codecs = {kv["codec"] for kv in kvs if "codec" in kv}
        return {
            "prompt_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "codec": ",".join(sorted(codecs)) or self._codec,
            "error": self._outcome,
        }

    def _chunk_event(self, choice: Mapping[str, Any]) -> str:
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self._request.stream_options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        return event(chunk)

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": self._choices.chunk_object}

    def _with_kv(self, choice: dict[str, Any], delta: TextDelta) -> dict[str, Any]:
        """Adds the figures of the hand-off to the end of a choice, if the request asks for them."""
        if self._request.kv and delta.finish_reason is not None:
            choice["kv"] = dict(delta.kv)
        return choice

    def _usage(self) -> dict[str, Any]:
        """Numbers of tokens. A prompt counts once, however many choices it has."""
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._prompts)
        completion_tokens = sum(delta.num_tokens for delta in self._last.values())
        cached_tokens = 0
        for number in range(len(self._prompts)):
            first_choice = number * self._request.n
            if first_choice in self._last:
                kv = self._last[first_choice].kv
                cached_tokens += kv.get("cached_tokens", 0)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def event(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def error_body(
    message: str, reason: str, status: int, param: str | None = None
) -> dict[str, Any]:
    """The body of an error, in the form that the `openai` client expects."""
    return {
        "error": {"message": message, "type": reason, "param": param, "code": status}
    }
