"""The application of Ray Serve without Ray: settings, paths, and doors that find their router."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import RayActorError
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from disagg import serve_app
from disagg.config import ClusterConfig, Config, ModelConfig
from disagg.errors import ConfigError, OccupiedError, PeerLostError, StoppingError
from disagg.router.client import fixed
from disagg.router.door_service import ROUTER_SERVICE
from disagg.serve_app import (
    Mounted,
    RouterDial,
    below_prefix,
    config_of,
    door_options,
    router_options,
)
from disagg.server.auth import KeyRing
from disagg.server.door import DoorApp
from disagg.transfer.rpc import connect, start_server
from disagg.transfer.security import Authority, Security, protected
from tests.router.fakes import SECRET, answer_of, following, serving
from tests.worker.pairs import collect

PROMPT = (3, 1, 4)


class DeploymentUnavailableError(Exception):
    """In place of Ray Serve's, which may not be installed."""


@pytest.fixture(autouse=True)
def serve_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ray.serve.exceptions")
    module.DeploymentUnavailableError = DeploymentUnavailableError
    module.RayServeException = Exception
    monkeypatch.setitem(sys.modules, "ray.serve", ModuleType("ray.serve"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


class FakeHandle:
    """The handle of a deployment whose only method is `locate`."""

    def __init__(self, locate: Callable[[], dict[str, Any]]):
        self._answer = locate
        self.locate = self

    async def remote(self) -> dict[str, Any]:
        return self._answer()


def router_at(address: str, config: Config | None = None) -> dict[str, Any]:
    """What a router says of itself."""
    return {"address": address, "model": asdict((config or Config()).model)}


def dial_of(locate: Callable[[], dict[str, Any]]) -> RouterDial:
    return RouterDial(FakeHandle(locate), Config(), Security())


def fail(error: Exception) -> Callable[[], dict[str, Any]]:
    def locate() -> dict[str, Any]:
        raise error

    return locate


# -- settings


@pytest.mark.parametrize(
    "args",
    [{"doors": 3}, {"doors": "3"}, {"server": {"doors": 3}}],
    ids=["number", "command-line", "setting"],
)
def test_the_number_of_doors_is_that_of_replicas(args):
    options = door_options(config_of(args))

    assert options["num_replicas"] == 3


def test_there_is_one_router_whatever_the_number_of_doors():
    options = router_options(config_of({"doors": 3}))

    assert options["num_replicas"] == 1


def test_a_router_may_end_after_its_doors_and_its_workers():
    args = {"cluster": {"grace_s": 100.0}, "server": {"drain_s": 50.0}}
    config = config_of(args)

    doors = door_options(config)["graceful_shutdown_timeout_s"]
    router = router_options(config)["graceful_shutdown_timeout_s"]

    assert doors == 50
    assert router > doors + 2 * 100


def test_a_router_is_silent_for_as_long_as_a_worker_until_it_is_replaced():
    options = router_options(config_of({"cluster": {"replace_s": 30.0}}))

    assert 3 * options["health_check_timeout_s"] == 30


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"cluster": {"address": "local"}}, "cluster.address is 'local'"),
        ({"server": {"pd_ports": 0}}, "server.pd_ports is set"),
        ({"doors": 0}, "server.doors is 0"),
    ],
    ids=["private-ray", "pd-ports", "no-door"],
)
def test_settings_that_ray_serve_cannot_serve_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        config_of(args)


# -- the start of a router


class FakeProcess:
    """A router whose workers run with other settings until a number of tries."""

    def __init__(self, tries: int):
        self.tries = tries

    def __enter__(self) -> "FakeProcess":
        self.tries -= 1
        if self.tries > 0:
            raise OccupiedError("decode-0 runs with other settings")
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only sleeping moves."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock.sleep = sleep
    monkeypatch.setattr(serve_app, "time", clock)
    return clock


def test_a_router_waits_for_workers_of_earlier_settings_to_end(clock):
    process = FakeProcess(tries=3)
    with ExitStack() as stack:
        router = serve_app.entered(stack, lambda: process, Config())

    assert router is process
    assert clock.now == 2 * serve_app.RETRY_S


def test_a_router_gives_up_on_workers_that_never_end(clock):
    config = Config(cluster=ClusterConfig(orphan_s=10))
    process = FakeProcess(tries=10**6)

    with ExitStack() as stack, pytest.raises(OccupiedError, match="other settings"):
        serve_app.entered(stack, lambda: process, config)

    assert clock.now >= 10 + serve_app.STOP_S


