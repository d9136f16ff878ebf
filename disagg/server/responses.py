"""OpenAI's responses, whole or as server-sent events, written from text deltas. No HTTP."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from disagg.errors import CancelledError, DisaggError, reason_of
from disagg.server.choices import Choices, WholeChoice
from disagg.server.output_text import TextDelta

if TYPE_CHECKING:  # errors need this module before pydantic is imported
    from disagg.server.reader import Generation, ServedModel

# log-probabilities that are written at once: those of a long prompt would take 0.1 s
MAX_CHUNK_SCORES = 256
WAITING = ": waiting\n\n"  # a comment, so that no proxy takes the connection for dead
DONE = "data: [DONE]\n\n"

# the index is that of the choice; None: no delta has arrived for a while
IndexedDelta = tuple[int, TextDelta] | None


class GenerationResponse:
    """The response to one request, written from the deltas of its choices."""

    def __init__(
        self,
        choices: Choices,
        generation: "Generation",
        served: "ServedModel",
    ):
        self._choices = choices
        self._request = generation.request
        self._prompts = generation.prompts
        self._prediction = generation.prediction
        self._has_thoughts = generation.has_thoughts
        self._codec = self._request.codec or served.codec
        self._last: dict[int, TextDelta] = {}  # by choice
        self._outcome: str | None = CancelledError.reason  # None: it is complete
        self._before_event = ""
        self._head = {
            "id": f"{choices.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }
        # of every chunk, written once: there is one for each token
        head = json.dumps(self._chunk_head())[:-1]
        self._event_head = f'data: {head}, "choices": ['

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
                for text in self._delta_events(first):
                    yield text
                async for indexed in deltas:
                    for text in self._delta_events(indexed):
                        yield text
                        await _let_others_run(indexed)
        except DisaggError as error:
            self._outcome = error.reason
            body = error_body(str(error), error.reason, error.http_status, error.param)
            yield self._behind_wait(event(body))
        else:
            self._outcome = None
            if self._request.stream_options.include_usage:
                yield event(
                    {**self._chunk_head(), "choices": [], "usage": self._usage()}
                )
        yield DONE

    def _delta_events(self, indexed: IndexedDelta) -> Iterator[str]:
        if indexed is None:
            self._before_event = WAITING
            yield WAITING
            return
        index, delta = indexed
        self._last[index] = delta
        for piece in delta.slices(MAX_CHUNK_SCORES):
            choice = self._choices.chunk(index, piece)
            if choice is not None:
                yield self._behind_wait(
                    self._chunk_event({**choice, **self._kv_of(piece)})
                )

    def _behind_wait(self, text: str) -> str:
        """An event, with a comment in front of it if the one before it was a comment.

        vLLM's client strips each piece that it reads, and so loses the line break behind a comment
        that comes alone; it then took the whole answer for that comment.
        """
        before, self._before_event = self._before_event, ""
        return before + text

    async def whole(self, deltas: AsyncGenerator[IndexedDelta]) -> list[WholeChoice]:
        """The choices of a response that is not streamed, when they are complete."""
        choices: dict[int, WholeChoice] = {}
        try:
            async with aclosing(deltas):
                async for indexed in deltas:
                    if indexed is None:
                        continue
                    index, delta = indexed
                    self._last[index] = delta
                    if index not in choices:
                        choices[index] = WholeChoice(index, self._choices)
                    for piece in delta.slices(MAX_CHUNK_SCORES):
                        choices[index].add(piece)
                        await _let_others_run(indexed)
        except Exception as error:
            self._outcome = reason_of(error)
            raise
        self._outcome = None
        return [choice for _, choice in sorted(choices.items())]

    def pieces(
        self, choices: list[WholeChoice], more: Mapping[str, Any]
    ) -> Iterator[bytes]:
        """The JSON of a response that is not streamed. more: further fields of it."""
        fields = {
            **self._head,
            "object": self._choices.whole_object,
            "usage": self._usage(),
            **more,
        }
        yield json.dumps(fields)[:-1].encode() + b', "choices": ['
        for index, choice in enumerate(choices):
            if index:
                yield b", "
            last = self._last[index]
            yield from choice.pieces(last.finish_reason or "", self._kv_of(last))
        yield b"]}"

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
        usage = ""
        if self._request.stream_options.continuous_usage_stats:
            usage = f', "usage": {json.dumps(self._usage())}'
        return f"{self._event_head}{json.dumps(choice)}]{usage}}}\n\n"

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": self._choices.chunk_object}

    def _kv_of(self, delta: TextDelta) -> dict[str, Any]:
        """The figures of the hand-off, at the end of a choice and if the request asks for them."""
        if self._request.kv and delta.finish_reason is not None:
            return {"kv": dict(delta.kv)}
        return {}

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
            **self._completion_details(),
        }

    def _completion_details(self) -> dict[str, Any]:
        """Tokens of thoughts, of a model that has them; and of the prediction, if there is one."""
        details = {}
        if self._has_thoughts:
            thought = sum(delta.num_thought for delta in self._last.values())
            details["reasoning_tokens"] = thought
        if self._prediction is not None:
            accepted = sum(delta.num_predicted for delta in self._last.values())
            predicted = len(self._prediction) * len(self._last)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = predicted - accepted
        return {"completion_tokens_details": details} if details else {}


async def _let_others_run(indexed: IndexedDelta) -> None:
    """Between two parts of a delta with many log-probabilities."""
    if indexed is not None and len(indexed[1].scores) > MAX_CHUNK_SCORES:
        await asyncio.sleep(0)


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
