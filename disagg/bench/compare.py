"""`disagg bench compare` and `auto`: serving by codec and by link, and codecs that it chooses.

Two workers with a thread each, and a link between them whose rate is a multiple of the KV in fp16
that prefill makes a second. That rate is measured first. It is what matters: an 8B meets the same
ratios on a GPU.

Compare: co-located, both workers do everything; disaggregated, one computes prompts and the other
decodes. A prompt arrives whenever one could have been computed. With `cached`, prefill has its
exact KV already, so that the link is all there is to wait for. What was sent before is sent again.

Auto: prompts one after another over a link that drops and returns, first under every codec, then
under the one that the service chooses for each. The first token shall be decoded within so many
times what a prompt takes to compute, and attention outputs be off by no more than the budget.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pydoc_data.topics import topics
from statistics import mean, median

from disagg.bench.child import Child
from disagg.bench.handoff import Answer, routed, started_workers, visit
from disagg.bench.result import Row, result_of, table, tell
from disagg.bench.serving import ServeOptions, summarize
from disagg.config import (
    AUTO,
    DEFAULT_CODEC,
    Config,
    EngineConfig,
    ModelConfig,
    RouterConfig,
    TransferConfig,
)
from disagg.errors import ConfigError, PeerLostError
from disagg.model.tokenizer import Tokenizer
from disagg.transfer.messages import Role, WorkerInfo

RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", "kivi:bits=4,residual=64", DEFAULT_CODEC)
RATES = (1 / 8, 1 / 2, 1.0, 8.0)  # of the link, times the KV that prefill makes
PHASES = (4.0, 1 / 8, 4.0)  # of it too, one after another
MOST_CHARS = 8  # of a token, on average
TOGETHER, APART = "co-located", "disaggregated"
CLIENT = ServeOptions("", "", metrics=("ttft", "tpot", "itl", "e2el"))
SHOWN = (
    "serving codec link_times first_decode_s request_s longest_pause_s wire_bytes ratio"
)
NOTES = (
    "seconds, means of the prompts: to the second token, which decode says, and to the last; "
    "link_times: of the KV that prefill makes a second; ratio: of request_s to co-located"
)
AUTO_SHOWN = "codec both_pct deadline_pct budget_pct mean_error chosen"
AUTO_NOTES = (
    "percent of requests that met the deadline, the budget, both; a request has the error of the "
    "last sampled prompt under its codec; phases: the codecs of each"
)


@dataclass(frozen=True)
class CompareOptions:
    """prompts: of each cell, of so many tokens, with so many tokens of answer · cached: prefill
    knows them"""

    model: str | None = None
    codecs: Sequence[str] = CODECS
    rates: Sequence[float] = RATES
    prompts: int = 3
    tokens: int = 512
    answer: int = field(kw_only=True)
    cached: bool = False


@dataclass(frozen=True)
class Speed:
    """Of prefill, alone: seconds of one prompt, and bytes of KV that it makes a second in fp16."""

    prefill_s: float
    kv_bytes_per_s: float


def measure_compare(options: CompareOptions) -> Row:
    """A row for co-located serving, and for every link and codec."""
    texts_of(options.model, options.tokens, options.prompts)  # its errors now
    config = config_of(options.model, prefix_cache=options.cached)
    with started_workers(config, Role.BOTH, Role.BOTH) as (workers, pair):
        speed, rows = asyncio.run(_measure(options, workers, pair))
    for row in rows:
        row["ratio"] = row["request_s"] / rows[0]["request_s"]
    about = asdict(speed) | {
        "model": options.model or "packaged",
        "cached": options.cached,
    }
    return result_of(rows, NOTES, **about, tokens=options.tokens, answer=options.answer)


async def _measure(
    options: CompareOptions, workers: Sequence[Child], pair: Sequence[WorkerInfo]
) -> tuple[Speed, list[Row]]:
    speed = await measure_speed(pair, options.model, options.tokens)
    row = await _cell(options, pair, speed, DEFAULT_CODEC)
    rows: list[Row] = [{"serving": TOGETHER, "codec": DEFAULT_CODEC} | row]
    roles = zip(workers, (Role.PREFILL, Role.DECODE), strict=True)
    pair = [end.ask("assume", role) for end, role in roles]
    cases = [(rate, codec) for rate in options.rates for codec in options.codecs]
    for rate, codec in tell(cases, "{0[0]:g} times, {0[1]}".format):
        workers[0].ask("pace", rate * speed.kv_bytes_per_s)
        row = await _cell(options, pair, speed, codec)
        rows.append({"serving": APART, "codec": codec, "link_times": rate} | row)
    return speed, rows


def config_of(
    model: str | None, codecs: Sequence[str] = (), prefix_cache: bool = False
) -> Config:
    """Of workers whose link can be paced, and that send every page of every prompt.

    codecs: that they choose from
    """
    transfer = TransferConfig(link_mbps=1e5, dedup=False, min_disagg_tokens=0)
    engine = EngineConfig(prefix_cache=prefix_cache)
    codec = AUTO if codecs else DEFAULT_CODEC
    return Config(codec, [*codecs], ModelConfig(model), engine, transfer)


def texts_of(model: str | None, tokens: int, count: int) -> list[tuple[int, ...]]:
    """Prompts of so many tokens, one after another in Python's documentation."""
    text = "\n".join(topics.values())[: MOST_CHARS * tokens * count]
    ids = Tokenizer.load(model).encode(text)
    if len(ids) < tokens * count:
        raise ConfigError(
            f"{count} prompts of {tokens} tokens; the text has {len(ids)} tokens"
        )
    return [tuple(ids[i * tokens : (i + 1) * tokens]) for i in range(count)]


