"""How long a worker that could not start waits before the next try. No Ray."""

import time
from collections.abc import Callable

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0


class RetryPauses:
    """Pauses by place of a worker: each failure in a row doubles the pause.

    now: a clock in seconds
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._pauses: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    def failed(self, place: str) -> float:
        """Begin a pause; returns its length in seconds."""
        last = self._pauses.get(place)
        pause_s = FIRST_PAUSE_S if last is None else min(2 * last, LONGEST_PAUSE_S)
        self._pauses[place] = pause_s
        self._ends[place] = self._now() + pause_s
        return pause_s

    def served(self, place: str) -> None:
        """The next failure begins with a short pause again."""
        self._pauses.pop(place, None)
        self._ends.pop(place, None)

    def is_over(self, place: str) -> bool:
        """Whether a worker may start at this place."""
        return self._now() >= self._ends.get(place, 0.0)
