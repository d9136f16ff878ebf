"""Writes the response to a completion or a chat, whole or as chunks. No HTTP."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from disagg.errors import DisaggError
from disagg.server.choices import Choices, WholeChoice
from disagg.server.output_text import TextDelta
from disagg.server.responses import ResponseWriter, error_body, event

if TYPE_CHECKING:
    from disagg.server.reader import Generation, ServedModel

DONE = "data: [DONE]\n\n"


class ChoicesWriter(ResponseWriter):
    """Writes the response to one request: a list of choices."""

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
        for piece in self._slices(delta):
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
        for piece in self._slices(delta):
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