async def measure_speed(
    pair: Sequence[WorkerInfo], model: str | None, tokens: int
) -> Speed:
    """Of the last three prompts of five; the others warm everything."""
    async with routed(pair) as router:
        prompts = texts_of(model, tokens + 1, 5)
        seen = [await visit(router, x[1:], DEFAULT_CODEC, 1) for x in prompts]
    prefill_s = median(x.ttft_s for x, _ in seen[2:])
    speed = Speed(prefill_s, figures_of(seen)[0]["fp16_bytes"] / prefill_s)
    told = f"prefill makes {1e-6 * speed.kv_bytes_per_s:.3g} MB of KV a second, in fp16"
    print(told, file=sys.stderr, flush=True)
    return speed


def figures_of(found: Sequence[Answer]) -> list[Row]:
    """Of hand-offs, as far as they came in time; PeerLostError if none did."""
    if not (told := [kv for _, kv in found if kv]):
        raise PeerLostError(
            "a prefill worker did not tell in time what its hand-offs took"
        )
    return told


async def _cell(
    options: CompareOptions, pair: Sequence[WorkerInfo], speed: Speed, codec: str
) -> Row:
    prompts = texts_of(options.model, options.tokens, options.prompts)
    async with routed(pair) as router:
        if options.cached:
            for prompt in prompts:
                await visit(router, prompt, codec, 1)
        began = time.perf_counter()
        timed = ((x, i * speed.prefill_s) for i, x in enumerate(prompts))
        calls = [visit(router, x, codec, options.answer, at_s) for x, at_s in timed]
        found = await asyncio.gather(*calls)
    seen = [x for x, _ in found]
    return {
        "first_decode_s": mean(x.decoded_s for x in seen),
        "request_s": mean(x.e2el_s for x in seen),
        "longest_pause_s": max(gap for x in seen for gap in x.gaps_s[1:]),
        "wire_bytes": int(mean(kv["wire_bytes"] for kv in figures_of(found))),
    } | {
        key: value
        for key, value in summarize(CLIENT, seen, time.perf_counter() - began).items()
        if key.endswith("_ms") or key == "output_throughput"
    }


