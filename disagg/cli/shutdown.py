"""`disagg serve` and `disagg submit` end on a signal, within a bounded time.

Ray's C++ code may wait forever for a raylet that also got the signal or no longer answers, and
Python's signal handlers wait for that code. This guard ends the process then; the reaper of a
private Ray removes what is left.
"""

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


class ShutdownGuard:
    """Ends this process on the first stop signal, even if Ray hangs; ignored signals stay ignored.

    grace_s: time for answers to finish, and the same again for workers
    """

    def __init__(self, grace_s: float, say: Callable[[str], None] = tell):
        self._say = say
        self._limit_s = 2 * grace_s + RAY_STOP_S
        self._ignore_until = 0.0
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
        message = b"stopped; Ray did not answer\n"
        self._timer = threading.Timer(self._limit_s, _exit_now, [message, 1])
        self._timer.daemon = True
        self.take_signals()
        return self

    def __exit__(self, *_: object) -> None:
        self.started()
        self._timer.cancel()
        signal.set_wakeup_fd(self._previous_wakeup)
        self._wakeup.close()

    def started(self) -> None:
        """The start is over: from now on signal handlers end the process, not `os._exit`."""
        self._started.set()

    def begin(self) -> None:
        """Shutdown begins; end the process by force if it takes too long."""
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
        """Start the shutdown once: signals come in pairs, and a second one would interrupt it."""
        if time.monotonic() < self._ignore_until:
            return
        self._ignore_until = time.monotonic() + RAY_STOP_S
        with suppress(RuntimeError):  # a line was just being written
            self._say("stopping ...")
        raise KeyboardInterrupt

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
