"""How long the place of a worker that keeps failing stays empty. No Ray."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0
STEADY_S = 300.0  # a worker that served for this long has not failed
FREE_ENDS = 2  # early ends in a row without a pause


@dataclass
class PlaceHistory:
    """Failures at one place.

    pause_s:      the last pause; 0 before the first
    over_at:      when it is over
    serving_from: when the last worker began to serve
    early_ends:   workers in a row that served for less than STEADY_S
    """

    pause_s: float = 0.0
    over_at: float = -math.inf
    serving_from: float = -math.inf
    early_ends: int = 0


class RetryPauses:
    """Pauses by place of a worker: each failure in a row doubles the pause.

    now: a clock in seconds
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._places: defaultdict[str, PlaceHistory] = defaultdict(PlaceHistory)

    def failed(self, place: str) -> float:
        """A worker did not start; returns the seconds until the next one may."""
        history = self._places[place]
        longer_s = 2 * history.pause_s or FIRST_PAUSE_S
        history.pause_s = min(longer_s, LONGEST_PAUSE_S)
        history.over_at = self._now() + history.pause_s
        return history.pause_s

    def served(self, place: str) -> None:
        """A worker serves."""
        self._places[place].serving_from = self._now()

    def ended(self, place: str) -> float:
        """A worker that served has ended; returns the seconds until the next one may start."""
        history = self._places[place]
        if self._now() - history.serving_from >= STEADY_S:
            del self._places[place]
            return 0.0
        history.early_ends += 1
        if history.early_ends <= FREE_ENDS:
            return 0.0
        return self.failed(place)

    def is_over(self, place: str) -> bool:
        """Whether a worker may start at this place."""
        return self._now() >= self._places[place].over_at