def verdict(result: Row) -> str:
    """When disaggregation loses, in one line."""
    together, *apart = result["rows"]
    lost: dict[str, list[str]] = {}
    for row in apart:
        if row["ratio"] > 1:
            lost.setdefault(row["codec"], []).append(f"{row['link_times']:g}")
    where = "; ".join(
        f"with {codec} at {', '.join(rates)} times" for codec, rates in lost.items()
    )
    of = f"a request takes longer than the {together['request_s']:.2f} s of co-located workers"
    if not lost:
        return f"Disaggregation loses nowhere here: at no link that was measured {of}."
    return f"Disaggregation loses, {of}: {where} the KV that prefill makes a second."


def draw_compare(result: Row) -> str:
    """What people read."""
    return f"{table(result['rows'], SHOWN.split())}\n\n{verdict(result)}"


# -- auto


@dataclass(frozen=True)
class AutoOptions:
    """times: the deadline, in prompts that are computed · requests: of each phase and codec"""

    model: str | None = None
    codecs: Sequence[str] = CODECS
    requests: int = 50
    tokens: int = 512
    times: float = 4.0
    budget: float = 0.15


def measure_auto(options: AutoOptions) -> Row:
    """A row for each codec, and one for the choice among them."""
    texts_of(
        options.model, options.tokens, options.requests * len(PHASES)
    )  # its errors now
    config = config_of(options.model, options.codecs)
    with started_workers(config, Role.PREFILL, Role.DECODE) as ((prefill, _), pair):
        speed, rows = asyncio.run(_measure_auto(options, prefill, pair))
    about: Row = {
        "deadline_s": options.times * speed.prefill_s,
        "budget": options.budget,
    }
    about |= {"model": options.model or "packaged", "tokens": options.tokens}
    about |= {"link_times": PHASES, "requests": options.requests}
    return result_of(rows, AUTO_NOTES, **asdict(speed), **about)


async def _measure_auto(
    options: AutoOptions, prefill: Child, pair: Sequence[WorkerInfo]
) -> tuple[Speed, list[Row]]:
    speed = await measure_speed(pair, options.model, options.tokens)
    deadline_s = options.times * speed.prefill_s
    router_config = RouterConfig(error_budget=options.budget, first_decode_s=deadline_s)
    texts = texts_of(options.model, options.tokens, options.requests * len(PHASES))
    known: dict[str, float] = {}  # errors of the last sampled prompt

    async def serve(codec: str) -> Row:
        prompts = iter(texts)
        phases, errors, timely = list[Counter[str]](), list[float](), list[bool]()
        async with routed(pair, router_config) as router:
            for rate in PHASES:
                prefill.ask("pace", rate * speed.kv_bytes_per_s)
                phases.append(Counter())
                for _ in range(options.requests):
                    seen, kv = await visit(router, next(prompts), codec, 2)
                    figures_of([(seen, kv)])
                    known.update(
                        {x: max(off) for x, off in kv["attention_error"].items()}
                    )
                    phases[-1][kv["codec"]] += 1
                    timely.append(seen.e2el_s <= deadline_s)
                    errors.append(known[kv["codec"]])
        allowed = [error <= options.budget for error in errors]
        both = [a and b for a, b in zip(timely, allowed, strict=True)]
        percent = {"both": both, "deadline": timely, "budget": allowed}
        figures: Row = {f"{name}_pct": 100 * mean(met) for name, met in percent.items()}
        figures |= {
            "mean_error": mean(errors),
            "phases": [dict(phase) for phase in phases],
        }
        return {"codec": codec} | figures

    return speed, [await serve(x) for x in tell([*options.codecs, AUTO], "{}".format)]


def draw_auto(result: Row) -> str:
    """What people read."""
    rows = []
    for row in result["rows"]:
        told = (
            ", ".join(f"{n} {codec}" for codec, n in x.items()) for x in row["phases"]
        )
        rows.append(row | {"chosen": " | ".join(told)})
    return table(rows, AUTO_SHOWN.split())
