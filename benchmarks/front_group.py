"""Workers behind a front end of several processes, for `chaos`.

    door 0, with its clients ─┐
    door 1, with its clients ─┴─► router ─► TcpProxy ─► workers

Router and doors can be killed like workers. As on a cluster, workers outlive their router, and the
next one takes them over.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.worker_group import WorkerGroup, WorkerProcess
from disagg.bench.child import Child
from disagg.bench.doors import NoWorkerPool
from disagg.bench.workers import Prompt, WorkerEnd
from disagg.config import Config
from disagg.errors import DisaggError
from disagg.router.client import RouterClient, fixed
from disagg.router.door_service import DoorService
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import WorkerInfo, WorkerStatus
from disagg.transfer.rpc import Link, connect, start_local_server
from disagg.transfer.security import Security

OWNER = "owner"
SECRET = Security(token=OWNER)
SOCKET = "router"
DOOR = "door-"  # and its number: its name
MOST_MISTAKES = 20  # that are quoted


@dataclass(frozen=True)
class RouterFigures:
    """A router at one moment.

    silent_s: as of `Router.silent_s`
    counts:   of this router: "moved", "retried" and "unequal_tokens"
    """

    is_ready: bool
    running: int
    silent_s: Mapping[str, float]
    counts: Counter[str]


class RouterEnd:
    """A router for doors, as the object of a `Child`."""

    async def start(self, config: Config, path: Path) -> None:
        """Serve doors on a Unix socket."""
        self._router = Router(config.router, lease_s=config.transfer.lease_s)
        self._links: dict[str, Link] = {}
        service = DoorService(self._router, NoWorkerPool())
        self._server, _ = await start_local_server([service.handler()], path, SECRET)

    async def follow(self, info: WorkerInfo, address: str) -> None:
        """Add a worker that it reaches at this address."""
        link = connect(address)
        self._links[info.name] = link
        self._router.add(WorkerConnection(info, WorkerClient(link)))

    async def forget(self, name: str) -> None:
        """A worker is dead."""
        self._router.died(name)
        await self._links.pop(name).close()

    async def figures(self) -> RouterFigures:
        """See `RouterFigures`."""
        table = self._router.table
        return RouterFigures(
            self._router.ready,
            self._router.running,
            self._router.silent_s(),
            Counter(
                moved=table.moves,
                retried=table.retries,
                unequal_tokens=table.unequal_tokens,
            ),
        )

    async def status(self) -> Mapping[str, WorkerStatus | DisaggError]:
        """As of `Router.status`."""
        return await self._router.status()


@dataclass(frozen=True)
class TokenRequest:
    """A request for this many tokens."""

    prompt: Prompt
    codec: str
    tokens: int


@dataclass(frozen=True)
class Crowd:
    """What the clients of a door ask for, again and again.

    requests: of the kind that the door takes
    expected: the answer to each
    numbers:  a client each; it begins with the request `step` after its number
    step:     from a client's request to its next one
    """

    requests: Sequence[Any]
    expected: Sequence[Any]
    numbers: Sequence[int]
    step: int = 1


@dataclass
class Answers:
    """Answers that clients have seen.

    failed:   by the error that ended them
    gaps_s:   between tokens of an answer, and before the first one
    outcomes: numbers of answers by kind and outcome, where there are kinds
    mistakes: what was wrong with the first wrong ones
    """

    completed: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)

    def add(self, other: "Answers") -> None:
        """Count those too."""
        self.completed += other.completed
        self.wrong += other.wrong
        self.failed.update(other.failed)
        self.gaps_s += other.gaps_s
        self.outcomes.update(other.outcomes)
        self.mistakes += other.mistakes[: MOST_MISTAKES - len(self.mistakes)]


class DoorEnd:
    """A door with clients that compare each answer, as the object of a `Child`."""

    def __init__(self) -> None:
        self._streams: list[asyncio.Task[None]] = []
        self._answers = Answers()
        self._is_over = False

    async def start(self, config: Config, path: Path, number: int) -> None:
        """Follow the router at this socket, whichever process it is."""
        link = connect(f"unix:{path}", SECRET)
        self._client = RouterClient(fixed(link), str(number), config.router)
        self._following = asyncio.create_task(self._client.run())

    async def answer(self, request: Any) -> Any:
        """The tokens that answer a `TokenRequest`; notes the gaps between them."""
        answer = list[int]()
        last = time.monotonic()
        params = {"max_tokens": request.tokens, "ignore_eos": True}
        outputs = self._client.generate(request.prompt, params, request.codec)
        async with aclosing(outputs):
            async for output in outputs:
                if output.token is not None:
                    answer.append(output.token)
                    last = self._note_gap(last)
        return answer

    def _note_gap(self, last: float) -> float:
        """A token came after the one at `last`: now."""
        now = time.monotonic()
        self._answers.gaps_s.append(now - last)
        return now

    async def begin(self, crowd: Crowd) -> None:
        """Let clients in."""
        self._streams = [
            asyncio.create_task(self._stream(crowd, number)) for number in crowd.numbers
        ]

    async def _stream(self, crowd: Crowd, number: int) -> None:
        while not self._is_over:
            number = (number + crowd.step) % len(crowd.requests)
            request = crowd.requests[number]
            try:
                answer = await self.answer(request)
            except DisaggError as error:
                self._answers.failed[f"{error.reason}: {error}"] += 1
                continue
            self._answers.completed += 1
            self.count(self._answers, request, answer, crowd.expected[number])

    def count(self, answers: Answers, request: Any, answer: Any, expected: Any) -> None:
        """Count a completed answer that is not as expected."""
        if answer != expected:
            answers.wrong += 1

    async def take(self) -> Answers:
        """The answers since the last call."""
        answers, self._answers = self._answers, Answers()
        return answers

    async def end(self) -> Answers:
        """Returns when the clients have their last answers."""
        self._is_over = True
        await asyncio.gather(*self._streams)
        return await self.take()


class ProcessEnd:
    """A process whose calls come one after another, from any task."""

    def __init__(self, role: type):
        self.child = Child(role)
        self._lock = asyncio.Lock()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """As `Child.ask`."""
        async with self._lock:
            return await asyncio.to_thread(self.child.ask, method, *arguments)

    async def kill(self) -> None:
        """SIGKILL, between two calls."""
        async with self._lock:
            os.kill(self.child.pid, signal.SIGKILL)
            await asyncio.to_thread(self.child.__exit__)

    async def close(self) -> None:
        """End it."""
        async with self._lock:
            await asyncio.to_thread(self.child.__exit__)


class FrontGroup(WorkerGroup):
    """Workers, their router and its doors, each in a process of its own.

    doors:   by name
    answers: of all clients, as of the last `take_answers`
    num_cut: answers that ended with their door
    """

    def __init__(
        self,
        config: Config,
        process: type[WorkerEnd],
        door: type[DoorEnd] = DoorEnd,
    ):
        super().__init__(config, process)
        self._door_type = door
        self.doors: dict[str, ProcessEnd] = {}
        self.answers = Answers()
        self.num_cut = 0
        self._crowds: dict[str, Crowd] = {}
        self._folder = TemporaryDirectory()
        self._path = Path(self._folder.name, SOCKET)
        self._router: ProcessEnd
        self._routing = asyncio.Lock()  # held while there is no router
        self._reading = asyncio.Lock()  # held while a door may be missing
        self._counts_before = Counter[str]()  # of routers that were killed

    async def open(self, num_doors: int) -> None:
        """Start the router and its doors, before any worker."""
        await self._start_router()
        for number in range(num_doors):
            await self._start_door(number)

    async def begin(self, crowds: Sequence[Crowd]) -> None:
        """Let clients in, a crowd at each door."""
        self._crowds = dict(zip(self.doors, crowds, strict=True))
        for name, crowd in self._crowds.items():
            await self.doors[name].ask("begin", crowd)

    async def take_answers(self) -> None:
        """Add the latest answers to `answers`."""
        async with self._reading:
            for door in self.doors.values():
                self.answers.add(await door.ask("take"))

    async def end(self) -> None:
        """Let the clients have their last answers."""
        ends = [door.ask("end") for door in self.doors.values()]
        for answers in await asyncio.gather(*ends):
            self.answers.add(answers)

    async def figures(self) -> RouterFigures:
        """Of the present router; counts of all."""
        figures: RouterFigures = await self._ask_router("figures")
        figures.counts.update(self._counts_before)
        return figures

    async def replace_router(self) -> None:
        """Kill the router; another one takes over the workers."""
        async with self._routing:
            figures = await self._router.ask("figures")
            await self._router.kill()
            self._counts_before.update(figures.counts)
            await self._start_router()
            for worker in self.workers.values():
                await self._router.ask("follow", worker.info, worker.router_address)

    async def replace_door(self, name: str) -> None:
        """Kill a door, which ends its answers; another one gets as many clients."""
        crowd = self._crowds[name]
        async with self._reading:
            door = self.doors[name]
            self.answers.add(await door.ask("take"))
            await door.kill()
            self.num_cut += len(crowd.numbers)
            await self._start_door(int(name.removeprefix(DOOR)))
            await self.doors[name].ask("begin", crowd)

    # -- as every group

    async def follow(self, worker: WorkerProcess) -> None:
        await self._ask_router("follow", worker.info, worker.router_address)

    async def forget(self, worker: WorkerProcess) -> None:
        await self._ask_router("forget", worker.name)

    async def status(self) -> Mapping[str, WorkerStatus | DisaggError]:
        status: Mapping[str, WorkerStatus | DisaggError] = await self._ask_router(
            "status"
        )
        return status

    async def is_ready(self) -> bool:
        return (await self.figures()).is_ready

    async def gauges(self) -> dict[str, float]:
        """Also requests of the router."""
        gauges = await super().gauges()
        running = (await self.figures()).running
        return gauges | {"router running": running} if running else gauges

    async def close(self) -> None:
        for process in (*self.doors.values(), self._router):
            await process.close()
        self._folder.cleanup()

    # -- inside

    async def _ask_router(self, method: str, *arguments: Any) -> Any:
        async with self._routing:
            return await self._router.ask(method, *arguments)

    async def _start_router(self) -> None:
        self._router = ProcessEnd(RouterEnd)
        await self._router.ask("start", self.config, self._path)

    async def _start_door(self, number: int) -> None:
        door = ProcessEnd(self._door_type)
        await door.ask("start", self.config, self._path, number)
        self.doors[f"{DOOR}{number}"] = door
