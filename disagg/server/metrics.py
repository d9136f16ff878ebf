"""Counts of this process and reports of workers as Prometheus series. Knows no HTTP.

Series of this service are called `disagg_`; vLLM's names are for dashboards that know them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

# upper bounds of buckets
SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

PHASES = ("encode", "queue", "wire", "verify", "admit")
KINDS = ("fp16", "wire", "cached", "resident", "state")
ROUTER = "router"
# a label lasts forever: long specs of clients, and more than these, are counted by family
MAX_CLIENT_CODECS = 32
MAX_CODEC_CHARS = 200
# a worker's gauge: the name of its series, and its help
GAUGES = {
    "engine_running": ("vllm:num_requests_running", "Sequences in the batch"),
    "engine_waiting": (
        "vllm:num_requests_waiting",
        "Sequences that wait for the batch",
    ),
    "engine_held": (
        "disagg_held_sequences",
        "Prefilled sequences whose hand-off is not acknowledged yet",
    ),
}
# where the KV of prompts comes from, in vLLM's words: the worker's counts of it
SOURCES = {
    "local_compute": ("computed_tokens",),
    "local_cache_hit": ("cached_tokens", "shared_tokens"),
    "external_kv_transfer": ("received_tokens",),
}

Series = TypeVar("Series", Counter, Gauge, Histogram)


@dataclass
class AnswerTimes:
    """When an answer was requested, and when its tokens came; seconds of a monotonic clock."""

    arrived: float
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.first_token = self.last_token = self.arrived

    def add_token(self, now: float) -> float | None:
        """A token has come. The seconds since the one before it; None: it is the first one."""
        self.num_tokens += 1
        gap_s = now - self.last_token
        self.last_token = now
        if self.num_tokens == 1:
            self.first_token = now
            return None
        return gap_s


class ServerMetrics:
    """The metrics of one service. Workers report totals; what they add since is counted here."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._model = model
        self._client_codecs: set[str] = set()  # specs that are labels
        self._totals: dict[tuple[Any, ...], int] = {}  # of workers, when last read
        self._create_request_series()
        self._create_handoff_series()
        self._create_worker_series()

    def _create_request_series(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts")
        self._generated_tokens = self._of(
            self._counter("vllm:generation_tokens", "Tokens generated")
        )
        self._ttft = self._seconds(
            "vllm:time_to_first_token_seconds", "Time to first token"
        )
        self._queue_time = self._seconds(
            "vllm:request_queue_time_seconds", "Time until a worker begins"
        )
        self._tpot = self._seconds(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between tokens of a request",
        )
        self._gaps = self._of(
            self._seconds("vllm:inter_token_latency_seconds", "Time between two tokens")
        )
        self._e2e = self._seconds(
            "vllm:e2e_request_latency_seconds", "Arrival to last token"
        )
        self._prompt_size = self._sizes(
            "vllm:request_prompt_tokens", "Tokens of a prompt"
        )
        self._answer_size = self._sizes(
            "vllm:request_generation_tokens", "Tokens of an answer"
        )
        self._success = self._counter(
            "vllm:request_success", "Finished requests", "finished_reason"
        )
        self._failures = self._counter(
            "disagg_request_failures",
            "Requests that were refused, failed or were cancelled by their client",
            "reason",
        )

    def _create_handoff_series(self) -> None:
        self._kv_bytes = self._counter(
            "disagg_kv_transfer_bytes", "KV of hand-offs", "kind", "codec"
        )
        self._phases = self._seconds(
            "disagg_kv_transfer_seconds", "Hand-offs, by phase", "phase"
        )
        self._exposed = self._seconds(
            "disagg_kv_exposed_seconds", "Hand-off time that prefill did not hide"
        )
        self._handoff_failures = self._counter(
            "disagg_kv_transfer_failures", "Failed hand-offs", "reason"
        )
        self._attention_errors = self._gauge(
            "disagg_attention_error",
            "Relative error of attention outputs, of sampled prompts, by listed codec",
            "codec",
        )
        self._worst_errors = self._gauge(
            "disagg_attention_error_worst_layer",
            "The same in the worst layer",
            "codec",
        )
        self._codec_choices = self._counter(
            "disagg_codec_choices",
            "Requests with codec auto, by the chosen codec and the reason",
            "codec",
            "reason",
        )

    def _create_worker_series(self) -> None:
        self._queued = self._gauge(
            "disagg_queue_requests", "Requests that wait for a worker"
        )
        self._routed = self._counter(
            "disagg_routed",
            "Times that a worker of a role was chosen, by the reason",
            "reason",
        )
        # series of a worker's count of the same name
        self._worker_counts = {
            "expired": self._counter(
                "disagg_kv_expired", "Reservations whose lease ran out"
            ),
            "damaged": self._counter(
                "disagg_kv_damaged", "Cached units whose bytes were altered"
            ),
            "preempted": self._counter(
                "vllm:num_preemptions", "Sequences that were preempted"
            ),
            "drafts": self._counter(
                "vllm:spec_decode_num_drafts", "Drafts of look-up speculation"
            ),
            "draft_tokens": self._counter(
                "vllm:spec_decode_num_draft_tokens", "Tokens of drafts"
            ),
            "accepted_tokens": self._counter(
                "vllm:spec_decode_num_accepted_tokens",
                "Tokens of drafts that were right",
            ),
        }
        self._worker_gauges = {
            gauge: self._gauge(name, text) for gauge, (name, text) in GAUGES.items()
        }
        self._usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Used part of the pool, 0 to 1"
        )
        self._sources = self._counter(
            "vllm:prompt_tokens_by_source",
            "Tokens of prompts, by where a worker has their KV from",
            "source",
        )
        self._cache_queries = self._counter(
            "vllm:prefix_cache_queries",
            "Tokens of prompts looked up in the prefix cache",
        )
        self._cache_hits = self._counter(
            "vllm:prefix_cache_hits", "Tokens of prompts found in the prefix cache"
        )
        self._worker = self._gauge(
            "disagg_worker", "A worker's own gauges, by name", "worker", "what"
        )

    # -- requests

    def failed(self, reason: str) -> None:
        """A request failed: it has no answer, or only a part of one."""
        self._of(self._failures, reason=reason).inc()

    def began(self, prompt_tokens: int, queue_time_s: float) -> None:
        """An answer has its first token; it waited `queue_time_s` for a worker."""
        self._of(self._prompt_tokens).inc(prompt_tokens)
        self._of(self._queue_time).observe(queue_time_s)

    def token(self) -> None:
        """An answer has one more token."""
        self._generated_tokens.inc()

    def gap(self, seconds: float) -> None:
        """Between two tokens of an answer."""
        self._gaps.observe(seconds)

    def finished(
        self,
        times: AnswerTimes,
        last: TextDelta,
        prompt_tokens: int,
        client_codec: bool = False,
    ) -> None:
        """An answer is complete; `last` has its size and the figures of its hand-off, if any.

        client_codec: the client chose the codec, and could invent any number of specs
        """
        self._of(self._ttft).observe(times.first_token - times.arrived)
        self._of(self._e2e).observe(times.last_token - times.arrived)
        if times.num_tokens > 1:
            decoding_s = times.last_token - times.first_token
            self._of(self._tpot).observe(decoding_s / (times.num_tokens - 1))
        self._of(self._prompt_size).observe(prompt_tokens)
        self._of(self._answer_size).observe(last.num_tokens)
        self._of(self._success, finished_reason=last.finish_reason or "").inc()
        if last.kv.get("wire_bytes"):  # else one worker computed all of it
            self._handed_off(last.kv, client_codec)

    def _handed_off(self, kv: Mapping[str, Any], client_codec: bool) -> None:
        codec = self._client_label(kv["codec"]) if client_codec else kv["codec"]
        for kind in KINDS:
            nbytes = kv.get(f"{kind}_bytes", 0)
            self._of(self._kv_bytes, kind=kind, codec=codec).inc(nbytes)
        for phase in PHASES:
            phase_s = 1e-3 * kv.get(f"{phase}_ms", 0.0)
            self._of(self._phases, phase=phase).observe(phase_s)
        self._of(self._exposed).observe(1e-3 * kv.get("exposed_ms", 0.0))

    def _client_label(self, spec: str) -> str:
        if spec in self._client_codecs:
            return spec
        is_full = len(self._client_codecs) >= MAX_CLIENT_CODECS
        if is_full or len(spec) > MAX_CODEC_CHARS:
            return family(spec)
        self._client_codecs.add(spec)
        return spec

    # -- workers

    def scrape(self, workers: Sequence[Mapping[str, Any]], router: Router) -> bytes:
        """What Prometheus reads. `workers`: as in `Completions.status`."""
        self.update(workers, router)
        return generate_latest(self.registry)

    def update(self, workers: Sequence[Mapping[str, Any]], router: Router) -> None:
        """Take over what the router and its workers report."""
        self._update_router(router)
        self._update_loads(workers)
        self._worker.clear()
        for worker in workers:
            self._update_counts(worker)
            for what, value in worker.get("gauges", {}).items():
                series = self._of(
                    self._worker, worker["role"], worker=worker["name"], what=what
                )
                series.set(value)

    def _update_router(self, router: Router) -> None:
        self._of(self._queued).set(router.waiting)
        for (role, reason), count in router.table.routed.items():
            source = {"name": role, "role": role}
            self._raise(self._routed, source, count, reason=reason)
        choices = router.table.codec_policy
        for codec, error in choices.errors.items():
            self._of(self._attention_errors, codec=codec).set(error.mean)
            self._of(self._worst_errors, codec=codec).set(error.worst)
        source = {"name": ROUTER, "role": ROUTER}
        for (codec, reason), count in choices.chosen.items():
            self._raise(self._codec_choices, source, count, codec=codec, reason=reason)

    def _update_counts(self, worker: Mapping[str, Any]) -> None:
        """Add a worker's counts; one that does not answer adds nothing."""
        counts = worker.get("counts", {})
        for name, series in self._worker_counts.items():
            self._raise(series, worker, counts.get(name, 0))
        prompt_tokens = 0
        for source, names in SOURCES.items():
            tokens = sum(counts.get(name, 0) for name in names)
            prompt_tokens += tokens
            self._raise(self._sources, worker, tokens, source=source)
            if source == "local_cache_hit":
                self._raise(self._cache_hits, worker, tokens)
        self._raise(self._cache_queries, worker, prompt_tokens)
        for reason, count in worker.get("failures", {}).items():
            self._raise(self._handoff_failures, worker, count, reason=reason)

    def _update_loads(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """The gauges of each role, summed over its workers that answer."""
        for gauge in (*self._worker_gauges.values(), self._usage):
            gauge.clear()
        for worker in workers:
            role = worker["role"]
            gauges = worker.get("gauges", {})
            for name, series in self._worker_gauges.items():
                self._of(series, role).inc(gauges.get(name, 0))
            arena_bytes = sum(
                other.get("gauges", {}).get("arena_bytes", 0)
                for other in workers
                if other["role"] == role
            )
            used_share = gauges.get("used_bytes", 0) / max(1, arena_bytes)
            self._of(self._usage, role).inc(used_share)

    def _raise(
        self, series: Counter, worker: Mapping[str, Any], total: int, **labels: str
    ) -> None:
        """Add the growth of a worker's total since the last read; a new process begins at 0."""
        key = (series, worker["name"], worker.get("pid", 0), *labels.values())
        before = self._totals.get(key, 0)
        after = max(before, total)  # an older answer may arrive after a newer one
        self._totals[key] = after
        self._of(series, worker["role"], **labels).inc(after - before)

    # -- series

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, self._labels(labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, self._labels(labels), registry=self.registry)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(
            name,
            text,
            self._labels(labels),
            buckets=SECONDS,
            registry=self.registry,
        )

    def _sizes(self, name: str, text: str) -> Histogram:
        return Histogram(
            name, text, self._labels(()), buckets=TOKENS, registry=self.registry
        )

    def _labels(self, labels: Sequence[str]) -> list[str]:
        return ["model_name", "role", *labels]

    def _of(self, series: Series, role: str = ROUTER, **labels: str) -> Series:
        return series.labels(model_name=self._model, role=role, **labels)


def family(spec: str) -> str:
    """The name of a codec without its options; "plan" for layers with codecs of their own."""
    return "plan" if spec[:1].isdigit() else spec.partition(":")[0]
