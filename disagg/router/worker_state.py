"""The workers that take part, as a router sees them: what they are, could take, and did lately."""

import math
from dataclasses import dataclass, field, replace

from disagg.router.prefix_index import KnownPrefixes
from disagg.transfer.messages import Load, WorkerInfo

OPENS_AT, LONGEST_S = 3, 30.0  # failures in a row that open a breaker; its longest time
ROOMY = Load(free_bytes=1 << 62, slots=1 << 30)  # of whoever has not said it yet


@dataclass
class WorkerState:
    """A worker that takes part: what it could take, and how it did lately.

    bound:    prompts of so many tokens or more found no room; until then, or a better load
    failures: in a row, the last one at `failed_at`; nothing is given to it until `open_until`
    recent:   tokens of prompts given to it lately · known: beginnings of prompts that it has
    """

    started: WorkerInfo
    load: Load = ROOMY
    bound: tuple[float, float] = (math.inf, 0.0)
    failures: int = 0
    failed_at: float = -math.inf
    open_until: float = -math.inf
    recent: float = 0.0
    known: KnownPrefixes = field(default_factory=KnownPrefixes)

    @property
    def name(self) -> str:
        return self.started.name

    def takes(self, tokens: int, nbytes: float, now: float) -> bool:
        """Whether a prompt of at least so many bytes may find room, as far as it said."""
        refused = now < self.bound[1] and tokens >= self.bound[0]
        room = (
            self.load.slots > 0
            and not self.load.waiting
            and self.load.free_bytes >= nbytes
        )
        return room and not refused

    def says(self, load: Load) -> bool:
        """Take its load in; whether it may have room that it did not have before."""
        old, self.load = self.load, load
        self.started = replace(self.started, role=load.role or self.started.role)
        more = load.free_bytes > old.free_bytes or load.slots > old.slots
        if roomier := more or load.waiting < old.waiting or load.role != old.role:
            self.bound = (math.inf, 0.0)
        return roomier

    def fails(self, began: float, now: float) -> None:
        """An attempt from `began` on failed; those that began before the last failure are one.

        The third in a row opens the breaker: for 1, 2, 4 .. 30 s, and one more try each time.
        """
        if began >= self.failed_at:
            self.failures, self.failed_at = self.failures + 1, now
            self.pause(now)

    def pause(self, now: float) -> None:
        """Nothing more for a while, if its breaker is open or half open."""
        if self.failures >= OPENS_AT:
            self.open_until = now + min(
                LONGEST_S, 2.0 ** min(10, self.failures - OPENS_AT)
            )
