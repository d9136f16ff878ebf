"""What a link can do: measured with messages like those of hand-offs, or made slower on purpose.

A slow or wrong transport is the failure that nobody notices, so workers say what they found.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from disagg.transfer.messages import KV_SERVICE
from disagg.transfer.rpc import Link
from disagg.wire import FRAME_BYTES, frame_message

TRIPS = 5
FIRST_BYTES = 64 << 10
LONG_S = 0.02  # a slow link is not kept busy for longer than a few times this
CALL_S = 5.0
FRAME_S, LEAST_FRAME_BYTES = 2.0, 4096  # a frame crosses in so long, or is as small as this
BURST_BYTES = 64 << 10


@dataclass(frozen=True)
class LinkReport:
    """What a link can do.

    round_trip_ms: of an empty message, the best of some · gbytes_per_s: of frames one after another
    """

    peer: str
    transport: str
    round_trip_ms: float
    gbytes_per_s: float

    def frame_bytes(self, most: int) -> int:
        """How large a frame may be that is not mistaken for a broken stream; at most so large."""
        return int(min(most, max(LEAST_FRAME_BYTES, 1e9 * self.gbytes_per_s * FRAME_S)))

    def __str__(self) -> str:
        return (
            f"link to {self.peer}: {self.round_trip_ms:.2f} ms round trip, "
            f"{self.gbytes_per_s:.3g} GB/s, {self.transport}"
        )


async def measure(link: Link, clock: Callable[[], float] = time.perf_counter) -> LinkReport:
    """Ask a decode worker's receiver; raises as `Link.call` does if nobody is there, or it cannot.

    At most 64 KiB and three frames cross; less where they would take long.
    """

    async def ask(nbytes: int, times: int = 1) -> float:
        message, best = frame_message([bytes(nbytes)]), math.inf  # as a ProbeRequest looks
        for _ in range(times):
            began = clock()
            await link.call(f"/{KV_SERVICE}/Probe", message, CALL_S)
            best = min(best, max(clock() - began, 1e-9))
        return best

    await ask(0)  # connects
    trip = await ask(0, TRIPS)
    first = max(await ask(FIRST_BYTES) - trip, 1e-9)
    size = int(min(FRAME_BYTES, max(FIRST_BYTES, FIRST_BYTES * LONG_S / first)))
    seconds = await ask(size, 3)
    rate = size / max(seconds - trip / 2, seconds / 2)
    return LinkReport(link.address, link.transport, 1e3 * trip, rate / 1e9)


async def absorb(data: bytes) -> bytes:
    """The receiver's side, as a method of `rpc.rpc_handlers`: it came."""
    return b""


class Pace:
    """A token bucket: what passes at once is at most a burst or one message."""

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
