"""Child processes of a benchmark: one object each, whose methods the parent calls over a pipe.

    python -m disagg.bench.child disagg.bench.sink Sink 5

A child ends when its parent does, however that ended: its end of the pipe closes. A child is a
fresh interpreter, so it imports what its module imports and nothing that its parent has.
"""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from disagg.errors import DisaggError, PeerLostError

STOP_S = 10.0


class Child:
    """A process that holds one object of a class; use it as a context.

    role:   a class with async methods, which is an async context; made without arguments
    prefix: a command that runs the interpreter somewhere else, such as in a network namespace
    """

    def __init__(self, role: type, prefix: Sequence[str] = ()):
        self._pipe, theirs = Pipe()
        with theirs:
            end = theirs.fileno()
            command = [*prefix, sys.executable, "-m", __name__, role.__module__, role.__name__]
            command.append(str(end))
            self._process = subprocess.Popen(command, pass_fds=[end], stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Of the process; the prefix is replaced by it."""
        return self._process.pid

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method there; raises the DisaggError it raised, PeerLostError if it died."""
        self.post(method, *arguments)
        return self.answer()

    def post(self, method: str, *arguments: Any) -> None:
        """Begin a call; `answer` ends it."""
        try:
            self._pipe.send((method, arguments))
        except BrokenPipeError as error:
            raise self._lost() from error

    def answer(self) -> Any:
        """What the method that was posted returned."""
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._lost() from error
        if isinstance(answer, DisaggError):
            raise answer
        return answer

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"process {self.pid} ended with {self._process.wait(STOP_S)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Returns when the process has ended."""
        self._pipe.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def cpu_seconds() -> float:
    """Processor time of this process so far, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Answer the parent's calls, one after another, until the parent is gone."""
    module, name, end = sys.argv[1:]
    pipe = Connection(int(end))
    os.set_inheritable(pipe.fileno(), False)
    asyncio.run(_serve(getattr(import_module(module), name)(), pipe))


async def _serve(role: AbstractAsyncContextManager[Any], pipe: Connection) -> None:
    calls: asyncio.Queue[tuple[str, tuple[Any, ...]] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    answering: asyncio.Task[None] | None = None

    def take() -> None:
        try:
            calls.put_nowait(pipe.recv())
        except (EOFError, ConnectionResetError):
            loop.remove_reader(pipe.fileno())
            calls.put_nowait(None)
            if answering is not None:
                answering.cancel()

    loop.add_reader(pipe.fileno(), take)
    async with role as object_there:
        while call := await calls.get():
            method, arguments = call
            answering = loop.create_task(_answer(pipe, getattr(object_there, method), arguments))
            await asyncio.wait([answering])
            if not answering.cancelled():
                answering.result()


async def _answer(pipe: Connection, method: Any, arguments: tuple[Any, ...]) -> None:
    try:
        answer = await method(*arguments)
    except DisaggError as error:
        answer = error
    pipe.send(answer)


if __name__ == "__main__":
    main()
