"""One request as the router sees it: its phase, its workers, its tokens."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from disagg.engine.sequence import AGEING_S
from disagg.errors import RequestError
from disagg.router.prefix_index import keys_of, page_keys_of
from disagg.transfer.messages import Job

Phase = StrEnum("Phase", ["QUEUED", "RESERVE", "PREFILL", "DECODE", "MOVE"])

ANY_WORKERS = ("", "")


def token_array(tokens: Sequence[int] = ()) -> "array[int]":
    """Token ids with 4 bytes each; `tokens` itself if it is an array already.

    RequestError for a number that is not a token id.
    """
    if isinstance(tokens, array):
        return tokens
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise RequestError(
            f"a token id is not from 0 to {2**32 - 1}: {error}"
        ) from error


@dataclass
class RequestState:
    """One request.

    serial:          number of requests that came before
    job:             its current attempt, which began at `attempt_began`
    at:              names of the prefill and the decode worker that it has to use while they take
                     part; "": any
    cached_tokens:   tokens of the prompt that `prefill` probably has in its prefix cache
    prefill, decode: names of its workers; the same name for local work
    target:          name of the worker that it is to move to
    prefill_done:    whether its prefill worker has computed the prompt
    sender_left_at:  when the worker that hands it over left
    avoid:           names of the workers that refused it last
    blamed_workers:  names of the workers that it has counted a failure for
    emitted:         tokens that were delivered to the client
    deaths:          number of workers that died while they computed this request alone
    client:          a name that stands for its client's API key; "": it has none
    rank:            the lowest goes first: a short prompt, or one that came early
    turn:            the turn of its client in which it last asked for room
    has_kept_worker: a worker was kept free for it while it waited for room
    max_tokens:      of the whole answer
    exclusive:       it shares its workers with no other request, as one more death ends it
    codec_reason:    why the service chose its codec, if it did
    """

    job: Job
    serial: int
    arrived: float
    deadline: float
    phase: Phase = Phase.QUEUED
    at: tuple[str, str] = ANY_WORKERS
    client: str = ""
    cached_tokens: int = 0
    prefill: str | None = None
    decode: str | None = None
    target: str | None = None
    prefill_done: bool = False
    sender_left_at: float = math.inf
    avoid: frozenset[str] = frozenset()
    blamed_workers: set[str] = field(default_factory=set)
    emitted: "array[int]" = field(default_factory=token_array)
    deaths: int = 0
    exclusive: bool = False
    turn: int = 0
    has_kept_worker: bool = False
    refusals: int = 0
    not_before: float = 0.0
    attempt_began: float = 0.0
    codec_reason: str = ""
    num_prompt_tokens: int = field(init=False)
    max_tokens: float = field(init=False)
    rank: float = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.job.prompt)
        self.max_tokens = self.job.sampling.get("max_tokens", math.inf)
        self._check()
        # the order by `urgency`, which halves with every AGEING_S, does not change with time
        self.rank = self.arrived + AGEING_S * math.log2(self.num_prompt_tokens)

    def _check(self) -> None:
        """RequestError for a request that would stop the placing of others."""
        if not self.num_prompt_tokens:
            raise RequestError("the prompt is empty; expected at least one token")
        if not isinstance(self.max_tokens, int | float):
            raise RequestError(f"max_tokens is {self.max_tokens!r:.40}, not a number")
        if not math.isfinite(self.arrived):
            raise RequestError(f"it arrived at {self.arrived}; expected a finite time")

    @property
    def rid(self) -> str:
        return self.job.rid

    @cached_property
    def prompt_keys(self) -> tuple[bytes, ...]:
        """Keys of the prompt's prefixes, as tokens."""
        return keys_of(token_array(self.job.prompt))

    @property
    def page_keys(self) -> tuple[bytes, ...]:
        """Keys of the prompt's prefixes, as pages of its codec."""
        return page_keys_of(self.prompt_keys, self.job.codec or "default")

    @property
    def workers(self) -> list[str]:
        """Names of its workers, each once."""
        names = dict.fromkeys([self.prefill, self.decode, self.target])
        return [name for name in names if name is not None]

    @property
    def occupied_workers(self) -> list[str]:
        """Names of the workers that still have work with it, or keep room for it."""
        if not self.is_decoding:
            return self.workers
        return [name for name in (self.decode, self.target) if name is not None]

    @property
    def answer_tokens(self) -> float:
        """How many more tokens its answer may have at most."""
        return self.max_tokens - len(self.emitted)

    @property
    def is_decoding(self) -> bool:
        return self.phase in (Phase.DECODE, Phase.MOVE)

    @property
    def is_single_token(self) -> bool:
        """Whether prefill's first token is the whole answer."""
        return self.max_tokens == 1

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

    def describe(self, now: float) -> dict[str, Any]:
        """What operators see of it. id: its client's name of it, else that of the router."""
        return {
            "id": self.job.request_id or self.rid,
            "state": self.phase.lower(),
            "age_s": round(now - self.arrived, 3),
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": len(self.emitted),
            "workers": self.workers,
        }

    def depends_on(self, name: str) -> bool:
        """Whether its attempt cannot go on without this worker."""
        if self.is_decoding:
            return name in (self.decode, self.target)
        return name in self.workers
