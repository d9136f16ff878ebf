"""Takes away what is left of a private service when its owner is gone, however it went.

A process of its own, started by path before anything else and fed through a pipe: two lines, the
secret of the service and its folder, and then nothing. The end of the pipe means that the owner is
gone or has finished. Whatever still carries the secret in its environment then gets a moment to
leave by itself. Standard library only: it has to start in no time and stay small.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 3.0
QUIET_S = 5.0
POLL_S = 0.05
SECRET_NAME = b"RAY_AUTH_TOKEN="


def main() -> None:
    """Read secret and folder, wait for the end of standard input, clean up."""
    secret = sys.stdin.buffer.readline().strip()
    folder = sys.stdin.readline().strip()
    sys.stdin.read()
    until = time.monotonic() + GRACE_S
    while (left := carriers(secret)) and time.monotonic() < until:
        time.sleep(POLL_S)
    quiet = time.monotonic() + QUIET_S  # one that was just being started shows up a moment later
    while left or time.monotonic() < quiet:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it left in between
        time.sleep(POLL_S)
        left = carriers(secret)
    shutil.rmtree(folder, ignore_errors=True)


def carriers(secret: bytes) -> list[int]:
    """The processes that were started with this secret; none where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
        except OSError:
            continue  # of another user, or gone
        if SECRET_NAME + secret in variables:
            found.append(int(entry.parent.name))
    return found


if __name__ == "__main__":
    main()
