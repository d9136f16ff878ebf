"""`disagg bench serve`: load on any OpenAI server, in the manner of `vllm bench serve`.

Same flags, same table, same keys of the JSON, and the same meaning of each: times are taken by the
client; TTFT ends with the first event that has a choice, TPOT is the rest by the tokens but one,
ITL is between events. Requests leave by a Poisson process of `request_rate`, or when a trace says.

What is asked is made as there, with the same seed the same lengths:

    random      so many tokens, consecutive ones of the vocabulary from a random one on
    sharegpt    JSON: [{"conversations": [{"value": prompt}, {"value": answer}]}]
    azure       CSV: TIMESTAMP,ContextTokens,GeneratedTokens; random prompts of these lengths
    mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids; what has the same
                hash is the same text, so that prefixes are shared as in the trace
"""

import asyncio
import csv
import json
import random
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from disagg.bench.result import Row
from disagg.errors import ConfigError, PeerLostError
from disagg.model.tokenizer import Tokenizer

SILENCE_S = 600.0  # a server that says nothing for so long has failed a request
NAMES = {
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
MOONCAKE_TOKENS = 512  # of a hash
MAX_REFITS = 10
LEAST_TOKENS, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048  # of what is taken from ShareGPT


@dataclass(frozen=True)
class LoadRequest:
    """One request. `at_s`: when the trace has it, seconds from its first one."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True)
class ServeOptions:
    """Whom to ask and how.

    max_concurrency: requests on the way at once; None: as many as there are
    request_rate:    a second; infinite: all at once
    burstiness:      of the gamma process between them; 1: Poisson
    self_timed:      when the trace says, instead
    goodput:         milliseconds that "ttft", "tpot" and "e2el" may take for a request to be good
    extra_body:      fields that every body has too
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
            if name not in NAMES or (name == "itl" and name in self.goodput):
                raise ConfigError(
                    f"metric {name!r}; known: {', '.join(NAMES)}; no goodput of itl"
                )


@dataclass
class RequestTimes:
    """What the client saw of one request; seconds."""

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
        """Of a token behind the first one; 0 where there is none."""
        return (
            (self.e2el_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0
        )

    @property
    def decoded_s(self) -> float:
        """Until its second token, the first that a decode worker says."""
        return self.ttft_s + self.gaps_s[0]

    def note(self) -> None:
        """Something of the answer came, now."""
        now = time.perf_counter() - self.start_s
        if self.ttft_s:
            self.gaps_s.append(now - self.e2el_s)
        else:
            self.ttft_s = now
        self.e2el_s = now


def find_model(base_url: str, name: str | None = None) -> tuple[str, str]:
    """A model as its server calls it, the first unless named, and as it was found: vLLM's `root`.

    PeerLostError where nobody answers.
    """
    try:
        found = (
            httpx.get(f"{base_url}/v1/models", timeout=30)
            .raise_for_status()
            .json()["data"]
        )
        named = found[0] if name is None else {"id": name}
        model = next((x for x in found if x["id"] == name), named)
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
    options: ServeOptions, visits: Sequence[LoadRequest], tokenizer: str
) -> Row:
    """The result with the keys of `vllm bench serve --save-result --save-detailed`."""
    about = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": None,
        "model_id": options.model,
        "tokenizer_id": tokenizer,
        "num_prompts": len(visits),
        "request_rate": "inf"
        if options.request_rate == float("inf")
        else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    return about | summarize(options, *asyncio.run(visit_all(options, visits)))


async def visit_all(
    options: ServeOptions, visits: Sequence[LoadRequest]
) -> tuple[list[RequestTimes], float]:
    """What was seen of each, and the seconds from the first request to the last answer."""
    gate = asyncio.Semaphore(options.max_concurrency or len(visits))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        verify=_trusted(), limits=limits, timeout=SILENCE_S
    ) as client:
        began = time.perf_counter()

        async def one(visit: LoadRequest, at_s: float) -> RequestTimes:
            await asyncio.sleep(began + at_s - time.perf_counter())
            arrived = time.perf_counter()
            async with gate:
                seen = await _visit(client, options, visit)
            seen.waited_s = seen.start_s - arrived
            return seen

        seen = await asyncio.gather(*map(one, visits, departures(options, visits)))
        return seen, time.perf_counter() - began


