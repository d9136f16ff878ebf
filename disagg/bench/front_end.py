"""The front end of a service in a process of its own: HTTP, tokenizer and router, without Ray.

A task on its event loop measures how late the loop is: that is how long every client waits.
"""

import asyncio
import gc
import logging
import os
import resource
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.bench.fake_workers import LOOPBACK
from disagg.bench.raw_clients import prompt_of_ids
from disagg.bench.result import p99
from disagg.config import Config, RouterConfig
from disagg.errors import DeadlineError
from disagg.router.router import Router, WorkerConnection
from disagg.server.app import create_app
from disagg.server.completions import Completions
from disagg.server.connections import http_server
from disagg.server.process import raise_file_limit, settled_collector
from disagg.server.service import bind
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import WorkerInfo
from disagg.transfer.rpc import connect

WATCH_S = 0.01  # between two looks at the clock
RESIDENT_S = 0.2  # between two looks at the memory
READY_S = 30.0  # for all workers to take part
MODEL = "front"
SECRET = "secret"
CONFIG = Config(router=RouterConfig(max_queue=1 << 20))


@dataclass(frozen=True)
class FrontEndFigures:
    """What a process did in one window of time.

    cpu_s:          processor time of all its threads
    late_max_s, late_p99_s, late_sum_s: how late its loop was, at each look
    busy_max_s:     most processor time of the loop between two looks: what it would be late on
                    a machine of its own
    collection_s:   the longest garbage collection
    resident_bytes: most memory at one look
    log_lines:      lines that it logged, from level warning on
    """

    cpu_s: float
    seconds: float
    late_max_s: float
    late_p99_s: float
    late_sum_s: float
    busy_max_s: float
    collection_s: float
    resident_bytes: int
    log_lines: int


class LineCount(logging.Handler):
    """Counts lines instead of writing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


@dataclass
class Watch:
    """What was seen on the loop since the window began."""

    log: LineCount
    began_at: float = field(default_factory=time.perf_counter)
    began_cpu_s: float = field(default_factory=time.process_time)
    late_s: list[float] = field(default_factory=list)
    busy_max_s: float = 0.0
    collection_s: float = 0.0
    resident_bytes: int = 0
    log_lines: int = 0

    def __post_init__(self) -> None:
        self.log_lines = self.log.lines

    def figures(self) -> FrontEndFigures:
        late_s = self.late_s or [0.0]
        return FrontEndFigures(
            cpu_s=time.process_time() - self.began_cpu_s,
            seconds=time.perf_counter() - self.began_at,
            late_max_s=max(late_s),
            late_p99_s=p99(late_s),
            late_sum_s=sum(late_s),
            busy_max_s=self.busy_max_s,
            collection_s=self.collection_s,
            resident_bytes=self.resident_bytes,
            log_lines=self.log.lines - self.log_lines,
        )


class Memory:
    """Memory of this process. It opens its file once: there may be no free one later."""

    def __init__(self) -> None:
        statm = Path("/proc/self/statm")
        self._file = statm.open("rb", buffering=0) if statm.exists() else None

    def resident_bytes(self) -> int:
        """0 where there is no /proc."""
        if self._file is None:
            return 0
        self._file.seek(0)
        pages = int(self._file.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class MeasuredProcess:
    """A process whose loop is watched, from `watch` on."""

    def __init__(self) -> None:
        gc.unfreeze()  # as in a service, whose imported modules are collected too
        self._log = LineCount()
        logging.getLogger().addHandler(self._log)
        self._memory = Memory()
        self._watch = Watch(self._log)
        self._tasks: list[asyncio.Task[object]] = []

    async def begin(self) -> int:
        """Begin a window; memory at its beginning."""
        self._watch = Watch(self._log)
        self._note_memory()
        return self._watch.resident_bytes

    async def resident_bytes(self) -> int:
        """Memory now."""
        return self._memory.resident_bytes()

    async def read(self) -> FrontEndFigures:
        """The window so far."""
        self._note_memory()
        return self._watch.figures()

    async def idle(self, seconds: float) -> FrontEndFigures:
        """What happens meanwhile."""
        await self.begin()
        await asyncio.sleep(seconds)
        return await self.read()

    def watch(self) -> None:
        """Watch the loop, the memory and the garbage collector."""
        self.spawn(self._watch_loop())
        self.spawn(self._watch_memory())
        self._watch_collections()

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run something as long as the process."""
        self._tasks.append(asyncio.create_task(work))

    async def _watch_loop(self) -> None:
        while True:
            began = time.perf_counter()
            began_busy_s = time.thread_time()
            await asyncio.sleep(WATCH_S)
            watch = self._watch
            watch.late_s.append(time.perf_counter() - began - WATCH_S)
            busy_s = time.thread_time() - began_busy_s
            watch.busy_max_s = max(watch.busy_max_s, busy_s)

    async def _watch_memory(self) -> None:
        while True:
            self._note_memory()
            await asyncio.sleep(RESIDENT_S)

    def _note_memory(self) -> None:
        watch = self._watch
        resident = self._memory.resident_bytes()
        watch.resident_bytes = max(watch.resident_bytes, resident)

    def _watch_collections(self) -> None:
        began = 0.0

        def on_collection(phase: str, info: dict[str, int]) -> None:
            nonlocal began
            now = time.perf_counter()
            if phase == "start":
                began = now
            else:
                watch = self._watch
                watch.collection_s = max(watch.collection_s, now - began)

        gc.callbacks.append(on_collection)


