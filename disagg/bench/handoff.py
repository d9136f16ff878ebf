"""`disagg bench latency`, `overlap` and `load`: prompts that real workers hand to each other.

Latency: a tiny prompt, loopback, an idle decode worker with the packaged model: from the last layer
offered until its engine runs the prompt, on the clock of the host; and to the acknowledgement, one
way more. Pages are ready and all layers are offered at once, so none is on its way before the last;
the prompt is reserved and attached by then, as workers do before they compute. Then one answer is
decoded alone, and while prompts arrive one after another, at 1 Gb/s and as fast as they come.

Overlap: time to the first decode token through a token bucket of 50 Mb/s, in bursts of at most
64 KiB. A prompt cannot decode before it is computed, nor before its KV has crossed the link: the
bound is max(compute, wire). Beside it: when pages leave only after the whole prompt is computed.

Load: 8 prompts of 1,500 tokens, and 40 of 4 to 1,500 that come while those are computed, for one
pair of workers. Each should wait for those with less work left and for one chunk of a longer one:
what the worker computed for whom while it waited says how much of it went to longer ones.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

import torch

from disagg.bench.child import Child
from disagg.bench.result import Row, p99, result_of, table, tell
from disagg.bench.serving import RequestTimes
from disagg.bench.transfer import SendingEnd, Sent, Way
from disagg.config import (
    DEFAULT_CODEC,
    ClusterConfig,
    Config,
    RouterConfig,
    TransferConfig,
)
from disagg.engine.messages import StepOutput
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import urgency
from disagg.engine.steps import StepAllocation
from disagg.kv.plan import Plan
from disagg.model.tokenizer import Tokenizer
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Job, Role, Submit, Work, WorkerInfo
from disagg.transfer.rpc import connect
from disagg.worker.worker import Worker, settle_memory

LINK_MBPS, BURST_BYTES = 50.0, 64 << 10
PROMPT_TOKENS = 1500
CODECS = ("raw", "raw:dtype=fp16", DEFAULT_CODEC, "kivi:bits=2,group=64,residual=64")
TEXT = "The old house by the river had stood empty for years, and nobody asked who had built it. "
Prompt = tuple[int, ...]
StepRecord = tuple[
    float, float, dict[Prompt, int]
]  # from when to when; how many tokens of which prompts
NOTES = "milliseconds; the model is the packaged one, on the CPU with one thread"
LOAD_NOTES = "seconds, tokens; the least work left goes first, halved for every second of waiting"
OVERLAP_NOTES = "milliseconds; ratios are to the slower of computing and sending"


class NotingWorker(Worker):
    """A worker that notes what its engine does.

    steps: those that computed prompts · said: tokens, by the name of the request there and when
    """

    def __init__(self, config: Config, role: Role, name: str):
        super().__init__(config, role, name)
        self.steps: list[StepRecord] = []
        self.said: list[tuple[str, float]] = []
        self._compute = self.engine._compute
        self.engine._compute = self._timed  # type: ignore[method-assign]

    def _timed(
        self, scheduled: Sequence[ScheduledTokens], allocation: StepAllocation
    ) -> None:
        began = time.monotonic()
        self._compute(scheduled, allocation)
        if prompts := {
            x.sequence.request.tokens: x.count for x in scheduled if not x.decodes
        }:
            self.steps.append((began, time.monotonic(), prompts))

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        """Called on the engine's thread with what a step brought."""
        now = time.monotonic()
        for output in args:
            if isinstance(output, StepOutput):
                self.said += [(token.rid, now) for token in output.tokens]
        super()._on_loop(call, *args)


class WorkerEnd:
    """A worker in a process of its own, without Ray, as a benchmark sees it."""

    worker_type: type[Worker] = Worker

    async def start(self, config: Config, role: Role, name: str) -> WorkerInfo:
        """Where it can be reached; no router need follow it."""
        torch.set_num_threads(1)
        config = replace(config, cluster=ClusterConfig(orphan_s=3600.0))
        self._worker = self.worker_type(config, role, name)
        settle_memory()
        return await asyncio.to_thread(self._worker.start)

    async def assume(self, role: Role) -> WorkerInfo:
        """Do something else from now on."""
        self._worker.assume(role)
        return replace(self._worker.started, role=role)

    async def leave(self, grace_s: float) -> None:
        """Returns when all that it had is gone elsewhere."""
        self._worker.stop(grace_s)
        await asyncio.to_thread(self._worker.wait)


