"""What a `RequestTable` decides: actions that `router.py` performs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import DisaggError
from disagg.transfer.messages import Grant, Job, Work


@dataclass(frozen=True)
class Reserve:
    """Ask a decode worker for room."""

    worker: str
    job: Job

    @property
    def rid(self) -> str:
        return self.job.rid


@dataclass(frozen=True)
class Start:
    """A worker begins a job. It hands the KV over to `decode`, under the reservation `grant`."""

    worker: str
    job: Job
    work: Work
    decode: str | None = None
    grant: Grant | None = None

    @property
    def rid(self) -> str:
        return self.job.rid


@dataclass(frozen=True)
class AbortAttempt:
    """A worker aborts an attempt and forgets every event of it."""

    worker: str
    rid: str
    attempt: int


@dataclass
class TokenOutput:
    """The client gets a token, or the reason why its answer ends: "stop" or "length".

    Not frozen: there is one for every token, and the router completes it in place.

    logprobs: of the token, if requested; with the first token, those of the prompt come first
    kv:       figures of the hand-off, once they have arrived; the router adds them
    waited_s: age of the request when this attempt began; the router adds it
    """

    rid: str
    token: int | None = None
    finish_reason: str | None = None
    logprobs: Sequence[Any] = ()
    kv: Mapping[str, Any] = field(default_factory=dict)
    waited_s: float = 0.0


@dataclass(frozen=True)
class FailRequest:
    """The client gets an error; its request is over."""

    rid: str
    error: DisaggError


Action = Reserve | Start | AbortAttempt | TokenOutput | FailRequest
