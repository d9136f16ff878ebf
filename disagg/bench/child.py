"""Child processes of a benchmark.

A child holds one object, whose methods the parent calls over a pipe. It is forked from a server
process that has only imported the module of the first child's object, and shares nothing with its
parent. It ends when its parent ends, even by SIGKILL, because its end of the pipe closes.
"""

import asyncio
import ctypes
import gc
import os
import signal
from multiprocessing import Pipe, get_context, resource_tracker
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, Self

from disagg.errors import DeadlineError, DisaggError, PeerLostError
from disagg.transfer.rpc import tune_malloc

CLONE_NEWNET = 0x40000000  # of linux/sched.h
ANSWER_S = 300.0  # for one call
END_S = 10.0  # for a process to end by itself


class Child:
    """A process that holds one object of a class; use it as a context.

    role:     a class with async methods, made without arguments
    isolated: the process has a network namespace of its own, for `link.join`
    """

    def __init__(self, role: type, isolated: bool = False):
        self._pipe, child_end = Pipe()
        context = get_context("forkserver")
        context.set_forkserver_preload([role.__module__])
        with child_end:
            self._process = context.Process(
                target=_run, args=(role, child_end, isolated), daemon=True
            )
            # started here: later it would unblock all signals again
            resource_tracker.ensure_running()
            # the fork server and the child inherit this mask: Ctrl-C is for the parent alone
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            self._process.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid or 0

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object; raises the DisaggError that it raised.

        PeerLostError if the process died, DeadlineError if it has not answered after ANSWER_S.
        """
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(ANSWER_S):
                raise DeadlineError(
                    f"process {self.pid}: no answer to {method} in {ANSWER_S:g} s"
                )
            answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise PeerLostError(
                f"process {self.pid} ended with {self.wait()}"
            ) from error
        if isinstance(answer, DisaggError):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when the process has ended."""
        self._pipe.close()
        if self.wait(END_S) is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the process has ended: its exit code; None while it runs."""
        self._process.join(timeout_s)
        return self._process.exitcode


def _run(role: type, pipe: Connection, isolated: bool) -> None:
    """The main function of a child; its garbage collector ignores imported modules."""
    if isolated and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        os._exit(ctypes.get_errno())
    tune_malloc()
    gc.freeze()
    asyncio.run(_serve(role, pipe))


async def _serve(role: type, pipe: Connection) -> None:
    """Answer the parent's calls, one after another."""
    calls: asyncio.Queue[tuple[str, tuple[Any, ...]]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    instance = role()

    def read_calls() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, pipe.recv())
        except (EOFError, OSError):
            os._exit(0)

    Thread(target=read_calls, daemon=True).start()
    while True:
        method, arguments = await calls.get()
        try:
            answer = await getattr(instance, method)(*arguments)
        except DisaggError as error:
            answer = error
        pipe.send(answer)
