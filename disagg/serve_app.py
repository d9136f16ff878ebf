"""The service as an application of Ray Serve: for `serve deploy`, and RayService on Kubernetes.

    applications:
      - name: disagg
        import_path: disagg.serve_app:build_app
        args: {prefill: 1, decode: 1, doors: 2, cluster: {pools: true, gpus: 1}}

Two deployments, which Ray Serve starts, checks, replaces and ends:

    clients ──► disagg, a door ─┐ gRPC, as secure as between workers
    clients ──► disagg, a door ─┴──────────────────────────────────► router, one replica ──► workers

Replicas of `disagg` keep nothing that outlives their clients' requests, so their number may change
at any time. The router is a deployment too, not a separate actor, so that Ray Serve starts another
one when it dies and ends it with the application.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg.config import Config, replace_keys
from disagg.errors import ConfigError, OccupiedError, PeerLostError, StoppingError
from disagg.launch.shared_facts import SharedFacts
from disagg.server.auth import KeyRing, read_keys
from disagg.server.door import DoorApp
from disagg.server.process import settled_collector
from disagg.server.router_process import RouterProcess
from disagg.server.service import LOCAL
from disagg.transfer.rpc import Link, connect, start_server
from disagg.transfer.security import Security, protected

if TYPE_CHECKING:
    from ray.serve import Application

DOORS = "disagg"
ROUTER = "router"
ROLES = ("prefill", "decode")
# at once in a replica; the router limits how many wait, and answers 429
MAX_REQUESTS = 1 << 16
STOP_S = 15.0  # for the end of the workers, beyond their grace
RETRY_S = 2.0  # between two tries to take workers over
CHECK_S = 1.0  # between two checks of the router; its death is noticed as late as that
FAILED_CHECKS = 3  # in a row, after which Ray Serve replaces a replica

log = logging.getLogger(__name__)


def build_app(args: Mapping[str, Any]) -> "Application":
    """The application, with the settings of `config_of`.

    ConfigError for invalid settings, and if Ray Serve is not installed.
    """
    config = config_of(args)
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            "Ray Serve is missing; pip install 'disagg[serve]'"
        ) from error
    router = serve.deployment(RouterReplica, name=ROUTER, **router_options(config))
    door = serve.ingress()(DoorReplica)
    doors = serve.deployment(door, name=DOORS, **door_options(config))
    return doors.bind(config, router.bind(config))


def config_of(args: Mapping[str, Any]) -> Config:
    """Settings as in a config file, and the numbers "prefill", "decode" and "doors".

    ConfigError for settings that do not work with Ray Serve.
    """
    short = {name: args[name] for name in (*ROLES, "doors") if name in args}
    settings = {name: value for name, value in args.items() if name not in short}
    roles = {name: number for name, number in short.items() if name in ROLES}
    config = replace_keys(Config(), {"cluster": {"address": "auto", **roles}})
    config = replace_keys(config, settings)
    if "doors" in short:
        config = replace_keys(config, {"server": {"doors": short["doors"]}})
    if config.cluster.address == LOCAL:
        raise ConfigError(
            "cluster.address is 'local'; leave it out: workers run on the Ray of Ray Serve"
        )
    if config.server.pd_ports is not None:
        raise ConfigError(
            "server.pd_ports is set; Ray Serve has a single port, so leave it out"
        )
    # Ray Serve listens, at an address of its own
    server = {"host": "127.0.0.1", "port": 0, "tls_certificate": None, "tls_key": None}
    return replace_keys(config, {"server": server})


def door_options(config: Config) -> dict[str, Any]:
    """Options of the deployment of doors; the file of an application may set others."""
    return {
        "num_replicas": config.server.doors,
        "max_ongoing_requests": MAX_REQUESTS,
        "graceful_shutdown_timeout_s": config.server.drain_s,
        # they run on any node, the head too, which may offer no core
        "ray_actor_options": {"num_cpus": 0},
    }


def router_options(config: Config) -> dict[str, Any]:
    """Options of the deployment of the router."""
    cluster = config.cluster
    grace_s = config.server.drain_s + 2 * cluster.grace_s + STOP_S
    return {
        "num_replicas": 1,
        "graceful_shutdown_timeout_s": grace_s,
        "health_check_period_s": CHECK_S,
        "health_check_timeout_s": cluster.replace_s / FAILED_CHECKS,
        "ray_actor_options": {"num_cpus": 0},
    }


class RouterReplica:
    """The router and its workers. It is ready once the workers have loaded."""

    def __init__(self, config: Config):
        self._stack = ExitStack()
        self._config = config
        host = ray.util.get_node_ip_address()
        listen = partial(
            start_server,
            host=host,
            security=security_at(host, config),
            ports=config.cluster.ports,
        )
        process = entered(self._stack, lambda: RouterProcess(config, listen), config)
        self._process = process

    def locate(self) -> dict[str, Any]:
        """Its address for doors, and the model that they must have, as plain data."""
        return {"address": self._process.address, "model": asdict(self._config.model)}

    async def check_health(self) -> None:
        """Called by Ray Serve, which starts another one after errors or silence."""
        if self._process.stopped.is_set():
            raise PeerLostError("the router has ended")
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def answer() -> None:
            loop.call_soon_threadsafe(answered.set)

        self._process.call_soon(answer)
        await answered.wait()

    def __del__(self) -> None:
        """Called by Ray Serve when the application ends: waits for the doors, which end first."""
        with self._stack:
            if hasattr(self, "_process"):
                self._process.wait_for_doors(self._config.server.drain_s)


def entered(
    stack: ExitStack, create: Callable[[], RouterProcess], config: Config
) -> RouterProcess:
    """A router that runs until the stack ends; it waits for workers of earlier settings to end.

    Without waiting, Ray Serve would give up a new version after three failures.
    """
    until = time.monotonic() + config.cluster.orphan_s + STOP_S
    while True:
        try:
            return stack.enter_context(create())
        except OccupiedError as error:
            if time.monotonic() >= until:
                raise
            log.warning("%s; trying again", error)
            time.sleep(RETRY_S)


class DoorReplica:
    """A door that gets its requests from Ray Serve. Needs a running event loop."""

    def __init__(self, config: Config, router: Any):
        from ray import serve

        self._stack = ExitStack()
        host = ray.util.get_node_ip_address()
        self._door = DoorApp.load(
            config,
            serve.get_replica_context().replica_id.unique_id,
            RouterDial(router, config, security_at(host, config)),
            KeyRing(read_keys(config.server), metrics=config.server.metrics_key),
        )
        self._following = asyncio.create_task(self._door.client.run())
        self._stack.enter_context(settled_collector())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that Ray Serve calls with requests."""
        return Mounted(self._door.app)

    async def check_health(self) -> None:
        """Called by Ray Serve on the loop of the requests; if it hangs, another door starts."""
        if self._following.done():
            raise PeerLostError("the door follows no router any more")

    async def __del__(self) -> None:
        """Called by Ray Serve when the requests have ended, or their grace is over."""
        await self._door.client.close()
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._door.completions.close()
        self._stack.close()


