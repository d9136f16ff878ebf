"""A worker whose engine stands still ends; one that only takes its time does not."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from disagg.config import ClusterConfig, EngineConfig
from disagg.engine.progress import StepProgress
from disagg.worker import watchdog
from disagg.worker.watchdog import CHECKS, Watchdog

STUCK_S = 0.1
HANGS = """
import time
from disagg.engine.progress import StepProgress
from disagg.worker.watchdog import Watchdog

def a_kernel_that_never_ends():
    time.sleep(60)

progress = StepProgress(time.monotonic)
progress.num_steps = 7
Watchdog("decode-0", progress, stuck_s=0.1).start()
with progress.running():
    a_kernel_that_never_ends()
"""
Watch = Callable[[StepProgress], threading.Event]


class LookedAt(StepProgress):
    """Progress that says for how long a step has stalled at each look; the last one stays."""

    def __init__(self, *stalls: float):
        super().__init__(time.monotonic)
        self.looks = 0
        self._stalls = stalls

    @property
    def stalled_s(self) -> float:
        stall = self._stalls[min(self.looks, len(self._stalls) - 1)]
        self.looks += 1
        return stall


@pytest.fixture
def watch() -> Any:
    """Watch the progress of an engine; the event is set when it is stuck."""
    dogs = []

    def start(progress: StepProgress) -> threading.Event:
        stuck = threading.Event()
        dog = Watchdog("decode-0", progress, STUCK_S, on_stuck=stuck.set)
        dog.start()
        dogs.append(dog)
        return stuck

    yield start
    for dog in dogs:
        dog.stop()


def wait_for_looks(progress: LookedAt, count: int) -> None:
    while progress.looks < count:
        time.sleep(STUCK_S / CHECKS)


def test_an_engine_that_stands_still_is_reported(watch: Watch, caplog: Any):
    progress = LookedAt(99.0)
    progress.num_steps = 1

    stuck = watch(progress)

    assert stuck.wait(10)
    assert "decode-0: step 1 of the engine has made no progress for 99 s" in caplog.text


def test_an_engine_that_progresses_is_let_alone(watch: Watch):
    progress = LookedAt(0.0)

    stuck = watch(progress)

    wait_for_looks(progress, 2 * CHECKS)
    assert not stuck.is_set()


def test_one_late_look_is_not_enough(watch: Watch):
    """A process that was frozen looks stuck at the first check after it."""
    progress = LookedAt(99.0, 0.0)

    stuck = watch(progress)

    wait_for_looks(progress, 5)
    assert not stuck.is_set()


def test_by_default_a_worker_ends_itself_before_it_is_killed():
    """Killed, it would leave no stacks. The second look in a row decides."""
    longest_s = EngineConfig().stuck_s * (1 + 2 / CHECKS)

    assert longest_s < ClusterConfig().replace_s


def test_the_process_ends_with_the_stacks_of_its_threads():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == watchdog.EXIT_CODE
    assert "a_kernel_that_never_ends" in done.stderr
    assert "step 7 of the engine has made no progress" in done.stderr
