"""Doors in front of one router, with the real command: kill -9 of each under 40 streams.

Says how long streams stood still (`-s`).
"""

import os
import signal
from pathlib import Path

import httpx
import pytest

from disagg.cli.state_file import RunningService
from tests.cli.conftest import answering, free_port, wait_for
from tests.cli.test_cluster import address as address
from tests.cli.test_cluster import pids
from tests.cli.test_private import Home, home, idle, workers
from tests.crowd import STREAMS, Crowd, count_cut, crowd_of, longest_pause_s, pool

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

GAUGES = (
    "disagg_queue_requests{",
    "vllm:num_requests_running{",
    "vllm:num_requests_waiting{",
)
__all__ = ["address", "home", "pool"]


def children(home: Home, kind: str) -> dict[str, int]:
    """Processes of a service by number: of its doors, or its router as "0"."""
    by_number = {}
    for pid, command in home.processes().items():
        if f"children import main; main()\0{kind}\0" in command:
            number = command.split("\0")[6]
            by_number[number] = pid
    return by_number


def test_forty_streams_survive_their_router_and_others_their_door(home, pool):
    process = home.start("serve", "--port", "0", "--doors", "2")
    state = home.service()
    crowd = crowd_of(state, pool)

    kill_the_router(home, crowd)
    wait_until_idle(state)
    kill_a_door(home, crowd)
    wait_until_idle(state)
    replace_a_door(home, crowd)

    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def wait_until_idle(state: RunningService) -> None:
    """All gauges are zero: of both workers, of the router, and those that a scrape shows."""
    wait_for(lambda: len(pids(state)) == 2, describe=lambda: workers(state))
    wait_for(lambda: idle(state), describe=lambda: workers(state))
    wait_for(lambda: not any(gauges(state).values()), describe=lambda: gauges(state))


def gauges(state: RunningService) -> dict[str, float]:
    """Requests that run or wait, as /metrics has them."""
    lines = httpx.get(f"{state.url}/metrics").text.splitlines()
    series = dict(line.rsplit(" ", 1) for line in lines if line.startswith(GAUGES))
    assert len(series) >= len(GAUGES), lines
    return {name: float(value) for name, value in series.items()}


def kill_the_router(home: Home, crowd: Crowd) -> None:
    """Every stream goes on, token by token."""
    crowd.begin()
    os.kill(children(home, "router")["0"], signal.SIGKILL)
    streams = crowd.end()

    assert [stream.error for stream in streams] == [None] * STREAMS
    assert all(crowd.is_exact(stream) for stream in streams)
    pause_s = longest_pause_s(streams)
    print(f"\nrouter killed: {STREAMS} streams exact after {pause_s:.1f} s at most")


def kill_a_door(home: Home, crowd: Crowd) -> None:
    """Its streams end with an error, the others go on."""
    crowd.begin()
    victim = children(home, "door")["0"]
    os.kill(victim, signal.SIGKILL)
    streams = crowd.end()

    num_cut, num_whole = count_cut(crowd, streams)
    print(f"door killed: {num_cut} streams cut, {num_whole} exact")
    wait_for(lambda: children(home, "door").get("0") not in (None, victim))


def replace_a_door(home: Home, crowd: Crowd) -> None:
    """Its streams end first; then nothing of it stays."""
    crowd.begin()
    leaver = children(home, "door")["1"]
    os.kill(leaver, signal.SIGTERM)
    streams = crowd.end()

    assert all(crowd.is_exact(stream) for stream in streams)
    wait_for(lambda: children(home, "door").get("1") not in (None, leaver))
    wait_for(lambda: leaver not in home.processes())


def test_on_a_cluster_the_next_router_takes_over_the_workers(address, tmp_path, pool):
    home = Home(tmp_path)
    cluster = ("--name", "doors", "--set", f"cluster.address={address}")
    port = str(free_port())
    process = home.start("serve", "--port", port, "--doors", "2", *cluster)
    state = home.service("doors")
    before = pids(state)
    crowd = crowd_of(state, pool)

    crowd.begin()
    os.kill(children(home, "router")["0"], signal.SIGKILL)
    streams = crowd.end()

    assert [stream.error for stream in streams] == [None] * STREAMS
    assert all(crowd.is_exact(stream) for stream in streams)
    assert pids(state) == before
    pause_s = longest_pause_s(streams)
    print(f"\nrouter killed: the same workers go on after {pause_s:.1f} s at most")
    wait_until_idle(state)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def test_nothing_stays_of_a_service_whose_supervisor_is_killed(home):
    process = home.start("serve", "--port", "0", "--doors", "2")
    state = home.service()
    assert len(children(home, "door")) == 2

    process.kill()
    process.communicate()

    wait_for(lambda: not home.processes(), describe=home.processes)
    assert not answering(state, "/health")
    Path(home.folder / "disagg.json").unlink()
