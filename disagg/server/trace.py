"""What a request did and when, from which `spans.py` makes spans. Knows no OpenTelemetry.

        arrived            attempt begins         first token      handed over        last token
    queue  ├───────────────────────┤                   │                │                  │
    prefill                        ├───────────────────┤                │                  │
    encode                                 ├───────────┤                │                  │
    wire                                      ├─────────────────────────┤                  │
    verify, admit                                                  ├──┼─┤                  │
    decode                                                              ├──────────────────┤

The length of each stage was measured. Encoding and sending go on in turns with prefill: their spans
stand where the last of that work was done.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from disagg.config import ServerConfig
from disagg.errors import ConfigError
from disagg.server.metrics import AnswerTimes

if TYPE_CHECKING:
    from starlette.types import Scope

    from disagg.server.client import Client
    from disagg.server.schema import GenerationRequest

# what the GenAI conventions call the requests for answers, by path
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
}
CARRIER = (b"traceparent", b"tracestate")
# the standard variables that say where spans go
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True)
class TracedStage:
    """A part of an answer, in seconds of the monotonic clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class AnswerTrace:
    """One answer that has ended.

    choice:   its index among the answers to its request
    waited_s: until a worker began
    kv:       figures of its hand-off
    finish_reason: "error" if it has failed
    """

    choice: int
    times: AnswerTimes
    waited_s: float
    kv: Mapping[str, Any]
    finish_reason: str

    def stages(self) -> list[TracedStage]:
        """The stages that it came to, in the order of their ends."""
        times = self.times
        started = times.arrived + self.waited_s
        if not times.num_tokens:
            return [TracedStage("queue", times.arrived, max(started, times.last_token))]
        first = times.first_token
        stages = [
            TracedStage("queue", times.arrived, min(started, first)),
            TracedStage("prefill", min(started, first), first),
        ]
        decodable = first
        if self.kv.get("wire_ms"):
            stages += self._handoff()
            decodable = stages[-1].end
        return [
            *stages,
            TracedStage("decode", decodable, max(decodable, times.last_token)),
        ]

    def _handoff(self) -> list[TracedStage]:
        """From the end of prefill, when the last pages were offered, to their admission."""
        first = self.times.first_token
        received = first + self._seconds("exposed_ms")
        committed = received - self._seconds("admit_ms")
        verified = committed - self._seconds("verify_ms")
        return [
            TracedStage("encode", first - self._seconds("encode_ms"), first),
            TracedStage("wire", received - self._seconds("wire_ms"), received),
            TracedStage("verify", verified, committed),
            TracedStage("admit", committed, received),
        ]

    def _seconds(self, name: str) -> float:
        return float(self.kv.get(name, 0.0)) / 1000


@dataclass
class RequestTrace:
    """One request, filled while it is served.

    carrier:  its headers of W3C Trace Context
    began, ended: seconds of the monotonic clock
    model:    that serves it; "" until its body is read
    status:   of the response
    """

    path: str
    carrier: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    model: str = ""
    request: "GenerationRequest | None" = None
    prompt_tokens: int = 0
    answers: list[AnswerTrace] = field(default_factory=list)
    status: int = 500

    @property
    def operation(self) -> str:
        """As the GenAI conventions name it."""
        return OPERATIONS[self.path]

    def read(
        self, request: "GenerationRequest", model: str, prompts: Sequence[int]
    ) -> None:
        """Its body is read. prompts: the number of tokens of each"""
        self.request = request
        self.model = model
        self.prompt_tokens = sum(prompts)

    def end(self) -> None:
        """Its response is complete, or its client has left."""
        self.ended = time.monotonic()


class SpanWriter(Protocol):
    """Sends spans to a collector, in the background."""

    def write(self, client: "Client") -> None:
        """The spans of a request that has ended."""

    def close(self) -> None:
        """Send what is left; returns within seconds."""


def is_traced(scope: "Scope") -> bool:
    """Whether a request asks for answers."""
    is_post: bool = scope.get("method") == "POST"
    return is_post and scope["path"] in OPERATIONS


def carrier_of(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of W3C Trace Context; `tracestate` may come in several."""
    carrier: dict[str, str] = {}
    for name, value in headers:
        if name in CARRIER:
            key, text = name.decode(), value.decode("latin-1")
            carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return carrier


def open_spans(config: ServerConfig) -> SpanWriter | None:
    """Where the settings, or the standard variables of OpenTelemetry, send spans; None: nowhere.

    Nothing of OpenTelemetry is imported then. ConfigError if it is not installed.
    """
    if not is_wanted(config):
        return None
    try:
        spans = import_module("disagg.server.spans")
    except ImportError as error:
        raise ConfigError(
            f"traces are on, but {error.name} is missing: pip install 'disagg[otel]', or set "
            "OTEL_SDK_DISABLED=true"
        ) from error
    writer: SpanWriter = spans.open_writer(config.traces_endpoint)
    return writer


def is_wanted(config: ServerConfig) -> bool:
    """Whether spans are to be sent, by the settings and the environment."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if config.traces_endpoint:
        return True
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "")
    has_endpoint = any(os.environ.get(name) for name in ENDPOINTS)
    return exporter == "otlp" or (not exporter and has_endpoint)
