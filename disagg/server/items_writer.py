"""Writes the response to POST /v1/responses, whole or as events. No HTTP.

response.created   response.in_progress   events of the output items ...   response.completed
                                                                           response.incomplete
                                                                    error, response.failed
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from disagg.errors import DisaggError
from disagg.model.tokenizer import Tokenizer
from disagg.parsers.parts import Content, Part, Thought
from disagg.server.choices import MAX_PIECE, chat_scores
from disagg.server.output_text import TextDelta
from disagg.server.responses import ResponseWriter
from disagg.server.responses_output import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Event,
    OutputWriter,
    with_field,
)
from disagg.server.responses_request import ResponsesRequest, translate

if TYPE_CHECKING:
    from disagg.server.reader import Generation, ServedModel

FAILED = "failed"
# what a request cannot choose here, whatever it says
FIXED_FIELDS = {
    "previous_response_id": None,
    "background": False,
    "store": False,
    "truncation": "disabled",
    "service_tier": "default",
}
SAMPLING_FIELDS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
SERVER_ERROR = "server_error"  # OpenAI's code of errors that are not the client's


class ItemsWriter(ResponseWriter):
    """Writes the response of one request of this dialect: a list of items.

    The fields of the request that the response repeats are kept as JSON.
    """

    def __init__(
        self,
        sent: ResponsesRequest,
        generation: "Generation",
        served: "ServedModel",
        tokenizer: Tokenizer,
        new_call_id: Callable[[], str],
    ):
        super().__init__(generation, served)
        namespaces = sent.functions.names
        self._output = OutputWriter(new_call_id, namespaces, sent.seals_thoughts)
        self._tokenizer = tokenizer
        self._shows_thoughts = sent.chat.include_reasoning
        self._id = f"resp_{uuid.uuid4().hex}"
        self._model = served.name
        self._created_at = int(time.time())
        self._numbers = count()
        sampling = self._request.sampling(0, served.defaults)
        echo = {name: sampling[name] for name in SAMPLING_FIELDS}
        self._echo = json.dumps({**FIXED_FIELDS, **echo, **sent.echo()})

    def pieces(self, more: Mapping[str, Any]) -> Iterator[bytes]:
        """The JSON of a response that is not streamed. more: further fields of it."""
        body = self._whole_body(more).encode()
        for begin in range(0, len(body), MAX_PIECE):
            yield body[begin : begin + MAX_PIECE]

    def _opening_events(self) -> Iterator[str]:
        yield self._response_event("response.created", self._body(IN_PROGRESS))
        yield self._response_event("response.in_progress", self._body(IN_PROGRESS))

    def _answer_events(self, index: int, delta: TextDelta) -> Iterator[str]:
        for event in self._events(delta):
            yield self._numbered(event)

    def _closing_events(self) -> Iterator[str]:
        body = self._whole_body({})
        yield self._response_event(f"response.{self._final_status}", body)

    def _failure_events(self, error: DisaggError) -> Iterator[str]:
        translate(error)
        payload = {
            "type": error.reason,
            "code": str(error.http_status),
            "message": str(error),
            "param": error.param,
        }
        yield self._numbered(Event("error", {"error": payload}))
        failure = {"code": SERVER_ERROR, "message": str(error)}
        body = self._body(FAILED, error=failure, usage=self._usage())
        yield self._response_event("response.failed", body)

    def _add(self, index: int, delta: TextDelta) -> Iterator[None]:
        for _ in self._events(delta):
            yield

    def _events(self, delta: TextDelta) -> Iterator[Event]:
        """The events of the next delta of the answer, which has one choice."""
        parts = self._parts(delta)
        logprobs = self._logprobs(delta)
        contents = [part for part in parts if isinstance(part, Content)]
        for part in parts:
            has_logprobs = part is contents[-1] if contents else False
            yield from self._output.add(part, logprobs if has_logprobs else ())
        if logprobs and not delta.parts and not delta.text:
            yield from self._output.add_logprobs(logprobs)
        if delta.finish_reason is not None:
            yield from self._output.finish(is_cut=delta.finish_reason == "length")

    def _parts(self, delta: TextDelta) -> list[Part]:
        """The parts that the response shows. A text that no parser reads is content."""
        parts = [Content(delta.text), *delta.parts] if delta.text else [*delta.parts]
        if self._shows_thoughts:
            return parts
        return [part for part in parts if not isinstance(part, Thought)]

    def _logprobs(self, delta: TextDelta) -> list[str]:
        """JSON of the log-probabilities of each token."""
        return [
            json.dumps(score) for score in chat_scores(self._tokenizer, delta.scores)
        ]

    def _response_event(self, kind: str, body: str) -> str:
        return self._numbered(Event(kind, {}, ("response", body)))

    def _numbered(self, event: Event) -> str:
        return event.text(next(self._numbers))

    @property
    def _last_delta(self) -> TextDelta:
        return self._last[0]

    @property
    def _final_status(self) -> str:
        is_cut = self._last_delta.finish_reason == "length"
        return INCOMPLETE if is_cut else COMPLETED

    def _whole_body(self, more: Mapping[str, Any]) -> str:
        """The JSON of the response when the answer is complete."""
        status = self._final_status
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        return self._body(
            status,
            incomplete_details=details,
            completed_at=int(time.time()) if status == COMPLETED else None,
            usage=self._usage(),
            **self._kv_of(self._last_delta),
            **more,
        )

    def _body(self, status: str, **fields: Any) -> str:
        """The JSON of the response at any time, with the items that are complete."""
        head = {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "usage": None,
            **fields,
        }
        body = with_field(json.dumps(head), "output", self._output.items)
        return f"{body[:-1]}, {self._echo[1:]}"

    def _usage(self) -> dict[str, Any]:
        details = {"cached_tokens": self._cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": self._prompt_tokens + self._output_tokens,
        }
