"""Cleans up after a private service when its owner has ended, however it ended.

A process of its own, started by path before the service's other processes. It reads two lines from
a pipe: the secret of the service and its folder. The end of the pipe means that the owner has
ended. The processes of the service then have GRACE_S to end by themselves; then they are killed.
Standard library only, so that it starts at once and stays small.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 3.0
QUIET_S = 0.5
POLL_S = 0.05
SECRET_NAME = b"RAY_AUTH_TOKEN="


def main() -> None:
    """Read secret and folder, wait for the end of standard input, clean up."""
    secret = sys.stdin.buffer.readline().strip()
    folder = sys.stdin.readline().strip()
    sys.stdin.read()
    clean_up(secret, folder)
    shutil.rmtree(folder, ignore_errors=True)


def clean_up(secret: bytes, folder: str) -> None:
    """Returns when every process of the service is gone.

    A process that is starting a program cannot be recognised for a moment. So a process counts
    from when it was first recognised until it is gone, and the service has ended after QUIET_S
    without a process.
    """
    deadline = time.monotonic() + GRACE_S
    processes: dict[int, str] = {}  # when each one started, by its number
    quiet_since = None
    while quiet_since is None or time.monotonic() < quiet_since + QUIET_S:
        update(processes, secret, folder)
        if processes:
            quiet_since = None
        elif quiet_since is None:
            quiet_since = time.monotonic()
        if time.monotonic() > deadline:
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def update(processes: dict[int, str], secret: bytes, folder: str) -> None:
    """Add processes of the service that can be recognised now; remove those that are gone."""
    for pid in members(secret, folder):
        born = birth(pid)
        if born:
            processes[pid] = born
    for pid, born in list(processes.items()):
        if birth(pid) != born:
            del processes[pid]


def members(secret: bytes, folder: str) -> list[int]:
    """Processes of the service that can be recognised now; none on a system without /proc."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    spared = {os.getpid(), os.getppid()}  # this process, and the owner if it lives
    pids = {int(name) for name in names if name.isdecimal()} - spared
    return [pid for pid in pids if carries(pid, secret) or holds(pid, folder)]


def carries(pid: int, secret: bytes) -> bool:
    """Whether a process was started with the secret."""
    try:
        variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # of another user, or gone
    return SECRET_NAME + secret in variables


def holds(pid: int, folder: str) -> bool:
    """Whether a process has a file in the folder open; every process of Ray has its log open.

    Some processes overwrite the start of their environment, and so the secret, with a title.
    """
    try:
        links = list(Path("/proc", str(pid), "fd").iterdir())
    except OSError:
        return False
    return any(target(link).startswith(f"{folder}/") for link in links)


def target(link: Path) -> str:
    """The path of an open file; "" if it was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def birth(pid: int) -> str | None:
    """When a process started, which tells it from a later one of the same number; None: gone."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state = fields[0]
    start_time = fields[19]
    return None if state in "ZX" else start_time


if __name__ == "__main__":
    main()