@cache
def _trusted() -> ssl.SSLContext:
    """Whom HTTPS trusts; made once: it takes 20 ms, which all streams of this loop would wait."""
    return httpx.create_ssl_context()


def departures(options: ServeOptions, visits: Sequence[LoadRequest]) -> list[float]:
    """When each request leaves, in seconds; the last one exactly where the rate says."""
    if options.self_timed:
        return [visit.at_s for visit in visits]
    if options.request_rate == float("inf"):
        return [0.0] * len(visits)
    rng, shape = np.random.default_rng(options.seed), options.burstiness
    times = np.cumsum(rng.gamma(shape, 1 / (options.request_rate * shape), len(visits)))
    found: list[float] = (
        times * (len(visits) / options.request_rate / times[-1])
    ).tolist()
    return found


def _body(options: ServeOptions, visit: LoadRequest) -> Row:
    chat = options.backend == "openai-chat"
    asked = [{"role": "user", "content": visit.prompt}] if chat else visit.prompt
    body: Row = {"model": options.model, "messages" if chat else "prompt": asked}
    body |= {"max_completion_tokens" if chat else "max_tokens": visit.max_tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"ignore_eos": True} if options.ignore_eos else {}
    body |= {} if options.temperature is None else {"temperature": options.temperature}
    return body | dict(options.extra_body)


async def _visit(
    client: httpx.AsyncClient, options: ServeOptions, visit: LoadRequest
) -> RequestTimes:
    url = options.base_url + (options.endpoint or BACKENDS[options.backend])
    seen = RequestTimes(visit.prompt_tokens, start_s=time.perf_counter())
    try:
        async with client.stream("POST", url, json=_body(options, visit)) as response:
            if response.status_code != 200:
                told = (await response.aread()).decode(errors="replace")
                seen.error = f"status {response.status_code}: {told[:200]}"
                return seen
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(seen, json.loads(line.removeprefix("data: ")))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        seen.error = f"{type(error).__name__} {error}"
    if not seen.ttft_s:
        seen.error = seen.error or "the answer has no token"
    return seen


def _take(seen: RequestTimes, event: Row) -> None:
    """Note what an event says, and when."""
    if "error" in event:
        raise ValueError(str(event["error"]))
    if choices := event.get("choices"):
        delta = choices[0].get("delta") or choices[0]
        text = delta.get("text") or delta.get("content") or ""
        if (
            text or "role" not in delta
        ):  # else it says who speaks, and comes with the first token
            seen.note()
        seen.text += text
    if usage := event.get("usage"):
        seen.tokens = usage["completion_tokens"]
        seen.prompt_tokens = usage.get("prompt_tokens", seen.prompt_tokens)


# -- what it comes to


