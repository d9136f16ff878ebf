"""A worker whose engine stands still ends; one that only takes its time does not."""

import subprocess
import sys
import threading
import time
from typing import Any

from disagg.engine.engine import Engine
from disagg.engine.messages import EngineLoad
from disagg.worker import watchdog
from disagg.worker.watchdog import Watchdog

STUCK_S = 0.1
HANGS = """
import time
from disagg.worker.watchdog import EXIT_CODE, Watchdog

class StuckEngine:
    num_steps, load, stalled_s = 7, "2 running", 99.0

def a_kernel_that_never_ends():
    time.sleep(60)

Watchdog("decode-0", StuckEngine(), stuck_s=0.1).start()
a_kernel_that_never_ends()
"""


class FakeEngine(Engine):
    """An engine that makes no progress while `is_stuck`."""

    def __init__(self, is_stuck: bool):
        self.is_stuck = is_stuck
        self.num_steps = 1

    @property
    def stalled_s(self) -> float:
        return 2 * STUCK_S if self.is_stuck else 0.0

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=2)


def watch(engine: Engine) -> tuple[Watchdog, threading.Event]:
    stuck = threading.Event()
    dog = Watchdog("decode-0", engine, STUCK_S, on_stuck=stuck.set)
    dog.start()
    return dog, stuck


def test_an_engine_that_stands_still_is_reported(caplog: Any):
    engine = FakeEngine(is_stuck=True)

    _, stuck = watch(engine)

    assert stuck.wait(10)
    assert "decode-0: step 1 of the engine has made no progress" in caplog.text
    assert "running=2" in caplog.text


def test_an_engine_that_progresses_is_let_alone():
    engine = FakeEngine(is_stuck=False)

    dog, stuck = watch(engine)

    assert not stuck.wait(10 * STUCK_S)
    dog.stop()


def test_one_late_look_is_not_enough(monkeypatch: Any):
    """A process that was frozen looks stuck at the first check after it."""

    class Thawed(FakeEngine):
        looks = 0

        @property
        def stalled_s(self) -> float:
            self.looks += 1
            return 99.0 if self.looks == 1 else 0.0

    engine = Thawed(is_stuck=False)

    dog, stuck = watch(engine)

    while engine.looks < 5:
        time.sleep(0.01)
    assert not stuck.is_set()
    dog.stop()


def test_the_process_ends_with_the_stacks_of_its_threads():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == watchdog.EXIT_CODE
    assert "a_kernel_that_never_ends" in done.stderr
    assert "step 7 of the engine has made no progress for 99 s" in done.stderr
