"""`disagg bench chaos` and `moves`: answers that go on whatever becomes of their workers.

Workers are processes of their own, each behind a door, for a router of this process; no Ray:

    router, other workers ──► Door ──► worker       a door that is shut cuts off whoever is behind

What Ray does for a service is done here: dead workers are told of and replaced.

Chaos: every answer is compared with the one that the same prompt got while nothing happened. Every
6 to 12 seconds a random worker that nothing happens to is

    killed    by SIGKILL; another one takes its place
    frozen    for 5 s: about as long as a router waits before it takes it for dead
    drained   another one takes its place, then it is told to leave: its sequences move
    cut off   for 2 to 8 s all its connections break and none is accepted

In the end nothing may be held, and no process or port of a worker may be left. Where it is calm
nothing of this happens, and the memory of the workers has to be what it was.

Moves: one answer at a time; in its middle its decode worker becomes a prefill worker, so that the
sequence moves to the other one. The gap is the longest between two tokens from then until five
tokens after the move. Beside it: prompt and answer prefilled again, as after a death.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, pairwise
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

from disagg.bench.child import LOOPBACK, Child, TcpProxy
from disagg.bench.handoff import WorkerEnd, prompt_of, visit
from disagg.bench.result import Row, result_of, table, tell
from disagg.config import (
    DEFAULT_CODEC,
    Config,
    EngineConfig,
    RouterConfig,
    TransferConfig,
)
from disagg.errors import DeadlineError, DisaggError, TransferError
from disagg.kv.arena import Arena
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Role, WorkerInfo, WorkerStatus
from disagg.transfer.records import ArenaSource, Manifest
from disagg.transfer.reservations import Admission
from disagg.transfer.rpc import Link, connect
from disagg.wire import digest
from disagg.worker.decode import DecodeSide
from disagg.worker.handoff import MigrationHandoff

POLL_S = 0.05
DRAIN_S, PATIENCE_S = 60.0, 120.0
STAYS = {"arena_bytes", "cached_pages", "cached_bytes"}  # of an idle worker
PROMPTS = 8  # different ones, of 40 to 320 tokens
IDLE_S = 60.0
NOTES = "seconds; gaps are between tokens of an answer, and before the first one"
CODECS = (DEFAULT_CODEC, "raw")
LENGTHS = (300, 1500)
BEFORE, AFTER, ANSWER = (
    40,
    5,
    120,
)  # tokens: until it is told to move, after it moved, of all
MOVE_NOTES = "milliseconds, medians; packaged model, CPU, one thread a worker"


# -- workers


@dataclass(eq=False)
class WorkerProcess:
    """A worker as its crew knows it."""

    name: str
    role: Role
    child: Child
    door: TcpProxy
    link: Link


class WorkerGroup:
    """Workers by name, and their router. `process`: what each is in its own."""

    def __init__(self, config: Config, process: type[WorkerEnd]):
        self.router = Router(config.router)
        self.hands: dict[str, WorkerProcess] = {}
        self.doors: list[TcpProxy] = []  # of all that ever were
        self._config, self._process = config, process
        self._numbers = count()

    async def hire(self, role: Role) -> WorkerProcess:
        """Start a worker and give it work."""
        name = f"{role}-{next(self._numbers)}"
        child = await asyncio.to_thread(Child, self._process)
        started = await asyncio.to_thread(child.ask, "start", self._config, role, name)
        door = TcpProxy(started.address)
        self.doors.append(door)
        started = replace(started, address=await door.open())
        link = connect(started.address)
        hand = self.hands[name] = WorkerProcess(name, role, child, door, link)
        self.router.add(WorkerConnection(started, WorkerClient(link)))
        return hand

    async def lose(self, hand: WorkerProcess) -> None:
        """A worker is dead, or has nothing to do any more."""
        del self.hands[hand.name]
        self.router.died(hand.name)
        hand.door.shut()
        await hand.link.close()
        await asyncio.to_thread(hand.child.__exit__)

    async def idle(self) -> dict[str, float]:
        """What is held, when that is nothing or after IDLE_S."""
        deadline = time.monotonic() + IDLE_S
        while (held := await self._held()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return held

    async def _held(self) -> dict[str, float]:
        held = dict[str, float]()
        for name, said in (await self.router.status()).items():
            gauges = said.gauges if isinstance(said, WorkerStatus) else {"silent": 1.0}
            held |= {
                f"{name} {x}": y for x, y in gauges.items() if y and x not in STAYS
            }
        return held

    async def left(self) -> dict[str, list[int]]:
        """Processes and ports that are there although everybody has left."""
        ports = []
        for port in (door.port for door in self.doors):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.close()
                ports.append(port)
        return {
            "processes": [child.pid or 0 for child in active_children()],
            "ports": ports,
        }

    def resident_mb(self) -> int:
        """Memory of the workers that are there, in MB; 0 where there is no /proc."""
        files = [
            Path("/proc", str(hand.child.pid), "statm") for hand in self.hands.values()
        ]
        pages = sum(int(file.read_text().split()[1]) for file in files if file.exists())
        return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


@asynccontextmanager
async def hired(
    config: Config, prefill: int, decode: int, process: type[WorkerEnd] = WorkerEnd
) -> AsyncIterator[WorkerGroup]:
    """A crew; all of it leaves in the end."""
    crew = WorkerGroup(config, process)
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    try:
        await asyncio.gather(*map(crew.hire, roles))
        await until(lambda: crew.router.ready, "all workers take part")
        yield crew
    finally:
        await crew.router.close()
        for hand in list(crew.hands.values()):
            await crew.lose(hand)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something to be so; DeadlineError, with what it is, after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DeadlineError(f"not within {PATIENCE_S:g} s: {what}") from None


# -- chaos


@dataclass(frozen=True)
class ChaosOptions:
    """How long, for whom, and how it is made.

    tokens: of an answer · pauses_s: the shortest and the longest between two events
    calm:   there are none
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
    calm: bool = False


