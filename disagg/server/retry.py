"""When a refused client should come again: how long the queue takes at its present rate."""

import math
import random
import time
from collections import deque
from collections.abc import Callable

MEASURED_ENDS = 64  # answers whose ends give the rate
MIN_RETRY_S = 1
MAX_RETRY_S = 60


class RetryEstimate:
    """Counts the answers that end, and divides the queue by their rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=MEASURED_ENDS)

    def ended(self) -> None:
        """An answer has ended, and made room for another one."""
        self._ends.append(self._clock())

    def wait_s(self, waiting: int) -> float:
        """Seconds until a queue of this length is served, within the bounds."""
        if not self._ends:
            return MIN_RETRY_S
        seconds_per_answer = (self._clock() - self._ends[0]) / len(self._ends)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, waiting * seconds_per_answer))

    def retry_after_s(self, waiting: int) -> int:
        """The same in whole seconds, and up to half more, so that clients do not come together."""
        least = math.ceil(self.wait_s(waiting))
        return random.randint(least, least + max(1, least // 2))
