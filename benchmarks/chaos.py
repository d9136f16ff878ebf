"""Answers under faults of workers, hosts and the network.

    python -m benchmarks.chaos --seed 12 --minutes 10 --json --out FILE
    python -m benchmarks.chaos --fault hang --fault router_cut_off

Every answer is compared with the answer to the same prompt before any fault. Every 6 to 12 seconds
a random fault hits a random worker that has none; `faults.py` says what each is. A fault of all
workers waits until none has a fault, and the next fault waits for it. No process may open more than
256 files.

At the end no worker may hold records or reservations, and no process or port may remain. With
`--calm` there are no faults, and the memory of the workers must not grow.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from statistics import median

from typer import Option

from benchmarks import command, faults
from benchmarks.faults import (
    ALL_FAULTS,
    GROUP_FAULTS,
    WORKER_FAULTS,
    Faults,
    FaultyWorker,
    limited_files,
)
from benchmarks.worker_group import WorkerGroup, running_group
from disagg.bench.result import Row, announce, result_of
from disagg.bench.tables import table
from disagg.bench.workers import Prompt, prompt_of
from disagg.cli.bench import Out, show, without_none
from disagg.cli.checks import check_codecs
from disagg.cli.options import Json, refuse_idle
from disagg.config import DEFAULT_CODEC, Config, EngineConfig, RouterConfig
from disagg.errors import DisaggError, UnknownNameError

NUM_PROMPTS = 8  # different ones, of 40 to 320 tokens
STEP_TOKENS = 40
POLL_S = 0.1
EVERYBODY = "all"  # hit by a fault of all workers
NOTES = "seconds; gaps are between tokens of an answer, and before the first one"
SUMMARY = (
    "completed",
    "failed",
    "wrong",
    "moved",
    "retried",
    "longest_gap_s",
    "median_gap_s",
)


@dataclass(frozen=True)
class ChaosOptions:
    """Duration, workers and load.

    tokens:   per answer
    pauses_s: shortest and longest pause between two faults
    faults:   names of those that happen
    calm:     no faults
    """

    seed: int = 1
    minutes: float = 10.0
    prefill: int = 2
    decode: int = 2
    streams: int = 40
    tokens: int = 100
    codec: str = DEFAULT_CODEC
    pauses_s: tuple[float, float] = (6.0, 12.0)
    deadline_s: float = 120.0
    faults: Sequence[str] = ALL_FAULTS
    calm: bool = False


def measure_chaos(options: ChaosOptions) -> Row:
    """A row for every fault; also counts of answers and leaks."""
    for name in options.faults:
        if name not in ALL_FAULTS:
            raise UnknownNameError.of("fault", name, ALL_FAULTS)
    announce(f"seed {options.seed}")
    with limited_files():
        return asyncio.run(_measure(options))


async def _measure(options: ChaosOptions) -> Row:
    router = RouterConfig(deadline_s=options.deadline_s)
    engine = EngineConfig(stuck_s=faults.REPLACE_S)
    config = Config(codec=options.codec, engine=engine, router=router)
    async with running_group(
        config, options.prefill, options.decode, FaultyWorker
    ) as group:
        prompts = [
            prompt_of(STEP_TOKENS * (number + 1), number)
            for number in range(NUM_PROMPTS)
        ]
        expected = [await _answer(group, options, prompt, []) for prompt in prompts]
        injector = FaultInjector(group, options, prompts, expected)
        memory_before = group.resident_mb()
        injecting = asyncio.create_task(injector.inject())
        streams = [injector.stream(number) for number in range(options.streams)]
        await asyncio.gather(injecting, *streams)
        gauges = await group.gauges_when_idle()
        memory_after = group.resident_mb()
        requests = group.router.table
    failed = injector.failed.total()
    return result_of(
        injecting.result(),
        NOTES,
        options=asdict(options),
        completed=injector.completed,
        failed=failed,
        wrong=injector.wrong,
        completed_share=injector.completed / max(1, injector.completed + failed),
        errors=dict(injector.failed),
        moved=requests.moves,
        retried=requests.retries,
        unequal_tokens=requests.unequal_tokens,
        longest_gap_s=max(injector.gaps_s),
        median_gap_s=median(injector.gaps_s),
        resident_mb={"before": memory_before, "after": memory_after},
        held=gauges,
        left=await group.leftovers(),
    )


async def _answer(
    group: WorkerGroup, options: ChaosOptions, prompt: Prompt, gaps_s: list[float]
) -> list[int]:
    """The tokens of one answer; `gaps_s` gets the time before each."""
    tokens = list[int]()
    last = time.monotonic()
    params = {"max_tokens": options.tokens, "ignore_eos": True}
    outputs = group.router.generate(prompt, params, options.codec)
    async with aclosing(outputs):
        async for output in outputs:
            if output.token is not None:
                now = time.monotonic()
                tokens.append(output.token)
                gaps_s.append(now - last)
                last = now
    return tokens


class FaultInjector:
    """Streams of answers, and faults while they run.

    failed: answers by the error that ended them
    """

    def __init__(
        self,
        group: WorkerGroup,
        options: ChaosOptions,
        prompts: list[Prompt],
        expected: list[list[int]],
    ):
        self.completed = 0
        self.wrong = 0
        self.failed: Counter[str] = Counter()
        self.gaps_s: list[float] = []
        self._group = group
        self._options = options
        self._prompts = prompts
        self._expected = expected
        self._random = random.Random(options.seed)
        self._faults = Faults(group, self._random)
        self._faulty: set[str] = set()  # workers by name
        self._over = False

    async def stream(self, number: int) -> None:
        """One stream of answers, until the faults are over."""
        while not self._over:
            number = (number + 1) % len(self._prompts)
            prompt = self._prompts[number]
            try:
                tokens = await _answer(self._group, self._options, prompt, self.gaps_s)
            except DisaggError as error:
                self.failed[f"{error.reason}: {error}"] += 1
                continue
            self.completed += 1
            if tokens != self._expected[number]:
                self.wrong += 1

    async def inject(self) -> list[Row]:
        """Inject faults until the time is over: which, at which worker, and when."""
        rows = list[Row]()
        duration_s = 60 * self._options.minutes
        if self._options.calm:
            await asyncio.sleep(duration_s)
            self._over = True
            return rows
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._random.uniform(*self._options.pauses_s))
                at_s = time.monotonic() - began
                if at_s > duration_s:
                    break
                fault = self._random.choice(self._options.faults)
                name = await self._next_worker(fault)
                row = {"at_s": at_s, "worker": name, "what": fault}
                rows.append(row)
                announce(" ".join(map(str, row.values())))
                injection = tasks.create_task(self._inject(fault, name))
                if fault in GROUP_FAULTS:
                    await injection
        self._over = True
        return rows

    async def _next_worker(self, fault: str) -> str:
        """The worker that a fault hits; waits until there is one without another fault."""
        while True:
            names = sorted(self._group.workers.keys() - self._faulty)
            if fault in GROUP_FAULTS and not self._faulty:
                return EVERYBODY
            if fault in WORKER_FAULTS and names:
                return self._random.choice(names)
            await asyncio.sleep(POLL_S)

    async def _inject(self, fault: str, name: str) -> None:
        self._faulty.add(name)
        await self._run_fault(fault, name)
        self._faulty.discard(name)

    def _run_fault(self, fault: str, name: str) -> Awaitable[None]:
        if fault in GROUP_FAULTS:
            return GROUP_FAULTS[fault](self._faults)
        return WORKER_FAULTS[fault](self._faults, self._group.workers[name])


def draw_chaos(result: Row) -> str:
    """The result as tables."""
    summary = {name: result[name] for name in SUMMARY}
    return f"{table(result['rows'])}\n\n{table([summary])}"


def chaos(
    seed: int | None = Option(None, help="Seed of the faults; default: 1."),
    minutes: float = Option(10.0, min=0.1, help="Duration."),
    codec: str | None = Option(None, help="Codec spec."),
    streams: int = Option(40, min=1, help="Concurrent answers."),
    fault: list[str] | None = Option(
        None, "--fault", help=f"{', '.join(ALL_FAULTS)}; may be repeated; default: all."
    ),
    calm: bool = Option(False, "--calm", help="Inject no faults."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Stream answers while workers are killed, frozen, hung, drained, cut off and upgraded."""
    refuse_idle(
        calm, "with --calm, which has no faults", seed=seed is not None, fault=fault
    )
    check_codecs(None, [] if codec is None else [codec])
    fields = without_none(codec=codec, seed=seed, faults=fault)
    options = ChaosOptions(minutes=minutes, streams=streams, calm=calm, **fields)
    show(measure_chaos(options), out, as_json, draw_chaos)


if __name__ == "__main__":
    command.main(chaos, "chaos")
