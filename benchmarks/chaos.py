"""Answers under faults of workers, hosts and the network.

    python -m benchmarks.chaos --seed 12 --minutes 10 --json --out FILE
    python -m benchmarks.chaos --fault hang --fault router_cut_off
    python -m benchmarks.chaos --model FOLDER --codec raw
    python -m benchmarks.chaos --agents
    python -m benchmarks.chaos --prefill-ranks 2 --decode-ranks 2 --codec raw

Every answer is compared with the answer to the same prompt before any fault. Every 6 to 12 seconds
a random fault hits a random worker or door that has none; `faults.py` says what each is. A fault of
all waits until none has a fault, and the next fault waits for it. No process may open more than 256
files.

With `--agents` the requests are those of `agent_mix.py`, through HTTP: answers bound to schemas,
tool calls, and plain ones. Every answer that does not end at its token limit must also be valid.

At the end no worker may hold records or reservations, the router may have no request, and no
process or port may remain. With
`--calm` there are no faults, and the memory of the workers must not grow.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from typer import Option

from benchmarks import agent_mix, command, faults
from benchmarks.agent_doors import TEMPLATE, AgentDoorEnd
from benchmarks.faults import (
    ALL_FAULTS,
    DOOR_FAULTS,
    FAULTS_OF_RANKS,
    GROUP_FAULTS,
    RANK_FAULTS,
    WORKER_FAULTS,
    Faults,
    FaultyWorker,
    limited_files,
)
from benchmarks.front_group import Crowd, DoorEnd, FrontGroup, TokenRequest
from benchmarks.worker_group import running
from disagg.bench.result import Row, announce, result_of
from disagg.bench.tables import table
from disagg.bench.workers import prompt_of
from disagg.cli.bench import Out, show, without_none
from disagg.cli.checks import check_codecs
from disagg.cli.options import Json, Model, refuse_idle
from disagg.config import (
    DEFAULT_CODEC,
    MAX_RANKS,
    ClusterConfig,
    Config,
    EngineConfig,
    ModelConfig,
    RouterConfig,
    ServerConfig,
)
from disagg.errors import UnknownNameError

NUM_PROMPTS = 8  # different ones, of 40 to 320 tokens
STEP_TOKENS = 40
POLL_S = 0.1
READ_S = 0.2
EVERYBODY = "all"  # hit by a fault of all
NOTES = (
    "seconds; gaps are between tokens of an answer, and before the first one; "
    "cut: answers that ended with their door"
)
SUMMARY = (
    "completed",
    "failed",
    "wrong",
    "cut",
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
    faults:   names of those that happen; default: all, those of followers if there are any
    prefill_ranks, decode_ranks: processes of each worker of this role
    calm:     no faults
    agents:   requests of agents; `tokens` is not used
    """

    model: str | None = None
    seed: int = 1
    minutes: float = 10.0
    prefill: int = 2
    decode: int = 2
    doors: int = 2
    streams: int = 40
    tokens: int = 100
    codec: str = DEFAULT_CODEC
    pauses_s: tuple[float, float] = (6.0, 12.0)
    deadline_s: float = 120.0
    faults: Sequence[str] = ()
    calm: bool = False
    agents: bool = False
    prefill_ranks: int = 1
    decode_ranks: int = 1

    @property
    def known_faults(self) -> Sequence[str]:
        """All that can happen to these workers."""
        has_followers = self.prefill_ranks > 1 or self.decode_ranks > 1
        return FAULTS_OF_RANKS if has_followers else ALL_FAULTS


def measure_chaos(options: ChaosOptions) -> Row:
    """A row for every fault; also counts of answers and leaks."""
    known = options.known_faults
    for name in options.faults:
        if name not in known:
            raise UnknownNameError.of("fault", name, known)
    options = replace(options, faults=options.faults or known)
    announce(f"seed {options.seed}")
    with limited_files():
        return asyncio.run(_measure(options))


async def _measure(options: ChaosOptions) -> Row:
    router = RouterConfig(deadline_s=options.deadline_s)
    engine = EngineConfig(stuck_s=faults.REPLACE_S)
    model = ModelConfig(options.model)
    cluster = ClusterConfig(
        prefill_ranks=options.prefill_ranks,
        decode_ranks=options.decode_ranks,
        rank_timeout_s=faults.RANK_TIMEOUT_S,
    )
    config = Config(
        options.codec, model=model, engine=engine, router=router, cluster=cluster
    )
    door: type[DoorEnd] = DoorEnd
    if options.agents:
        config = replace(config, server=ServerConfig(chat_template=str(TEMPLATE)))
        door = AgentDoorEnd
    group = FrontGroup(config, FaultyWorker, door)
    await group.open(options.doors)
    async with running(group, options.prefill, options.decode):
        crowds = await _crowds(group, options)
        injector = FaultInjector(group, options)
        memory_before = group.resident_mb()
        await group.begin(crowds)
        reading = asyncio.create_task(injector.read())
        faults_by_time = await injector.inject()
        reading.cancel()
        await group.end()
        held = await group.gauges_when_idle()
        memory_after = group.resident_mb()
        counts = (await group.figures()).counts
    answers = group.answers
    num_failed = answers.failed.total()
    return result_of(
        faults_by_time,
        NOTES,
        options=asdict(options),
        completed=answers.completed,
        failed=num_failed,
        wrong=answers.wrong,
        cut=group.num_cut,
        completed_share=answers.completed / max(1, answers.completed + num_failed),
        errors=dict(answers.failed),
        kinds=_kinds(answers.outcomes),
        mistakes=answers.mistakes,
        **counts,
        longest_gap_s=max(answers.gaps_s),
        median_gap_s=median(answers.gaps_s),
        resident_mb={"before": memory_before, "after": memory_after},
        held=held,
        left=await group.leftovers(),
    )


