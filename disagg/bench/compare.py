"""`disagg bench compare`: co-located against disaggregated serving, by codec and by link.

Two workers with one thread each are joined by a link. Its rate is a multiple of the fp16 KV that
prefill produces per second, which is measured first: only this ratio matters, and an 8B model on a
GPU has the same ones.

Co-located, both workers do everything; disaggregated, one computes prompts and the other decodes.
Prompts arrive as fast as prefill can compute them. With `cached`, prefill already has their exact
KV, so requests wait for the link alone. Every prompt is sent whole, even if it was sent before.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pydoc_data.topics import topics
from statistics import mean, median

from disagg.bench.child import Child
from disagg.bench.result import Row, announce, progress, result_of
from disagg.bench.serving import ServeOptions, summarize
from disagg.bench.tables import table
from disagg.bench.workers import Answer, Prompt, routed, started_workers, visit
from disagg.config import (
    AUTO,
    DEFAULT_CODEC,
    Config,
    EngineConfig,
    ModelConfig,
    TransferConfig,
)
from disagg.errors import ConfigError, PeerLostError
from disagg.model.tokenizer import Tokenizer
from disagg.transfer.messages import Role, WorkerInfo

RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", "kivi:bits=4,residual=64", DEFAULT_CODEC)
RATES = (1 / 8, 1 / 2, 1.0, 8.0)  # of the link, relative to the KV rate of prefill
MOST_CHARS = 8  # of a token, on average
COLOCATED = "co-located"
DISAGGREGATED = "disaggregated"
CLIENT = ServeOptions("", "", metrics=("ttft", "tpot", "itl", "e2el"))
COLUMNS = (
    "serving",
    "codec",
    "link_times",
    "first_decode_s",
    "request_s",
    "longest_pause_s",
    "wire_bytes",
    "ratio",
)
NOTES = (
    "seconds, means of the prompts: to the second token, which decode emits, and to the last; "
    "link_times: link rate / KV rate of prefill; ratio: of request_s to co-located"
)


@dataclass(frozen=True)
class CompareOptions:
    """The prompts of each cell.

    prompts: how many, of `tokens` tokens each, with `answer` tokens of answer
    cached:  prefill knows them
    """

    model: str | None = None
    codecs: Sequence[str] = CODECS
    rates: Sequence[float] = RATES
    prompts: int = 3
    tokens: int = 512
    answer: int = field(kw_only=True)
    cached: bool = False


@dataclass(frozen=True)
class Speed:
    """Prefill alone: seconds per prompt, and bytes of fp16 KV per second."""

    prefill_s: float
    kv_bytes_per_s: float


def measure_compare(options: CompareOptions) -> Row:
    """A row for co-located serving, and for every link and codec."""
    texts_of(options.model, options.tokens, options.prompts)  # its errors now
    config = config_of(options.model, prefix_cache=options.cached)
    with started_workers(config, Role.BOTH, Role.BOTH) as (children, infos):
        speed, rows = asyncio.run(_measure(options, children, infos))
    for row in rows:
        row["ratio"] = row["request_s"] / rows[0]["request_s"]
    return result_of(
        rows,
        NOTES,
        **asdict(speed),
        model=options.model or "packaged",
        cached=options.cached,
        tokens=options.tokens,
        answer=options.answer,
    )


async def _measure(
    options: CompareOptions, children: Sequence[Child], infos: Sequence[WorkerInfo]
) -> tuple[Speed, list[Row]]:
    speed = await measure_speed(infos, options.model, options.tokens)
    colocated: Row = {"serving": COLOCATED, "codec": DEFAULT_CODEC}
    colocated |= await _measure_cell(options, infos, speed, DEFAULT_CODEC)
    rows = [colocated]
    prefill, decode = children
    infos = [prefill.ask("assume", Role.PREFILL), decode.ask("assume", Role.DECODE)]
    cases = [(rate, codec) for rate in options.rates for codec in options.codecs]
    for rate, codec in progress(cases, "{0[0]:g} times, {0[1]}".format):
        prefill.ask("pace", rate * speed.kv_bytes_per_s)
        row: Row = {"serving": DISAGGREGATED, "codec": codec, "link_times": rate}
        row |= await _measure_cell(options, infos, speed, codec)
        rows.append(row)
    return speed, rows


def config_of(
    model: str | None, codecs: Sequence[str] = (), prefix_cache: bool = False
) -> Config:
    """The config of workers with a paced link that send every page of every prompt.

    codecs: the codecs to choose from
    """
    return Config(
        codec=AUTO if codecs else DEFAULT_CODEC,
        codecs=[*codecs],
        model=ModelConfig(model),
        engine=EngineConfig(prefix_cache=prefix_cache),
        transfer=TransferConfig(link_mbps=1e5, dedup=False, min_disagg_tokens=0),
    )


def texts_of(model: str | None, tokens: int, count: int) -> list[Prompt]:
    """Consecutive prompts of this many tokens from Python's documentation."""
    text = "\n".join(topics.values())[: MOST_CHARS * tokens * count]
    ids = Tokenizer.load(model).encode(text)
    if len(ids) < tokens * count:
        raise ConfigError(
            f"{count} prompts of {tokens} tokens; the text has {len(ids)} tokens"
        )
    return [tuple(ids[i * tokens : (i + 1) * tokens]) for i in range(count)]