def measure_chaos(options: ChaosOptions) -> Row:
    """A row for every event, and beside them what became of the answers, and what was left."""
    return asyncio.run(_measure(options))


async def _measure(options: ChaosOptions) -> Row:
    config = Config(
        codec=options.codec, router=RouterConfig(deadline_s=options.deadline_s)
    )
    async with hired(config, options.prefill, options.decode) as crew:
        prompts = [prompt_of(40 * (number + 1), number) for number in range(PROMPTS)]
        answers = [await _answer(crew, options, prompt, []) for prompt in prompts]
        storm, before = FaultInjector(crew, options), crew.resident_mb()
        calls = [
            storm.ask(prompts, answers, number) for number in range(options.streams)
        ]
        raging = asyncio.create_task(storm.rage())
        await asyncio.gather(raging, *calls)
        held, rules, after = await crew.idle(), crew.router.table, crew.resident_mb()
    failed = storm.failed.total()
    return result_of(
        raging.result(),
        NOTES,
        options=asdict(options),
        completed=storm.completed,
        failed=failed,
        wrong=storm.wrong,
        completed_share=storm.completed / max(1, storm.completed + failed),
        errors=dict(storm.failed),
        moved=rules.moves,
        retried=rules.retries,
        unequal_tokens=rules.unequal_tokens,
        longest_gap_s=max(storm.gaps_s),
        median_gap_s=median(storm.gaps_s),
        resident_mb={"before": before, "after": after},
        held=held,
        left=await crew.left(),
    )


async def _answer(
    crew: WorkerGroup,
    options: ChaosOptions,
    prompt: tuple[int, ...],
    gaps_s: list[float],
) -> list[int]:
    """The tokens of one answer; `gaps_s` gets the time before each."""
    tokens, last = list[int](), time.monotonic()
    params = {"max_tokens": options.tokens, "ignore_eos": True}
    async with aclosing(crew.router.generate(prompt, params, options.codec)) as outputs:
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
                gaps_s.append((now := time.monotonic()) - last)
                last = now
    return tokens