def _kinds(outcomes: Counter[tuple[str, str]]) -> dict[str, Row]:
    """Counts of answers by kind, then by outcome."""
    kinds: dict[str, Row] = {}
    for (kind, outcome), count in sorted(outcomes.items()):
        kinds.setdefault(kind, {})[outcome] = count
    return kinds


async def _crowds(group: FrontGroup, options: ChaosOptions) -> list[Crowd]:
    """The clients of each door, and the answers that they have to get."""
    requests: Sequence[Any] = _token_requests(options)
    if options.agents:
        requests = agent_mix.agent_requests()
    (door, *_) = group.doors.values()
    expected = [await door.ask("answer", request) for request in requests]
    numbers = range(options.streams)
    step = agent_mix.ROUND if options.agents else 1
    return [
        Crowd(requests, expected, numbers[number :: options.doors], step)
        for number in range(options.doors)
    ]


def _token_requests(options: ChaosOptions) -> list[TokenRequest]:
    prompts = [
        prompt_of(STEP_TOKENS * (number + 1), number, options.model)
        for number in range(NUM_PROMPTS)
    ]
    return [TokenRequest(prompt, options.codec, options.tokens) for prompt in prompts]


class FaultInjector:
    """Faults while clients of the doors read answers."""

    def __init__(self, group: FrontGroup, options: ChaosOptions):
        self._group = group
        self._options = options
        self._random = random.Random(options.seed)
        self._faults = Faults(group, self._random)
        self._faulty: set[str] = set()  # workers and doors by name

    async def read(self) -> None:
        """Read the answers of the clients again and again, until cancelled."""
        while True:
            await self._group.take_answers()
            await asyncio.sleep(READ_S)

    async def inject(self) -> list[Row]:
        """Inject faults until the time is over: which, at which worker, and when."""
        rows = list[Row]()
        duration_s = 60 * self._options.minutes
        if self._options.calm:
            await asyncio.sleep(duration_s)
            return rows
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._random.uniform(*self._options.pauses_s))
                at_s = time.monotonic() - began
                if at_s > duration_s:
                    break
                fault = self._random.choice(self._options.faults)
                name = await self._next_victim(fault)
                row = {"at_s": at_s, "victim": name, "what": fault}
                rows.append(row)
                announce(" ".join(map(str, row.values())))
                injection = tasks.create_task(self._inject(fault, name))
                if fault in GROUP_FAULTS:
                    await injection
        return rows

    async def _next_victim(self, fault: str) -> str:
        """What a fault hits; waits until there is something without another fault."""
        while True:
            if fault in GROUP_FAULTS and not self._faulty:
                return EVERYBODY
            victims = self._victims(fault) - self._faulty
            if victims:
                return self._random.choice(sorted(victims))
            await asyncio.sleep(POLL_S)

    def _victims(self, fault: str) -> set[str]:
        """The names of all that a fault may hit."""
        workers = self._group.workers
        if fault in WORKER_FAULTS:
            return set(workers)
        if fault in RANK_FAULTS:
            return {name for name, x in workers.items() if x.info.ranks > 1}
        return set(self._group.doors) if fault in DOOR_FAULTS else set()

    async def _inject(self, fault: str, name: str) -> None:
        self._faulty.add(name)
        await self._run_fault(fault, name)
        self._faulty.discard(name)

    def _run_fault(self, fault: str, name: str) -> Awaitable[None]:
        if fault in GROUP_FAULTS:
            return GROUP_FAULTS[fault](self._faults)
        if fault in DOOR_FAULTS:
            return DOOR_FAULTS[fault](self._faults, name)
        faults_of_workers = WORKER_FAULTS | RANK_FAULTS
        return faults_of_workers[fault](self._faults, self._group.workers[name])


def draw_chaos(result: Row) -> str:
    """The result as tables."""
    summary = {name: result[name] for name in SUMMARY}
    return f"{table(result['rows'])}\n\n{table([summary])}"


def chaos(
    model: Model = None,
    seed: int | None = Option(None, help="Seed of the faults; default: 1."),
    minutes: float = Option(10.0, min=0.1, help="Duration."),
    codec: str | None = Option(None, help="Codec spec."),
    streams: int = Option(40, min=1, help="Concurrent answers."),
    fault: list[str] | None = Option(
        None,
        "--fault",
        help=f"{', '.join((*ALL_FAULTS, *RANK_FAULTS))}; may be repeated; default: all.",
    ),
    prefill_ranks: int = Option(
        1, min=1, max=MAX_RANKS, help="Processes of each prefill worker."
    ),
    decode_ranks: int = Option(
        1, min=1, max=MAX_RANKS, help="Processes of each decode worker."
    ),
    calm: bool = Option(False, "--calm", help="Inject no faults."),
    agents: bool = Option(
        False, "--agents", help="Answers bound to schemas and tool calls, validated."
    ),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Stream answers while workers, doors and the router are killed, hung, cut off or replaced."""
    refuse_idle(
        calm, "with --calm, which has no faults", seed=seed is not None, fault=fault
    )
    check_codecs(model, [] if codec is None else [codec])
    fields = without_none(codec=codec, seed=seed, faults=fault)
    options = ChaosOptions(
        model,
        minutes=minutes,
        streams=streams,
        calm=calm,
        agents=agents,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        **fields,
    )
    show(measure_chaos(options), out, as_json, draw_chaos)


if __name__ == "__main__":
    command.main(chaos, "chaos")
