"""`disagg bench serve`: load on any OpenAI server, compatible with `vllm bench serve`.

Flags, table and JSON keys are the same, and mean the same. Times are measured by the client: TTFT
ends with the first event that has a choice, TPOT is the remaining time divided by the tokens minus
one, ITL is between events. Requests arrive by a Poisson process of `request_rate`, or at the times
of a trace.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import httpx
import numpy as np

from disagg.bench.result import Row
from disagg.bench.workload import LoadRequest
from disagg.errors import ConfigError, PeerLostError

SILENCE_S = 600.0  # a server that sends nothing for so long has failed a request
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
DETAILS = [
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
]
WIDTH = 50
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class ServeOptions:
    """The server, and how requests are sent.

    max_concurrency: requests in flight at once; None: no limit
    request_rate:    requests per second; infinite: all at once
    burstiness:      of the gamma distributed gaps; 1: Poisson
    self_timed:      send at the times of the trace instead
    goodput:         milliseconds that "ttft", "tpot" and "e2el" may take for a request to be good
    extra_body:      additional fields of every body
    """

    base_url: str
    model: str
    backend: str = "openai"
    endpoint: str | None = None
    max_concurrency: int | None = None
    request_rate: float = float("inf")
    burstiness: float = 1.0
    self_timed: bool = False
    ignore_eos: bool = False
    temperature: float | None = None
    seed: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percentiles: Sequence[float] = (99.0,)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.metrics, *self.goodput):
            if name not in METRICS or (name == "itl" and name in self.goodput):
                raise ConfigError(
                    f"metric {name!r}; known: {', '.join(METRICS)}; no goodput of itl"
                )


@dataclass
class RequestTimes:
    """What the client measured of one request; seconds.

    start_s:  on the client's clock; waited_s: before that, for `max_concurrency`
    gaps_s:   between events
    """

    prompt_tokens: int
    start_s: float = 0.0
    waited_s: float = 0.0
    ttft_s: float = 0.0
    e2el_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first one; 0 without any."""
        if self.tokens <= 1:
            return 0.0
        return (self.e2el_s - self.ttft_s) / (self.tokens - 1)

    @property
    def decoded_s(self) -> float:
        """Time to the second token, the first one of a decode worker."""
        return self.ttft_s + self.gaps_s[0]

    def note(self) -> None:
        """A piece of the answer arrived, now."""
        now = time.perf_counter() - self.start_s
        if self.ttft_s:
            self.gaps_s.append(now - self.e2el_s)
        else:
            self.ttft_s = now
        self.e2el_s = now


def find_model(base_url: str, name: str | None = None) -> tuple[str, str]:
    """A model's name at the server, by default the first, and its source (vLLM's `root`).

    PeerLostError if no server answers.
    """
    try:
        response = httpx.get(f"{base_url}/v1/models", timeout=30).raise_for_status()
        models = response.json()["data"]
        if name is None:
            model = models[0]
        else:
            model = next((x for x in models if x["id"] == name), {"id": name})
        return str(model["id"]), str(model.get("root") or model["id"])
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        raise PeerLostError(f"no model is served at {base_url}: {error}") from error


def measure_serving(
    options: ServeOptions, requests: Sequence[LoadRequest], tokenizer: str
) -> Row:
    """The result with the keys of `vllm bench serve --save-result --save-detailed`."""
    is_unlimited = options.request_rate == float("inf")
    result: Row = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": None,
        "model_id": options.model,
        "tokenizer_id": tokenizer,
        "num_prompts": len(requests),
        "request_rate": "inf" if is_unlimited else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    times, duration_s = asyncio.run(visit_all(options, requests))
    result.update(summarize(options, times, duration_s))
    return result


