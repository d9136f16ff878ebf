"""The router and its workers for doors, which are other processes: no HTTP, no text."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from disagg.config import Config
from disagg.router.door_service import DoorService
from disagg.server.door_metrics import rendered
from disagg.server.metrics import ServerMetrics
from disagg.server.service import Backend
from disagg.transfer.rpc import start_local_server
from disagg.transfer.security import Security


class RouterProcess(Backend):
    """Serves doors while entered.

    path:   of the Unix socket that doors connect to, in a folder that is closed to others
    secret: of the service's owner, which doors have to know
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        secret: str,
        say: Callable[[str], None] = lambda stage: None,
    ):
        super().__init__(config, say)
        self._path = path
        self._secret = secret
        self._metrics = ServerMetrics(self.name)
        self._counts: dict[str, bytes] = {}  # by door

    async def _serve(self) -> None:
        security = Security(token=self._secret)
        service = DoorService(self._router, self)
        server, _ = await start_local_server([service.handler()], self._path, security)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self._serving.set_result((loop, lambda: loop.call_soon_threadsafe(ended.set)))
        await ended.wait()
        await server.stop(None)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call something on the event loop; RuntimeError when it has ended."""
        self._on_loop(call)

    def count(self, door: str, counts: bytes) -> None:
        """The series of a door, in place of its last ones."""
        self._counts[door] = counts

    async def scrape(self) -> bytes:
        """The series of all doors, the router and the workers, in Prometheus's text format."""
        report = await self._router.report()
        self._metrics.update(report.workers, self._router)
        return rendered(self._metrics.registry, self._counts)
