"""Processes that tests start: whether they live, and waiting for what they do."""

import time
from collections.abc import Callable
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
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
