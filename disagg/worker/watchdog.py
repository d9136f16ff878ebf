"""Ends the process of a worker whose engine stands still, with its stacks in the log.

A kernel that never ends, or a lock that is never released, stops the engine's thread but not the io
thread: without a watchdog such a worker would answer for ever, and compute nothing.
"""

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

from disagg.engine.progress import StepProgress

EXIT_CODE = 86  # of a process whose engine stood still
CHECKS = 30  # in the time that a step may stall

log = logging.getLogger(__name__)


class Watchdog:
    """A thread that looks at the steps of an engine until it is stopped.

    stuck_s:  how long a step may make no progress
    on_stuck: called once when it has made none for longer; ends the process
    """

    def __init__(
        self,
        name: str,
        progress: StepProgress,
        stuck_s: float,
        on_stuck: Callable[[], None] | None = None,
    ):
        self._name = name
        self._progress = progress
        self._stuck_s = stuck_s
        self._on_stuck = on_stuck or end_process
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"{name}-watchdog", daemon=True
        )

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        was_stuck = False
        while not self._stopped.wait(self._stuck_s / CHECKS):
            is_stuck = self._progress.stalled_s > self._stuck_s
            # twice in a row: a process that was frozen goes on between the two checks
            if is_stuck and was_stuck:
                self._report()
                self._on_stuck()
                return
            was_stuck = is_stuck

    def _report(self) -> None:
        log.critical(
            "%s: step %d of the engine has made no progress for %.0f s, with %s; the worker ends",
            self._name,
            self._progress.num_steps,
            self._progress.stalled_s,
            self._progress.contents,
        )


def end_process() -> None:
    """Write the stacks of all threads to stderr, and end without waiting for any of them."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_CODE)
