"""`disagg bench streams`: a whole service beside what it stands on: a dense batch, and `LLM`.

Every process has one thread of torch, but a service has several processes; a client in one more
asks over HTTP. A dense batch is `generate` of transformers: prompts padded on the left, and as many
steps as the longest answer has; only tokens that were wanted count.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from disagg.bench.child import Child
from disagg.bench.result import Row, p99, result_of, tell
from disagg.bench.serving import (
    LoadRequest,
    RequestTimes,
    ServeOptions,
    WorkloadOptions,
    find_model,
    make_visits,
    visit_all,
)
from disagg.config import DEFAULT_CODEC, Config, ModelConfig, ServerConfig
from disagg.errors import ConfigError
from disagg.llm import LLM, SamplingParams
from disagg.model.describe import describe_model
from disagg.model.tokenizer import Tokenizer
from disagg.server.service import Service

CODECS = (DEFAULT_CODEC, "raw", "kivi:bits=4", "gear:bits=4")
PARTS = ("batch", "mixed", "overhead", "beside", "known")
PAUSE_S = 1.0  # between prompts that arrive beside streams
NOTES = "known and beside: milliseconds; all else is said by its name"


@dataclass(frozen=True)
class StreamsOptions:
    """What is asked, of which model.

    streams, prompt, output: of the batch, and tokens of each · arriving: tokens of long prompts
    beside: streams while these arrive, and tokens of their answers · codecs: of known prompts
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
        """Of a prompt and its answer, in the parts that are wanted."""
        one, (_, beside) = self.prompt + self.output, self.beside
        most = {"batch": one, "mixed": one + one // 2, "overhead": one}
        most |= {
            "beside": max(self.arriving + 1, self.prompt + beside),
            "known": self.arriving + 2,
        }
        return max(most[part] for part in self.parts)


class DenseEnd:
    """The model as transformers has it."""

    async def load(self, model: str | None) -> None:
        torch.set_num_threads(1)
        info = describe_model(model)
        dtype = getattr(torch, info.dtype)
        transformers_logging.disable_progress_bar()  # its lock would be left behind
        self._model = AutoModelForCausalLM.from_pretrained(info.path, dtype=dtype)

    async def rate(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int]
    ) -> float:
        """Tokens of a batch that were wanted, a second."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(x)) + list(x) for x in prompts])
        mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in prompts])
        steps, began = max(outputs), time.perf_counter()
        limits: dict[str, Any] = {"max_new_tokens": steps, "min_new_tokens": steps}
        self._model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, **limits
        )
        return sum(outputs) / (time.perf_counter() - began)


class LlmEnd:
    """The model as `LLM` has it."""

    async def load(self, model: str | None) -> None:
        torch.set_num_threads(1)
        self._llm = LLM(model)

    async def seconds(self, prompt: str, tokens: int) -> float:
        """For an answer of so many tokens."""
        began = time.perf_counter()
        self._llm.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - began


class ClientEnd:
    """Who asks the service."""

    async def ask(
        self, options: ServeOptions, visits: Sequence[LoadRequest]
    ) -> Sequence[RequestTimes]:
        """All at once."""
        seen, _ = await visit_all(options, visits)
        for x in seen:
            assert not x.error, x.error
        return seen

    async def ask_beside(
        self,
        options: ServeOptions,
        visits: Sequence[LoadRequest],
        arriving: Sequence[LoadRequest],
    ) -> tuple[Sequence[RequestTimes], list[RequestTimes]]:
        """All at once, and beside them one after another, as long as the others go on."""
        streams, came = (
            asyncio.create_task(self.ask(options, visits)),
            list[RequestTimes](),
        )
        for visit in arriving:
            await asyncio.wait([streams], timeout=PAUSE_S)
            if not streams.done():
                came += await self.ask(options, [visit])
        return await streams, came


class Questions:
    """Prompts that were not asked before, of a model."""

    def __init__(self, model: str | None):
        self.tokenizer = Tokenizer.load(model)
        self._seed = 0

    def make(
        self, count: int, prompt: int, output: int, spread: float = 0.0
    ) -> list[LoadRequest]:
        """Requests of so many tokens, more or less by a share `spread`."""
        self._seed += 1
        wanted = WorkloadOptions(
            "random", None, count, prompt, output, spread, 0, self._seed
        )
        return make_visits(wanted, self.tokenizer)


def measure_streams(options: StreamsOptions) -> Row:
    """The parts that are wanted: rows of batches, of equal and of mixed lengths, and others.

    share:    of the gain of a dense batch, over one stream, that the service has too
    overhead: milliseconds that the service takes longer than `LLM`: for the first token, and for
              each further one
    beside:   between the tokens of streams, with a long prompt on its way and without
    known:    until the second token of a prompt that is new, and of the same once more
    """
    questions, parts = Questions(options.model), set(options.parts)
    one = (options.prompt, options.output)
    batches = (
        [questions.make(1, *one)] if parts & {"batch", "mixed"} else []
    )  # gains are over it
    batches += [questions.make(options.streams, *one)] if "batch" in parts else []
    batches += [questions.make(options.streams, *one, 0.5)] if "mixed" in parts else []
    with Child(DenseEnd) as dense:
        dense.ask("load", options.model)
        rows = [
            _dense(dense, questions.tokenizer, x)
            for x in tell(batches, lambda x: f"{len(x)} streams, dense")
        ]
    engine, more = replace(Config().engine, torch_threads=1), Row()
    config = Config(
        model=ModelConfig(options.model), engine=engine, server=ServerConfig(port=0)
    )
    with Service(config) as service, Child(ClientEnd) as client:
        asked = ServeOptions(service.url, find_model(service.url)[0], ignore_eos=True)
        client.ask("ask", asked, questions.make(2, *one))
        for row, visits in zip(
            rows, tell(batches, lambda x: f"{len(x)} streams, served"), strict=True
        ):
            row |= _spread(client.ask("ask", asked, visits))
            for name in ("dense", "served"):
                row[f"{name}_gain"] = (
                    row[f"{name}_tokens_per_s"] / rows[0][f"{name}_tokens_per_s"]
                )
            row["share"] = row["served_gain"] / row["dense_gain"]
        if "overhead" in parts:
            more["overhead"] = [_overhead(options, client, asked, questions)]
        if "beside" in parts:
            more["beside"] = [_beside(options, client, asked, questions)]
        if "known" in parts:
            codecs = tell(options.codecs, "a known prompt, {}".format)
            more["known"] = [
                _known(options, client, asked, questions, x) for x in codecs
            ]
    return result_of(rows, NOTES, **more)


def _dense(dense: Child, tokenizer: Tokenizer, visits: Sequence[LoadRequest]) -> Row:
    prompts = [tokenizer.encode(visit.prompt) for visit in visits]
    outputs = [visit.max_tokens for visit in visits]
    lengths = {"prompts": _range(map(len, prompts)), "outputs": _range(outputs)}
    dense.ask("rate", prompts, [4] * len(prompts))
    rate = dense.ask("rate", prompts, outputs)
    return {"streams": len(visits), **lengths, "dense_tokens_per_s": rate}


def _range(numbers: Any) -> str:
    some = sorted(numbers)
    return f"{some[0]}" if some[0] == some[-1] else f"{some[0]}-{some[-1]}"


def _spread(seen: Sequence[RequestTimes]) -> Row:
    began = min(x.start_s for x in seen)
    took = max(x.start_s + x.e2el_s for x in seen) - began
    gaps = [1e3 * gap for x in seen for gap in x.gaps_s]
    return {
        "served_tokens_per_s": sum(x.tokens for x in seen) / took,
        "itl_p50_ms": median(gaps),
        "itl_p99_ms": p99(gaps),
    }


def _overhead(
    options: StreamsOptions, client: Child, asked: ServeOptions, questions: Questions
) -> Row:
    """By turns; medians."""
    found = []
    with Child(LlmEnd) as llm:
        llm.ask("load", options.model)
        for _ in tell(range(options.rounds + 1), "beside LLM, round {}".format):
            first, whole, visit = questions.make(3, options.prompt, options.output)
            alone = llm.ask("seconds", first.prompt, 1)
            each = (llm.ask("seconds", whole.prompt, options.output) - alone) / (
                options.output - 1
            )
            (seen,) = client.ask("ask", asked, [visit])
            found.append([1e3 * x for x in (alone, seen.ttft_s, each, seen.tpot_s)])
    names = "llm_first_ms", "served_first_ms", "llm_each_ms", "served_each_ms"
    row = dict(zip(names, np.median(found[1:], 0).tolist(), strict=True))
    row["first_more_ms"] = row["served_first_ms"] - row["llm_first_ms"]
    return row | {"each_ratio": row["served_each_ms"] / row["llm_each_ms"]}


def _beside(
    options: StreamsOptions, client: Child, asked: ServeOptions, questions: Questions
) -> Row:
    count, tokens = options.beside
    streams = questions.make(count, options.prompt, tokens)
    long = questions.make(50, options.arriving, 1)
    seen, came = client.ask("ask_beside", asked, streams, long)
    ways = [(x.start_s, x.start_s + x.ttft_s) for x in came]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for x in seen:
        ends = x.start_s + x.ttft_s + np.cumsum(x.gaps_s)
        for end, gap in zip(ends, x.gaps_s, strict=True):
            gaps[any(begun < end and end - gap < over for begun, over in ways)].append(
                1e3 * gap
            )
    p50, calm_p50 = median(gaps[True]), median(gaps[False])
    most = p99(gaps[True])
    first_ms = 1e3 * median(x.ttft_s for x in came)
    row = {"streams": count, "arrived": len(came), "first_ms": first_ms}
    return row | {
        "p50_ms": p50,
        "p99_ms": most,
        "ratio": most / p50,
        "calm_p50_ms": calm_p50,
    }


def _known(
    options: StreamsOptions,
    client: Child,
    asked: ServeOptions,
    questions: Questions,
    codec: str,
) -> Row:
    asked = replace(asked, extra_body={"codec": codec})
    new, known = list[float](), list[float]()
    for visit in questions.make(options.rounds, options.arriving, 2):
        for found in (new, known):
            (seen,) = client.ask("ask", asked, [visit])
            found.append(1e3 * seen.e2el_s)
    row = {"codec": codec, "tokens": options.arriving, "new_ms": median(new)}
    return row | {"known_ms": median(known), "ratio": median(known) / median(new)}
