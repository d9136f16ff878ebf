"""The workers that take part, as a router sees them: their load, room, failures and prefixes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from disagg.router.prefix_index import KnownPrefixes, KnownSnapshots
from disagg.transfer.messages import Load, WorkerInfo

OPENS_AT = 3  # consecutive failures that open a circuit breaker
MAX_OPEN_S = 30.0  # the longest time that a breaker stays open
UNKNOWN_LOAD = Load(
    free_bytes=1 << 62, slots=1 << 30
)  # until a worker reports its load


@dataclass
class WorkerState:
    """A worker that takes part.

    refused_tokens: it has no room for prompts of this length or more, until `refused_until` or
                    until it reports more room
    failures:       consecutive failures, the last at `failed_at`
    open_until:     the circuit breaker is open: no request goes to the worker before this time
    recent_tokens:  tokens of prompts that it got lately, fading with time
    prefixes:       prefixes of prompts that it has in its cache
    snapshots:      those of its states; None: its model has none, and resumes any prefix
    """

    info: WorkerInfo
    load: Load = UNKNOWN_LOAD
    refused_tokens: float = math.inf
    refused_until: float = 0.0
    failures: int = 0
    failed_at: float = -math.inf
    open_until: float = -math.inf
    recent_tokens: float = 0.0
    prefixes: KnownPrefixes = field(default_factory=KnownPrefixes)
    snapshots: KnownSnapshots | None = field(init=False)

    def __post_init__(self) -> None:
        count = self.info.snapshots
        self.snapshots = None if count is None else KnownSnapshots(count)

    @property
    def name(self) -> str:
        return self.info.name

    def resumable_tokens(self, keys: Sequence[bytes]) -> int:
        """Leading tokens of a prompt with these keys that it probably need not compute."""
        cached_tokens = self.prefixes.tokens(keys)
        if self.snapshots is None:
            return cached_tokens
        return self.snapshots.tokens(keys, cached_tokens)

    def add_prompt(self, keys: Sequence[bytes], tokens: int) -> None:
        """It computes a prompt of so many tokens, and caches its prefixes."""
        if self.snapshots is not None:
            self.snapshots.add(keys, tokens, self.prefixes.tokens(keys))
        self.prefixes.add(keys)

    def room(self, token_bytes: float, now: float, state_bytes: float = 0.0) -> float:
        """Length of the longest prompt that may find room, as far as the router can tell.

        token_bytes: the least that a token takes; 0: unknown
        state_bytes: what the states of a sequence take besides
        """
        if self.load.slots <= 0 or self.load.waiting:
            return 0.0
        free_bytes = max(0.0, self.load.free_bytes - state_bytes)
        tokens = free_bytes / token_bytes if token_bytes else math.inf
        if now < self.refused_until:
            tokens = min(tokens, self.refused_tokens - 1)
        return tokens

    def update_load(self, load: Load) -> bool:
        """Replace the load; whether there may be room now that was not there before."""
        old, self.load = self.load, load
        if load.role:
            self.info = replace(self.info, role=load.role)
        has_more_room = (
            load.free_bytes > old.free_bytes
            or load.slots > old.slots
            or load.waiting < old.waiting
            or load.role != old.role
        )
        if has_more_room:
            self.refused_tokens = math.inf
            self.refused_until = 0.0
        return has_more_room

    def refuse_room(self, tokens: int, until: float) -> None:
        """A prompt of this length was refused: the worker gets none like it for a while."""
        self.refused_tokens = tokens
        self.refused_until = until

    def add_failure(self, attempt_began: float, now: float) -> None:
        """Count a failed attempt, unless it began before the last failure.

        The third consecutive failure opens the breaker for 1 s, the next ones for 2, 4 .. 30 s.
        When it closes, one request tries the worker again.
        """
        if attempt_began >= self.failed_at:
            self.failures += 1
            self.failed_at = now
            self.pause(now)

    def reset_failures(self) -> None:
        """An attempt has succeeded: close the breaker."""
        self.failures = 0
        self.open_until = -math.inf

    def distrust(self, times_stuck: int, now: float) -> None:
        """Open the breaker of a worker whose engine hung so many times: it may hang again."""
        self.failures = OPENS_AT - 1 + times_stuck
        self.failed_at = now
        self.pause(now)

    def pause(self, now: float) -> None:
        """Open the breaker (again), if the worker has failed often enough."""
        if self.failures >= OPENS_AT:
            doublings = min(10, self.failures - OPENS_AT)
            self.open_until = now + min(MAX_OPEN_S, 2.0**doublings)
