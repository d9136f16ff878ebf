"""A whole service in this process: HTTP and router on a thread of their own, workers through Ray.

main thread    Ray: start workers, wait            (signals arrive here)
http thread    one asyncio loop: uvicorn, router
ray-watch      deaths and replacements, passed on to the loop

`Backend` is all of it but HTTP; router_process.py serves doors with it.
"""

import asyncio
import logging
import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Self

from disagg.config import Config, ServerConfig
from disagg.errors import ConfigError, DisaggError, PeerLostError
from disagg.launch.private_ray import SILENT, Session
from disagg.log import fields
from disagg.model.describe import DEFAULT_MODEL
from disagg.router.router import Router, WorkerConnection
from disagg.server.auth import KeyRing, check_tls, read_keys
from disagg.server.limits import MAX_NAME_CHARS, shown
from disagg.server.live_settings import plan_update, reload_http, warn_of_fixed
from disagg.server.process import raise_file_limit, settled_collector
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import WorkerInfo
from disagg.transfer.rpc import Link, bind_within, connect

if TYPE_CHECKING:
    from disagg.launch.ray_cluster import Cluster
    from disagg.server.connections import HttpServer

log = logging.getLogger(__name__)

LOCAL = "local"
ANSWER_S = 1.0  # the router's loop answers other threads within this, or is busy
# addresses that mean all interfaces, and how this host reaches itself then
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Backend(ABC):
    """The router and its workers, which run while it is entered; subclasses let clients in.

    say: called with a description of each stage of the start
    """

    def __init__(self, config: Config, say: Callable[[str], None] = lambda stage: None):
        check_ports(config)
        self.config = config
        self.name = served_name(config)
        self.stopped = threading.Event()
        self._is_draining = False
        self._ends_now = False
        self.links: list[str] = []  # each worker's room and its links, for the log
        self._say = say
        self._sockets: list[socket.socket] = []

        self._stack = ExitStack()
        self._links: dict[str, Link] = {}
        self._cluster: Cluster | None = None  # before its first workers serve, too
        self._workers: Cluster | None = None
        self._failure: DisaggError | None = None
        # set when the http thread serves: its loop, and what ends it
        self._serving: Future[tuple[asyncio.AbstractEventLoop, Callable[[], object]]]
        self._serving = Future()
        self._thread = threading.Thread(target=self._run_http, name="http", daemon=True)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for listening in self._sockets:
                stack.callback(listening.close)
            raise_file_limit(self.config.server)
            os.environ.update(SILENT)
            session = None
            if self.config.cluster.address == LOCAL:
                session = stack.enter_context(Session())
            self._thread.start()
            stack.callback(self._stop_http)
            self._start_workers(stack, session)
            # before the workers close: running requests need them
            stack.callback(self._drain)
            stack.enter_context(settled_collector())
            self._stack = stack.pop_all()
        return self

    def _start_workers(self, stack: ExitStack, session: Session | None) -> None:
        # imported here: Ray reads its environment at import. On another thread: a Ctrl-C during
        # the initialisation of its C module (Ray 2.60) would be lost on this one
        with ThreadPoolExecutor(1) as pool:
            pool.submit(import_module, "disagg.launch.ray_cluster").result()
        from disagg.launch.ray_cluster import Cluster

        cluster = self.config.cluster
        if session is None:
            self._say(f"joining Ray at {cluster.address}")
        else:
            self._say("starting a private Ray")
        workers = Cluster(self.config, session)
        stack.callback(workers.close)
        workers.connect()
        self._cluster = workers
        self._security = workers.security
        if cluster.colocated:
            count = f"{cluster.prefill} worker for both"
        else:
            count = f"{cluster.prefill} prefill and {cluster.decode} decode worker"
        self._say(f"loading {self.name} on {count}, then measuring their links")
        for started in workers.start(self._say):
            self._on_loop(self._add, started)
            self.links.append(f"{started.name}: room for {started.room:,} tokens")
        self.links += workers.links
        workers.watch(
            partial(self._on_loop, self._add),
            partial(self._on_loop, self._remove),
            self._lost,
            self._silent_s,
        )
        self._workers = workers

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        self._stack.close()
        if self._failure is not None and error is None:
            raise self._failure

    # -- for its owner

    @property
    def target_counts(self) -> Mapping[str, int]:
        """The target number of workers of each role."""
        roles = (
            self._workers.target_counts if self._workers else self.config.cluster.roles
        )
        return {str(role): number for role, number in roles.items()}

    @property
    def lacks_room(self) -> Mapping[str, str]:
        """What room workers wait for, in words, by name."""
        return self._cluster.lacks_room if self._cluster else {}

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """Scale each role to this count, in the background; None keeps the current one."""
        self._started_workers().scale(prefill, decode)
        log.info("scale", extra=fields(**self.target_counts))

    def drain(self, name: str) -> None:
        """Replace a worker; it leaves once another one has its place, and no request is lost."""
        self._started_workers().drain(name)
        log.info("drain", extra=fields(worker=name))

    def end_now(self) -> None:
        """End without time for requests, or without any more of it; from any thread."""
        self._ends_now = True
        self.stopped.set()
        if self._is_draining:
            loop, _ = self._serving.result()
            asyncio.run_coroutine_threadsafe(self._router.close(), loop)

    def reload(self, config: Config) -> None:
        """Apply the limits of a configuration that was read again."""
        update = plan_update(self.config, config)
        self._on_loop(self._router.configure, update.config.router)
        self.config = update.config

    def _started_workers(self) -> "Cluster":
        if self._workers is None:
            raise PeerLostError("the service is still starting its workers")
        return self._workers

    # -- on the http thread

    def _run_http(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            if not self._serving.done():
                self._serving.set_exception(error)
            raise

    async def _run(self) -> None:
        self._router = Router(self.config.router, lease_s=self.config.transfer.lease_s)
        await self._serve()
        for link in self._links.values():
            await link.close()

    @abstractmethod
    async def _serve(self) -> None:
        """Let clients in until the end; `_serving` is set when they may come."""

    def _add(self, started: WorkerInfo) -> None:
        log.info(
            "worker serves", extra=fields(worker=started.name, address=started.address)
        )
        link = connect(started.address, self._security)
        self._links[started.name] = link
        self._router.add(WorkerConnection(started, WorkerClient(link)))

    def _remove(self, name: str) -> None:
        self._router.died(name)
        link = self._links.pop(name, None)
        if link is not None:
            self._closing = asyncio.create_task(link.close())

    # -- from other threads

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        loop, _ = self._serving.result()
        loop.call_soon_threadsafe(call, *args)

    def _silent_s(self) -> Mapping[str, float]:
        """Seconds of silence by worker; none while the loop of the router is busy."""
        answer = Future[Mapping[str, float]]()
        self._on_loop(lambda: answer.set_result(self._router.silent_s()))
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            return {}

    def _lost(self, error: DisaggError) -> None:
        """Ray is lost for good: running requests fail, and the service ends."""
        self._failure = error
        self.stopped.set()

    def _drain(self) -> None:
        """Let running requests end within their time, then cancel the rest."""
        self._is_draining = True  # /ready answers 503 before requests are refused
        has_no_time = self._failure or self._ends_now
        drain_s = 0.0 if has_no_time else self._drain_s
        log.info(
            "stopping", extra=fields(drain_s=drain_s, requests=self._router.running)
        )
        loop, _ = self._serving.result()
        closing = self._router.close(drain_s)
        asyncio.run_coroutine_threadsafe(closing, loop).result()

    @property
    def _drain_s(self) -> float:
        """Time for requests to end; doors continue what the router has not ended by then."""
        return self.config.cluster.grace_s

    def _stop_http(self) -> None:
        if self._serving.exception() is None:
            _, end = self._serving.result()
            end()
        self._thread.join()


class Service(Backend):
    """Serves while entered, at `url`, which is bound from the start.

    secret: lets its owner stop the service, which sets `stopped`; None: a new one
    say:    called with a description of each stage of the start
    """

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None] = lambda stage: None,
        secret: str | None = None,
    ):
        server = config.server
        api_keys = read_keys(server)
        check_tls(server)
        super().__init__(config, say)
        self.secret = secret or secrets.token_hex(16)
        self.keys = KeyRing(api_keys, self.secret, server.metrics_key)

        self._socket = bind(server.host, server.port)
        self.url = url_of(self._socket, server)
        self._http: HttpServer
        self._pd_sockets = open_pd_ports(config)
        self._sockets = [self._socket, *self._pd_sockets.values()]
        self._ports = {
            listening.getsockname()[1]: name
            for name, listening in self._pd_sockets.items()
        }
        # where foreign routers reach each worker, for the log
        self.pd_addresses = [
            f"{name} at {url_of(listening, server)}"
            for name, listening in self._pd_sockets.items()
        ]

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """Scale each role to this count, in the background; None keeps the current one.

        ConfigError if each worker has a port of its own: foreign routers know no other ports.
        """
        if self._pd_sockets:
            raise ConfigError(
                "a service with --pd-ports cannot scale: each worker has a port of its own"
            )
        super().scale(prefill, decode)

    def reload(self, config: Config) -> None:
        """Apply the keys, the certificate and the limits of a configuration that was read again.

        Files of keys and certificates are read again too. Logs which settings changed, and which
        need a restart. ConfigError, and nothing changes, for files that cannot be used.
        """
        update = plan_update(self.config, config)
        reload_http(update, self.keys, self._http, self._completions.reader)
        super().reload(config)
        warn_of_fixed(update)

    async def _serve(self) -> None:
        # imported here, on this thread, while Ray starts on the other
        from disagg.server.app import create_app
        from disagg.server.completions import Completions
        from disagg.server.connections import http_server

        config = self.config
        self._completions = Completions.load(
            config, self.name, self._router, self._ports
        )
        app = create_app(
            self._completions,
            token=self.secret,
            on_stop=self._stop,
            keys=self.keys,
            worker_pool=self,
            origins=config.server.allowed_origins,
            is_stopping=self._is_stopping,
        )
        self._http = http_server(app, config.server)
        self._serving.set_result((asyncio.get_running_loop(), self._http.end))
        await self._http.serve(self._sockets)
        await self._completions.close()

    def _stop(self, now: bool) -> None:
        if now:
            self.end_now()
        self.stopped.set()

    def _is_stopping(self) -> bool:
        return self._is_draining or self.stopped.is_set()

    @property
    def _drain_s(self) -> float:
        return self.config.server.drain_s


