"""Child processes of a benchmark: one object each, whose methods the parent calls over a pipe.

    python -m disagg.bench.child disagg.bench.ends ReceivingEnd 5

A child is a fresh interpreter that has what its module imports, and nothing that its parent has; or
a fork of one such, for who cannot wait for imports. It ends when its parent does, however that
ended and whatever it is doing: its end of the pipe closes.
"""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, Self

from disagg.errors import DeadlineError, DisaggError, PeerLostError
from disagg.transfer.rpc import tune_malloc

ANSWER_S, END_S = 300.0, 10.0  # for one call; for a process to end by itself


class Child:
    """A process that holds one object of a class; use it as a context.

    role:   a class with async methods, made without arguments
    prefix: a command that runs the interpreter and becomes it, such as `link.ISOLATED`
    """

    def __init__(self, role: type, prefix: Sequence[str] = ()):
        self._pipe, theirs = Pipe()
        with theirs:
            end = theirs.fileno()
            command = [*prefix, sys.executable, "-m", __name__, role.__module__, role.__name__]
            command.append(str(end))
            self._process = subprocess.Popen(command, pass_fds=[end], stdin=subprocess.DEVNULL)
        self.pid = self._process.pid

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method there; raises the DisaggError it raised, PeerLostError if it died.

        DeadlineError after ANSWER_S: it answers no call any more.
        """
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(ANSWER_S):
                raise DeadlineError(f"process {self.pid}: no answer to {method} in {ANSWER_S:g} s")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise PeerLostError(f"process {self.pid} ended with {self._wait()}") from error
        if isinstance(answer, DisaggError):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when the process has ended."""
        self._pipe.close()
        if self._wait(END_S) is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def _wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code; None: it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode


class Fork(Child):
    """A process out of one that has imported the module of `role`, and is kept for the next."""

    def __init__(self, role: type):
        self._pipe, theirs = Pipe()
        context = get_context("forkserver")
        context.set_forkserver_preload([role.__module__])
        with theirs:
            self._forked = context.Process(target=_live, args=(role, theirs), daemon=True)
            self._forked.start()
        self.pid = self._forked.pid or 0

    def _wait(self, timeout_s: float | None = None) -> int | None:
        self._forked.join(timeout_s)
        return self._forked.exitcode


async def _serve(role: type, pipe: Connection) -> None:
    """Answer the parent's calls, one after another."""
    calls: asyncio.Queue[tuple[str, tuple[Any, ...]]] = asyncio.Queue()
    loop, there = asyncio.get_running_loop(), role()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, pipe.recv())
        except (EOFError, OSError):
            os._exit(0)

    Thread(target=read, daemon=True).start()
    while True:
        method, arguments = await calls.get()
        try:
            answer = await getattr(there, method)(*arguments)
        except DisaggError as error:
            answer = error
        pipe.send(answer)


def main() -> None:
    """A fresh process."""
    module, name, end = sys.argv[1:]
    pipe = Connection(int(end))
    os.set_inheritable(pipe.fileno(), False)
    _live(getattr(import_module(module), name), pipe)


def _live(role: type, pipe: Connection) -> None:
    """The garbage collector never looks at what was imported."""
    tune_malloc()
    gc.freeze()
    asyncio.run(_serve(role, pipe))


if __name__ == "__main__":
    main()
