"""Links: measured with messages like those of hand-offs, or made slower on purpose.

A slow or wrong transport is a failure that is easy to miss, so workers report what they measured.
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
SHORT_BYTES = (
    16 << 10
)  # of a short probe: a ping waits for it, on any link that can be used
LONG_S = 0.02  # how long one probe may take on a slow link
CALL_S = 5.0
# a frame takes at most this long, unless it is of the least size: a ping after two is on time
FRAME_S = 0.4
LEAST_FRAME_BYTES = 4096


@dataclass(frozen=True)
class LinkReport:
    """Latency and bandwidth of a link.

    round_trip_ms: of an empty message, the best of several
    gbytes_per_s:  of frames one after another
    """

    peer: str
    transport: str
    round_trip_ms: float
    gbytes_per_s: float

    def frame_bytes(self, most: int) -> int:
        """How large a frame may be, up to `most`, without being mistaken for a broken stream."""
        return int(min(most, max(LEAST_FRAME_BYTES, 1e9 * self.gbytes_per_s * FRAME_S)))

    def __str__(self) -> str:
        return (
            f"link to {self.peer}: {self.round_trip_ms:.2f} ms round trip, "
            f"{self.gbytes_per_s:.3g} GB/s, {self.transport}"
        )


async def measure(
    link: Link, clock: Callable[[], float] = time.perf_counter, is_short: bool = False
) -> LinkReport:
    """Measure the link to a decode worker's receiver; raises as `Link.call` does.

    At most 64 KiB and three frames cross, or less on a slow link.

    is_short: only 16 KiB cross, which shows a fast link slower than it is
    """

    async def probe_s(nbytes: int, times: int = 1) -> float:
        """Seconds of a message of this size, the best of several."""
        message = frame_message([bytes(nbytes)])  # the bytes of a ProbeRequest
        best = math.inf
        for _ in range(times):
            began = clock()
            await link.call(f"/{KV_SERVICE}/Probe", message, CALL_S)
            best = min(best, max(clock() - began, 1e-9))
        return best

    await probe_s(0)  # connects
    trip_s = await probe_s(0, TRIPS)
    size = SHORT_BYTES if is_short else FIRST_BYTES
    frame_s = await probe_s(size)
    if not is_short:
        affordable = FIRST_BYTES * LONG_S / max(frame_s - trip_s, 1e-9)
        size = int(min(FRAME_BYTES, max(FIRST_BYTES, affordable)))
        frame_s = await probe_s(size, 3)
    bytes_per_s = size / max(frame_s - trip_s / 2, frame_s / 2)
    return LinkReport(
        peer=link.address,
        transport=link.transport,
        round_trip_ms=1e3 * trip_s,
        gbytes_per_s=bytes_per_s / 1e9,
    )


async def reach(link: Link) -> None:
    """Call a decode worker's receiver; raises as `Link.call` does."""
    await link.call(f"/{KV_SERVICE}/Probe", frame_message([b""]), CALL_S)


async def absorb(data: bytes) -> bytes:
    """The receiver's side of a probe, as a method of `rpc.rpc_handlers`."""
    return b""


@dataclass
class RateSample:
    """Answered frames, and the seconds in which at least one was in flight."""

    frames: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a frame that was answered so long after the one before, or after it left."""
        self.frames += 1
        self.nbytes += nbytes
        self.seconds += seconds

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 without a frame."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def seconds_per_frame(self) -> float:
        """The mean; 0 without a frame."""
        return self.seconds / self.frames if self.frames else 0.0


class RateMeter:
    """The rate of a link while frames are in flight, and for how long it has been silent.

    sample: since it was last taken
    """

    def __init__(self) -> None:
        self.sample = RateSample()
        self._in_flight = deque[int]()  # bytes of each frame
        # when the oldest of them left, or the one before was answered
        self._since = 0.0
        self._since_reading = RateSample()
        self._last_rate = 0.0

    def read(self) -> float:
        """Bytes a second since the last reading; the last rate if no frame was answered since.

        0 before the first answer.
        """
        self._last_rate = self._since_reading.bytes_per_s or self._last_rate
        self._since_reading = RateSample()
        return self._last_rate

    def take_sample(self) -> RateSample:
        """The frames answered since the last sample; begins another one."""
        sample = self.sample
        self.sample = RateSample()
        return sample

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the frames that are not answered yet."""
        return sum(self._in_flight)

    def quiet_s(self, now: float) -> float:
        """For how long no frame in flight was answered; 0 if none is in flight."""
        return now - self._since if self._in_flight else 0.0

    def leaves(self, nbytes: int, now: float) -> None:
        """A frame is sent, or waits for the pace of the link."""
        if not self._in_flight:
            self._since = now
        self._in_flight.append(nbytes)

    def arrived(self, now: float) -> None:
        """The oldest frame in flight was answered; an answer to none is not counted."""
        if not self._in_flight:
            return
        nbytes = self._in_flight.popleft()
        for sample in (self.sample, self._since_reading):
            sample.add(nbytes, now - self._since)
        self._since = now


class RateLimiter:
    """A token bucket: at most a burst, or one message, passes at once."""

    def __init__(self, bytes_per_s: float, burst_bytes: int):
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._since: float | None = None

    def delay(self, nbytes: int, now: float) -> float:
        """Seconds to wait before `nbytes` pass. They count as passed."""
        if self._since is not None:
            earned = (now - self._since) * self.bytes_per_s
            self._tokens = min(self.burst_bytes, self._tokens + earned)
        self._since = now
        self._tokens -= nbytes
        return max(0.0, -self._tokens / self.bytes_per_s)
