"""What a link can do: measured with messages like those of hand-offs, or made slower on purpose.

A slow or wrong transport is the failure that nobody notices, so workers say what they found.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from disagg.transfer.messages import KV_SERVICE
from disagg.transfer.rpc import Link
from disagg.wire import FRAME_BYTES, frame_message

TRIPS = 5
FIRST_BYTES = 64 << 10
LONG_S = 0.02  # a slow link is not kept busy for longer than a few times this
CALL_S = 5.0
# a frame crosses in so long, or is as small as this: a ping behind two of them is on time
FRAME_S, LEAST_FRAME_BYTES = 0.4, 4096


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


async def measure(
    link: Link, clock: Callable[[], float] = time.perf_counter
) -> LinkReport:
    """Ask a decode worker's receiver; raises as `Link.call` does if nobody is there, or it cannot.

    At most 64 KiB and three frames cross; less where they would take long.
    """

    async def ask(nbytes: int, times: int = 1) -> float:
        message, best = (
            frame_message([bytes(nbytes)]),
            math.inf,
        )  # as a ProbeRequest looks
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


class RateMeter:
    """Bytes a second that a link takes while something is on its way, and how long it is silent."""

    def __init__(self) -> None:
        self._out = deque[int]()
        self._nbytes, self._since, self._busy_s, self._last = 0, 0.0, 0.0, 0.0

    def read(self) -> float:
        """Since it was read last, or what that was where nothing came since; 0 before anything."""
        if self._busy_s:
            self._last = self._nbytes / self._busy_s
            self._nbytes, self._busy_s = 0, 0.0
        return self._last

    def quiet_s(self, now: float) -> float:
        """How long nothing was answered of what is on its way; 0 where nothing is."""
        return now - self._since if self._out else 0.0

    def leaves(self, nbytes: int, now: float) -> None:
        """A frame is on its way, or waits for the pace of the link."""
        self._since = self._since if self._out else now
        self._out.append(nbytes)

    def arrived(self, now: float) -> None:
        """The first of these frames was answered; an answer to none counts nothing."""
        if self._out:
            self._busy_s += now - self._since
            self._nbytes, self._since = self._nbytes + self._out.popleft(), now


class RateLimiter:
    """A token bucket: what passes at once is at most a burst or one message."""

    def __init__(self, bytes_per_s: float, burst_bytes: int):
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