async def measure_speed(
    workers: Sequence[WorkerInfo], model: str | None, tokens: int
) -> Speed:
    """Of the last three prompts of five; the others warm everything."""
    async with routed(workers) as router:
        prompts = texts_of(model, tokens + 1, 5)
        answers = [await visit(router, x[1:], DEFAULT_CODEC, 1) for x in prompts]
    prefill_s = median(times.ttft_s for times, _ in answers[2:])
    kv_bytes = kv_figures(answers)[0]["fp16_bytes"]
    speed = Speed(prefill_s, kv_bytes / prefill_s)
    announce(f"prefill produces {1e-6 * speed.kv_bytes_per_s:.3g} MB/s of fp16 KV")
    return speed


def kv_figures(answers: Sequence[Answer]) -> list[Row]:
    """Figures of the hand-offs reported in time; PeerLostError if there are none."""
    figures = [kv for _, kv in answers if kv]
    if not figures:
        raise PeerLostError(
            "a prefill worker did not report the times of its hand-offs in time"
        )
    return figures


async def _measure_cell(
    options: CompareOptions, workers: Sequence[WorkerInfo], speed: Speed, codec: str
) -> Row:
    prompts = texts_of(options.model, options.tokens, options.prompts)
    async with routed(workers) as router:
        if options.cached:
            for prompt in prompts:
                await visit(router, prompt, codec, 1)
        began = time.perf_counter()
        visits = []
        for number, prompt in enumerate(prompts):
            at_s = number * speed.prefill_s
            visits.append(visit(router, prompt, codec, options.answer, at_s))
        answers = await asyncio.gather(*visits)
    return _cell_row(answers, time.perf_counter() - began)


def _cell_row(answers: Sequence[Answer], duration_s: float) -> Row:
    times = [x for x, _ in answers]
    row: Row = {
        "first_decode_s": mean(x.decoded_s for x in times),
        "request_s": mean(x.e2el_s for x in times),
        "longest_pause_s": max(gap for x in times for gap in x.gaps_s[1:]),
        "wire_bytes": int(mean(kv["wire_bytes"] for kv in kv_figures(answers))),
    }
    summary = summarize(CLIENT, times, duration_s)
    for name, value in summary.items():
        if name.endswith("_ms") or name == "output_throughput":
            row[name] = value
    return row


def verdict(result: Row) -> str:
    """The links on which disaggregation loses, in one line."""
    colocated, *disaggregated = result["rows"]
    losing_rates: dict[str, list[str]] = {}
    for row in disaggregated:
        if row["ratio"] > 1:
            rate = f"{row['link_times']:g}"
            losing_rates.setdefault(row["codec"], []).append(rate)
    loss = (
        f"a request takes longer than the {colocated['request_s']:.2f} s of co-located "
        "workers"
    )
    if not losing_rates:
        return f"Disaggregation loses on no measured link: nowhere {loss}."
    cells = "; ".join(
        f"with {codec} at {', '.join(rates)} times"
        for codec, rates in losing_rates.items()
    )
    return f"Disaggregation loses, {loss}: {cells} the KV rate of prefill."


def draw_compare(result: Row) -> str:
    """The result as a table, and the verdict."""
    return f"{table(result['rows'], COLUMNS)}\n\n{verdict(result)}"