async def route(workers: Sequence[WorkerInfo]) -> Router:
    """A router in which all workers take part."""
    router = Router(CONFIG.router)
    for worker in workers:
        client = WorkerClient(connect(worker.address))
        router.add(WorkerConnection(worker, client))
    try:
        async with asyncio.timeout(READY_S):
            while len(router.table.workers) < len(workers):
                await asyncio.sleep(WATCH_S)
    except TimeoutError:
        raise DeadlineError(
            f"{len(workers)} workers did not take part in {READY_S:g} s"
        ) from None
    return router


class MeasuredFront(MeasuredProcess):
    """HTTP, tokenizer and router in one process."""

    async def start(
        self, workers: Sequence[WorkerInfo], max_files: int | None = None
    ) -> int:
        """The port at which it serves these workers.

        max_files: its soft limit of open files at first; None: as it is
        """
        if max_files is not None:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, most))
        # as a service does
        raise_file_limit(CONFIG.server)
        self._router = await route(workers)
        self._requests: list[asyncio.Task[None]] = []  # the last ones that began
        self._earlier: list[asyncio.Task[None]] = []
        completions = Completions.load(CONFIG, MODEL, self._router, {})
        listening = bind(LOOPBACK, 0)
        server = http_server(create_app(completions, SECRET), CONFIG.server)
        self.spawn(server.serve([listening]))
        self._settled = ExitStack()
        self._settled.enter_context(settled_collector())
        self.watch()
        return int(listening.getsockname()[1])

    # -- requests that come without HTTP

    async def begin_requests(
        self, count: int, prompt_tokens: int, tokens: int
    ) -> FrontEndFigures:
        """Requests that arrive at the router, one a turn of the loop, and go on."""
        await self.begin()
        prompt = prompt_of_ids(prompt_tokens)
        self._earlier += self._requests
        self._requests = []
        for number in range(count):
            prompt_ids = (*prompt[:-1], number)
            request = asyncio.create_task(self._generate(prompt_ids, tokens))
            self._requests.append(request)
            await asyncio.sleep(0)
        await asyncio.sleep(WATCH_S)
        return await self.read()

    async def cancel_requests(self) -> FrontEndFigures:
        """The clients of the requests that began last leave, one a turn of the loop."""
        await self.begin()
        for request in self._requests:
            request.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*self._requests, return_exceptions=True)
        await asyncio.sleep(WATCH_S)
        return await self.read()

    async def _generate(self, prompt: tuple[int, ...], tokens: int) -> None:
        outputs = self._router.generate(prompt, {"max_tokens": tokens}, "")
        async with aclosing(outputs):
            async for _ in outputs:
                pass
