"""What is counted and timed: figures of requests and hand-offs, and their Prometheus names.

Times are seconds of whatever monotonic clock the caller reads; nothing here looks at a clock.
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class RequestTimes:
    """When things happened to one request, in seconds."""

    arrived: float
    first_token: float
    ended: float
    tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token - self.arrived

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for a single token."""
        return (self.ended - self.first_token) / max(1, self.tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.ended - self.arrived


@dataclass(frozen=True)
class HandoffStats:
    """What the KV of one prompt took and what handing it over cost: bytes and milliseconds.

    fp16_bytes, fp8_bytes: of the same tokens, uncompressed
    wire_bytes:     every message of the hand-off, both ways, control included
    payload_bytes:  of records, in those messages
    cached_bytes:   not sent, because the decode worker had them of another prompt
    resident_bytes: of the prompt's records at the decode worker
    encode_ms:      compressing
    queue_ms:       the longest that an item waited for its frame to leave
    wire_ms:        from the first frame to the acknowledgement
    verify_ms:      digests and copies at the receiver · admit_ms: from the commit to the engine
    exposed_ms:     from the last item offered to the acknowledgement: what computing did not hide
    attaches:       how often the sender attached; 1 if nothing broke
    """

    codec: str
    tokens: int
    fp16_bytes: int
    fp8_bytes: int
    wire_bytes: int = 0
    payload_bytes: int = 0
    cached_bytes: int = 0
    resident_bytes: int = 0
    encode_ms: float = 0.0
    queue_ms: float = 0.0
    wire_ms: float = 0.0
    verify_ms: float = 0.0
    admit_ms: float = 0.0
    exposed_ms: float = 0.0
    attaches: int = 1


class Metrics:
    """The Prometheus series of one process: `disagg_` names, and vLLM's for dashboards."""

    def __init__(self, model: str, role: str):
        self.registry = CollectorRegistry()
        self._model, self._role = model, role
        counter, histogram = self._counter, self._histogram
        self.transfer_bytes = counter("kv_transfer_bytes", "KV of hand-offs", "kind", "codec")
        self.transfer_seconds = histogram("kv_transfer_seconds", "Hand-offs, by phase", "phase")
        self.exposed_seconds = histogram("kv_exposed_seconds", "Hand-off time nothing hid")
        self.transfer_failures = counter("kv_transfer_failures", "Failed hand-offs", "reason")
        self.expired = counter("kv_expired", "Reservations whose lease ran out")
        self.damaged = counter("kv_damaged", "Cached units whose bytes were altered")
        self.engine = {
            name: Gauge(name, text, ["model_name", "role"], registry=self.registry)
            for name, text in {
                "vllm:num_requests_running": "Sequences that compute",
                "vllm:num_requests_waiting": "Sequences that wait",
                "vllm:kv_cache_usage_perc": "Used part of the pool, 0 to 1",
                "disagg_held_sequences": "Prefilled sequences that wait for their acknowledgement",
            }.items()
        }
        self.preemptions = counter("vllm:num_preemptions", "Sequences that had to make room")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens prefilled")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token")
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a request"
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token")
        self.success = counter("vllm:request_success", "Finished requests", "finished_reason")

    def load(self, role: str, running: float, waiting: float, held: float, usage: float) -> None:
        """Set the gauges of a role: sequences by what they do, and the used part of its pools."""
        values = (running, waiting, usage, held)
        for gauge, value in zip(self.engine.values(), values, strict=True):
            gauge.labels(self._model, role).set(value)

    def add(self, counter: Counter, amount: float = 1, role: str = "", **labels: str) -> None:
        """Count up one of the counters of this object; `role` of another process, if it was it."""
        counter.labels(model_name=self._model, role=role or self._role, **labels).inc(amount)

    def observe(self, histogram: Histogram, seconds: float, **labels: str) -> None:
        """Note a duration in one of the histograms of this object."""
        histogram.labels(model_name=self._model, role=self._role, **labels).observe(seconds)

    def finished(self, times: RequestTimes, reason: str) -> None:
        """Note a finished request."""
        self.observe(self.ttft, times.ttft_s)
        self.observe(self.e2e, times.e2e_s)
        if times.tokens > 1:
            self.observe(self.tpot, times.tpot_s)
        self.add(self.success, finished_reason=reason)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = ["model_name", "role", *labels]
        return Counter(_full(name), text, names, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        names = ["model_name", "role", *labels]
        return Histogram(_full(name), text, names, buckets=SECONDS, registry=self.registry)


def _full(name: str) -> str:
    return name if ":" in name else f"disagg_{name}"
