"""What workers say of themselves, as metrics of this process. Knows no HTTP."""

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.metrics import Metrics

GAUGES = ("engine_running", "engine_waiting", "engine_held", "used_bytes", "arena_bytes")


class WorkerCounts:
    """Adds to the metrics what the counts of each worker rose by since they were last seen."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._seen: dict[tuple[str, int, str], int] = {}

    def take(self, worker: Mapping[str, Any]) -> None:
        """One entry of `Completions.status`; a worker that does not answer counts nothing."""
        metrics = self._metrics
        counters = {
            "expired": metrics.expired,
            "damaged": metrics.damaged,
            "preempted": metrics.preemptions,
        }
        for name, counter in counters.items():
            if rise := self._rise(worker, name, worker.get("counts", {}).get(name, 0)):
                metrics.add(counter, rise, role=worker["role"])
        for reason, count in worker.get("failures", {}).items():
            if rise := self._rise(worker, f"failed: {reason}", count):
                metrics.add(metrics.transfer_failures, rise, role=worker["role"], reason=reason)

    def load(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """The gauges of each role, of all its workers together; of those that answer."""
        by_role: dict[str, list[Mapping[str, float]]] = {}
        for worker in workers:
            by_role.setdefault(worker["role"], []).append(worker.get("gauges", {}))
        for role, gauges in by_role.items():
            running, waiting, held, used, arena = (sum(x.get(y, 0) for x in gauges) for y in GAUGES)
            self._metrics.load(role, running, waiting, held, usage=used / max(1, arena))

    def _rise(self, worker: Mapping[str, Any], name: str, count: int) -> int:
        """A new incarnation of a worker begins at 0."""
        key = (worker["name"], worker.get("epoch", 0), name)
        before, self._seen[key] = self._seen.get(key, 0), count
        return count - before
