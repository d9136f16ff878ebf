"""A front end of several processes: doors and their router, as objects of a `Child`."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from disagg.bench.fake_workers import LOOPBACK
from disagg.bench.front_end import CONFIG, SECRET, MeasuredProcess, route
from disagg.router.door_service import DoorService
from disagg.server.door import Door
from disagg.server.process import settled_collector
from disagg.server.service import bind
from disagg.transfer.messages import WorkerInfo
from disagg.transfer.rpc import start_local_server
from disagg.transfer.security import Security


class NoWorkerPool:
    """The `DoorHost` of workers that nobody scales."""

    target_counts: Mapping[str, int] = {}
    lacks_room: Mapping[str, str] = {}

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """Not for fake workers."""

    def drain(self, name: str) -> None:
        """Not for fake workers."""

    def count(self, door: str, counts: bytes) -> None:
        """Counts of doors are not shown."""

    def leave(self, door: str) -> None:
        """Counts of doors are not kept."""

    async def scrape(self) -> bytes:
        """No series."""
        return b""


class MeasuredRouter(MeasuredProcess):
    """The router for doors."""

    async def start(self, workers: Sequence[WorkerInfo], path: Path) -> None:
        """Serve doors on a Unix socket."""
        service = DoorService(await route(workers), NoWorkerPool())
        security = Security(token=SECRET)
        self._server = await start_local_server([service.handler()], path, security)
        self._settled = ExitStack()
        self._settled.enter_context(settled_collector())
        self.watch()


class MeasuredDoor(MeasuredProcess):
    """HTTP and tokenizer in front of a router."""

    async def start(self, number: int, path: Path) -> int:
        """The port of a door, whose router listens on a Unix socket."""
        listening = bind(LOOPBACK, 0)
        door = Door(
            CONFIG,
            number,
            [listening],
            path=path,
            secret=SECRET,
            on_stop=lambda now: None,
        )
        is_serving = asyncio.Event()
        self.spawn(door.serve(is_serving.set))
        await is_serving.wait()
        self.watch()
        return int(listening.getsockname()[1])
