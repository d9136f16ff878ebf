"""One request and what can happen to it, as plain data. `dispatch.py` has the rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from disagg.errors import DisaggError


class Phase(StrEnum):
    """Where a request is; `dispatch.py` draws the arrows."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True)
class Work:
    """A request as the client gave it. `params` are plain values for the engine's sampler."""

    rid: str
    prompt: tuple[int, ...]
    params: Mapping[str, int | float | bool]
    codec: str
    deadline: float


@dataclass(frozen=True)
class Member:
    """A worker that takes part, and in which roles."""

    name: str
    prefills: bool
    decodes: bool


@dataclass
class Entry:
    """One request: its work, its current attempt and what was emitted."""

    work: Work
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    prefill: str | None = None
    decode: str | None = None
    emitted: list[int] = field(default_factory=list)
    deaths: int = 0
    refusals: int = 0
    not_before: float = 0.0

    def uses(self, worker: str) -> bool:
        """Whether the current attempt is lost without that worker."""
        if self.phase is Phase.PREFILL:
            return worker in (self.prefill, self.decode)
        return self.phase is Phase.DECODE and worker == self.decode


@dataclass(frozen=True)
class Start:
    """Action: the prefill worker computes the prompt and hands it to the decode worker."""

    prefill: str
    decode: str
    work: Work
    attempt: int
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Abort:
    """Action: a worker forgets an attempt, whatever it did for it."""

    worker: str
    rid: str
    attempt: int


@dataclass(frozen=True)
class Release:
    """Action: a worker need not keep the first `count` outputs of a request any longer."""

    worker: str
    rid: str
    count: int


@dataclass(frozen=True)
class Deliver:
    """Action: the client gets its next token."""

    rid: str
    token: int


@dataclass(frozen=True)
class Finish:
    """Action: the request is done; reason "stop" or "length"."""

    rid: str
    reason: str


@dataclass(frozen=True)
class Fail:
    """Action: the request ends with an error."""

    rid: str
    error: DisaggError


Action = Start | Abort | Release | Deliver | Finish | Fail