def summarize(
    options: ServeOptions, seen: Sequence[RequestTimes], duration_s: float
) -> Row:
    """Figures of all requests; those that failed count only as such."""
    done = [x for x in seen if not x.error]
    for x in done:
        x.tokens = x.tokens or 1 + len(x.gaps_s)  # of a server that tells no usage
    given, made = sum(x.prompt_tokens for x in done), sum(x.tokens for x in done)
    peak_tokens, peak_requests = _peaks(done)
    result: Row = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(seen) - len(done),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(done) / duration_s,
        "request_goodput": _goodput(options, done) / duration_s
        if options.goodput
        else None,
        "output_throughput": made / duration_s,
        "total_token_throughput": (given + made) / duration_s,
        "input_lens": [x.prompt_tokens for x in seen],
        "output_lens": [0 if x.error else x.tokens for x in seen],
        "ttfts": [x.ttft_s for x in seen],
        "itls": [x.gaps_s for x in seen],
        "start_times": [x.start_s for x in seen],
        "queue_times": [x.waited_s for x in seen],
        "latencies": [x.e2el_s for x in seen],
        "generated_texts": [x.text for x in seen],
        "errors": [x.error for x in seen],
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    values = {
        "ttft": [x.ttft_s for x in done],
        "tpot": [x.tpot_s for x in done if x.tokens > 1],
        "itl": [gap for x in done for gap in x.gaps_s],
        "e2el": [x.e2el_s for x in done],
    }
    for name in options.metrics:
        result |= _spread(name, values[name], options.percentiles)
    return result


def _spread(name: str, seconds: Sequence[float], percentiles: Iterable[float]) -> Row:
    some = 1e3 * np.array(seconds or [0.0])
    found = {"mean": some.mean(), "median": np.median(some), "std": some.std()}
    found |= {f"p{p:g}": np.percentile(some, p) for p in percentiles}
    return {f"{kind}_{name}_ms": float(value) for kind, value in found.items()}


def _goodput(options: ServeOptions, done: Iterable[RequestTimes]) -> int:
    """Requests that kept every limit."""
    return sum(
        all(1e3 * getattr(x, f"{name}_s") <= ms for name, ms in options.goodput.items())
        for x in done
    )


def _peaks(done: Sequence[RequestTimes]) -> tuple[float, int]:
    """Most tokens in one second of the run, and most requests that one second has seen."""
    if not done:
        return 0.0, 0
    first = min(x.start_s for x in done)
    last = max(x.start_s + x.e2el_s for x in done)
    tokens, requests = (np.zeros(int(last - first) + 2) for _ in range(2))
    for x in done:
        begun = x.start_s - first
        for at in begun + x.ttft_s + np.cumsum([0.0, *x.gaps_s]):
            tokens[int(at)] += 1
        requests[int(begun) : int(begun + x.e2el_s) + 1] += 1
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
    for name, (short, long) in NAMES.items():
        found = {
            x: result[x] for x in result if x.endswith(f"_{name}_ms") and x[:3] != "std"
        }
        if found:
            told = [
                (f"{x.split('_')[0].capitalize()} {short} (ms):", y)
                for x, y in found.items()
            ]
            lines += [f"{long:-^{WIDTH}}", *_lines(told)]
    return "\n".join([*lines, "=" * WIDTH])


def _lines(rows: Iterable[tuple[str, Any]]) -> list[str]:
    form = {int: "{:<40} {:<10}", float: "{:<40} {:<10.2f}"}
    return [form[type(y)].format(x, y) for x, y in rows if y is not None]


# -- what is asked


@dataclass(frozen=True)
class WorkloadOptions:
    """Which requests, and how many; `path` is of the file, lengths and spread are of "random"."""

    dataset: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0


def make_visits(options: WorkloadOptions, tokenizer: Tokenizer) -> list[LoadRequest]:
    """The requests, in order; ConfigError for a file without any."""
    if options.dataset != "random" and options.path is None:
        raise ConfigError(f"data set {options.dataset} wants --dataset-path FILE")
    made = MAKERS[options.dataset](options, Prompts(tokenizer, options.seed))
    try:
        visits = list(islice(made, options.num_prompts))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        told = f"{options.path} is no file of {options.dataset}"
        raise ConfigError(f"{told}: {type(error).__name__} {error}") from error
    if not visits:
        raise ConfigError(f"{options.path} has no request that can be asked")
    return visits