class RouterDial:
    """Links to the current router of an application.

    router: handle of its deployment
    """

    def __init__(self, router: Any, config: Config, security: Security):
        self._router = router
        self._model = asdict(config.model)
        self._security = security
        self._link: Link | None = None

    async def __call__(self) -> Link:
        """Waits for a router. See `Dial` for the errors.

        A door with an older model ends its streams, because the new one cannot continue them.
        """
        router = await self._locate()
        if router["model"] != self._model:
            raise StoppingError("the application was deployed anew, with another model")
        address = router["address"]
        if self._link is None or self._link.address != address:
            self._link = connect(address, self._security)
        return self._link

    async def _locate(self) -> Mapping[str, Any]:
        from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

        try:
            located: Mapping[str, Any] = await self._router.locate.remote()
        except DeploymentUnavailableError as error:
            raise StoppingError("the application has no router any more") from error
        except (RayError, RayServeException) as error:
            raise PeerLostError(f"no router answers: {error}") from error
        return located


class Mounted:
    """An application behind Ray Serve; its paths come without the route prefix.

    Ray Serve gives every response the X-Request-Id of its request, so the application's is dropped.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the application."""

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        if scope["type"] == "lifespan":
            await _live(receive, send)
        else:
            await self._app(below_prefix(scope), receive, send_without_id)


async def _live(receive: Receive, send: Send) -> None:
    """Answer the lifespan messages; the replica starts and ends the application itself."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


def below_prefix(scope: Scope) -> Scope:
    """The scope of a request without its route prefix, `root_path`."""
    prefix = scope.get("root_path", "")
    path = scope["path"].removeprefix(prefix)
    raw_path = (scope.get("raw_path") or b"").removeprefix(prefix.encode())
    own = {"root_path": "", "path": path or "/", "raw_path": raw_path or b"/"}
    return {**scope, **own}


def security_at(host: str, config: Config) -> Security:
    """The security of a process of the service, as its workers have it."""
    authority = SharedFacts(config.cluster.name).authority(config.security.plane)
    return protected(config.security, authority, host)
