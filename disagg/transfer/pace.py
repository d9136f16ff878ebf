"""A token bucket: makes a fast link behave like a slower one, for benchmarks and tests."""

BURST_BYTES = 64 << 10


class Pace:
    """Lets bytes pass at a rate; what passes at once is at most a burst or one message."""

    def __init__(self, bytes_per_s: float, burst_bytes: int = BURST_BYTES):
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._since: float | None = None

    def delay(self, nbytes: int, now: float) -> float:
        """Seconds to wait before `nbytes` pass; they are counted as passed."""
        if self._since is not None:
            earned = (now - self._since) * self.bytes_per_s
            self._tokens = min(self.burst_bytes, self._tokens + earned)
        self._since = now
        self._tokens -= nbytes
        return max(0.0, -self._tokens / self.bytes_per_s)
