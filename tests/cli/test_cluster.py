"""Workers on a Ray cluster: stopped with their service, taken over if it was killed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from disagg.cli.client import RunningService, complete, get
from tests.cli.conftest import wait_for
from tests.cli.test_private import ASKED, Home

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A Ray of one node, as `ray start` makes it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block"]
    command += [f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray puts sockets in it
    command += ["--disable-usage-stats", f"--temp-dir={folder}"]
    ray = subprocess.Popen(
        command, env=os.environ | {"HOME": str(tmp_path)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: answers(port))
    yield f"127.0.0.1:{port}"
    ray.send_signal(signal.SIGTERM)
    ray.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def pids(state: RunningService) -> set[int]:
    return {worker["pid"] for worker in get(state.url, "/status")["workers"]}


def alive(workers: set[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_workers_stop_with_their_service_and_are_taken_over_if_it_was_killed(address, tmp_path):
    home = Home(tmp_path)
    where = ("--set", f"cluster.address={address}", "--set", "cluster.orphan_s=8")
    serve = partial(home.start, "serve", "--port", "0", *where)

    first = serve()
    workers = pids(home.service())
    first.kill()
    _, said = first.communicate()
    assert "gRPC over TLS" in said
    second = serve()
    state = home.service()
    assert pids(state) == workers
    answer = complete(state.url, ASKED | {"max_tokens": 8}, lambda piece: None)
    assert answer.completion_tokens == 8
    intruder = serve("--state-file", str(tmp_path / "intruder.json"))
    _, error = intruder.communicate(timeout=60)
    assert intruder.returncode == 2
    assert "works for another service" in error
    assert complete(state.url, ASKED, lambda piece: None).completion_tokens == 16
    neighbour = serve("--name", "neighbour", "--set", "security.plane=token")
    beside = home.service("neighbour")
    assert not pids(beside) & workers
    assert complete(beside.url, ASKED, lambda piece: None).completion_tokens == 16
    stop(second)
    assert not alive(workers)
    stop(neighbour)

    detached = serve("--set", "cluster.detach=true")
    workers = pids(home.service())
    stop(detached)
    other = serve("--codec", "raw")
    _, error = other.communicate(timeout=60)
    assert other.returncode == 2
    assert "runs with other settings, until 8 s after its last router" in error
    wait_for(lambda: not alive(workers))
