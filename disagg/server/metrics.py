"""What this process counts: its requests, and what workers say of themselves. Knows no HTTP.

Prometheus series of the service: `disagg_` names, and vLLM's for dashboards.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from disagg.router.router import Router
from disagg.server.output_text import TextDelta

SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
PHASES = ("encode", "queue", "wire", "verify", "admit")
KINDS = ("fp16", "wire", "cached", "resident")
ROUTER = "router"
# what a worker says of itself: a series, and what it is
GAUGES = {
    "engine_running": ("vllm:num_requests_running", "Sequences that compute"),
    "engine_waiting": ("vllm:num_requests_waiting", "Sequences that wait"),
    "engine_held": (
        "disagg_held_sequences",
        "Prefilled ones that wait for an acknowledgement",
    ),
}
# where the KV of prompts is from, as vLLM names it: what a worker counts of it
SOURCES = {
    "local_compute": ("computed_tokens",),
    "local_cache_hit": ("cached_tokens", "shared_tokens"),
    "external_kv_transfer": ("received_tokens",),
}

Series = TypeVar("Series", Counter, Gauge, Histogram)


class ServerMetrics:
    """The metrics of one service. A worker's counts are added as they rose since they were seen."""

    def __init__(self, model: str):
        self._registry = CollectorRegistry()
        self._model = model
        self._seen: dict[tuple[Any, ...], int] = {}
        gauge, counter = partial(self._series, Gauge), partial(self._series, Counter)
        histogram = partial(self._series, partial(Histogram, buckets=SECONDS))
        self._bytes = counter(
            "disagg_kv_transfer_bytes", "KV of hand-offs", "kind", "codec"
        )
        self._phases = histogram(
            "disagg_kv_transfer_seconds", "Hand-offs, by phase", "phase"
        )
        self._exposed = histogram(
            "disagg_kv_exposed_seconds", "Hand-off time nothing hid"
        )
        self._broken = counter(
            "disagg_kv_transfer_failures", "Failed hand-offs", "reason"
        )
        self._rising = {
            "expired": counter("disagg_kv_expired", "Reservations whose lease ran out"),
            "damaged": counter(
                "disagg_kv_damaged", "Cached units whose bytes were altered"
            ),
            "preempted": counter(
                "vllm:num_preemptions", "Sequences that had to make room"
            ),
        }
        self._gauges = {name: gauge(*series) for name, series in GAUGES.items()}
        self._usage = gauge("vllm:kv_cache_usage_perc", "Used part of the pool, 0 to 1")
        wrong = (
            "Relative error of attention outputs, of sampled prompts, by listed codec"
        )
        self._errors = gauge("disagg_attention_error", wrong, "codec")
        left = "Requests that left their codec to the service, by codec and why it is that one"
        self._chosen = counter("disagg_codec_choices", left, "codec", "reason")
        self._queued = gauge("disagg_queue_requests", "Requests that no worker has")
        chosen = "Times that a worker of a role was chosen, by why it was this one"
        self._routed = counter("disagg_routed", chosen, "reason")
        by_source = "Tokens of prompts, by where a worker has their KV from"
        self._sources = counter("vllm:prompt_tokens_by_source", by_source, "source")
        asked = "Tokens of prompts that were looked for in the prefix cache"
        self._queries = counter("vllm:prefix_cache_queries", asked)
        self._hits = counter("vllm:prefix_cache_hits", "Those of them that were there")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts")
        self._said = self._of(counter("vllm:generation_tokens", "Tokens generated"))
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Time to first token"
        )
        self._waited = histogram(
            "vllm:request_queue_time_seconds", "Time until a worker begins"
        )
        mean = "Mean time between tokens of a request"
        self._tpot = histogram("vllm:request_time_per_output_token_seconds", mean)
        self._itl = histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens"
        )
        sizes = partial(self._series, partial(Histogram, buckets=TOKENS))
        self._prompt_size = sizes("vllm:request_prompt_tokens", "Tokens of a prompt")
        self._answer_size = sizes(
            "vllm:request_generation_tokens", "Tokens of an answer"
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token"
        )
        self._success = counter(
            "vllm:request_success", "Finished requests", "finished_reason"
        )
        refused = "Requests that were refused, failed or were given up by their client"
        self._failures = counter("disagg_request_failures", refused, "reason")
        holds = "What a worker holds, by the name of the thing"
        self._workers = gauge("disagg_worker", holds, "worker", "what")

    # -- requests

    def failed(self, reason: str) -> None:
        """A request that has no answer, or half of one."""
        self._of(self._failures, reason=reason).inc()

    def began(self, prompt_tokens: int, waited_s: float) -> None:
        """An answer has its first token, and began to be computed after so long."""
        self._of(self._prompt_tokens).inc(prompt_tokens)
        self._of(self._waited).observe(waited_s)

    def said(self) -> None:
        """An answer has one more token."""
        self._said.inc()

    def finished(
        self,
        times: Sequence[float],
        last: TextDelta,
        prompt_tokens: int,
        own: bool = False,
    ) -> None:
        """An answer, and the figures of its hand-off if there are any.

        times: when it was asked for, then when each token came; seconds of any monotonic clock
        own:   the client chose the codec; then only its family is a label: labels are for ever
        """
        asked, first, ended = times[0], times[:2][-1], times[-1]
        self._of(self._ttft).observe(first - asked)
        self._of(self._e2e).observe(ended - asked)
        if len(times) > 2:
            self._of(self._tpot).observe((ended - first) / (len(times) - 2))
        between = self._of(self._itl)
        for before, after in pairwise(times[1:]):
            between.observe(after - before)
        self._of(self._prompt_size).observe(prompt_tokens)
        self._of(self._answer_size).observe(last.num_tokens)
        self._of(self._success, finished_reason=last.finish_reason or "").inc()
        if not (kv := last.kv).get("wire_bytes"):
            return  # served whole: nothing was handed off
        codec = family(kv["codec"]) if own else kv["codec"]
        for kind in KINDS:
            self._of(self._bytes, kind=kind, codec=codec).inc(
                kv.get(f"{kind}_bytes", 0)
            )
        for phase in PHASES:
            self._of(self._phases, phase=phase).observe(
                1e-3 * kv.get(f"{phase}_ms", 0.0)
            )
        self._of(self._exposed).observe(1e-3 * kv.get("exposed_ms", 0.0))

    # -- workers

    def scrape(self, workers: Sequence[Mapping[str, Any]], router: Router) -> bytes:
        """What Prometheus reads. `workers`: as in `Completions.status`."""
        choices = router.table.codec_policy
        self._of(self._queued).set(router.waiting)
        for (role, reason), count in router.table.routed.items():
            self._raise(
                self._routed, {"name": role, "role": role}, count, reason=reason
            )
        for codec, error in choices.errors.items():
            self._of(self._errors, codec=codec).set(error.value)
        for (codec, reason), count in choices.chosen.items():
            ours = {"name": ROUTER, "role": ROUTER}
            self._raise(self._chosen, ours, count, codec=codec, reason=reason)
        self._workers.clear()
        self._load(workers)
        for worker in workers:
            name, role = worker["name"], worker["role"]
            for what, value in worker.get("gauges", {}).items():
                self._of(self._workers, role, worker=name, what=what).set(value)
            self._take(worker)
        return generate_latest(self._registry)

    def _take(self, worker: Mapping[str, Any]) -> None:
        """A worker that does not answer counts nothing."""
        counts = worker.get("counts", {})
        for name, counter in self._rising.items():
            self._raise(counter, worker, counts.get(name, 0))
        known = {
            x: sum(counts.get(name, 0) for name in names)
            for x, names in SOURCES.items()
        }
        for source, count in known.items():
            self._raise(self._sources, worker, count, source=source)
        self._raise(self._queries, worker, sum(known.values()))
        self._raise(self._hits, worker, known["local_cache_hit"])
        for reason, count in worker.get("failures", {}).items():
            self._raise(self._broken, worker, count, reason=reason)

    def _load(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """The gauges of each role, of all its workers together; of those that answer."""
        for gauge in (*self._gauges.values(), self._usage):
            gauge.clear()
        for worker in workers:
            role, said = worker["role"], worker.get("gauges", {})
            alike = (x.get("gauges", {}) for x in workers if x["role"] == role)
            arena = sum(x.get("arena_bytes", 0) for x in alike)
            for name, gauge in self._gauges.items():
                self._of(gauge, role).inc(said.get(name, 0))
            self._of(self._usage, role).inc(said.get("used_bytes", 0) / max(1, arena))

    def _raise(
        self, series: Counter, worker: Mapping[str, Any], count: int, **labels: str
    ) -> None:
        """Add what a worker counted since it was last seen; a new process of it begins at 0."""
        key = (series, worker["name"], worker.get("pid", 0), *labels.values())
        before = self._seen.get(key, 0)
        self._seen[key] = max(
            before, count
        )  # of two answers the older one may come last
        self._of(series, worker["role"], **labels).inc(self._seen[key] - before)

    # -- series

    def _series(self, kind: Any, name: str, text: str, *labels: str) -> Any:
        return kind(
            name, text, ["model_name", "role", *labels], registry=self._registry
        )

    def _of(self, series: Series, role: str = ROUTER, **labels: str) -> Series:
        return series.labels(model_name=self._model, role=role, **labels)


def family(spec: str) -> str:
    """The name of a codec without its options; "plan" for layers with codecs of their own."""
    return "plan" if spec[:1].isdigit() else spec.partition(":")[0]