class NotingEnd(WorkerEnd):
    """One that tells what its engine does."""

    worker_type = NotingWorker
    _worker: NotingWorker

    async def steps(self) -> list[StepRecord]:
        """Its steps with chunks of prompts so far; all are forgotten."""
        found, self._worker.steps = self._worker.steps, []
        return found

    async def pace(self, bytes_per_s: float) -> None:
        """Another rate of a link that is paced."""
        pace = self._worker.prefill.context.peers.options.pace
        assert pace is not None, "the config of the worker paces no link"
        pace.bytes_per_s = bytes_per_s

    async def plan(self, codec: str) -> Plan:
        """The plan of its model under a codec."""
        return self._worker.engine.plan(codec)

    async def answer(self, rid: str, tokens: int) -> None:
        """Begin to decode an answer."""
        started, sampling = (
            self._worker.started,
            {"max_tokens": tokens, "ignore_eos": True},
        )
        job = Job(rid, 0, (1,) * 64, sampling=sampling)
        link = connect(started.address)
        await WorkerClient(link).submit(Submit(job, Work.LOCAL, started.epoch))
        await link.close()

    async def said(self, rid: str, count: int) -> list[float]:
        """When it had the tokens of a request, once there are so many; all are forgotten.

        On the monotonic clock of the host.
        """
        said = self._worker.said
        while (
            len(found := [at for name, at in said if name.startswith(f"{rid}#0/")])
            < count
        ):
            await asyncio.sleep(0.02)
        said.clear()
        return found


# -- latency


@dataclass(frozen=True)
class LatencyOptions:
    """The tiny prompt, how often it is sent, and the answer that is decoded beside.

    arriving: tokens of the prompts that arrive meanwhile, for so many `seconds`
    """

    codec: str = DEFAULT_CODEC
    tokens: int = 100
    rounds: int = 200
    answer: int = 600
    arriving: int = 1900
    seconds: float = 5.0


def measure_latency(options: LatencyOptions) -> Row:
    """Send a prompt again and again, one at a time; then decode beside. Milliseconds.

    running_ms:      from the last layer offered until the engine runs the prompt
    acknowledged_ms: until its sender knows
    admit_ms:        of these, from the commit at the decode worker to the inbox of its engine
    decoding:        between the tokens of an answer, alone and while `received_gbps` arrive
    """
    with (
        started_workers(Config(), Role.BOTH) as ((worker,), (started,)),
        Child(SendingEnd) as source,
    ):
        plan = worker.ask("plan", options.codec)
        source.ask("encode", options.codec, plan, options.tokens)
        sent: list[Sent] = []
        running: list[float] = []
        for _ in tell(range(options.rounds + 1), "hand-off {}".format):
            sent.append(one := source.ask("send", options.codec, Way(started)))
            (at,) = worker.ask("said", one.rid, 1)
            running.append(1e3 * (at - one.began_at))
        source.ask("encode", options.codec, plan, options.arriving)
        beside = {
            "an answer alone": None,
            "an answer while prompts arrive": Way(started),
        }
        beside["an answer while prompts arrive at 1 Gb/s"] = Way(
            started, bytes_per_s=1e9 / 8
        )
        ways = tell(beside.items(), lambda case: case[0])
        decoding = [_decode(options, worker, source, *way) for way in ways]
    sent, running = sent[1:], running[1:]  # the first opened the connection
    acknowledged = [x.stats.exposed_ms for x in sent]
    row = {
        "codec": options.codec,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "wire_bytes": sent[0].stats.wire_bytes,
        "running_ms": median(running),
        "running_p99_ms": p99(running),
        "acknowledged_ms": median(acknowledged),
        "acknowledged_p99_ms": p99(acknowledged),
        "admit_ms": median(x.stats.admit_ms for x in sent),
        "decoding": decoding,
    }
    return result_of([row], NOTES)


def _decode(
    options: LatencyOptions, worker: Child, source: Child, rid: str, way: Way | None
) -> Row:
    """Decode one answer, while prompts arrive if there is a way for them."""
    worker.ask("answer", rid, options.answer)
    began, ended, nbytes = 0.0, float("inf"), 0
    if way is not None:
        began = time.monotonic()
        while (ended := time.monotonic()) < began + options.seconds:
            nbytes += source.ask("send", options.codec, way).stats.payload_bytes
    times = [
        at for at in worker.ask("said", rid, options.answer) if began <= at <= ended
    ]
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    told = {"received_gbps": 8e-9 * nbytes / (ended - began), "tokens": len(gaps)}
    return told | {"p50_ms": median(gaps), "p99_ms": p99(gaps)}


