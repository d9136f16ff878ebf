"""The router and its workers for doors, which are other processes: no HTTP, no text."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from disagg.config import Config
from disagg.router.door_service import DoorService
from disagg.server.door_metrics import DoorSeries, rendered
from disagg.server.metrics import ServerMetrics
from disagg.server.service import Backend
from disagg.transfer.rpc import RpcHandler, RpcServer

POLL_S = 0.05

# starts a server of these handlers; returns it and its address
Listen = Callable[[Sequence[RpcHandler]], Awaitable[tuple[RpcServer, str]]]


class RouterProcess(Backend):
    """Serves doors while entered, at `address`."""

    address: str

    def __init__(
        self,
        config: Config,
        listen: Listen,
        say: Callable[[str], None] = lambda stage: None,
    ):
        super().__init__(config, say)
        self._listen = listen
        self._metrics = ServerMetrics(self.name)
        self._series = DoorSeries()

    async def _serve(self) -> None:
        self._service = DoorService(self._router, self)
        server, self.address = await self._listen([self._service.handler()])
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self._serving.set_result((loop, lambda: loop.call_soon_threadsafe(ended.set)))
        await ended.wait()
        await server.stop(None)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call something on the event loop; RuntimeError when it has ended."""
        self._on_loop(call)

    def wait_for_doors(self, limit_s: float) -> None:
        """Returns when no door is attached any more, or after the limit."""
        until = time.monotonic() + limit_s
        while self._service.num_doors and time.monotonic() < until:
            time.sleep(POLL_S)

    # -- for doors, on the event loop

    def count(self, door: str, counts: bytes) -> None:
        """The series of a door, in place of its last ones."""
        self._series.replace(door, counts)

    def leave(self, door: str) -> None:
        """No door of this name is attached any more."""
        self._series.leave(door)

    async def scrape(self) -> bytes:
        """The series of all doors, the router and the workers, in Prometheus's text format."""
        report = await self._router.report()
        self._metrics.update(report.workers, self._router)
        return rendered(self._metrics.registry, self._series.current())
