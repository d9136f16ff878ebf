"""OpenAI's responses, whole or as server-sent events, written from text deltas. No HTTP."""

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
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


class ResponseWriter(ABC):
    """Writes the response to one request, whole or as events, from the deltas of its answers.

    A subclass is a dialect: what the bodies and the events look like.
    """

    def __init__(self, generation: "Generation", served: "ServedModel"):
        self._request = generation.request
        self._prompts = generation.prompts
        self._prediction = generation.prediction
        self._has_thoughts = generation.has_thoughts
        self._codec = self._request.codec or served.codec
        self._last: dict[int, TextDelta] = {}  # by choice
        self._outcome: str | None = CancelledError.reason  # None: it is complete

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
        """Server-sent events; an error in mid-stream is an event too."""
        try:
            async with aclosing(deltas):
                for text in self._opening_events():
                    yield text
                for text in self._delta_events(first):
                    yield text
                async for indexed in deltas:
                    for text in self._delta_events(indexed):
                        yield text
                        await _let_others_run(indexed)
        except DisaggError as error:
            self._outcome = error.reason
            for text in self._failure_events(error):
                yield text
        else:
            self._outcome = None
            for text in self._closing_events():
                yield text

    def _delta_events(self, indexed: IndexedDelta) -> Iterator[str]:
        if indexed is None:
            yield WAITING
            return
        index, delta = indexed
        self._last[index] = delta
        yield from self._answer_events(index, delta)

    async def gather(self, deltas: AsyncGenerator[IndexedDelta]) -> None:
        """Wait for all deltas of a response that is not streamed; `pieces` are its JSON then."""
        try:
            async with aclosing(deltas):
                async for indexed in deltas:
                    if indexed is None:
                        continue
                    index, delta = indexed
                    self._last[index] = delta
                    for _ in self._add(index, delta):
                        await _let_others_run(indexed)
        except Exception as error:
            self._outcome = reason_of(error)
            raise
        self._outcome = None

    @abstractmethod
    def pieces(self, more: Mapping[str, Any]) -> Iterator[bytes]:
        """The JSON of a response that is not streamed. more: further fields of it."""

    def log_fields(self) -> dict[str, Any]:
        """Fields of the log line of a finished request."""
        # with codec auto the router chooses, and the figures of the hand-off name the codec
        kvs = [delta.kv for delta in self._last.values()]
        codecs = {kv["codec"] for kv in kvs if "codec" in kv}
        return {
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "codec": ",".join(sorted(codecs)) or self._codec,
            "error": self._outcome,
        }

    @abstractmethod
    def _opening_events(self) -> Iterator[str]:
        """The events before all text."""

    @abstractmethod
    def _answer_events(self, index: int, delta: TextDelta) -> Iterator[str]:
        """The events of the next delta of an answer."""

    @abstractmethod
    def _closing_events(self) -> Iterator[str]:
        """The events behind all text."""

    @abstractmethod
    def _failure_events(self, error: DisaggError) -> Iterator[str]:
        """The events behind the text that was sent before an error."""

    @abstractmethod
    def _add(self, index: int, delta: TextDelta) -> Iterator[None]:
        """Gather the next delta of an answer, in steps of a few milliseconds at most."""

    @property
    def _prompt_tokens(self) -> int:
        """Of all prompts; one counts once, however many answers it has."""
        return sum(len(prompt.tokens) for prompt in self._prompts)

    @property
    def _output_tokens(self) -> int:
        """Of all answers."""
        return sum(delta.num_tokens for delta in self._last.values())

    @property
    def _thought_tokens(self) -> int:
        """Of the thoughts of all answers."""
        return sum(delta.num_thought for delta in self._last.values())

    @property
    def _cached_tokens(self) -> int:
        """Of all prompts, those whose KV was cached."""
        cached_tokens = 0
        for number in range(len(self._prompts)):
            first_choice = number * self._request.n
            if first_choice in self._last:
                kv = self._last[first_choice].kv
                cached_tokens += kv.get("cached_tokens", 0)
        return cached_tokens

    def _kv_of(self, delta: TextDelta) -> dict[str, Any]:
        """The figures of the hand-off, at the end of a choice and if the request asks for them."""
        if self._request.kv and delta.finish_reason is not None:
            return {"kv": dict(delta.kv)}
        return {}


class ChoicesWriter(ResponseWriter):
    """Writes the response to a completion or a chat: a list of choices."""

    def __init__(
        self,
        choices: Choices,
        generation: "Generation",
        served: "ServedModel",
    ):
        super().__init__(generation, served)
        self._choices = choices
        self._whole: dict[int, WholeChoice] = {}
        self._head = {
            "id": f"{choices.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }
        # of every chunk, written once: there is one for each token
        head = json.dumps(self._chunk_head())[:-1]
        self._event_head = f'data: {head}, "choices": ['

    def _opening_events(self) -> Iterator[str]:
        for opening in self._choices.openings(self._request.n):
            yield self._chunk_event(opening)

    def _answer_events(self, index: int, delta: TextDelta) -> Iterator[str]:
        for piece in delta.slices(MAX_CHUNK_SCORES):
            choice = self._choices.chunk(index, piece)
            if choice is not None:
                yield self._chunk_event({**choice, **self._kv_of(piece)})

    def _closing_events(self) -> Iterator[str]:
        if self._request.stream_options.include_usage:
            yield event({**self._chunk_head(), "choices": [], "usage": self._usage()})
        yield DONE

    def _failure_events(self, error: DisaggError) -> Iterator[str]:
        yield event(
            error_body(str(error), error.reason, error.http_status, error.param)
        )
        yield DONE

    def _add(self, index: int, delta: TextDelta) -> Iterator[None]:
        if index not in self._whole:
            self._whole[index] = WholeChoice(index, self._choices)
        for piece in delta.slices(MAX_CHUNK_SCORES):
            self._whole[index].add(piece)
            yield

    def pieces(self, more: Mapping[str, Any]) -> Iterator[bytes]:
        fields = {
            **self._head,
            "object": self._choices.whole_object,
            "usage": self._usage(),
            **more,
        }
        yield json.dumps(fields)[:-1].encode() + b', "choices": ['
        for number, (index, choice) in enumerate(sorted(self._whole.items())):
            if number:
                yield b", "
            last = self._last[index]
            yield from choice.pieces(last.finish_reason or "", self._kv_of(last))
        yield b"]}"

    def _chunk_event(self, choice: Mapping[str, Any]) -> str:
        usage = ""
        if self._request.stream_options.continuous_usage_stats:
            usage = f', "usage": {json.dumps(self._usage())}'
        return f"{self._event_head}{json.dumps(choice)}]{usage}}}\n\n"

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": self._choices.chunk_object}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": self._prompt_tokens + self._output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            **self._completion_details(),
        }

    def _completion_details(self) -> dict[str, Any]:
        """Tokens of thoughts, of a model that has them; and of the prediction, if there is one."""
        details = {}
        if self._has_thoughts:
            details["reasoning_tokens"] = self._thought_tokens
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
