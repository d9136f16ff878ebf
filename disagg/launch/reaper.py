"""Takes away what is left of a private service when its owner is gone, however it went.

A process of its own, started by path before anything else and fed through a pipe: two lines, the
secret of the service and its folder, and then nothing. The end of the pipe means that the owner is
gone or has finished. Whatever belongs to the service then gets a moment to leave by itself.
Standard library only: it has to start in no time and stay small.
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

    While a process starts a program there is nothing of it to read for a moment. So one that was
    seen once counts until it is gone, and the end is nobody for QUIET_S.
    """
    patience = time.monotonic() + GRACE_S
    seen: dict[int, str] = {}
    quiet_since = None
    while quiet_since is None or time.monotonic() < quiet_since + QUIET_S:
        seen |= {pid: born for pid in members(secret, folder) if (born := birth(pid))}
        seen = {pid: born for pid, born in seen.items() if birth(pid) == born}
        if seen:
            quiet_since = None
        elif quiet_since is None:
            quiet_since = time.monotonic()
        if time.monotonic() > patience:
            for pid in seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def members(secret: bytes, folder: str) -> list[int]:
    """The processes of the service that can be recognised now; none where there is no /proc."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    spared = {os.getpid(), os.getppid()}  # the owner, if it lives, and this one
    there = {int(name) for name in names if name.isdecimal()} - spared
    return [pid for pid in there if carries(pid, secret) or holds(pid, folder)]


def carries(pid: int, secret: bytes) -> bool:
    """Whether a process was started with the secret."""
    try:
        variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # of another user, or gone
    return SECRET_NAME + secret in variables


def holds(pid: int, folder: str) -> bool:
    """Whether a process has a file of the folder open, as all of Ray's have their logs.

    Some of them write a title over the beginning of their environment, and the secret may be there.
    """
    try:
        links = list(Path("/proc", str(pid), "fd").iterdir())
    except OSError:
        return False
    return any(target(link).startswith(f"{folder}/") for link in links)


def target(link: Path) -> str:
    """What an open file is; nothing if it was closed by now."""
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
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


if __name__ == "__main__":
    main()
