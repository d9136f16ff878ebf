"""`disagg bench chaos`: answers that go on while workers are killed, frozen, drained and cut off.

Every answer is compared with the one that the same prompt got while nothing happened. Every 6 to 12
seconds a random worker that nothing happens to is

    killed    by SIGKILL; another one takes its place
    frozen    for 5 s: about as long as a router waits before it takes it for dead
    drained   another one takes its place, then it is told to leave: its sequences move
    cut off   for 2 to 8 s all its connections break and none is accepted

In the end nothing may be held, and no process or port of a worker may be left. Where it is calm
nothing of this happens, and the memory of the workers has to be what it was.
"""

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from disagg.bench.crew import Crew, Hand, hired
from disagg.bench.handoff import prompt_of
from disagg.bench.result import Row, result_of, table
from disagg.config import DEFAULT_CODEC, Config, RouterConfig
from disagg.errors import DisaggError

PROMPTS = 8  # different ones, of 40 to 320 tokens
IDLE_S = 60.0
NOTES = "seconds; gaps are between tokens of an answer, and before the first one"


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


@dataclass
class Outcome:
    """What became of the answers. `failed`: by the error that they ended with."""

    completed: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)


def measure_chaos(options: ChaosOptions) -> Row:
    """A row for every event, and beside them what became of the answers, and what was left."""
    return asyncio.run(_measure(options))


async def _measure(options: ChaosOptions) -> Row:
    config = Config(codec=options.codec, router=RouterConfig(deadline_s=options.deadline_s))
    async with hired(config, options.prefill, options.decode) as crew:
        prompts = [prompt_of(40 * (number + 1), number) for number in range(PROMPTS)]
        answers = [await _answer(crew, options, prompt, []) for prompt in prompts]
        storm, before = Storm(crew, options), resident_mb(*crew.pids)
        calls = [storm.ask(prompts, answers, number) for number in range(options.streams)]
        raging = asyncio.create_task(storm.rage())
        await asyncio.gather(raging, *calls)
        held, rules = await crew.idle(IDLE_S), crew.router.dispatch
        after = resident_mb(*(hand.child.pid for hand in crew.hands.values()))
    outcome = storm.outcome
    failed, gaps = sum(outcome.failed.values()), outcome.gaps_s
    return result_of(
        raging.result(),
        NOTES,
        options=asdict(options),
        completed=outcome.completed,
        failed=failed,
        wrong=outcome.wrong,
        completed_share=outcome.completed / max(1, outcome.completed + failed),
        errors=dict(outcome.failed),
        moved=rules.moves,
        retried=rules.retries,
        unequal_tokens=rules.unequal_tokens,
        longest_gap_s=max(gaps),
        median_gap_s=median(gaps),
        resident_mb={"before": before, "after": after},
        held=held,
        left=await crew.left(),
    )


async def _answer(
    crew: Crew, options: ChaosOptions, prompt: tuple[int, ...], gaps_s: list[float]
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


class Storm:
    """Asks, and strikes meanwhile."""

    def __init__(self, crew: Crew, options: ChaosOptions):
        self.outcome = Outcome()
        self._crew = crew
        self._options = options
        self._pick = random.Random(options.seed)
        self._struck: set[str] = set()
        self._over = False

    async def ask(
        self, prompts: list[tuple[int, ...]], answers: list[list[int]], number: int
    ) -> None:
        """One stream of answers, until the storm is over."""
        outcome = self.outcome
        while not self._over:
            number = (number + 1) % PROMPTS
            try:
                tokens = await _answer(self._crew, self._options, prompts[number], outcome.gaps_s)
            except DisaggError as error:
                outcome.failed[f"{error.reason}: {error}"] += 1
            else:
                outcome.completed += 1
                outcome.wrong += tokens != answers[number]

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
                    events.append({"at_s": at, "worker": name, "what": strike.__name__[1:]})
                    print(*events[-1].values(), file=sys.stderr, flush=True)
                    tasks.create_task(self._strike(strike, self._crew.hands[name]))
        self._over = True
        return events

    async def _strike(self, strike: Callable[[Hand], Awaitable[None]], hand: Hand) -> None:
        self._struck.add(hand.name)
        await strike(hand)
        self._struck.discard(hand.name)

    async def _kill(self, hand: Hand) -> None:
        hand.kill(signal.SIGKILL)
        await self._crew.lose(hand)
        await self._crew.hire(hand.role)

    async def _freeze(self, hand: Hand) -> None:
        hand.kill(signal.SIGSTOP)
        await asyncio.sleep(5.0)
        hand.kill(signal.SIGCONT)

    async def _drain(self, hand: Hand) -> None:
        await self._crew.hire(hand.role)
        await asyncio.to_thread(hand.child.ask, "leave")
        await self._crew.lose(hand)

    async def _cut_off(self, hand: Hand) -> None:
        hand.door.shut()
        await asyncio.sleep(self._pick.uniform(2.0, 8.0))
        await hand.door.open()


def resident_mb(*pids: int) -> int:
    """Memory of processes, in MB; 0 where there is no /proc."""
    pages = 0
    for pid in pids:
        file = Path("/proc", str(pid), "statm")
        pages += int(file.read_text().split()[1]) if file.exists() else 0
    return pages * 4096 // 1_000_000


def draw_chaos(result: Row) -> str:
    """What people read."""
    told = ("completed", "failed", "wrong", "moved", "retried", "longest_gap_s", "median_gap_s")
    return f"{table(result['rows'])}\n\n{table([{x: result[x] for x in told}])}"
