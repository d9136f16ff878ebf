"""Deaths are told and the dead replaced, also when a replacement does not start at first."""

import os
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import RayActorError

from disagg.config import Config, load_config
from disagg.errors import ConfigError, ModelError, PeerLostError
from disagg.transfer.messages import Role
from disagg.workers import launch
from disagg.workers.dispatch import Started
from disagg.workers.launch import Actor, Cluster, gpu_share, torch_threads


@dataclass(eq=False)
class Call:
    """What Ray would give for a call: done or not, with a value or an error."""

    done: bool = False
    value: Any = None

    told: tuple[object, ...] | None = None

    def remote(self, *arguments: object) -> "Call":
        self.told = arguments
        return self


@dataclass(eq=False)
class Handle:
    """An actor. `watch` is the call that ends with it."""

    watch: Call = field(default_factory=Call)
    stop: Call = field(default_factory=Call)
    assume: Call = field(default_factory=Call)
    meet: Call = field(default_factory=lambda: Call(done=True, value=[]))


class FakeCluster(Cluster):
    """Workers that start at once, with the outcomes given; then well."""

    def __init__(self, *outcomes: Any):
        super().__init__(Config(), token=None)
        self.outcomes = list(outcomes)
        self.handles: dict[str, Handle] = {}
        self.connected, self.there = 0, True
        self._doors = [("ray", 1)]
        self.told: list[str] = []

    def _load(self, role: Role, name: str) -> Actor:
        self.handles[name] = Handle()
        started = Started(name, role, "127.0.0.1:1", epoch=1)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        return Actor(role, name, self.handles[name], Call(True, outcome or started))

    def connect(self) -> None:
        self.connected += 1
        self.there = True

    def kill(self, name: str) -> None:
        self.handles[name].watch.done = True

    def step(self) -> list[str]:
        """One look; what it told."""
        self.told = []
        launch.knock = lambda host, port: self.there  # type: ignore[assignment]
        self.look(lambda up: self.told.append(f"+{up.name}"), lambda x: self.told.append(f"-{x}"))
        return self.told


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(asked: Any, timeout: float | None = None) -> Any:
        if isinstance(asked, list):
            return [get(each) for each in asked]
        if isinstance(asked.value, Exception):
            raise asked.value
        return asked.value

    def wait(calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        assert calls, "Ray refuses to wait for nothing"
        return [call for call in calls if call.done][:1], []

    monkeypatch.setattr(launch, "knock", lambda host, port: True)
    monkeypatch.setattr(launch.ray, "shutdown", lambda: None)
    monkeypatch.setattr(launch.ray, "get", get)
    monkeypatch.setattr(launch.ray, "wait", wait)
    monkeypatch.setattr(launch, "RETRY_S", 0.0)


def test_a_dead_worker_is_told_of_and_replaced_under_a_new_name() -> None:
    cluster = FakeCluster()
    assert [started.name for started in cluster.start()] == ["prefill-0", "decode-0"]
    assert cluster.step() == []
    cluster.kill("decode-0")
    assert cluster.step() == ["-decode-0"]
    assert cluster.step() == ["+decode-0.1"]
    cluster.kill("decode-0.1")
    assert [cluster.step(), cluster.step()] == [["-decode-0.1"], ["+decode-0.2"]]


@pytest.mark.parametrize("failure", [RayActorError(), ("model", "the file is gone")])
def test_a_replacement_that_does_not_start_is_tried_again(failure: Any) -> None:
    cluster = FakeCluster(None, None, failure, failure)
    cluster.start()
    cluster.kill("prefill-0")
    steps = [cluster.step() for _ in range(4)]
    assert steps == [["-prefill-0"], [], [], ["+prefill-0.3"]]


def test_others_are_watched_while_a_replacement_loads() -> None:
    cluster = FakeCluster()
    cluster.start()
    cluster.kill("prefill-0")
    cluster.step()
    cluster._actors[-1].call.done = False
    cluster.kill("decode-0")
    assert cluster.step() == ["-decode-0"]
    assert cluster.step() == ["+decode-0.2"]


def test_more_workers_load_and_one_of_too_many_changes_what_it_does() -> None:
    cluster = FakeCluster()
    cluster.start()
    cluster.scale(2, 2)
    assert [cluster.step() for _ in range(3)] == [[], ["+prefill-1.1"], ["+decode-1.2"]]
    cluster.scale(1, 3)
    assert cluster.step() == []
    assert cluster.handles["prefill-1.1"].assume.told == (Role.DECODE,)
    cluster.scale(None, 1)
    cluster.step()
    left = {name for name, handle in cluster.handles.items() if handle.stop.told is not None}
    assert left == {"prefill-1.1", "decode-1.2"}
    for name in sorted(left):
        cluster.kill(name)
        assert cluster.step() == [f"-{name}"]
    assert cluster.step() == []


def test_a_worker_leaves_when_the_one_in_its_place_serves() -> None:
    cluster = FakeCluster()
    cluster.start()
    cluster.drain("decode-0")
    stop = cluster.handles["decode-0"].stop
    assert (cluster.step(), stop.told) == ([], None)
    assert (cluster.step(), stop.told) == (["+decode-1.1"], ())
    cluster.kill("decode-0")
    assert [cluster.step(), cluster.step()] == [["-decode-0"], []]


def test_what_cannot_be_wanted_is_refused_by_name() -> None:
    cluster = FakeCluster()
    cluster.start()
    with pytest.raises(ConfigError, match="0 decode"):
        cluster.scale(1, 0)
    with pytest.raises(ConfigError, match="'decode-7'; known: decode-0, prefill-0"):
        cluster.drain("decode-7")


def test_a_worker_that_cannot_start_is_an_error_at_the_start() -> None:
    with pytest.raises(ModelError, match="no such model"):
        FakeCluster(("model", "no such model")).start()


def test_a_lost_ray_starts_anew_with_all_workers_and_not_for_ever() -> None:
    cluster = FakeCluster()
    cluster.start()
    for i in range(1, launch.RESTARTS + 1):
        cluster.there = False
        ups = [x for _ in range(3) for x in cluster.step()]
        assert cluster.connected == i
        assert [x[0] for x in ups] == ["-", "-", "+", "+"]
        assert sum(x.startswith("+prefill-0.") for x in ups) == 1
        assert sum(x.startswith("+decode-0.") for x in ups) == 1
    cluster.there = False
    with pytest.raises(PeerLostError, match="4 times"):
        cluster.step()


def test_a_busy_ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        assert launch.knock(host, port)
        monkeypatch.setattr(socket, "create_connection", late)
        assert launch.knock(host, port)
        monkeypatch.undo()
    assert not launch.knock(host, port)


@pytest.mark.parametrize(
    ("gpus", "prefill", "decode", "share"),
    [
        (0, 1, 1, 0.0),
        (2, 1, 1, 1.0),
        (8, 1, 1, 1.0),
        (1, 1, 1, 0.5),
        (4, 2, 4, 0.5),
        (3, 3, 4, 1 / 3),
    ],
)
def test_every_worker_finds_a_place_on_the_gpus(
    gpus: int, prefill: int, decode: int, share: float
) -> None:
    flags = {"cluster.prefill": prefill, "cluster.decode": decode}
    assert gpu_share(gpus, load_config(None, flags)) == share
    assert not gpus or gpus * int(1 / share) >= prefill + decode
    assert gpu_share(gpus, load_config(None, flags | {"model.device": "cpu"})) == 0.0


def test_the_cores_are_shared_unless_a_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert torch_threads(load_config(None, {"cluster.decode": 2})) == 4
    assert torch_threads(load_config(None, {"cluster.decode": 20})) == 1
    assert torch_threads(load_config(None, {"engine.torch_threads": 7})) == 7


def late(*arguments: object, **options: object) -> None:
    raise TimeoutError
