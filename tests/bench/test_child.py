"""Child processes of a benchmark."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.bench import child
from disagg.bench.child import Child
from disagg.errors import CapacityError, DeadlineError, PeerLostError
from tests.processes import lives, wait_for

PARENT = """
import os, signal
from disagg.bench.child import Child
from tests.bench.test_child import Clerk
child = Child(Clerk)
child.ask("count")
"""
WAITS = "print(child.pid, flush=True); signal.pause()"
ASKS = "os.kill(child.pid, signal.SIGINT); print(child.ask('count'))"


class Clerk:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def count(self) -> int:
        self.calls += 1
        return self.calls

    async def refuse(self, *arguments: object) -> None:
        raise CapacityError(f"no room for {arguments}")


def test_calls_are_answered_in_turn_until_the_context_ends():
    with Child(Clerk) as process:
        assert process.ask("count") == 1

        with pytest.raises(CapacityError, match="no room for \\('a', 2\\)"):
            process.ask("refuse", "a", 2)

        assert process.ask("count") == 2

    assert not Path(f"/proc/{process.pid}").exists()


def test_a_killed_process_is_a_lost_peer():
    with Child(Clerk) as process:
        process.ask("count")
        os.kill(process.pid, signal.SIGKILL)

        with pytest.raises(PeerLostError, match="ended with -9"):
            process.ask("count")


def test_a_process_that_hangs_is_an_error_and_does_not_stay(monkeypatch):
    monkeypatch.setattr(child, "ANSWER_S", 0.1)
    monkeypatch.setattr(child, "END_S", 0.1)

    with Child(Clerk) as process:
        os.kill(process.pid, signal.SIGSTOP)

        with pytest.raises(DeadlineError, match=r"no answer to count in 0.1 s"):
            process.ask("count")

    assert not lives(process.pid)


def test_ctrl_c_is_for_the_parent_alone():
    process = subprocess.run(
        [sys.executable, "-c", PARENT + ASKS], capture_output=True, text=True
    )

    assert (process.stdout, process.stderr) == ("2\n", "")


def test_a_child_ends_with_its_killed_parent():
    command = [sys.executable, "-c", PARENT + WAITS]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()

    wait_for(lambda: not lives(pid), 30)
