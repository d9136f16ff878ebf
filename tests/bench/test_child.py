import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disagg.bench import child as child_module
from disagg.bench.child import Child, Fork
from disagg.bench.ends import ReceivingEnd
from disagg.errors import CapacityError, DeadlineError, PeerLostError

LIMIT_S = 30.0
PARENT = """
import signal
from disagg.bench.child import Child
from disagg.bench.ends import ReceivingEnd
child = Child(ReceivingEnd)
child.ask("cpu_seconds")
print(child.pid, flush=True)
signal.pause()
"""


def wait_until_gone(pid: int) -> None:
    """Not there, or dead and not yet collected by whoever inherited it."""
    deadline = time.monotonic() + LIMIT_S
    while running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kind", [Child, Fork])
def test_a_call_is_answered_and_the_end_of_the_context_ends_the_process(kind):
    with kind(ReceivingEnd) as child:
        assert child.ask("cpu_seconds") > 0
    assert not Path(f"/proc/{child.pid}").exists()


@pytest.mark.parametrize("kind", [Child, Fork])
def test_a_typed_error_comes_back_as_itself_and_the_next_call_is_answered(kind):
    with kind(ReceivingEnd) as child:
        with pytest.raises(CapacityError):
            child.ask("open", {}, 0)
        assert child.ask("cpu_seconds") > 0


@pytest.mark.parametrize("kind", [Child, Fork])
def test_a_killed_process_is_a_lost_peer(kind):
    with kind(ReceivingEnd) as child:
        child.ask("cpu_seconds")
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="ended with -9"):
            child.ask("cpu_seconds")


@pytest.mark.parametrize("kind", [Child, Fork])
def test_a_process_that_hangs_is_told_of_and_does_not_stay(kind, monkeypatch):
    monkeypatch.setattr(child_module, "ANSWER_S", 0.1)
    monkeypatch.setattr(child_module, "END_S", 0.1)
    with kind(ReceivingEnd) as child:
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"no answer to cpu_seconds in 0.1 s"):
            child.ask("cpu_seconds")
    assert not running(child.pid)


def test_a_child_ends_with_its_killed_parent():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert running(pid)
        parent.kill()
    wait_until_gone(pid)
