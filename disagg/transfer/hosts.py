"""The links of a worker to other hosts: how fast they are, and whether direct connections open.

Channels come and go, hosts stay: this is remembered for hours, by host. Pure rules; every call
gets the time.
"""

import asyncio
import logging
from collections import OrderedDict
from dataclasses import asdict, replace
from typing import Any

from disagg.errors import DisaggError
from disagg.transfer.link import FRAME_S, LinkReport, RateSample

MAX_HOSTS = 1024
REMEMBER_S = 6 * 3600.0
# frames on a link of unknown rate: two of them delay a ping by no more than a slow link allows
UNKNOWN_FRAME_BYTES = 16 << 10
# a sample with this many round trips per frame, or more, shows the rate and not the latency
TRIPS_PER_FRAME = 4
MAX_FAILED_DIALS = 2
DIRECT_PAUSE_S = 600.0

log = logging.getLogger(__name__)


class HostLink:
    """The link to one host.

    report:  latency and rate as last measured; None: unknown
    probing: held while the link is probed, so that it is probed once
    """

    def __init__(self, host: str):
        self.host = host
        self.report: LinkReport | None = None
        self.probing = asyncio.Lock()
        self.used_at = 0.0
        self._failed_dials = 0  # in a row
        self._no_direct_until = 0.0
        self._why_not_direct = ""

    def frame_bytes(self, most: int) -> int:
        """How large a frame may be, up to `most`."""
        if self.report is None:
            return min(most, UNKNOWN_FRAME_BYTES)
        return self.report.frame_bytes(most)

    def window_bytes(self, most: int) -> int:
        """How many bytes may be in flight, of all hand-offs, in frames of at most `most` bytes.

        A ping waits for all of them.
        """
        frames = 2 * self.frame_bytes(most)
        if self.report is None:
            return frames
        return max(frames, int(2 * FRAME_S * 1e9 * self.report.gbytes_per_s))

    # -- the rate

    def learn(self, measured: LinkReport, sample: RateSample) -> None:
        """Update the rate from answered frames.

        Small frames show the latency of a fast link, not its rate: such a sample only shows that
        the rate is at least so high.

        measured: the rate and round trip of the sample, used where the link is unknown
        """
        if self.report is None:
            self.report = measured
            return
        rate = measured.gbytes_per_s
        trips_per_frame = 1e3 * sample.seconds_per_frame / self.report.round_trip_ms
        if trips_per_frame >= TRIPS_PER_FRAME:
            rate = (self.report.gbytes_per_s + rate) / 2
        elif rate <= self.report.gbytes_per_s:
            return
        self.report = replace(self.report, gbytes_per_s=rate)

    def broke(self, quiet_s: float) -> None:
        """A stream broke, where frames had waited so long for an answer.

        If that is longer than a frame may take, the report is not true any more.
        """
        if quiet_s > 2 * FRAME_S:
            self.report = None

    # -- direct connections

    def may_dial(self, now: float) -> bool:
        """Whether to try a direct connection."""
        return now >= self._no_direct_until

    def dial_failed(
        self, error: DisaggError, now: float, for_good: bool = False
    ) -> None:
        """A direct connection did not open, or carried no frame, while gRPC worked.

        for_good: do not try again before the pause
        """
        self._failed_dials += 1
        if self._failed_dials < MAX_FAILED_DIALS and not for_good:
            return
        level = logging.DEBUG if self._why_not_direct else logging.WARNING
        log.log(
            level,
            "direct connections to %s fail (%s): frames go over gRPC, for %.0f min at a time",
            self.host,
            error,
            DIRECT_PAUSE_S / 60,
        )
        self._failed_dials = MAX_FAILED_DIALS
        self._no_direct_until = now + DIRECT_PAUSE_S
        self._why_not_direct = str(error)

    def dial_worked(self) -> None:
        """A frame was answered on a direct connection."""
        if self._why_not_direct:
            log.info("direct connections to %s work again", self.host)
        self._failed_dials = 0
        self._why_not_direct = ""

    def as_info(self) -> dict[str, Any]:
        """Plain values; `direct_failed`: why frames go over gRPC, "" if they need not."""
        report = self.report or LinkReport(self.host, "unknown", 0.0, 0.0)
        return {**asdict(report), "direct_failed": self._why_not_direct}

    @property
    def is_noteworthy(self) -> bool:
        """Whether there is anything to report."""
        return self.report is not None or bool(self._why_not_direct)


class HostLinks:
    """The links of a worker by host. The least recently used are forgotten."""

    def __init__(self) -> None:
        self._links: OrderedDict[str, HostLink] = OrderedDict()

    def to(self, address: str, now: float) -> HostLink:
        """The link to the host of "host:port"."""
        host = address.rpartition(":")[0].strip("[]")
        link = self._links.get(host)
        if link is None or now - link.used_at > REMEMBER_S:
            link = self._links[host] = HostLink(host)
        link.used_at = now
        self._links.move_to_end(host)
        if len(self._links) > MAX_HOSTS:
            self._links.popitem(last=False)
        return link

    def as_info(self) -> list[dict[str, Any]]:
        """The measured links, and those without direct connections, as plain values."""
        return [x.as_info() for x in self._links.values() if x.is_noteworthy]
