"""A service whose workers are groups of ranks, with the real command: kill -9 of any rank under 16
streams.

Says how long streams stood still (`-s`).
"""

import os
import signal
from pathlib import Path

import pytest

from disagg.cli.state_file import RunningService
from tests.cli.conftest import wait_for
from tests.cli.test_hybrid_service import BODIES, STREAMS, check, wait_until_whole
from tests.cli.test_private import home, workers
from tests.crowd import Crowd, crowd_of, pool

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["home", "pool"]


@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (1, 2)])
def test_streams_of_groups_survive_their_followers(home, pool, senders, receivers):
    ranks = (f"--prefill-ranks={senders}", f"--decode-ranks={receivers}")
    options = ("--port", "0", "--codec", "raw", "--decode", "2")
    process = home.start("serve", *options, *ranks)
    state = home.service()
    crowd = crowd_of(state, pool, STREAMS, BODIES)
    role = "prefill" if senders == 2 else "decode"

    kill_a_follower(state, crowd, role)
    wait_until_whole(state)
    kill_a_follower(state, crowd, role, first=True)
    wait_until_whole(state)

    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def kill_a_follower(
    state: RunningService, crowd: Crowd, role: str, first: bool = False
) -> None:
    """In the middle of all answers, or when the first one begins."""
    if first:
        crowd.send()
        wait_for(lambda: any(stream.pieces for stream in crowd.streams))
    else:
        crowd.begin()
    victim = next(worker for worker in workers(state) if worker["role"] == role)
    (pid,) = followers(victim["pid"], role)
    os.kill(pid, signal.SIGKILL)

    check(crowd, f"a follower of {role}")


def followers(pid: int, role: str) -> list[int]:
    """The processes of the other ranks, at the same Ray as rank 0."""
    raylet = parent(pid)
    title = f"ray::{role.title()}Rank".encode()
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [x for x in pids if parent(x) == raylet and title in command_line(x)]


def parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