async def visit_all(
    options: ServeOptions, requests: Sequence[LoadRequest]
) -> tuple[list[RequestTimes], float]:
    """The times of each, and the seconds from the first request to the last answer."""
    gate = asyncio.Semaphore(options.max_concurrency or len(requests))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        verify=_ssl_context(), limits=limits, timeout=SILENCE_S
    ) as client:
        began = time.perf_counter()

        async def visit(request: LoadRequest, at_s: float) -> RequestTimes:
            await asyncio.sleep(began + at_s - time.perf_counter())
            arrived = time.perf_counter()
            async with gate:
                times = await _visit(client, options, request)
            times.waited_s = times.start_s - arrived
            return times

        visits = map(visit, requests, departures(options, requests))
        times = await asyncio.gather(*visits)
        return times, time.perf_counter() - began


@cache
def _ssl_context() -> ssl.SSLContext:
    """Cached: creating it takes 20 ms, which would stall all streams of this loop."""
    return httpx.create_ssl_context()


def departures(options: ServeOptions, requests: Sequence[LoadRequest]) -> list[float]:
    """When each request is sent, in seconds; the last one exactly at the configured rate."""
    if options.self_timed:
        return [request.at_s for request in requests]
    if options.request_rate == float("inf"):
        return [0.0] * len(requests)
    rng = np.random.default_rng(options.seed)
    shape = options.burstiness
    gaps_s = rng.gamma(shape, 1 / (options.request_rate * shape), len(requests))
    times_s = np.cumsum(gaps_s)
    scale = len(requests) / options.request_rate / times_s[-1]
    departures_s: list[float] = (times_s * scale).tolist()
    return departures_s


def _body(options: ServeOptions, request: LoadRequest) -> Row:
    body: Row = {"model": options.model}
    if options.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": request.prompt}]
        body["max_completion_tokens"] = request.max_tokens
    else:
        body["prompt"] = request.prompt
        body["max_tokens"] = request.max_tokens
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.temperature is not None:
        body["temperature"] = options.temperature
    body.update(options.extra_body)
    return body


async def _visit(
    client: httpx.AsyncClient, options: ServeOptions, request: LoadRequest
) -> RequestTimes:
    url = options.base_url + (options.endpoint or BACKENDS[options.backend])
    body = _body(options, request)
    times = RequestTimes(request.prompt_tokens, start_s=time.perf_counter())
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                times.error = f"status {response.status_code}: {text[:200]}"
                return times
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _on_event(times, json.loads(line.removeprefix("data: ")))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        times.error = f"{type(error).__name__} {error}"
    if not times.ttft_s:
        times.error = times.error or "the answer has no token"
    return times


def _on_event(times: RequestTimes, event: Row) -> None:
    """Note the text and the usage of an event."""
    if "error" in event:
        raise ValueError(str(event["error"]))
    if choices := event.get("choices"):
        delta = choices[0].get("delta") or choices[0]
        text = delta.get("text") or delta.get("content") or ""
        # an event with only a role comes together with the first token
        if text or "role" not in delta:
            times.note()
        times.text += text
    if usage := event.get("usage"):
        times.tokens = usage["completion_tokens"]
        times.prompt_tokens = usage.get("prompt_tokens", times.prompt_tokens)


# -- figures of all requests


def summarize(
    options: ServeOptions, times: Sequence[RequestTimes], duration_s: float
) -> Row:
    """Figures of all requests; failed ones are only counted."""
    completed = [x for x in times if not x.error]
    for x in completed:
        x.tokens = x.tokens or 1 + len(x.gaps_s)  # of a server that sends no usage
    num_failed = len(times) - len(completed)
    result = _totals(options, completed, num_failed, duration_s)
    result.update(_details(times))
    peak_tokens, peak_requests = _peaks(completed)
    result["max_output_tokens_per_s"] = peak_tokens
    result["max_concurrent_requests"] = peak_requests
    for name in options.metrics:
        seconds = _values(name, completed)
        result.update(_distribution(name, seconds, options.percentiles))
    return result