# -- requests


@pytest.mark.parametrize(
    ("root_path", "path", "own_path"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/llm", "/llm/v1/models", "/v1/models"),
        ("/llm", "/llm", "/"),
        ("/llm", "/llm/llm", "/llm"),
    ],
    ids=["none", "route", "root", "twice"],
)
def test_an_application_sees_its_paths_without_the_prefix(root_path, path, own_path):
    scope = {"root_path": root_path, "path": path, "raw_path": path.encode()}

    own = below_prefix(scope)

    assert own == {"root_path": "", "path": own_path, "raw_path": own_path.encode()}
    assert scope["path"] == path


async def test_a_response_has_no_request_id_beside_that_of_ray_serve():
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"X-Request-Id": "1", "Retry-After": "2"}
        await PlainTextResponse(scope["path"], headers=headers)(scope, receive, send)

    transport = httpx.ASGITransport(Mounted(app), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        response = await client.get("/llm/ready")

    assert response.text == "/ready"
    assert "x-request-id" not in response.headers
    assert response.headers["retry-after"] == "2"


async def test_the_life_of_the_application_is_that_of_its_replica():
    events = iter(["startup", "shutdown"])
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        return {"type": f"lifespan.{next(events)}"}

    async def send(message: dict[str, str]) -> None:
        sent.append(message["type"])

    await Mounted(PlainTextResponse("unused"))({"type": "lifespan"}, receive, send)

    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# -- the way to the router


async def test_a_router_at_the_same_address_keeps_its_link():
    dial = dial_of(lambda: router_at("127.0.0.1:1"))

    first = await dial()

    assert await dial() is first
    assert first.address == "127.0.0.1:1"


async def test_the_next_router_may_have_another_address():
    addresses = ["127.0.0.2:2", "127.0.0.1:1"]
    dial = dial_of(lambda: router_at(addresses.pop()))

    links = [await dial(), await dial()]

    assert [link.address for link in links] == ["127.0.0.1:1", "127.0.0.2:2"]


async def test_a_door_never_goes_on_with_another_model():
    other = replace(Config(), model=ModelConfig("another"))
    dial = dial_of(lambda: router_at("127.0.0.1:1", other))

    with pytest.raises(StoppingError, match="another model"):
        await dial()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DeploymentUnavailableError(), StoppingError),
        (RayActorError(), PeerLostError),
    ],
    ids=["deleted", "died"],
)
async def test_errors_of_ray_serve_say_whether_a_router_will_come(error, expected):
    dial = dial_of(fail(error))

    with pytest.raises(PeerLostError) as failure:
        await dial()

    assert failure.type is expected


@pytest.fixture(scope="module")
def issued() -> Security:
    """The security of a process at this host."""
    return protected(Config().security, Authority.make(), "127.0.0.1")


async def test_doors_reach_a_router_over_tls(issued):
    listen = partial(start_server, host="127.0.0.1", security=issued)
    async with serving(listen) as process:
        handle = FakeHandle(lambda: router_at(process.address))
        async with following(RouterDial(handle, Config(), issued)) as client:
            outputs = client.generate(PROMPT, {"max_tokens": 20}, "raw")
            tokens, _ = await collect(outputs)

    assert tokens == answer_of(PROMPT, 20)


async def test_a_stranger_does_not_reach_the_router(issued):
    foreign = protected(Config().security, Authority.make(), "127.0.0.1")
    listen = partial(start_server, host="127.0.0.1", security=issued)
    async with serving(listen) as process:
        link = connect(process.address, replace(foreign, ca=issued.ca))
        with pytest.raises(PeerLostError):
            await link.call(f"/{ROUTER_SERVICE}/Report", b"", 10)
        await link.close()


async def test_a_door_of_ray_serve_answers_and_nobody_stops_it_over_http(tmp_path):
    path = tmp_path / "router"
    async with (
        serving(path),
        client_of(
            DoorApp.load(
                Config(), "a", fixed(connect(f"unix:{path}", SECRET)), KeyRing()
            )
        ) as http,
    ):
        body = {"prompt": [*PROMPT], "max_tokens": 5}
        answer = await http.post("/v1/completions", json=body)
        stopped = await http.post("/stop")

    assert answer.json()["usage"]["completion_tokens"] == 5
    assert stopped.status_code == 404


@asynccontextmanager
async def client_of(door: DoorApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a door that follows its router."""
    running = asyncio.create_task(door.client.run())
    transport = httpx.ASGITransport(Mounted(door.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
        yield http
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
