"""A group of workers that join and leave, and their router, for `chaos` and `moves`.

Each worker is a process behind a proxy; the router is in this process. No Ray:

    router ─────────► TcpProxy ──► worker       closed proxies cut the worker off from the router,
    other workers ──► TcpProxy ──► worker       from other workers, or from both

In place of Ray, the group reports deaths to the router and starts replacements.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
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
from disagg.transfer.messages import Role, WorkerStatus
from disagg.transfer.rpc import Link, connect

POLL_S = 0.05
PATIENCE_S = 120.0  # for a condition to hold
IDLE_S = 60.0  # for workers to release everything
IDLE_GAUGES = {"arena_bytes", "cached_pages", "cached_bytes"}  # of an idle worker too


@dataclass(eq=False)
class WorkerProcess:
    """A worker as its group has it.

    router_proxy, peer_proxy: in front of it, for the router and for other workers
    """

    name: str
    role: Role
    child: Child
    router_proxy: TcpProxy
    peer_proxy: TcpProxy
    link: Link

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


class WorkerGroup:
    """Workers by name, and their router.

    process: the object of each worker's process
    prepare: called with the process of each worker before it starts
    proxies: of all workers that ever were
    """

    def __init__(self, config: Config, process: type[WorkerEnd]):
        self.router = Router(config.router, lease_s=config.transfer.lease_s)
        self.workers: dict[str, WorkerProcess] = {}
        self.proxies: list[TcpProxy] = []
        self.prepare: Callable[[Child], object] = lambda child: None
        self.config = config
        self._process = process
        self._numbers = count()

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
        router_proxy, peer_proxy = TcpProxy(info.address), TcpProxy(info.address)
        self.proxies += [router_proxy, peer_proxy]
        info = replace(info, address=await peer_proxy.open())
        link = connect(await router_proxy.open())
        worker = WorkerProcess(name, role, child, router_proxy, peer_proxy, link)
        self.workers[name] = worker
        self.router.add(WorkerConnection(info, WorkerClient(link)))
        return worker

    async def remove(self, worker: WorkerProcess) -> None:
        """Take a worker out that is dead, or has nothing to do any more."""
        del self.workers[worker.name]
        self.router.died(worker.name)
        worker.cut_off()
        await worker.link.close()
        await asyncio.to_thread(worker.child.__exit__)

    async def gauges_when_idle(self) -> dict[str, float]:
        """What workers still hold: empty as soon as that is nothing, else as it is after IDLE_S."""
        deadline = time.monotonic() + IDLE_S
        gauges = await self._gauges()
        while gauges and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            gauges = await self._gauges()
        return gauges

    async def _gauges(self) -> dict[str, float]:
        """Every gauge that an idle worker would not have, by worker and name."""
        gauges = dict[str, float]()
        for name, status in (await self.router.status()).items():
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
        return {"processes": processes, "ports": ports}

    def resident_mb(self) -> int:
        """Memory of the present workers, in MB; 0 where there is no /proc."""
        pages = 0
        for worker in self.workers.values():
            statm = Path("/proc", str(worker.child.pid), "statm")
            if statm.exists():
                pages += int(statm.read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


@asynccontextmanager
async def running_group(
    config: Config, prefill: int, decode: int, process: type[WorkerEnd] = WorkerEnd
) -> AsyncIterator[WorkerGroup]:
    """A group with this many workers of each role; all leave at the end."""
    group = WorkerGroup(config, process)
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    try:
        await asyncio.gather(*map(group.start, roles))
        await until(lambda: group.router.ready, "all workers take part")
        yield group
    finally:
        await group.router.close()
        for worker in list(group.workers.values()):
            await group.remove(worker)


async def until(condition: Callable[[], bool], description: str) -> None:
    """Wait for a condition; DeadlineError with its description after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DeadlineError(f"not within {PATIENCE_S:g} s: {description}") from None