def _totals(
    options: ServeOptions,
    completed: Sequence[RequestTimes],
    num_failed: int,
    duration_s: float,
) -> Row:
    input_tokens = sum(x.prompt_tokens for x in completed)
    output_tokens = sum(x.tokens for x in completed)
    goodput = None
    if options.goodput:
        goodput = _num_good(options, completed) / duration_s
    return {
        "duration": duration_s,
        "completed": len(completed),
        "failed": num_failed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(completed) / duration_s,
        "request_goodput": goodput,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
    }


def _details(times: Sequence[RequestTimes]) -> Row:
    """Lists with a value for every request."""
    return {
        "input_lens": [x.prompt_tokens for x in times],
        "output_lens": [0 if x.error else x.tokens for x in times],
        "ttfts": [x.ttft_s for x in times],
        "itls": [x.gaps_s for x in times],
        "start_times": [x.start_s for x in times],
        "queue_times": [x.waited_s for x in times],
        "latencies": [x.e2el_s for x in times],
        "generated_texts": [x.text for x in times],
        "errors": [x.error for x in times],
    }


def _values(metric: str, completed: Sequence[RequestTimes]) -> list[float]:
    """The seconds of a metric, of every request or of every gap."""
    match metric:
        case "ttft":
            return [x.ttft_s for x in completed]
        case "tpot":
            return [x.tpot_s for x in completed if x.tokens > 1]
        case "itl":
            return [gap for x in completed for gap in x.gaps_s]
        case _:
            return [x.e2el_s for x in completed]


def _distribution(
    name: str, seconds: Sequence[float], percentiles: Iterable[float]
) -> Row:
    """In milliseconds."""
    values = 1e3 * np.array(seconds or [0.0])
    row = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percentile in percentiles:
        row[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return row


def _num_good(options: ServeOptions, completed: Iterable[RequestTimes]) -> int:
    """Requests that kept every limit."""

    def is_good(times: RequestTimes) -> bool:
        return all(
            1e3 * getattr(times, f"{name}_s") <= limit_ms
            for name, limit_ms in options.goodput.items()
        )

    return sum(is_good(times) for times in completed)


def _peaks(completed: Sequence[RequestTimes]) -> tuple[float, int]:
    """Most tokens in one second of the run, and most requests in flight in one second."""
    if not completed:
        return 0.0, 0
    first = min(x.start_s for x in completed)
    last = max(x.start_s + x.e2el_s for x in completed)
    num_seconds = int(last - first) + 2
    tokens = np.zeros(num_seconds)
    requests = np.zeros(num_seconds)
    for x in completed:
        begin = x.start_s - first
        for at in begin + x.ttft_s + np.cumsum([0.0, *x.gaps_s]):
            tokens[int(at)] += 1
        requests[int(begin) : int(begin + x.e2el_s) + 1] += 1
    return float(tokens.max()), int(requests.max())


def draw_serving(result: Mapping[str, Any]) -> str:
    """The table of `vllm bench serve`."""
    rate = result["request_rate"]
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Maximum request concurrency:", result["max_concurrency"]),
        ("Request rate configured (RPS):", None if rate == "inf" else float(rate)),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_lines(rows)]
    for name, (short, long) in METRICS.items():
        figures = []
        for key, value in result.items():
            kind = key.split("_")[0]
            if key.endswith(f"_{name}_ms") and kind != "std":
                figures.append((f"{kind.capitalize()} {short} (ms):", value))
        if figures:
            lines += [f"{long:-^{WIDTH}}", *_lines(figures)]
    return "\n".join([*lines, "=" * WIDTH])


def _lines(rows: Iterable[tuple[str, Any]]) -> list[str]:
    lines = []
    for name, value in rows:
        if isinstance(value, float):
            lines.append(f"{name:<40} {value:<10.2f}")
        elif value is not None:
            lines.append(f"{name:<40} {value:<10}")
    return lines
