"""What the rules of `dispatch.py` want done, for whoever does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagg.errors import DisaggError
from disagg.transfer.messages import Grant, Job, Work


@dataclass(frozen=True)
class Reserve:
    """Ask a decode worker for room."""

    worker: str
    job: Job


@dataclass(frozen=True)
class Start:
    """A worker begins; what it has of the request goes to `decode`, by the `grant` that it gave."""

    worker: str
    job: Job
    work: Work
    decode: str | None = None
    grant: Grant | None = None


@dataclass(frozen=True)
class AbortAttempt:
    """A worker aborts an attempt, whatever it did for it, and keeps nothing of what it said."""

    worker: str
    rid: str
    attempt: int


@dataclass(frozen=True)
class EmitToken:
    """The client gets its next token, with its log-probabilities where they are wanted; or the
    end: "stop", "length" or an error."""

    rid: str
    what: int | str | DisaggError
    logprobs: Sequence[Any] = ()


Action = Reserve | Start | AbortAttempt | EmitToken