class Prompts:
    """Texts of as many tokens as wanted, with one stream of random numbers."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        special = tokenizer.special_ids
        self.allowed = np.array([x for x in range(tokenizer.size) if x not in special])

    def walk(self, start: int, length: int) -> list[int]:
        """Consecutive tokens of those allowed."""
        found: list[int] = self.allowed[
            (start + np.arange(length)) % len(self.allowed)
        ].tolist()
        return found

    def draw(self, count: int) -> list[int]:
        """Random tokens."""
        found: list[int] = self.rng.integers(
            0, self.tokenizer.size, size=count
        ).tolist()
        return found

    def fit(self, ids: Sequence[int], length: int) -> tuple[str, int]:
        """A text whose tokens are these, cut or filled up to `length`; and how many it has: text
        that was made of tokens may have others, so that a few more or less may remain."""
        tokens = list(ids)
        for left in reversed(range(MAX_REFITS + 1)):
            text = self.tokenizer.decode(tokens, special=True)
            tokens = self.tokenizer.encode(text, special=False)
            if len(tokens) == length or not left:
                break
            tokens = (tokens + self.draw(max(0, length - len(tokens))))[:length]
        return text, len(tokens)


def _random(options: WorkloadOptions, prompts: Prompts) -> Iterator[LoadRequest]:
    size, ratio = (options.num_prompts,), options.range_ratio
    inputs, outputs = (
        prompts.rng.integers(
            max(1, int(length * (1 - ratio))),
            -int(-length * (1 + ratio)) + 1,
            size=size,
        )
        for length in (options.input_len, options.output_len)
    )
    starts = prompts.rng.integers(0, prompts.tokenizer.size, size=size)
    shared = prompts.draw(options.prefix_len)
    for number, (start, length) in enumerate(zip(starts, inputs, strict=True)):
        ids = shared + prompts.walk(int(start) + number, int(length))
        yield LoadRequest(*prompts.fit(ids, len(ids)), int(outputs[number]))


def _sharegpt(options: WorkloadOptions, prompts: Prompts) -> Iterator[LoadRequest]:
    found = json.loads(_text(options))
    talks = [x["conversations"] for x in found if len(x.get("conversations", ())) > 1]
    random.Random(options.seed).shuffle(talks)
    for prompt, answer in ((talk[0]["value"], talk[1]["value"]) for talk in talks):
        asked, said = (len(prompts.tokenizer.encode(text)) for text in (prompt, answer))
        if (
            min(asked, said) >= LEAST_TOKENS
            and asked <= MOST_PROMPT
            and asked + said <= MOST_TOTAL
        ):
            yield LoadRequest(prompt, asked, said)


def _azure(options: WorkloadOptions, prompts: Prompts) -> Iterator[LoadRequest]:
    rows = [*csv.DictReader(_text(options).splitlines())]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    for row, at in zip(rows, times, strict=True):
        length = int(row["ContextTokens"])
        start = int(prompts.rng.integers(0, prompts.tokenizer.size))
        text = prompts.fit(prompts.walk(start, length), length)
        yield LoadRequest(
            *text, int(row["GeneratedTokens"]), (at - times[0]).total_seconds()
        )


def _mooncake(options: WorkloadOptions, prompts: Prompts) -> Iterator[LoadRequest]:
    rows = [json.loads(line) for line in _text(options).splitlines()]
    for row in rows:
        ids: list[int] = []
        for number in row["hash_ids"]:
            rng = np.random.default_rng([options.seed, number])
            ids += prompts.allowed[
                rng.integers(0, len(prompts.allowed), MOONCAKE_TOKENS)
            ].tolist()
        length = row["input_length"]
        text = prompts.fit(ids[:length], length)
        yield LoadRequest(
            *text,
            row["output_length"],
            1e-3 * (row["timestamp"] - rows[0]["timestamp"]),
        )


def _text(options: WorkloadOptions) -> str:
    assert options.path is not None
    return options.path.read_text("utf-8")


MAKERS: dict[str, Callable[[WorkloadOptions, Prompts], Iterator[LoadRequest]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "azure": _azure,
    "mooncake": _mooncake,
}
