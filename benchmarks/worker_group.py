"""A group of workers that join and leave, and their router, for `chaos` and `moves`.

Each worker is a process behind a proxy. The router is in this process, or in another one (see
front_group.py). No Ray:

    router ─────────► TcpProxy ──► worker       closed proxies cut the worker off from the router,
    other workers ──► TcpProxy ──► worker       from other workers, or from both

In place of Ray, the group reports deaths to the router and starts replacements.
"""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import active_children
from pathlib import Path

from disagg.bench.child import Child
from disagg.bench.link import LOOPBACK, TcpProxy
from disagg.bench.workers import WorkerEnd
from disagg.config import Config
from disagg.errors import DeadlineError, DisaggError
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Role, WorkerInfo, WorkerStatus
from disagg.transfer.rpc import Link, connect

POLL_S = 0.05
PATIENCE_S = 120.0  # for a condition to hold
IDLE_S = 60.0  # for workers to release everything
FOLLOWER = b"disagg.worker.rank_process"  # in the command of a rank other than 0
IDLE_GAUGES = {"arena_bytes", "cached_pages", "cached_bytes"}  # of an idle worker too


@dataclass(eq=False)
class WorkerProcess:
    """A worker as its group has it.

    info: how other workers reach it
    router_address: how the router does
    router_proxy, peer_proxy: in front of it, for the router and for other workers
    """

    name: str
    role: Role
    child: Child
    info: WorkerInfo
    router_address: str
    router_proxy: TcpProxy
    peer_proxy: TcpProxy

    @property
    def proxies(self) -> tuple[TcpProxy, TcpProxy]:
        return self.router_proxy, self.peer_proxy

    def cut_off(self) -> None:
        """Break its connections, and refuse new ones."""
        for proxy in self.proxies:
            proxy.close()

    async def restore(self) -> None:
        """Let connections through again."""
        for proxy in self.proxies:
            await proxy.open()


class WorkerGroup(ABC):
    """Workers by name; a subclass has their router.

    process: the object of each worker's process
    prepare: called with the process of each worker before it starts
    proxies: of all workers that ever were
    followers: processes of their other ranks, of all that ever were
    """

    def __init__(self, config: Config, process: type[WorkerEnd]):
        self.workers: dict[str, WorkerProcess] = {}
        self.proxies: list[TcpProxy] = []
        self.followers: list[int] = []
        self.prepare: Callable[[Child], object] = lambda child: None
        self.config = config
        self._process = process
        self._numbers = count()

    @abstractmethod
    async def follow(self, worker: WorkerProcess) -> None:
        """Add a worker to the router."""

    @abstractmethod
    async def forget(self, worker: WorkerProcess) -> None:
        """Tell the router that a worker is dead."""

    @abstractmethod
    async def status(self) -> Mapping[str, WorkerStatus | DisaggError]:
        """As of `Router.status`."""

    @abstractmethod
    async def is_ready(self) -> bool:
        """As of `Router.ready`."""

    @abstractmethod
    async def close(self) -> None:
        """End the router."""

    async def start(self, role: Role, config: Config | None = None) -> WorkerProcess:
        """Start a worker and add it to the router; raises the DisaggError that it raised."""
        name = f"{role}-{next(self._numbers)}"
        child = await asyncio.to_thread(Child, self._process)
        try:
            await asyncio.to_thread(self.prepare, child)
            arguments = config or self.config, role, name
            info = await asyncio.to_thread(child.ask, "start", *arguments)
        except DisaggError:
            await asyncio.to_thread(child.__exit__)
            raise
        self.followers += followers_of(child.pid)
        router_proxy, peer_proxy = TcpProxy(info.address), TcpProxy(info.address)
        self.proxies += [router_proxy, peer_proxy]
        worker = WorkerProcess(
            name,
            role,
            child,
            info=replace(info, address=await peer_proxy.open()),
            router_address=await router_proxy.open(),
            router_proxy=router_proxy,
            peer_proxy=peer_proxy,
        )
        self.workers[name] = worker
        await self.follow(worker)
        return worker

    async def remove(self, worker: WorkerProcess) -> None:
        """Take a worker out that is dead, or has nothing to do any more."""
        del self.workers[worker.name]
        await self.forget(worker)
        worker.cut_off()
        await asyncio.to_thread(worker.child.__exit__)

    async def gauges_when_idle(self) -> dict[str, float]:
        """What is still held: empty as soon as that is nothing, else as it is after IDLE_S."""
        deadline = time.monotonic() + IDLE_S
        gauges = await self.gauges()
        while gauges and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            gauges = await self.gauges()
        return gauges

    async def gauges(self) -> dict[str, float]:
        """Every gauge that an idle worker would not have, by worker and name."""
        gauges = dict[str, float]()
        for name, status in (await self.status()).items():
            if not isinstance(status, WorkerStatus):
                gauges[f"{name} silent"] = 1.0
                continue
            for gauge, value in status.gauges.items():
                if value and gauge not in IDLE_GAUGES:
                    gauges[f"{name} {gauge}"] = value
        return gauges

    async def leftovers(self) -> dict[str, list[int]]:
        """Processes and open ports after all workers have left."""
        ports = []
        for port in (proxy.port for proxy in self.proxies):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.close()
                ports.append(port)
        processes = [child.pid or 0 for child in active_children()]
        processes += filter(is_follower, self.followers)
        return {"processes": processes, "ports": ports}

    def resident_mb(self) -> int:
        """Memory of the present workers, in MB; 0 where there is no /proc."""
        pages = 0
        pids = [worker.child.pid for worker in self.workers.values()]
        for pid in [*pids, *filter(is_follower, self.followers)]:
            statm = Path("/proc", str(pid), "statm")
            if statm.exists():
                pages += int(statm.read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


def followers_of(pid: int) -> list[int]:
    """The processes of a worker's other ranks, in their order; none where there is no /proc."""
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return [*filter(is_follower, sorted(children))]


def is_follower(pid: int) -> bool:
    """Whether this is the process of a rank other than 0, and runs."""
    try:
        return FOLLOWER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has ended


class RoutedGroup(WorkerGroup):
    """Workers and a router in this process."""

    def __init__(self, config: Config, process: type[WorkerEnd]):
        super().__init__(config, process)
        self.router = Router(config.router, lease_s=config.transfer.lease_s)
        self._links: dict[str, Link] = {}

    async def follow(self, worker: WorkerProcess) -> None:
        link = connect(worker.router_address)
        self._links[worker.name] = link
        self.router.add(WorkerConnection(worker.info, WorkerClient(link)))

    async def forget(self, worker: WorkerProcess) -> None:
        self.router.died(worker.name)
        await self._links.pop(worker.name).close()

    async def status(self) -> Mapping[str, WorkerStatus | DisaggError]:
        return await self.router.status()

    async def is_ready(self) -> bool:
        return self.router.ready

    async def close(self) -> None:
        await self.router.close()


@asynccontextmanager
async def running(group: WorkerGroup, prefill: int, decode: int) -> AsyncIterator[None]:
    """The group has this many workers of each role; all leave at the end."""
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    try:
        await asyncio.gather(*map(group.start, roles))
        await until(group.is_ready, "all workers take part")
        yield
    finally:
        for worker in list(group.workers.values()):
            await group.remove(worker)
        await group.close()


async def until(condition: Callable[[], Awaitable[bool]], description: str) -> None:
    """Wait for a condition; DeadlineError with its description after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DeadlineError(f"not within {PATIENCE_S:g} s: {description}") from None
