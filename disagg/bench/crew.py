"""Workers in processes of their own, each behind a door, for a router of this process; no Ray.

    router, other workers ──► Door ──► worker       a door that is shut cuts off whoever is behind

What Ray does for a service is done here: dead workers are told of and replaced.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count

import torch

from disagg.bench.child import Child, Fork
from disagg.config import Config
from disagg.errors import DeadlineError
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Role, WorkerStatus
from disagg.transfer.rpc import Link, connect
from disagg.workers.dispatch import Started
from disagg.workers.router import Peer, Router
from disagg.workers.worker import Worker, settle_memory

HOST, CHUNK_BYTES, POLL_S = "127.0.0.1", 1 << 18, 0.05
DRAIN_S, PATIENCE_S = 60.0, 120.0
STAYS = {"arena_bytes", "cached_pages", "cached_bytes"}  # of an idle worker


class WorkerProcess:
    """A worker, from within its process."""

    async def start(self, config: Config, role: Role, name: str) -> Started:
        """How it can be reached."""
        torch.set_num_threads(1)
        self._worker = Worker(config, role, name)
        settle_memory()
        return await asyncio.to_thread(self._worker.start)

    async def assume(self, role: Role) -> None:
        """Do something else from now on."""
        self._worker.assume(role)

    async def leave(self) -> None:
        """Returns when all that it had is gone elsewhere."""
        self._worker.stop(DRAIN_S)
        await asyncio.to_thread(self._worker.wait)


class Door:
    """A port in front of another one."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._there = host, int(port)
        self._guests: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> str:
        """Let connections through; the address to use."""
        self._server = await asyncio.start_server(self._enter, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return f"{HOST}:{self.port}"

    def shut(self) -> None:
        """Break what is through, and refuse the rest."""
        self._server.close()
        for guest in self._guests:
            guest.cancel()

    def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = asyncio.create_task(self._carry(reader, writer))
        self._guests.add(guest)
        guest.add_done_callback(self._guests.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        with suppress(OSError, asyncio.CancelledError):
            back, forth = await asyncio.open_connection(*self._there)
            ends.append(forth)
            ways = [asyncio.create_task(x) for x in (_copy(reader, forth), _copy(back, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        for end in ends:
            end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


@dataclass(eq=False)
class Hand:
    """A worker as its crew knows it."""

    name: str
    role: Role
    child: Child
    door: Door
    link: Link

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.child.pid, number)


class Crew:
    """Workers by name, and their router. `process`: what each is in its own."""

    def __init__(self, config: Config, process: type[WorkerProcess] = WorkerProcess):
        self.router = Router(config.router)
        self.hands: dict[str, Hand] = {}
        self.pids: list[int] = []  # of all that ever were, as are the doors
        self.doors: list[Door] = []
        self._config, self._process = config, process
        self._numbers = count()

    async def hire(self, role: Role) -> Hand:
        """Start a worker and give it work."""
        name = f"{role}-{next(self._numbers)}"
        child = await asyncio.to_thread(Fork, self._process)
        self.pids.append(child.pid)
        started = await asyncio.to_thread(child.ask, "start", self._config, role, name)
        door = Door(started.address)
        self.doors.append(door)
        started = replace(started, address=await door.open())
        link = connect(started.address)
        hand = self.hands[name] = Hand(name, role, child, door, link)
        self.router.add(Peer(started, WorkerClient(link)))
        return hand

    async def lose(self, hand: Hand) -> None:
        """A worker is dead, or has nothing to do any more."""
        del self.hands[hand.name]
        self.router.died(hand.name)
        hand.door.shut()
        await hand.link.close()
        await asyncio.to_thread(hand.child.__exit__)

    async def idle(self, patience_s: float) -> dict[str, float]:
        """What is held, when that is nothing or after so long."""
        until = asyncio.get_running_loop().time() + patience_s
        while (held := await self._held()) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(POLL_S)
        return held

    async def _held(self) -> dict[str, float]:
        held = dict[str, float]()
        for name, said in (await self.router.status()).items():
            gauges = said.gauges if isinstance(said, WorkerStatus) else {"silent": 1.0}
            held |= {f"{name} {x}": y for x, y in gauges.items() if y and x not in STAYS}
        return held

    async def left(self) -> dict[str, list[int]]:
        """Processes and ports that are there although everybody has left."""
        ports = []
        for port in (door.port for door in self.doors):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.close()
                ports.append(port)
        return {"processes": [pid for pid in self.pids if _lives(pid)], "ports": ports}


@asynccontextmanager
async def hired(
    config: Config, prefill: int, decode: int, process: type[WorkerProcess] = WorkerProcess
) -> AsyncIterator[Crew]:
    """A crew; all of it leaves in the end."""
    crew = Crew(config, process)
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    try:
        await asyncio.gather(*map(crew.hire, roles))
        await until(lambda: crew.router.ready, "all workers take part")
        yield crew
    finally:
        await crew.router.close()
        for hand in list(crew.hands.values()):
            await crew.lose(hand)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something to be so; DeadlineError, with what it is, after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DeadlineError(f"not within {PATIENCE_S:g} s: {what}") from None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