class FaultInjector:
    """Asks, and strikes meanwhile. `failed`: answers by the error that they ended with."""

    def __init__(self, crew: WorkerGroup, options: ChaosOptions):
        self.completed = self.wrong = 0
        self.failed: Counter[str] = Counter()
        self.gaps_s: list[float] = []
        self._crew = crew
        self._options = options
        self._pick = random.Random(options.seed)
        self._struck: set[str] = set()
        self._over = False

    async def ask(
        self, prompts: list[tuple[int, ...]], answers: list[list[int]], number: int
    ) -> None:
        """One stream of answers, until the storm is over."""
        while not self._over:
            number = (number + 1) % PROMPTS
            try:
                tokens = await _answer(
                    self._crew, self._options, prompts[number], self.gaps_s
                )
            except DisaggError as error:
                self.failed[f"{error.reason}: {error}"] += 1
            else:
                self.completed += 1
                self.wrong += tokens != answers[number]

    async def rage(self) -> list[Row]:
        """Strike until the time is over; what was done to whom, when."""
        events, began = list[Row](), time.monotonic()
        if self._options.calm:
            await asyncio.sleep(60 * self._options.minutes)
            self._over = True
            return events
        strikes = (self._kill, self._freeze, self._drain, self._cut_off)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._pick.uniform(*self._options.pauses_s))
                if (at := time.monotonic() - began) > 60 * self._options.minutes:
                    break
                strike = self._pick.choice(strikes)
                if names := sorted(self._crew.hands.keys() - self._struck):
                    name = self._pick.choice(names)
                    events.append(
                        {"at_s": at, "worker": name, "what": strike.__name__[1:]}
                    )
                    print(*events[-1].values(), file=sys.stderr, flush=True)
                    tasks.create_task(self._strike(strike, self._crew.hands[name]))
        self._over = True
        return events

    async def _strike(
        self, strike: Callable[[WorkerProcess], Awaitable[None]], hand: WorkerProcess
    ) -> None:
        self._struck.add(hand.name)
        await strike(hand)
        self._struck.discard(hand.name)

    async def _kill(self, hand: WorkerProcess) -> None:
        os.kill(hand.child.pid, signal.SIGKILL)
        await self._crew.lose(hand)
        await self._crew.hire(hand.role)

    async def _freeze(self, hand: WorkerProcess) -> None:
        os.kill(hand.child.pid, signal.SIGSTOP)
        await asyncio.sleep(5.0)
        os.kill(hand.child.pid, signal.SIGCONT)

    async def _drain(self, hand: WorkerProcess) -> None:
        await self._crew.hire(hand.role)
        await asyncio.to_thread(hand.child.ask, "leave", DRAIN_S)
        await self._crew.lose(hand)

    async def _cut_off(self, hand: WorkerProcess) -> None:
        hand.door.shut()
        await asyncio.sleep(self._pick.uniform(2.0, 8.0))
        await hand.door.open()


def draw_chaos(result: Row) -> str:
    """What people read."""
    told = (
        "completed",
        "failed",
        "wrong",
        "moved",
        "retried",
        "longest_gap_s",
        "median_gap_s",
    )
    return f"{table(result['rows'])}\n\n{table([{x: result[x] for x in told}])}"


# -- moves


Seen = Counter[
    tuple[int, ...]
]  # the digests of all items of a sequence, each as often as it was


@contextmanager
def witnessed() -> Iterator[tuple[Seen, Seen]]:
    """What sequences that leave workers of this process consist of, and those that come.

    Read where it lies: when one has stopped, and before another engine has it.
    """
    left, came, begin, admit = Seen(), Seen(), MigrationHandoff.begin, DecodeSide.admit

    def begins(
        self: MigrationHandoff, plan: Plan, groups: Sequence[GroupState]
    ) -> None:
        begin(self, plan, groups)
        if self.all_offered:
            left[_digests(self.arena, self.manifest, groups)] += 1

    def admits(self: DecodeSide, admission: Admission) -> None:
        if tokens := admission.job.moved:
            engine = self.context.engine
            checklist = Manifest(engine.plan(admission.job.codec), tokens)
            came[_digests(engine.pool.arena, checklist, admission.groups)] += 1
        admit(self, admission)

    with (
        patch.object(MigrationHandoff, "begin", begins),
        patch.object(DecodeSide, "admit", admits),
    ):
        yield left, came


def _digests(
    arena: Arena, checklist: Manifest, groups: Sequence[GroupState]
) -> tuple[int, ...]:
    items = ArenaSource(arena, checklist, groups)
    return tuple(digest(items.read([item])[0]) for item in checklist.items)


class PageWitness(WorkerEnd):
    """A worker that looks at what leaves and what comes."""

    async def start(self, config: Config, role: Role, name: str) -> WorkerInfo:
        self._stack = ExitStack()
        self._seen = self._stack.enter_context(witnessed())
        return await super().start(config, role, name)

    async def seen(self) -> tuple[Seen, Seen]:
        """What left and what came so far."""
        return self._seen


