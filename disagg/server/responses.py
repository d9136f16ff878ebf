"""How any response is written, whole or as server-sent events. No HTTP.

`choices_writer.py` and `items_writer.py` have the dialects.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from disagg.errors import CancelledError, DisaggError, reason_of
from disagg.server.output_text import TextDelta

if TYPE_CHECKING:  # errors need this module before pydantic is imported
    from disagg.server.reader import Generation, ServedModel

# log-probabilities that are written at once: those of a long prompt would take 0.1 s
MAX_CHUNK_SCORES = 256
WAITING = ": waiting\n\n"  # a comment, so that no proxy takes the connection for dead

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
        self._before_event = ""

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
                yield self._behind_wait(text)
        else:
            self._outcome = None
            for text in self._closing_events():
                yield self._behind_wait(text)

    def _delta_events(self, indexed: IndexedDelta) -> Iterator[str]:
        if indexed is None:
            self._before_event = WAITING
            yield WAITING
            return
        index, delta = indexed
        self._last[index] = delta
        for text in self._answer_events(index, delta):
            yield self._behind_wait(text)

    def _behind_wait(self, text: str) -> str:
        """An event, with a comment in front of it if the one before it was a comment.

        vLLM's client strips each piece that it reads, and so loses the line break behind a comment
        that comes alone; it then took the whole answer for that comment.
        """
        before, self._before_event = self._before_event, ""
        return before + text

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

    def _slices(self, delta: TextDelta) -> Iterator[TextDelta]:
        """Slices of a delta, which are written one by one."""
        return delta.slices(MAX_CHUNK_SCORES)

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
