"""A whole service in this process, but for Ray: HTTP on a port, a router, two workers, a model."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from disagg.config import Config, ModelConfig, ServerConfig
from disagg.model.runner import Runner
from disagg.server.access import read_keys
from disagg.server.app import create_app
from disagg.server.completions import Completions
from disagg.server.connections import http_server
from disagg.server.service import bind
from disagg.workers.router import Router
from tests.workers.pairs import House


@dataclass(frozen=True)
class Running:
    """Where it is, and what is behind it; `loop` is the one that its router lives on.

    doors: where each worker is for foreign routers
    """

    url: str
    doors: dict[str, str]
    house: House
    loop: asyncio.AbstractEventLoop

    def empty(self) -> None:
        """Wait until every gauge of every worker is zero, and the pools are whole."""
        asyncio.run_coroutine_threadsafe(self.house.empty(), self.loop).result()


@contextmanager
def running(model: str | None, http: ServerConfig = ServerConfig(port=0)) -> Iterator[Running]:
    """Serve a model on a thread of its own while inside; each of two workers loads it."""
    runners = [Runner.load(model) for _ in range(2)]
    config = Config(codec="raw", model=ModelConfig(model), server=http)
    socket, *doors = (bind(http.host, port) for port in (http.port, 0, 0))
    ports = {x.getsockname()[1]: name for x, name in zip(doors, "pd", strict=True)}
    found: Future[tuple[Running, uvicorn.Server]] = Future()

    async def serve() -> None:
        house = House(config, Router(config.router))
        house.pair(runners)
        completions = Completions.load(config, "tiny", house.router, ports)
        app = create_app(completions, "owner", keys=read_keys(http))
        server = http_server(app, http)
        scheme = "https" if http.tls_certificate else "http"
        host = f"{scheme}://127.0.0.1"
        url, loop = f"{host}:{socket.getsockname()[1]}", asyncio.get_running_loop()
        urls = {name: f"{host}:{port}" for port, name in ports.items()}
        found.set_result((Running(url, urls, house, loop), server))
        try:
            await server.serve([socket, *doors])
        finally:
            await house.router.close()
            for worker in house.workers.values():
                worker.stop(0.0)
                await asyncio.to_thread(worker.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="http", daemon=True)
    thread.start()
    service, server = found.result()
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join()
