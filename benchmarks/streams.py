"""The overhead of a service over a dense batch and over `LLM`.

    python -m benchmarks.streams --json --out FILE

Every process has one thread of torch, but a service has several processes, and its client is one
more, over HTTP. A dense batch is `generate` of transformers: prompts padded on the left, as many
steps as the longest answer; only requested tokens count.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging
from typer import Option

from benchmarks import command
from disagg.bench.child import Child
from disagg.bench.result import Row, p99, progress, result_of
from disagg.bench.serving import (
    RequestTimes,
    ServeOptions,
    find_model,
    visit_all,
)
from disagg.bench.workload import LoadRequest, WorkloadOptions, make_requests
from disagg.cli.bench import Out, Rounds, show, without_none
from disagg.cli.checks import check_codecs
from disagg.cli.options import Json, Model, refuse_idle
from disagg.config import DEFAULT_CODEC, Config, ModelConfig, ServerConfig
from disagg.errors import ConfigError
from disagg.llm import LLM, SamplingParams
from disagg.model.describe import describe_model
from disagg.model.tokenizer import Tokenizer
from disagg.server.service import Service

CODECS = (DEFAULT_CODEC, "raw", "kivi:bits=4", "gear:bits=4")
PARTS = ("batch", "mixed", "overhead", "beside", "known")
PARTS_BY_ROUNDS = {"overhead", "known"}
MIXED_SPREAD = 0.5  # lengths of mixed batches differ by up to this share
MAX_ARRIVING = 50  # long prompts beside streams
PAUSE_S = 1.0  # between them
WARM_UP_TOKENS = 4
NOTES = "known and beside: milliseconds; all else is said by its name"
Batch = Sequence[LoadRequest]


@dataclass(frozen=True)
class StreamsOptions:
    """The model and the requests.

    streams, prompt, output: size of the batch, and tokens of each
    arriving: tokens of the long prompts
    beside:   number of streams while these arrive, and tokens of their answers
    codecs:   for known prompts
    """

    model: str | None = None
    streams: int = 32
    prompt: int = 64
    output: int = 256
    arriving: int = 1500
    beside: tuple[int, int] = (8, 600)
    codecs: Sequence[str] = CODECS
    rounds: int = 5
    parts: Sequence[str] = PARTS

    def __post_init__(self) -> None:
        if unknown := set(self.parts) - set(PARTS):
            raise ConfigError(f"part {min(unknown)!r}; known: {', '.join(PARTS)}")

    @property
    def most_tokens(self) -> int:
        """The longest prompt with its answer, in the selected parts."""
        batch = self.prompt + self.output
        _, beside = self.beside
        most = {
            "batch": batch,
            "mixed": batch + batch // 2,
            "overhead": batch,
            "beside": max(self.arriving + 1, self.prompt + beside),
            "known": self.arriving + 2,
        }
        return max(most[part] for part in self.parts)


class DenseEnd:
    """The model in transformers."""

    async def load(self, model: str | None) -> None:
        torch.set_num_threads(1)
        info = describe_model(model)
        dtype = getattr(torch, info.dtype)
        # its progress bar leaves a lock behind
        transformers_logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(info.path, dtype=dtype)

    async def rate(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int]
    ) -> float:
        """Tokens of a batch that were asked for, a second."""
        longest = max(map(len, prompts))
        ids, mask = [], []
        for prompt in prompts:
            padding = [0] * (longest - len(prompt))
            ids.append(padding + list(prompt))
            mask.append(padding + [1] * len(prompt))
        steps = max(outputs)
        began = time.perf_counter()
        self._model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=steps,
            min_new_tokens=steps,
        )
        return sum(outputs) / (time.perf_counter() - began)


class LlmEnd:
    """The model in `LLM`."""

    async def load(self, model: str | None) -> None:
        torch.set_num_threads(1)
        self._llm = LLM(model)

    async def seconds(self, prompt: str, tokens: int) -> float:
        """The time of an answer of this many tokens."""
        began = time.perf_counter()
        self._llm.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - began


class ClientEnd:
    """A client of the service."""

    async def ask(self, options: ServeOptions, batch: Batch) -> Sequence[RequestTimes]:
        """All requests at once."""
        times, _ = await visit_all(options, batch)
        for x in times:
            assert not x.error, x.error
        return times

    async def ask_beside(
        self, options: ServeOptions, batch: Batch, arriving: Batch
    ) -> tuple[Sequence[RequestTimes], list[RequestTimes]]:
        """A batch at once, and beside it other requests one by one, until the batch is done."""
        streams = asyncio.create_task(self.ask(options, batch))
        arrived = list[RequestTimes]()
        for request in arriving:
            await asyncio.wait([streams], timeout=PAUSE_S)
            if not streams.done():
                arrived += await self.ask(options, [request])
        return await streams, arrived


class Questions:
    """Prompts for a model, each of them new."""

    def __init__(self, model: str | None):
        self.tokenizer = Tokenizer.load(model)
        self._seed = 0

    def make(
        self, count: int, prompt: int, output: int, spread: float = 0.0
    ) -> list[LoadRequest]:
        """Requests of these lengths, more or less by up to a share `spread`."""
        self._seed += 1
        workload = WorkloadOptions(
            dataset="random",
            num_prompts=count,
            input_len=prompt,
            output_len=output,
            range_ratio=spread,
            seed=self._seed,
        )
        return make_requests(workload, self.tokenizer)


def measure_streams(options: StreamsOptions) -> Row:
    """The selected parts: batches of equal and of mixed lengths, and the others.

    share:    the service's gain over one stream, relative to the gain of a dense batch
    overhead: milliseconds that the service takes longer than `LLM`, for the first token and for
              each further one
    beside:   gaps between tokens of streams, with a long prompt arriving and without
    known:    time to the second token of a new prompt, and of the same prompt again
    """
    questions = Questions(options.model)
    batches = _make_batches(options, questions)
    with Child(DenseEnd) as dense:
        dense.ask("load", options.model)
        rows = [
            _measure_dense(dense, questions.tokenizer, batch)
            for batch in progress(batches, lambda batch: f"{len(batch)} streams, dense")
        ]
    config = Config(
        model=ModelConfig(options.model),
        engine=replace(Config().engine, torch_threads=1),
        server=ServerConfig(port=0),
    )
    with Service(config) as service, Child(ClientEnd) as client:
        model, _ = find_model(service.url)
        target = ServeOptions(service.url, model, ignore_eos=True)
        service_run = MeasuredService(options, client, target, questions)
        service_run.warm_up()
        service_run.add_served(rows, batches)
        other_parts = service_run.other_parts()
    return result_of(rows, NOTES, **other_parts)


def _make_batches(
    options: StreamsOptions, questions: Questions
) -> list[list[LoadRequest]]:
    """The first is of one stream: gains are over it."""
    parts = set(options.parts)
    lengths = (options.prompt, options.output)
    batches = []
    if parts & {"batch", "mixed"}:
        batches.append(questions.make(1, *lengths))
    if "batch" in parts:
        batches.append(questions.make(options.streams, *lengths))
    if "mixed" in parts:
        batches.append(questions.make(options.streams, *lengths, spread=MIXED_SPREAD))
    return batches


def _measure_dense(dense: Child, tokenizer: Tokenizer, batch: Batch) -> Row:
    prompts = [tokenizer.encode(request.prompt) for request in batch]
    outputs = [request.max_tokens for request in batch]
    dense.ask("rate", prompts, [WARM_UP_TOKENS] * len(prompts))
    return {
        "streams": len(batch),
        "prompts": _range_text([len(prompt) for prompt in prompts]),
        "outputs": _range_text(outputs),
        "dense_tokens_per_s": dense.ask("rate", prompts, outputs),
    }


def _range_text(numbers: Sequence[int]) -> str:
    """ "64", or "32-96"."""
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least}-{most}"


@dataclass(frozen=True)
class MeasuredService:
    """The service under test: its client, and the server and model that the client uses."""

    options: StreamsOptions
    client: Child
    target: ServeOptions
    questions: Questions

    def warm_up(self) -> None:
        batch = self.questions.make(2, self.options.prompt, self.options.output)
        self.client.ask("ask", self.target, batch)

    def add_served(self, rows: Sequence[Row], batches: Sequence[Batch]) -> None:
        """Serve the batches, and compare each row with the first."""
        cases = progress(batches, lambda batch: f"{len(batch)} streams, served")
        for row, batch in zip(rows, cases, strict=True):
            row |= _summary(self.client.ask("ask", self.target, batch))
            for name in ("dense", "served"):
                rate = f"{name}_tokens_per_s"
                row[f"{name}_gain"] = row[rate] / rows[0][rate]
            row["share"] = row["served_gain"] / row["dense_gain"]

    def other_parts(self) -> dict[str, list[Row]]:
        """Rows by the name of the part."""
        parts: dict[str, list[Row]] = {}
        if "overhead" in self.options.parts:
            parts["overhead"] = [self.overhead()]
        if "beside" in self.options.parts:
            parts["beside"] = [self.beside()]
        if "known" in self.options.parts:
            codecs = progress(self.options.codecs, "a known prompt, {}".format)
            parts["known"] = [self.known(codec) for codec in codecs]
        return parts

    def overhead(self) -> Row:
        """Beside `LLM`, by turns; medians."""
        options = self.options
        samples = []
        with Child(LlmEnd) as llm:
            llm.ask("load", options.model)
            for _ in progress(range(options.rounds + 1), "beside LLM, {}".format):
                first, whole, request = self.questions.make(
                    3, options.prompt, options.output
                )
                first_s = llm.ask("seconds", first.prompt, 1)
                whole_s = llm.ask("seconds", whole.prompt, options.output)
                each_s = (whole_s - first_s) / (options.output - 1)
                (times,) = self.client.ask("ask", self.target, [request])
                samples.append([first_s, times.ttft_s, each_s, times.tpot_s])
        samples_ms = 1e3 * np.array(samples[1:])
        llm_first, served_first, llm_each, served_each = np.median(samples_ms, 0)
        return {
            "llm_first_ms": float(llm_first),
            "served_first_ms": float(served_first),
            "llm_each_ms": float(llm_each),
            "served_each_ms": float(served_each),
            "first_more_ms": float(served_first - llm_first),
            "each_ratio": float(served_each / llm_each),
        }

    def beside(self) -> Row:
        """Gaps between tokens of streams, with a long prompt arriving and without."""
        count, tokens = self.options.beside
        batch = self.questions.make(count, self.options.prompt, tokens)
        long = self.questions.make(MAX_ARRIVING, self.options.arriving, 1)
        streams, arrived = self.client.ask("ask_beside", self.target, batch, long)
        gaps_ms, calm_gaps_ms = gaps_beside(streams, arrived)
        p50_ms, p99_ms = median(gaps_ms), p99(gaps_ms)
        return {
            "streams": count,
            "arrived": len(arrived),
            "first_ms": 1e3 * median(x.ttft_s for x in arrived),
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "ratio": p99_ms / p50_ms,
            "calm_p50_ms": median(calm_gaps_ms),
        }

    def known(self, codec: str) -> Row:
        """Every prompt twice."""
        target = replace(self.target, extra_body={"codec": codec})
        new_ms, known_ms = list[float](), list[float]()
        requests = self.questions.make(self.options.rounds, self.options.arriving, 2)
        for request in requests:
            for times_ms in (new_ms, known_ms):
                (times,) = self.client.ask("ask", target, [request])
                times_ms.append(1e3 * times.e2el_s)
        return {
            "codec": codec,
            "tokens": self.options.arriving,
            "new_ms": median(new_ms),
            "known_ms": median(known_ms),
            "ratio": median(known_ms) / median(new_ms),
        }


def gaps_beside(
    streams: Sequence[RequestTimes], arrived: Sequence[RequestTimes]
) -> tuple[list[float], list[float]]:
    """Milliseconds between tokens of streams, while a prompt waits for its first token and else."""
    intervals = [(x.start_s, x.start_s + x.ttft_s) for x in arrived]
    gaps_ms: list[float] = []
    calm_gaps_ms: list[float] = []
    for stream in streams:
        ends = stream.start_s + stream.ttft_s + np.cumsum(stream.gaps_s)
        for end, gap in zip(ends, stream.gaps_s, strict=True):
            overlaps = any(
                begin < end and end - gap < finish for begin, finish in intervals
            )
            (gaps_ms if overlaps else calm_gaps_ms).append(1e3 * gap)
    return gaps_ms, calm_gaps_ms


def _summary(times: Sequence[RequestTimes]) -> Row:
    began = min(x.start_s for x in times)
    ended = max(x.start_s + x.e2el_s for x in times)
    gaps_ms = [1e3 * gap for x in times for gap in x.gaps_s]
    return {
        "served_tokens_per_s": sum(x.tokens for x in times) / (ended - began),
        "itl_p50_ms": median(gaps_ms),
        "itl_p99_ms": p99(gaps_ms),
    }


def streams(
    model: Model = None,
    part: list[str] | None = Option(
        None, help="Part of the benchmark; may be repeated; default: all."
    ),
    rounds: Rounds = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare a service with a dense batch and with `LLM`; send long and known prompts."""
    has_rounds = not part or PARTS_BY_ROUNDS & {*part}
    refuse_idle(not has_rounds, "without the parts overhead and known", rounds=rounds)
    options = StreamsOptions(model, **without_none(rounds=rounds, parts=part))
    check_codecs(model, (), tokens=options.most_tokens)
    show(measure_streams(options), out, as_json)


if __name__ == "__main__":
    command.main(streams, "streams")
