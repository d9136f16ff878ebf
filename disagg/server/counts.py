"""What this process counts: its requests, and what workers say of themselves. Knows no HTTP."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge

from disagg.metrics import Metrics, RequestTimes
from disagg.server.text import Piece

GAUGES = ("engine_running", "engine_waiting", "engine_held", "used_bytes", "arena_bytes")
PHASES = ("encode", "queue", "wire", "verify", "admit")
KINDS = ("fp16", "wire", "cached", "resident")


class Counts:
    """The metrics of one service. A worker's counts are added as they rose since they were seen."""

    def __init__(self, model: str):
        self._metrics = metrics = Metrics(model, "router")
        self._model = model
        self._seen: dict[tuple[str, int, str], int] = {}
        self._failures = Counter(
            "disagg_request_failures",
            "Requests that were refused, failed or were given up by their client",
            ["model_name", "reason"],
            registry=metrics.registry,
        )
        self._workers = Gauge(
            "disagg_worker",
            "What a worker holds, by the name of the thing",
            ["worker", "role", "what"],
            registry=metrics.registry,
        )

    # -- requests

    def failed(self, reason: str) -> None:
        """A request that has no answer, or half of one."""
        self._failures.labels(self._model, reason).inc()

    def finished(self, times: RequestTimes, last: Piece, prompt_tokens: int, own: bool) -> None:
        """An answer, and the figures of its hand-off if there are any.

        own: the client chose the codec; then only its family is a label: labels are for ever
        """
        metrics, kv = self._metrics, last.kv
        metrics.finished(times, last.finish_reason or "")
        metrics.add(metrics.prompt_tokens, prompt_tokens)
        metrics.add(metrics.generation_tokens, last.num_tokens)
        if not kv:
            return
        codec = family(kv["codec"]) if own else kv["codec"]
        for kind in KINDS:
            amount = kv.get(f"{kind}_bytes", 0)
            metrics.add(metrics.transfer_bytes, amount, kind=kind, codec=codec)
        for phase in PHASES:
            seconds = kv.get(f"{phase}_ms", 0.0) / 1e3
            metrics.observe(metrics.transfer_seconds, seconds, phase=phase)
        metrics.observe(metrics.exposed_seconds, kv.get("exposed_ms", 0.0) / 1e3)

    # -- workers

    def scrape(self, workers: Sequence[Mapping[str, Any]]) -> bytes:
        """What Prometheus reads. `workers`: as in `Completions.status`."""
        self._workers.clear()
        self._load(workers)
        for worker in workers:
            for name, value in worker.get("gauges", {}).items():
                self._workers.labels(worker["name"], worker["role"], name).set(value)
            self._take(worker)
        return self._metrics.render()

    def _take(self, worker: Mapping[str, Any]) -> None:
        """A worker that does not answer counts nothing."""
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

    def _load(self, workers: Sequence[Mapping[str, Any]]) -> None:
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


def family(spec: str) -> str:
    """The name of a codec without its options; "plan" for layers with codecs of their own."""
    return "plan" if spec[:1].isdigit() else spec.partition(":")[0]
