"""A door: HTTP, tokenizer, text, limits and counts, in front of a router in another process.

It keeps nothing that outlives its clients' requests, so doors start, drain and die one by one.
"""

import asyncio
import math
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from starlette.types import ASGIApp

from disagg.config import Config
from disagg.router.client import Dial, RouterClient, fixed
from disagg.server.app import create_app
from disagg.server.auth import KeyRing, read_keys
from disagg.server.completions import Completions
from disagg.server.connections import HttpServer, http_server
from disagg.server.door_metrics import exported
from disagg.server.live_settings import plan_update, reload_http
from disagg.server.process import raise_file_limit, settled_collector
from disagg.server.service import served_name
from disagg.transfer.rpc import connect
from disagg.transfer.security import Security

POLL_S = 0.05


class DoorCompletions(Completions):
    """Completions whose router is in another process, which has the series of all doors."""

    router: RouterClient

    async def _collect(self) -> bytes:
        return await self.router.scrape()


class RemoteWorkers:
    """The owner of the workers, in the process of the router."""

    def __init__(self, client: RouterClient):
        self._client = client
        self._loop = asyncio.get_running_loop()

    @property
    def target_counts(self) -> Mapping[str, int]:
        """The target number of workers of each role."""
        return self._client.target_counts

    @property
    def lacks_room(self) -> Mapping[str, str]:
        """What room workers wait for, in words, by name."""
        return self._client.lacks_room

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """Scale each role to this count, in the background; None keeps the current one."""
        self._wait_for(self._client.scale(prefill, decode))

    def drain(self, name: str) -> None:
        """Replace a worker; it leaves once another one has taken its place."""
        self._wait_for(self._client.drain(name))

    def _wait_for(self, call: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()


@dataclass(frozen=True)
class DoorApp:
    """What a door serves, over its own HTTP server or Ray Serve's; `client.run` must be running."""

    app: ASGIApp
    client: RouterClient
    completions: DoorCompletions

    @classmethod
    def load(
        cls,
        config: Config,
        name: str,
        dial: Dial,
        keys: KeyRing,
        secret: str | None = None,
        on_stop: Callable[[bool], None] = lambda now: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Load the tokenizer. Needs a running event loop.

        name:   of the door, for the series of its counts
        secret: of the service's owner; None: it cannot be stopped or scaled over HTTP
        """
        client = RouterClient(
            dial, name, config.router, counts=lambda: exported(metrics.registry)
        )
        completions = DoorCompletions.load(config, served_name(config), client, {})
        metrics = completions.metrics
        app = create_app(
            completions,
            token=secret,
            on_stop=on_stop,
            keys=keys,
            worker_pool=RemoteWorkers(client),
            origins=config.server.allowed_origins,
            is_stopping=is_stopping,
        )
        return cls(app, client, completions)


class Door:
    """Serves clients on sockets that it shares with other doors.

    number:  of its place among the doors of the service
    path:    where the router listens
    secret:  of the service's owner
    on_stop: called when the owner asks for the end of the service, at once or not
    """

    def __init__(
        self,
        config: Config,
        number: int,
        sockets: Sequence[socket.socket],
        path: Path,
        secret: str,
        on_stop: Callable[[bool], None],
    ):
        self._config = config
        self._name = str(number)
        self._sockets = list(sockets)
        self._path = path
        self._secret = secret
        self._on_stop = on_stop
        server = config.server
        self._keys = KeyRing(read_keys(server), secret, server.metrics_key)
        self._ends = asyncio.Event()
        # until when requests may take, once it ends
        self._until = math.inf
        self.is_leaving = False
        self._has_to_end = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: RouterClient
        self._completions: DoorCompletions
        self._http: HttpServer

    async def serve(self, on_serving: Callable[[], None]) -> None:
        """Serve until `end` was called and requests have ended. on_serving: called when it does."""
        raise_file_limit(self._config.server)
        link = connect(f"unix:{self._path}", Security(token=self._secret))
        served = DoorApp.load(
            self._config,
            self._name,
            fixed(link),
            self._keys,
            self._secret,
            self._on_stop,
            is_stopping=lambda: self.is_leaving,
        )
        client = served.client
        server = http_server(served.app, self._config.server)
        self._client = client
        self._completions = served.completions
        self._http = server
        self._loop = asyncio.get_running_loop()
        if self._has_to_end:
            self._ends.set()
        following = asyncio.create_task(client.run())
        serving = asyncio.create_task(server.serve(self._sockets))
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        on_serving()
        with settled_collector():
            await self._drain(server, serving)
        await client.close()
        server.end()
        await serving
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await served.completions.close()

    async def _drain(self, server: HttpServer, serving: asyncio.Task[None]) -> None:
        """Wait for the end, then take no new connections, and let requests end in time."""
        ends = asyncio.create_task(self._ends.wait())
        await asyncio.wait([ends, serving], return_when=asyncio.FIRST_COMPLETED)
        for listening in server.servers:
            listening.close()
        while server.server_state.tasks and time.monotonic() < self._until:
            await asyncio.sleep(POLL_S)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call something on the event loop once there is one; RuntimeError when it has ended."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call)

    def leave(self) -> None:
        """From now on it is not ready, though it serves until `end`."""
        self.is_leaving = True

    def refuse(self, drain_s: float, on_idle: Callable[[], None]) -> None:
        """Take no new requests, and let the others end within a time; then serve on until `end`.

        It may be called from any thread, and again with less time.

        on_idle: called when no request is left
        """
        self.is_leaving = True
        if self._loop is None:
            on_idle()
            return

        def begin() -> None:
            self._refusing = asyncio.create_task(self._end_requests(drain_s, on_idle))

        with suppress(RuntimeError):
            self.call_soon(begin)

    async def _end_requests(self, drain_s: float, on_idle: Callable[[], None]) -> None:
        await self._client.close(drain_s)
        on_idle()

    def end(self, grace_s: float = math.inf) -> None:
        """Take no new connections, and end with the last request or after the grace.

        It may be called from any thread, and again with another grace.
        """
        self._until = time.monotonic() + grace_s
        self.is_leaving = True
        self._has_to_end = True
        with suppress(RuntimeError):
            self.call_soon(self._ends.set)

    def reload(self, config: Config) -> None:
        """Apply what a running service can use of a configuration that was read again.

        ConfigError, and nothing changes, for files that cannot be used.
        """
        update = plan_update(self._config, config)
        reload_http(update, self._keys, self._http, self._completions.reader)
        self._client.configure(update.config.router)
        self._config = update.config