def draw_latency(result: Row) -> str:
    """What people read."""
    (row,) = result["rows"]
    return f"{table([row], list(row)[:-1])}\n\n{table(row['decoding'])}"


# -- overlap


Answer = tuple[RequestTimes, Row]  # what a client saw of a request, and its figures


def measure_overlap(runs: int = 5) -> Row:
    """Rows for every codec, with what they were measured with."""
    ways = tell([True, False], lambda way: "sent early" if way else "sent afterwards")
    early, late = (measure_side(way, runs) for way in ways)
    rows = [summarise(codec, early[codec], late[codec]) for codec in CODECS]
    link = {"link_mbps": LINK_MBPS, "burst_bytes": BURST_BYTES}
    return result_of(
        rows, OVERLAP_NOTES, **link, prompt_tokens=PROMPT_TOKENS, runs=runs
    )


def summarise(codec: str, early: Sequence[Answer], late: Sequence[Answer]) -> Row:
    """The medians of two sides, in milliseconds; ratios are to `bound_ms` = max(compute, wire).

    compute_ms: until the first token, which prefill says as soon as it has it
    wire_ms:    all bytes of the hand-off at the pace of the link
    overlapped_ms, after_ms: until the first decoded token, with pages leaving early or afterwards
    """
    wire_bytes = int(median(kv.get("wire_bytes", 0) for _, kv in early))
    wire_ms = wire_bytes * 8 / (LINK_MBPS * 1e3)
    compute_ms = 1e3 * median(seen.ttft_s for seen, _ in early)
    bound_ms = max(compute_ms, wire_ms)
    overlapped_ms, after_ms = (
        1e3 * median(seen.decoded_s for seen, _ in answers) for answers in (early, late)
    )
    return {
        "codec": codec,
        "wire_bytes": wire_bytes,
        "compute_ms": compute_ms,
        "wire_ms": wire_ms,
        "bound_ms": bound_ms,
        "overlapped_ms": overlapped_ms,
        "overlapped_ratio": overlapped_ms / bound_ms,
        "after_ms": after_ms,
        "after_ratio": after_ms / bound_ms,
    }


def measure_side(overlap: bool, runs: int) -> dict[str, list[Answer]]:
    """Runs of every codec with a fresh pair of workers; one more is to warm up."""
    link = TransferConfig(link_mbps=LINK_MBPS, burst_bytes=BURST_BYTES, overlap=overlap)
    transfer = replace(link, min_disagg_tokens=0)
    with started_workers(Config(transfer=transfer), Role.DECODE, Role.PREFILL) as (
        _,
        pair,
    ):
        return asyncio.run(_ask_all(pair, runs))


@contextmanager
def started_workers(
    config: Config, *roles: Role
) -> Iterator[tuple[list[Child], list[WorkerInfo]]]:
    """Workers in processes of their own, and where each can be reached."""
    with ExitStack() as stack:
        ends = [stack.enter_context(Child(NotingEnd)) for _ in roles]
        cases = enumerate(zip(ends, roles, strict=True))
        yield (
            ends,
            [end.ask("start", config, role, f"worker-{x}") for x, (end, role) in cases],
        )


async def _ask_all(pair: Sequence[WorkerInfo], runs: int) -> dict[str, list[Answer]]:
    """A prompt of its own each time: prefill would know one of before, whatever its codec was."""
    found: dict[str, list[Answer]] = {codec: [] for codec in CODECS}
    async with routed(pair) as router:
        for number, codec in enumerate(tell(CODECS * (runs + 1), "{}".format)):
            found[codec].append(
                await visit(router, prompt_of(PROMPT_TOKENS, number), codec)
            )
    return {codec: runs[1:] for codec, runs in found.items()}


@asynccontextmanager
async def routed(
    pair: Sequence[WorkerInfo], config: RouterConfig | None = None
) -> AsyncIterator[Router]:
    """A router of these workers."""
    router, links = Router(config), [connect(started.address) for started in pair]
    for started, link in zip(pair, links, strict=True):
        router.add(WorkerConnection(started, WorkerClient(link)))
    try:
        yield router
    finally:
        await router.close()
        for link in links:
            await link.close()


