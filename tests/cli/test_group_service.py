"""A service whose workers are groups of ranks, with the real command: under 16 streams followers
are killed, a group is drained, and groups change their roles.

Says how long streams stood still (`-s`).
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from disagg.cli.state_file import RunningService
from tests.cli.conftest import wait_for
from tests.cli.test_hybrid_service import BODIES, STREAMS, check, wait_until_whole
from tests.cli.test_private import Home, home, workers
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


def test_streams_of_groups_survive_drains_and_changes_of_role(home, pool):
    counts = ("--prefill", "1", "--decode", "2", "--prefill-ranks=2")
    options = ("--port", "0", "--codec", "raw", "--decode-ranks=2")
    process = home.start("serve", *options, *counts)
    state = home.service()
    crowd = crowd_of(state, pool, STREAMS, BODIES)

    with under_streams(crowd, "drain of decode-0"):
        command(home, "drain", "decode-0")
        wait_for(lambda: "decode-0" not in names(state))
    with under_streams(crowd, "a decode worker that prefills"):
        command(home, "scale", "prefill=2", "decode=1")
        wait_for(lambda: count(state) == {"prefill": 2, "decode": 1})
    with under_streams(crowd, "a prefill worker that decodes"):
        command(home, "scale", "prefill=1", "decode=2")
        wait_for(lambda: count(state) == {"prefill": 1, "decode": 2})
    wait_until_whole(state)

    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


@contextmanager
def under_streams(crowd: Crowd, event: str) -> Iterator[None]:
    """Something happens once all answers have begun; each stays exact."""
    crowd.begin()
    yield
    check(crowd, event)


def command(home: Home, *arguments: str) -> None:
    """A command of disagg, until its end."""
    process = home.start(*arguments)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def names(state: RunningService) -> set[str]:
    return {worker["name"] for worker in workers(state)}


def count(state: RunningService) -> Counter[str]:
    """The workers that serve, by role."""
    return Counter(worker["role"] for worker in workers(state) if "pid" in worker)


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
    _, pid = victim["rank_pids"]
    os.kill(pid, signal.SIGKILL)

    check(crowd, f"a follower of {role} killed")
