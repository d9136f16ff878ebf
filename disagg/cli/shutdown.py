"""`disagg serve` and `disagg submit` end on a signal, within a bounded time.

The first signal begins the shutdown, in which requests have time to end; a second one takes that
time away.

Ray's C++ code may wait forever for a raylet that also got the signal or no longer answers, and
Python's signal handlers wait for that code. This guard ends the process then; the reaper of a
private Ray removes what is left.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from disagg.cli.output import tell

# SIGHUP: a closed terminal
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RAY_STOP_S = 15.0  # for everything that Ray does at the end
PAIR_S = 0.5  # `timeout` and terminals send one signal twice within this time


class ShutdownGuard:
    """Ends this process on the first stop signal, even if Ray hangs; ignored signals stay ignored.

    grace_s: time for the router to end, and the same again for workers
    drain_s: time for requests to end before
    """

    def __init__(
        self,
        grace_s: float,
        drain_s: float = 0.0,
        say: Callable[[str], None] = tell,
    ):
        self._say = say
        self._drain_s = drain_s
        self._end_s = 2 * grace_s + RAY_STOP_S
        self._ignore_until = 0.0
        self._end_now: Callable[[], None] | None = None
        self._timer: threading.Timer | None = None
        self._started = threading.Event()
        self._hung_up = threading.Event()
        self._ends_with_terminal = True
        self._handlers = dict.fromkeys(STOP_SIGNALS, self._interrupt)

    def __enter__(self) -> Self:
        self._wakeup, watched = socket.socketpair()
        self._wakeup.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(
            self._wakeup.fileno(), warn_on_full_buffer=False
        )
        threading.Thread(target=self._watch, args=[watched], daemon=True).start()
        self.take_signals()
        return self

    def __exit__(self, *_: object) -> None:
        self.started()
        if self._timer is not None:
            self._timer.cancel()
        signal.set_wakeup_fd(self._previous_wakeup)
        self._wakeup.close()

    def started(self) -> None:
        """The start is over: from now on signal handlers end the process, not `os._exit`."""
        self._started.set()

    def begin(self, end_now: Callable[[], None] = lambda: None) -> None:
        """Shutdown begins; end the process by force if it takes too long.

        end_now: called on another thread at the next signal, so that requests get no more time
        """
        self._end_now = end_now
        self._ignore_until = time.monotonic() + PAIR_S
        self._set_timer(self._drain_s + self._end_s)

    def _set_timer(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        message = b"stopped; Ray did not answer\n"
        self._timer = threading.Timer(limit_s, _exit_now, [message, 1])
        self._timer.daemon = True
        self._timer.start()

    def take_signals(self) -> None:
        """Install our handlers, again after each start of Ray, whose own abort the process."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handlers[number])

    def take_hang_up(self) -> threading.Event:
        """From now on SIGHUP sets the event, unless it says that our terminal was closed.

        `nohup` and a service without a terminal get no such message.
        """
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._ends_with_terminal = has_terminal() and not is_ignored
        self._handlers[signal.SIGHUP] = self._hang_up
        signal.signal(signal.SIGHUP, self._hang_up)
        return self._hung_up

    def reporting(self, report: Callable[[str], None]) -> Callable[[str], None]:
        """Reports stages, and takes the signals before each."""

        def take_signals_and_report(stage: str) -> None:
            self.take_signals()
            report(stage)

        return take_signals_and_report

    def _interrupt(self, *_: object) -> None:
        """Start the shutdown once; when it has begun, hurry it."""
        if time.monotonic() < self._ignore_until:
            return
        if self._end_now is not None:
            self._hurry(self._end_now)
            return
        self._ignore_until = time.monotonic() + RAY_STOP_S
        with suppress(RuntimeError):  # a line was just being written
            self._say("stopping ...")
        raise KeyboardInterrupt

    def _hurry(self, end_now: Callable[[], None]) -> None:
        self._ignore_until = math.inf
        with suppress(RuntimeError):
            self._say("stopping at once ...")
        self._set_timer(self._end_s)
        # not here: this handler may have interrupted what holds a lock that it takes
        threading.Thread(target=end_now, daemon=True).start()

    def _hang_up(self, *_: object) -> None:
        if self._ends_with_terminal and not has_terminal():
            self._interrupt()
        self._hung_up.set()

    def _watch(self, watched: socket.socket) -> None:
        """End the process if a signal during the start is not handled in time."""
        with watched:
            while received := watched.recv(1):
                number = received[0]
                if number in STOP_SIGNALS and not self._started.wait(RAY_STOP_S):
                    _exit_now(b"stopped while Ray started\n", 128 + number)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is open."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    os.close(terminal)
    return True


def _exit_now(message: bytes, status: int) -> None:
    with suppress(OSError):
        os.write(2, message)
    os._exit(status)
