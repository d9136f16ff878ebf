"""Processes that tests start: whether they live, and waiting for what they do."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 120.0  # a start takes about 10 s on two idle cores, 40 s on a busy host


def wait_for(
    condition: Callable[[], object],
    patience_s: float = PATIENCE_S,
    told: Callable[[], object] = lambda: "",
) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, told()
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether a process is there, and not only as one that nobody has collected yet."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


@contextmanager
def ray_head(
    port: int, environment: Mapping[str, str], *options: str
) -> Iterator[None]:
    """A Ray of one node, as `ray start` makes it; whoever uses it waits until it is there."""
    folder = tempfile.mkdtemp(
        prefix="ray-", dir="/tmp"
    )  # short: Ray puts sockets in it
    start = "from ray.scripts.scripts import main; main()"
    command = [
        sys.executable,
        "-c",
        start,
        "start",
        "--head",
        "--block",
        f"--port={port}",
    ]
    command += [f"--temp-dir={folder}", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    ray = subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, **quiet
    )
    try:
        yield
    finally:
        ray.terminate()
        ray.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
