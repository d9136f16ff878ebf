"""The series of doors, in the process of the router: each with a label `door`.

A door sends its own series as JSON. They stay separate, so that a door that starts again is to
Prometheus what any process is that does: its counters begin at zero, and no other series changes.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest

DOOR = "door"
# how long the series of a door that left are kept; Prometheus looks back as far
KEEP_S = 300.0


class DoorSeries:
    """The series of each door, including those that left a short time ago.

    A replica of Ray Serve never comes back under its name, so its series must end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._series: dict[str, bytes] = {}
        self._left_at: dict[str, float] = {}

    def replace(self, door: str, counts: bytes) -> None:
        """Its series now, as `ScrapeRequest.counts` has them."""
        self._series[door] = counts
        self._left_at.pop(door, None)

    def leave(self, door: str) -> None:
        """The door is gone."""
        self._left_at[door] = self._clock()

    def current(self) -> Mapping[str, bytes]:
        """The series by door."""
        now = self._clock()
        for door, left_at in list(self._left_at.items()):
            if now >= left_at + KEEP_S:
                del self._left_at[door]
                self._series.pop(door, None)
        return dict(self._series)


def exported(registry: CollectorRegistry) -> bytes:
    """The series that have values, as `ScrapeRequest.counts` has them."""
    families = [
        (
            family.name,
            family.documentation,
            family.type,
            [(sample.name, sample.labels, sample.value) for sample in family.samples],
        )
        for family in registry.collect()
        if family.samples
    ]
    return json.dumps(families).encode()


def rendered(registry: CollectorRegistry, doors: Mapping[str, bytes]) -> bytes:
    """Series in Prometheus's text format: of doors, and those of a registry that no door has."""
    of_doors: dict[str, Metric] = {}
    for door, counts in sorted(doors.items()):
        for name, text, kind, samples in json.loads(counts):
            family = of_doors.setdefault(name, Metric(name, text, kind))
            for sample_name, labels, value in samples:
                family.add_sample(sample_name, {**labels, DOOR: door}, value)
    families = {family.name: family for family in registry.collect()} | of_doors
    return generate_latest(_Collected(families.values()))


class _Collected:
    """Families in the place of a registry."""

    def __init__(self, families: Iterable[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
