"""Processes that tests start: whether they live, and waiting for a condition."""

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
    describe: Callable[[], object] = lambda: "",
) -> None:
    """Poll until the condition is true. describe: returns the message of the failure."""
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, describe()
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    state = fields[0]
    return state != "Z"


@contextmanager
def ray_head(
    port: int, environment: Mapping[str, str], *options: str
) -> Iterator[None]:
    """A Ray of one node, as `ray start` makes it. It may not listen yet."""
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
        f"--temp-dir={folder}",
        *options,
    ]
    ray = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        ray.terminate()
        ray.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
