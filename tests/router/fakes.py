"""Workers without a model, a router that has some, and its service for doors on a Unix socket."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from disagg.config import RouterConfig
from disagg.router.client import Dial, RouterClient, fixed
from disagg.router.door_service import MAX_BEHIND, DoorService
from disagg.router.router import Router, WorkerConnection
from disagg.server.router_process import Listen
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    StepEvents,
    Submit,
    TokenEvent,
    WorkerInfo,
    WorkerStatus,
)
from disagg.transfer.rpc import connect, start_local_server
from disagg.transfer.security import Security
from tests.transfer.peer import until

SECRET = Security(token="the owner's secret")
FIGURES = {"codec": "raw", "tokens": 3, "wire_bytes": 10, "fp16_bytes": 40}


def answer_of(prompt: tuple[int, ...], num_tokens: int, seed: int = 0) -> list[int]:
    """What a fake worker answers: tokens that depend on the prompt, the seed and the index."""
    return [(sum(prompt) + 7 * seed + i) % 1000 for i in range(num_tokens)]


class FakeWorker:
    """Does all work itself, one token of each job a step.

    go:   cleared: it makes no steps
    jobs: that run, by rid
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.emitted: dict[str, int] = {}
        self.submitted: list[Job] = []
        self.go = asyncio.Event()
        self.go.set()

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        return Grant(1, epoch)

    async def submit(self, submit: Submit) -> None:
        job = submit.job
        self.submitted.append(job)
        self.jobs[job.rid] = job
        # as an engine it repeats the last token, which may be the end
        self.emitted[job.rid] = max(0, len(job.emitted) - 1)

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncGenerator[StepEvents]:
        self.jobs.clear()
        while True:
            events = [self._token(job) for job in list(self.jobs.values())]
            yield StepEvents(tuple(events), Load(1 << 40, 1 << 10, 0, Role.BOTH))
            await self.go.wait()
            await asyncio.sleep(0.001)

    def _token(self, job: Job) -> TokenEvent:
        index = self.emitted[job.rid]
        self.emitted[job.rid] += 1
        is_last = index + 1 >= job.sampling["max_tokens"]
        if is_last:
            del self.jobs[job.rid]
        answer = answer_of(job.prompt, index + 1, job.sampling.get("seed", 0))
        scores: list[Any] = []
        if job.sampling.get("logprobs") is not None:
            scores = [[-float(index), [[answer[-1], -float(index)]]]]
        return TokenEvent(
            job.rid,
            job.attempt,
            index,
            answer[-1],
            finish_reason="length" if is_last else "",
            stats=FIGURES if index == 0 else None,
            logprobs=scores,
        )

    async def acknowledge(self, have: Mapping[str, int], router: str) -> None:
        pass

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        self.jobs.pop(rid, None)

    async def fence(self, epoch: int, router: str) -> None:
        self.jobs.clear()

    async def status(self) -> WorkerStatus:
        return WorkerStatus(1, {"jobs": len(self.jobs)}, {"pid": 1})


class FakeHost:
    """Does what a door asks for beside requests, and notes it."""

    target_counts: Mapping[str, int] = {"both": 1}
    lacks_room: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.counts: dict[str, bytes] = {}
        self.departures: list[str] = []

    def scale(self, prefill: int | None, decode: int | None) -> None:
        self.calls.append(("scale", prefill, decode))

    def drain(self, name: str) -> None:
        self.calls.append(("drain", name))

    def count(self, door: str, counts: bytes) -> None:
        self.counts[door] = counts

    def leave(self, door: str) -> None:
        self.departures.append(door)

    async def scrape(self) -> bytes:
        return b"".join(self.counts.values())


class RouterProcess:
    """What a process of a router has, on this loop.

    listen: what starts its server, or the path of its Unix socket
    """

    address = ""

    def __init__(
        self, listen: Listen | Path, max_behind: int = MAX_BEHIND, **config: Any
    ):
        self.worker = FakeWorker()
        self.host = FakeHost()
        self.router = Router(RouterConfig(**config))
        if isinstance(listen, Path):
            listen = partial(start_local_server, path=listen, security=SECRET)
        self._listen = listen
        self._service = DoorService(self.router, self.host, max_behind)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serve doors; requests wait until there is a worker."""
        handlers = [self._service.handler()]
        self._server, self.address = await self._listen(handlers)

    def add_worker(self) -> None:
        info = WorkerInfo("both-0", Role.BOTH, "here:1", 1, step_tokens=1 << 20)
        self.router.add(WorkerConnection(info, self.worker))

    async def die(self) -> None:
        """All of its connections break at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        await self.router.close()


@asynccontextmanager
async def serving(
    listen: Listen | Path, max_behind: int = MAX_BEHIND, **config: Any
) -> AsyncIterator[RouterProcess]:
    """A router with one worker, whose doors find it where it listens."""
    process = RouterProcess(listen, max_behind, **config)
    await process.start()
    process.add_worker()
    try:
        yield process
    finally:
        await process.die()


@asynccontextmanager
async def door_at(
    path: Path, name: str = "0", **config: Any
) -> AsyncIterator[RouterClient]:
    """A door of the router at this path."""
    link = connect(f"unix:{path}", SECRET)
    async with following(fixed(link), name, **config) as client:
        yield client


@asynccontextmanager
async def following(
    dial: Dial, name: str = "0", **config: Any
) -> AsyncIterator[RouterClient]:
    """A door that follows the routers of its dial."""
    client = RouterClient(dial, name, RouterConfig(**config), counts=lambda: b"1 ")
    running = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(30):
            yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def attached(client: RouterClient) -> None:
    await until(lambda: client.ready)