def url_of(listening: socket.socket, server: ServerConfig) -> str:
    """Where clients reach a socket that is bound."""
    scheme = "https" if server.tls_certificate else "http"
    host = EVERYWHERE.get(server.host, server.host)
    if ":" in host:
        host = f"[{host}]"
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def served_name(config: Config) -> str:
    """The model's name for clients: the setting, else its Hugging Face name or its folder's name.

    ConfigError for a name that responses cannot carry.
    """
    name = config.server.served_model_name or config.model.name or DEFAULT_MODEL.name
    folder = Path(os.path.expanduser(name))
    if name == config.model.name and folder.is_dir():
        name = folder.resolve().name
    if not name.isprintable() or len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f"model name {shown(name)} is too long or not printable; set server.served_model_name"
        )
    return name


def open_pd_ports(config: Config) -> dict[str, socket.socket]:
    """A bound socket for each worker that the service starts with, by name; empty if disabled."""
    first_port = config.server.pd_ports
    if first_port is None:
        return {}
    names = [
        f"{role}-{number}"
        for role, count in config.cluster.roles.items()
        for number in range(count)
    ]
    any_port = first_port == 0
    return {
        name: bind(config.server.host, 0 if any_port else first_port + index)
        for index, name in enumerate(names)
    }


def check_ports(config: Config) -> None:
    """ConfigError if `cluster.ports` has too few free ports for the workers of a private Ray."""
    ports = config.cluster.ports
    if ports is None or config.cluster.address != LOCAL:
        return
    ports_per_worker = 2 if config.transfer.channel == "direct" else 1
    with ExitStack() as reserved:

        def reserve(port: int) -> int:
            listening = socket.create_server(("127.0.0.1", port))
            return reserved.enter_context(listening).fileno()

        for _ in range(ports_per_worker * sum(config.cluster.roles.values())):
            bind_within(ports, reserve)


def bind(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """A bound socket; ConfigError if the address is in use, not this host's, or empty.

    An empty address would mean all interfaces, but clients could not connect to it.
    reuse_port: other sockets of this user may be bound to it too, and share its connections
    """
    if not host:
        raise ConfigError(
            f"server.host is {host!r}; expected an address, 0.0.0.0 for all"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port),
            family=family,
            reuse_port=reuse_port,
            dualstack_ipv6=host == "::",
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error


def bind_many(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets bound to one address; the system spreads connections over them evenly.

    ConfigError as of `bind`, also where another service of this user has the address.
    """
    with bind(host, port) as probe:
        port = probe.getsockname()[1]
    return [bind(host, port, reuse_port=True) for _ in range(count)]
