"""What workers count of their hand-offs, as counters of this process. Knows no HTTP."""

from collections.abc import Mapping
from typing import Any

from disagg.metrics import Metrics


class WorkerCounts:
    """Adds to the metrics what the counts of each worker rose by since they were last seen."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._seen: dict[tuple[str, int, str], int] = {}

    def take(self, worker: Mapping[str, Any]) -> None:
        """One entry of `Completions.status`; a worker that does not answer counts nothing."""
        metrics = self._metrics
        for name, counter in (("expired", metrics.expired), ("damaged", metrics.damaged)):
            if rise := self._rise(worker, name, worker.get("counts", {}).get(name, 0)):
                metrics.add(counter, rise, role=worker["role"])
        for reason, count in worker.get("failures", {}).items():
            if rise := self._rise(worker, f"failed: {reason}", count):
                metrics.add(metrics.transfer_failures, rise, role=worker["role"], reason=reason)

    def _rise(self, worker: Mapping[str, Any], name: str, count: int) -> int:
        """A new incarnation of a worker begins at 0."""
        key = (worker["name"], worker.get("epoch", 0), name)
        before, self._seen[key] = self._seen.get(key, 0), count
        return count - before
