"""SIGHUP: read the settings again, or end because the terminal was closed. Signals that stop."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg.cli import shutdown
from disagg.cli.shutdown import STOP_SIGNALS, ShutdownGuard

SERVE = """
import fcntl, signal, sys, termios
from disagg.cli.shutdown import ShutdownGuard
if sys.argv[1:2] == ["terminal"]:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
is_nohup = sys.argv[2:] == ["nohup"]  # these tests may themselves run under nohup
signal.signal(signal.SIGHUP, signal.SIG_IGN if is_nohup else signal.SIG_DFL)
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


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Iterator[Clock]:
    """The clock of signals, whose handlers are put back."""
    clock = Clock()
    monkeypatch.setattr(shutdown, "time", clock)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield clock
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def stopping(guard: ShutdownGuard, ends: threading.Event) -> Iterator[None]:
    """A service that a first SIGTERM has begun to stop."""
    with guard:
        guard.started()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        guard.begin(ends.set)
        yield


def test_a_second_signal_ends_a_service_that_drains(clock):
    ends, lines = threading.Event(), []

    with stopping(ShutdownGuard(0.0, drain_s=3600.0, say=lines.append), ends):
        clock.now = 3.0
        signal.raise_signal(signal.SIGINT)

        assert ends.wait(60)

    assert lines == ["stopping ...", "stopping at once ..."]


def test_a_signal_that_comes_twice_at_once_counts_once(clock):
    ends, lines = threading.Event(), []

    with stopping(ShutdownGuard(0.0, drain_s=3600.0, say=lines.append), ends):
        clock.now = 0.1
        signal.raise_signal(signal.SIGTERM)

    assert lines == ["stopping ..."]
    assert not ends.is_set()


def test_a_shutdown_may_take_as_long_as_its_requests(clock, monkeypatch):
    timers = []
    monkeypatch.setattr(threading, "Timer", FakeTimer.kept_in(timers))

    with stopping(ShutdownGuard(5.0, drain_s=45.0, say=str), threading.Event()):
        clock.now = 3.0
        signal.raise_signal(signal.SIGTERM)

    assert timers == [45 + 2 * 5 + 15, 2 * 5 + 15]


class FakeTimer:
    """A timer that never fires."""

    daemon = False

    @classmethod
    def kept_in(cls, limits: list[float]) -> Any:
        """A class of timers that notes their limits."""

        def create(limit_s: float, *_: object) -> FakeTimer:
            limits.append(limit_s)
            return cls()

        return create

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        pass
