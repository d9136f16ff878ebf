"""A whole service in this process: HTTP and router on a thread of their own, workers through Ray.

main thread    Ray: start workers, wait            (signals arrive here)
http thread    one asyncio loop: uvicorn, router
ray-watch      deaths and replacements, told to the loop
"""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Self

from disagg.config import Config
from disagg.errors import ConfigError, DisaggError, PeerLostError
from disagg.launch.private_ray import SILENT, Session
from disagg.model.describe import DEFAULT_MODEL
from disagg.router.router import Router, WorkerConnection
from disagg.server.access import check_tls, read_keys
from disagg.server.limits import MAX_NAME_CHARS, shown
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import WorkerInfo
from disagg.transfer.rpc import Link, bind_within, connect

if TYPE_CHECKING:
    import uvicorn

    from disagg.launch.ray_cluster import Cluster

LOCAL = "local"
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and where that is on this host


class Service:
    """Serves while entered, at `url`, which is bound from the start.

    secret: whoever knows it may ask the service to stop, which sets `stopped`; None: a new one
    say:    is told what goes on while the service starts, in words
    """

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None] = lambda stage: None,
        secret: str | None = None,
    ):
        server = config.server
        self._keys = read_keys(server)
        check_tls(server)
        check_ports(config)
        self._socket = bind(server.host, server.port)
        host = EVERYWHERE.get(server.host, server.host)
        host = f"[{host}]" if ":" in host else host
        scheme = "https" if server.tls_certificate else "http"
        self.url = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        self._doors = open_doors(config)
        self._ports = {x.getsockname()[1]: name for name, x in self._doors.items()}
        # where foreign routers find each worker, in words
        self.doors = [
            f"{name} at {scheme}://{host}:{x}" for x, name in self._ports.items()
        ]
        self.config = config
        self.name = served_name(config)
        self._say = say
        self.stopped = threading.Event()
        self.secret = secret or secrets.token_hex(16)
        self._stack = ExitStack()
        self._links: dict[str, Link] = {}
        self._workers: Cluster | None = None
        self._failure: DisaggError | None = None
        self.links: list[
            str
        ] = []  # what the workers have and measured between them, in words
        self._serving: Future[tuple[asyncio.AbstractEventLoop, uvicorn.Server]] = (
            Future()
        )
        self._thread = threading.Thread(target=self._run_http, name="http", daemon=True)

    def __enter__(self) -> Self:
        cluster = self.config.cluster
        with ExitStack() as stack:
            for listening in (self._socket, *self._doors.values()):
                stack.callback(listening.close)
            os.environ.update(SILENT)
            session = (
                stack.enter_context(Session()) if cluster.address == LOCAL else None
            )
            self._thread.start()
            stack.callback(self._stop_http)
            # here, not above: Ray reads its environment when it is imported; and on another thread,
            # since a Ctrl-C on this one while its C module begins (2.60, Cython's) would be lost
            with ThreadPoolExecutor(1) as pool:
                pool.submit(import_module, "disagg.launch.ray_cluster").result()
            from disagg.launch.ray_cluster import Cluster

            self._say(
                "starting a private Ray"
                if session
                else f"joining Ray at {cluster.address}"
            )
            workers = Cluster(self.config, session)
            stack.callback(workers.close)
            workers.connect()
            self._security = workers.security
            count = f"{cluster.prefill} prefill and {cluster.decode} decode worker"
            count = f"{cluster.prefill} worker for both" if cluster.colocated else count
            self._say(f"loading {self.name} on {count}, then measuring their links")
            for started in workers.start(self._say):
                self._tell(self._add, started)
                self.links.append(f"{started.name}: room for {started.room:,} tokens")
            self.links += workers.links
            up, down = (partial(self._tell, call) for call in (self._add, self._remove))
            workers.watch(up, down, self._lost)
            self._workers = workers
            stack.callback(
                self._drain
            )  # first of all: answers on their way need their workers
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        self._stack.close()
        if self._failure is not None and error is None:
            raise self._failure

    # -- for whoever owns it

    @property
    def wanted(self) -> Mapping[str, int]:
        """How many workers of each role there shall be."""
        wanted = self._workers.wanted if self._workers else self.config.cluster.roles
        return {str(role): number for role, number in wanted.items()}

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """So many workers of each role, soon; None: as many as now.

        ConfigError where foreign routers find each at a port of its own: those know no others.
        """
        if self._doors:
            told = "are as many as their ports; serve without --pd-ports to scale"
            raise ConfigError(f"the workers of this service {told}")
        self._staffed().scale(prefill, decode)

    def drain(self, name: str) -> None:
        """A worker leaves when another one has taken its place; no request is lost by it."""
        self._staffed().drain(name)

    def _staffed(self) -> "Cluster":
        if self._workers is None:
            raise PeerLostError("the service is still starting its workers")
        return self._workers

    # -- on the http thread

    def _run_http(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._serving.done():
                self._serving.set_exception(error)
            raise

    async def _serve(self) -> None:
        # here, not above: imported while Ray starts, on the other thread
        from disagg.server.app import create_app
        from disagg.server.completions import Completions
        from disagg.server.connections import http_server

        config = self.config
        self._router = Router(config.router)
        completions = Completions.load(config, self.name, self._router, self._ports)
        origins = config.server.allowed_origins
        app = create_app(
            completions, self.secret, self.stopped.set, self._keys, self, origins
        )
        server = http_server(app, config.server)
        self._serving.set_result((asyncio.get_running_loop(), server))
        await server.serve([self._socket, *self._doors.values()])
        for link in self._links.values():
            await link.close()

    def _add(self, started: WorkerInfo) -> None:
        link = self._links[started.name] = connect(started.address, self._security)
        self._router.add(WorkerConnection(started, WorkerClient(link)))

    def _remove(self, name: str) -> None:
        self._router.died(name)
        if link := self._links.pop(name, None):
            self._closing = asyncio.create_task(link.close())

    # -- from other threads

    def _tell(self, call: Callable[..., object], *about: object) -> None:
        loop, _ = self._serving.result()
        loop.call_soon_threadsafe(call, *about)

    def _lost(self, error: DisaggError) -> None:
        """No workers any more: what goes on ends with an error, and the service too."""
        self._failure = error
        self.stopped.set()

    def _drain(self) -> None:
        """Let answers end within the grace, if there are workers; then end them."""
        loop, _ = self._serving.result()
        closing = self._router.close(
            0.0 if self._failure else self.config.cluster.grace_s
        )
        asyncio.run_coroutine_threadsafe(closing, loop).result()

    def _stop_http(self) -> None:
        if self._serving.exception() is None:
            _, server = self._serving.result()
            server.should_exit = True
        self._thread.join()


def served_name(config: Config) -> str:
    """What clients call the model: what they shall, else a Hugging Face name, or a folder's.

    ConfigError for what answers cannot carry.
    """
    name = config.server.served_model_name or config.model.name or DEFAULT_MODEL.name
    folder = Path(os.path.expanduser(name))
    is_folder = name == config.model.name and folder.is_dir()
    name = folder.resolve().name if is_folder else name
    if not name.isprintable() or len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f"no client can call a model {shown(name)}; set server.served_model_name"
        )
    return name


def open_doors(config: Config) -> dict[str, socket.socket]:
    """A bound socket for each worker that the service starts with, by name; none unless wanted."""
    roles, first = config.cluster.roles, config.server.pd_ports
    names = [f"{role}-{i}" for role, number in roles.items() for i in range(number)]
    ports = [] if first is None else [first and first + i for i in range(len(names))]
    return {
        name: bind(config.server.host, port)
        for name, port in zip(names, ports, strict=False)
    }


def check_ports(config: Config) -> None:
    """ConfigError where the workers of a private Ray, on this host, would not each find a port."""
    if (ports := config.cluster.ports) is None or config.cluster.address != LOCAL:
        return
    each = 2 if config.transfer.channel == "direct" else 1
    with ExitStack() as held:

        def hold(port: int) -> int:
            return held.enter_context(
                socket.create_server(("127.0.0.1", port))
            ).fileno()

        for _ in range(each * sum(config.cluster.roles.values())):
            bind_within(ports, hold)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; ConfigError where the address is taken or not ours, or is empty: to listen
    everywhere, which nobody can ask by that name."""
    if not host:
        raise ConfigError(
            f"server.host is {host!r}; an address is wanted, 0.0.0.0 for all"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=host == "::"
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
