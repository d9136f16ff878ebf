"""SIGHUP: read the settings again, or end because the terminal was closed."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SERVE = """
import fcntl, signal, sys, termios
from disagg.cli.shutdown import ShutdownGuard
if sys.argv[1:2] == ["terminal"]:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if sys.argv[2:] == ["nohup"]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    with ShutdownGuard(5.0) as guard:
        guard.started()
        hung_up = guard.take_hang_up()
        print("serving", flush=True)
        while not hung_up.wait(0.05):
            pass
        print("read again", flush=True)
except KeyboardInterrupt:
    print("ended", flush=True)
"""


@contextmanager
def serving(*arguments: str, stdin: int) -> Iterator[subprocess.Popen[str]]:
    """A process that waits for SIGHUP, in a session of its own."""
    command = [sys.executable, "-c", SERVE, *arguments]
    with subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "serving\n"
        yield process


@pytest.mark.parametrize("terminal", ["no terminal", "terminal"])
def test_a_hang_up_signal_reads_the_settings_again(terminal):
    ours, theirs = pty.openpty()

    with serving(terminal, stdin=theirs) as process:
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=60)

    assert out == "read again\n"
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), "ended\n"), (("nohup",), "read again\n")],
    ids=["plain", "nohup"],
)
def test_a_closed_terminal_ends_the_service_unless_nohup(arguments, expected):
    ours, theirs = pty.openpty()

    with serving("terminal", *arguments, stdin=theirs) as process:
        os.close(theirs)
        os.close(ours)
        out, _ = process.communicate(timeout=60)

    assert out == expected