async def visit(
    router: Router, prompt: Prompt, codec: str, answer: int = 3, at_s: float = 0.0
) -> Answer:
    """What a client sees of a request that leaves in so many seconds, and its figures."""
    await asyncio.sleep(at_s)
    seen, kv = RequestTimes(len(prompt), start_s=time.perf_counter()), Row()
    params = {"max_tokens": answer, "ignore_eos": True}
    async with aclosing(router.generate(prompt, params, codec)) as outputs:
        async for output in outputs:
            if output.token is not None:
                seen.tokens += 1
                seen.note()
            kv = dict(output.kv) or kv
    return seen, kv


def prompt_of(tokens: int, number: int) -> Prompt:
    """A prompt of so many tokens; another number begins another one, so that no page is known."""
    return tuple(Tokenizer.load().encode(f"{number}. " + TEXT * tokens)[:tokens])


# -- load


def measure_load(long: int = 8, others: int = 40) -> Row:
    """A row for every prompt: how long it waited for its first token, and for whom.

    passed_over: tokens of less urgent prompts that were computed meanwhile
    busy:        share of the time in which the prefill worker computed
    """
    pick, config = (
        random.Random(1),
        Config(transfer=TransferConfig(min_disagg_tokens=0)),
    )
    sizes = [(0.1 * number, PROMPT_TOKENS) for number in range(long)]
    times = (pick.uniform(0, 0.4 * long) for _ in range(others))
    sizes = sorted([*sizes, *((at, pick.randint(4, PROMPT_TOKENS)) for at in times)])
    with started_workers(config, Role.DECODE, Role.PREFILL) as ((_, prefill), pair):
        prompts, came, waits = zip(
            *asyncio.run(_arrive(pair, prefill, sizes)), strict=True
        )
        steps: list[StepRecord] = prefill.ask("steps")
    passed = passed_over(dict(zip(prompts, came, strict=True)), steps)
    computed = sum(end - began for began, end, _ in steps)
    rows = [
        {
            "arrived_s": at - came[0],
            "tokens": tokens,
            "waited_s": wait,
            "passed_over": over,
        }
        for at, (_, tokens), wait, over in zip(came, sizes, waits, passed, strict=True)
    ]
    measured = {
        "mean_wait_s": mean(waits),
        "longest_wait_s": max(waits),
        "most_passed_over": max(passed),
        "step_tokens": config.engine.max_batch_tokens,
        "mean_step_s": computed / len(steps),
        "busy": computed / (max(map(sum, zip(came, waits, strict=True))) - came[0]),
    }
    return result_of(rows, LOAD_NOTES, **measured)


async def _arrive(
    pair: Sequence[WorkerInfo], prefill: Child, sizes: Sequence[tuple[float, int]]
) -> list[tuple[Prompt, float, float]]:
    """Send every prompt in its turn; when that was, and the seconds to its first token."""
    prompts = [
        prompt_of(tokens, 1000 + number) for number, (_, tokens) in enumerate(sizes)
    ]
    told = tell(sizes, "a prompt of {0[1]} tokens".format)
    async with routed(pair) as router:
        await visit(router, prompt_of(PROMPT_TOKENS, 0), "")  # warms everything
        prefill.ask("steps")

        async def one(at: float, prompt: Prompt) -> tuple[Prompt, float, float]:
            await asyncio.sleep(at)
            next(told)
            came = time.monotonic()
            seen, _ = await visit(router, prompt, "")
            return prompt, came, seen.ttft_s

        calls = [
            one(at, prompt) for (at, _), prompt in zip(sizes, prompts, strict=True)
        ]
        return await asyncio.gather(*calls)


def passed_over(came: Mapping[Prompt, float], steps: Sequence[StepRecord]) -> list[int]:
    """Tokens of less urgent ones that were computed while each prompt waited: in steps that ended
    after it came, and did not end it.

    came: when, of each
    """
    left, found = {prompt: len(prompt) for prompt in came}, Counter[Prompt]()
    for began, end, computed in steps:
        there = [prompt for prompt, at in came.items() if left[prompt] and at < end]
        key = {x: urgency(left[x], max(0.0, began - came[x])) for x in there}
        for prompt in there:
            if computed.get(prompt, 0) < left[prompt]:
                found[prompt] += sum(
                    n for x, n in computed.items() if key[x] > key[prompt]
                )
        for prompt, count in computed.items():
            left[prompt] -= count
    return [found[prompt] for prompt in came]
