"""How long prompts wait for each other.

    python -m benchmarks.load --json --out FILE

One pair of workers gets 8 prompts of 1,500 tokens, and 40 of 4 to 1,500 tokens while these are
computed. A prompt should wait only for those with less work left, and for one chunk of a longer
prompt. The benchmark counts the tokens computed for longer prompts while a prompt waits.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks import command
from benchmarks.recorded_worker import RecordedEnd, StepRecord
from disagg.bench.child import Child
from disagg.bench.result import Row, progress, result_of
from disagg.bench.workers import Prompt, prompt_of, routed, started_workers, visit
from disagg.cli.bench import Out, show
from disagg.cli.options import Json
from disagg.config import Config, TransferConfig
from disagg.engine.sequence import urgency
from disagg.transfer.messages import Role, WorkerInfo

LONG_TOKENS = 1500
LEAST_TOKENS = 4
INTERVAL_S = 0.1  # between two long prompts; the short ones come in four times as long
SEED = 1
NOTES = "seconds, tokens; the least work left goes first, halved for every second of waiting"


@dataclass(frozen=True)
class Arrival:
    """A prompt, when it came on the monotonic clock, and how long its first token took."""

    prompt: Prompt
    came_at: float
    waited_s: float


def measure_load(long: int = 8, others: int = 40) -> Row:
    """A row for every prompt: the time to its first token, and how much of it others took.

    passed_over: tokens of less urgent prompts computed meanwhile
    busy:        share of the time in which the prefill worker computed
    """
    config = Config(transfer=TransferConfig(min_disagg_tokens=0))
    with started_workers(config, Role.DECODE, Role.PREFILL, process=RecordedEnd) as (
        workers,
        infos,
    ):
        prefill = workers[1]
        schedule = make_schedule(long, others)
        arrivals = asyncio.run(_send_all(infos, prefill, schedule))
        steps: list[StepRecord] = prefill.ask("steps")
    passed = passed_over({x.prompt: x.came_at for x in arrivals}, steps)
    waits = [x.waited_s for x in arrivals]
    first_at = arrivals[0].came_at
    last_s = max(x.came_at + x.waited_s for x in arrivals) - first_at
    computed_s = sum(ended - began for began, ended, _ in steps)
    rows = [
        {
            "arrived_s": arrival.came_at - first_at,
            "tokens": len(arrival.prompt),
            "waited_s": arrival.waited_s,
            "passed_over": tokens,
        }
        for arrival, tokens in zip(arrivals, passed, strict=True)
    ]
    return result_of(
        rows,
        NOTES,
        mean_wait_s=mean(waits),
        longest_wait_s=max(waits),
        most_passed_over=max(passed),
        step_tokens=config.engine.max_batch_tokens,
        mean_step_s=computed_s / len(steps),
        busy=computed_s / last_s,
    )


def make_schedule(long: int, others: int) -> list[tuple[float, int]]:
    """When each prompt comes, in seconds, and its tokens; in order."""
    source = random.Random(SEED)
    schedule = [(INTERVAL_S * number, LONG_TOKENS) for number in range(long)]
    for _ in range(others):
        at_s = source.uniform(0, 4 * INTERVAL_S * long)
        schedule.append((at_s, source.randint(LEAST_TOKENS, LONG_TOKENS)))
    return sorted(schedule)


async def _send_all(
    workers: Sequence[WorkerInfo], prefill: Child, schedule: Sequence[tuple[float, int]]
) -> list[Arrival]:
    """Send every prompt at its time."""
    numbers = progress(schedule, "a prompt of {0[1]} tokens".format)
    async with routed(workers) as router:
        await visit(router, prompt_of(LONG_TOKENS, 0), "")  # warms everything
        prefill.ask("steps")

        async def send(at_s: float, prompt: Prompt) -> Arrival:
            await asyncio.sleep(at_s)
            next(numbers)
            came_at = time.monotonic()
            times, _ = await visit(router, prompt, "")
            return Arrival(prompt, came_at, times.ttft_s)

        calls = []
        for number, (at_s, tokens) in enumerate(schedule):
            calls.append(send(at_s, prompt_of(tokens, 1000 + number)))
        return await asyncio.gather(*calls)


def passed_over(came: Mapping[Prompt, float], steps: Sequence[StepRecord]) -> list[int]:
    """Tokens of less urgent prompts computed while each prompt waited.

    Counts steps that ended after the prompt arrived, except the one that completed it.

    came: arrival times
    """
    tokens_left = {prompt: len(prompt) for prompt in came}
    passed = Counter[Prompt]()
    for began, ended, computed in steps:
        waiting = [x for x, at in came.items() if tokens_left[x] and at < ended]
        keys = {x: urgency(tokens_left[x], max(0.0, began - came[x])) for x in waiting}
        for prompt in waiting:
            is_last_step = computed.get(prompt, 0) >= tokens_left[prompt]
            if not is_last_step:
                passed[prompt] += _less_urgent_tokens(keys, prompt, computed)
        for prompt, count in computed.items():
            tokens_left[prompt] -= count
    return [passed[prompt] for prompt in came]


def _less_urgent_tokens(
    keys: Mapping[Prompt, float], prompt: Prompt, computed: Mapping[Prompt, int]
) -> int:
    """Tokens of a step that belong to prompts less urgent than this one."""
    return sum(count for other, count in computed.items() if keys[other] > keys[prompt])


def load(out: Out = None, as_json: Json = False) -> None:
    """How long 48 prompts of 4 to 1,500 tokens wait for each other."""
    show(measure_load(), out, as_json)


if __name__ == "__main__":
    command.main(load, "load")
