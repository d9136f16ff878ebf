"""One request as the router sees it: its phase, its workers, its tokens."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from disagg.engine.sequence import urgency
from disagg.transfer.messages import Job

Phase = StrEnum("Phase", ["QUEUED", "RESERVE", "PREFILL", "DECODE", "MOVE"])


@dataclass
class RequestState:
    """One request.

    job:             its current attempt, which began at `attempt_began`
    at:              names of the prefill and the decode worker that it has to use while they take
                     part; "": any
    prompt_keys:     keys of the prompt's prefixes, as tokens
    page_keys:       keys of the same prefixes, as pages of its codec
    cached_tokens:   tokens of the prompt that `prefill` probably has in its prefix cache
    prefill, decode: names of its workers; the same name for local work
    target:          name of the worker that it is to move to
    prefill_done:    whether its prefill worker has computed the prompt
    sender_left_at:  when the worker that hands it over left
    avoid:           names of the workers that refused it last
    blamed_workers:  names of the workers that it has counted a failure for
    emitted:         tokens that were delivered to the client
    deaths:          number of workers that died while they computed this request alone
    exclusive:       it shares its workers with no other request, as one more death ends it
    codec_reason:    why the service chose its codec, if it did
    """

    job: Job
    arrived: float
    deadline: float
    phase: Phase = Phase.QUEUED
    at: tuple[str, str] = ("", "")
    prompt_keys: tuple[bytes, ...] = ()
    page_keys: tuple[bytes, ...] = ()
    cached_tokens: int = 0
    prefill: str | None = None
    decode: str | None = None
    target: str | None = None
    prefill_done: bool = False
    sender_left_at: float = math.inf
    avoid: frozenset[str] = frozenset()
    blamed_workers: set[str] = field(default_factory=set)
    emitted: list[int] = field(default_factory=list)
    deaths: int = 0
    exclusive: bool = False
    refusals: int = 0
    not_before: float = 0.0
    attempt_began: float = 0.0
    codec_reason: str = ""

    @property
    def rid(self) -> str:
        return self.job.rid

    @property
    def workers(self) -> list[str]:
        """Names of its workers, each once."""
        names = dict.fromkeys([self.prefill, self.decode, self.target])
        return [name for name in names if name is not None]

    @property
    def is_decoding(self) -> bool:
        return self.phase in (Phase.DECODE, Phase.MOVE)

    @property
    def is_single_token(self) -> bool:
        """Whether prefill's first token is the whole answer."""
        return self.job.sampling.get("max_tokens") == 1

    @property
    def computed_by(self) -> str | None:
        """The worker whose engine works on it now."""
        if self.phase is Phase.PREFILL and not self.prefill_done:
            return self.prefill
        return self.decode if self.is_decoding else None

    @property
    def sender(self) -> str | None:
        """The worker that has computed its part and hands it over to another."""
        if self.phase is Phase.PREFILL and self.prefill_done:
            return self.prefill
        return self.decode if self.phase is Phase.MOVE else None

    @property
    def spare_tokens(self) -> int:
        """Room for tokens that the answer had not reached when it asked its target for room."""
        return self.job.moved - len(self.job.prompt) - len(self.job.emitted)

    def depends_on(self, name: str) -> bool:
        """Whether its attempt cannot go on without this worker."""
        if self.is_decoding:
            return name in (self.decode, self.target)
        return name in self.workers

    def urgency(self, now: float) -> float:
        """Lower goes first, by the rule of the engine."""
        return urgency(len(self.job.prompt), now - self.arrived)
