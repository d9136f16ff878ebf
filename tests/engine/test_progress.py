"""What other threads see of an engine's steps."""

from types import SimpleNamespace
from typing import Any

from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.progress import LISTED, StepProgress
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import Status
from tests.engine.serving import request


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduled(rid: str, status: Status, start: int, count: int) -> ScheduledTokens:
    sequence: Any = SimpleNamespace(rid=rid, status=status, n=start)
    return ScheduledTokens(sequence, count)


def test_a_step_stalls_from_its_last_progress_on():
    clock = Clock()
    progress = StepProgress(clock)

    with progress.running():
        clock.now = 3.0
        assert progress.stalled_s == 3.0
        progress.advance()
        assert progress.stalled_s == 0.0
        clock.now = 5.0
        assert progress.stalled_s == 2.0
    clock.now = 9.0

    assert progress.stalled_s == 0.0


def test_a_step_names_its_sequences_and_their_tokens():
    progress = StepProgress(Clock())

    with progress.running():
        progress.scheduled = [
            scheduled("a", Status.DECODE, 40, 1),
            scheduled("b", Status.PREFILL, 512, 256),
        ]
        contents = progress.contents

    assert contents == (
        "257 tokens of 2 sequences: a (1 from 40, decode), b (256 from 512, prefill)"
    )
    assert progress.contents == "no sequences"


def test_a_large_step_names_a_few_of_its_sequences():
    progress = StepProgress(Clock())
    progress.scheduled = [scheduled("x", Status.DECODE, 1, 1)] * (LISTED + 3)

    contents = progress.contents

    assert contents.startswith(f"{LISTED + 3} tokens of {LISTED + 3} sequences: x (")
    assert contents.endswith("and 3 more")


def test_a_message_that_wakes_an_engine_can_stall_it(runner):
    clock = Clock()
    engine = Engine(runner, EngineConfig(arena_bytes=32 << 20), clock)
    plan_of = engine.plan
    stalls = []

    def slow_plan(spec: str) -> Any:
        clock.now += 7
        stalls.append(engine.progress.stalled_s)
        return plan_of(spec)

    engine.plan = slow_plan
    engine.submit(Prefill(request("a", (1, 2, 3), "raw", 1)))

    engine._wait()

    assert stalls == [7.0]
    assert engine.progress.stalled_s == 0.0