class MoveSample(NamedTuple):
    """One answer: its longest gap around the move, all other gaps, and a prefill instead of it."""

    gap_ms: float
    others_ms: list[float]
    prefill_ms: float
    prefill_bytes: int


def measure_moves(rounds: int = 20) -> Row:
    """A row for every codec and length of a prompt.

    moves, equal:   how many there were; with equal digests of all records on both sides
    gap_ms, itl_ms: between tokens, at a move and else
    stopped_ms:     from the last token at one worker until the other one has acknowledged it all
    prefill_ms:     until the first decoded token, had prompt and answer been prefilled again
    """
    return result_of(asyncio.run(_measure_moves(rounds)), MOVE_NOTES, rounds=rounds)


async def _measure_moves(rounds: int) -> list[Row]:
    config = Config(
        engine=EngineConfig(prefix_cache=False), transfer=TransferConfig(dedup=False)
    )
    rows = []
    async with hired(config, 1, 2, PageWitness) as crew:
        for codec, tokens in tell([(x, y) for x in CODECS for y in LENGTHS], str):
            await _look(crew, prompt_of(tokens, 0), codec)  # warms everything
            before, seen_before = await _counts(crew), await _seen(crew)
            prompts = [prompt_of(tokens, number + 1) for number in range(rounds)]
            seen = [await _look(crew, prompt, codec) for prompt in prompts]
            left, came = (
                x - y for x, y in zip(await _seen(crew), seen_before, strict=True)
            )
            moved = await _counts(crew) - before
            gap_ms = median(sight.gap_ms for sight in seen)
            itl_ms = median(chain(*(sight.others_ms for sight in seen)))
            row = {"codec": codec, "prompt_tokens": tokens, "moves": moved["moved"]}
            row |= {"equal": sum((left & came).values())}
            row |= {"gap_ms": gap_ms, "itl_ms": itl_ms, "ratio": gap_ms / itl_ms}
            row |= {"stopped_ms": moved["moved_ms"] / moved["moved"]}
            row |= {"moved_bytes": moved["moved_bytes"] // moved["moved"]}
            row |= {"prefill_ms": median(sight.prefill_ms for sight in seen)}
            row |= {"prefill_bytes": int(median(sight.prefill_bytes for sight in seen))}
            rows.append(row)
    return rows


async def _look(crew: WorkerGroup, prompt: tuple[int, ...], codec: str) -> MoveSample:
    """One answer that moves; then its beginning again, as a prompt."""
    rules, tokens, times, told, ends = crew.router.table, list[int](), [], 0, ANSWER
    moves, params = rules.moves, {"max_tokens": ANSWER, "ignore_eos": True}
    async with aclosing(crew.router.generate(prompt, params, codec)) as outputs:
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
                times.append(time.monotonic())
            if len(tokens) == BEFORE and not told:
                (entry,) = rules.requests.values()
                source, told = crew.hands[str(entry.decode)], len(times)
                await asyncio.to_thread(source.child.ask, "assume", Role.PREFILL)
            if rules.moves > moves and ends == ANSWER:
                ends = len(times) + AFTER
    await asyncio.to_thread(source.child.ask, "assume", Role.DECODE)
    peers = crew.router.peers
    await until(
        lambda: peers[source.name].info.role.decodes, f"{source.name} decodes again"
    )
    if rules.moves == moves:
        raise TransferError(
            f"an answer of {len(tokens)} tokens ended before it had moved"
        )
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    again, kv = await visit(crew.router, (*prompt, *tokens[: ends - AFTER]), codec)
    others_ms, prefill_ms = gaps[1:told] + gaps[ends:], 1e3 * again.decoded_s
    return MoveSample(
        max(gaps[told:ends]), others_ms, prefill_ms, kv.get("wire_bytes", 0)
    )


async def _seen(crew: WorkerGroup) -> tuple[Seen, Seen]:
    """What left and what came, of all workers together."""
    found = Seen(), Seen()
    for hand in crew.hands.values():
        for total, some in zip(
            found, await asyncio.to_thread(hand.child.ask, "seen"), strict=True
        ):
            total.update(some)
    return found


async def _counts(crew: WorkerGroup) -> Counter[str]:
    """Of all workers together."""
    found = Counter[str]()
    for said in (await crew.router.status()).values():
        assert isinstance(said, WorkerStatus)
        found.update(said.info["counts"])
    return found
