"""Deaths are told and the dead replaced, also when a replacement does not start at first."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import RayActorError

from disagg.config import Config
from disagg.errors import ModelError
from disagg.workers import launch
from disagg.workers.launch import Cluster, Starting
from disagg.workers.members import Role, Started


@dataclass(eq=False)
class Call:
    """What Ray would give for a call: done or not, with a value or an error."""

    done: bool = False
    value: Any = None

    def remote(self, *arguments: object) -> "Call":
        return self


@dataclass(eq=False)
class Handle:
    """An actor. `watch` is the call that ends with it."""

    watch: Call = field(default_factory=Call)
    meet: Call = field(default_factory=lambda: Call(done=True, value=[]))


class FakeCluster(Cluster):
    """Workers that start at once, with the outcomes given; then well."""

    def __init__(self, *outcomes: Any):
        super().__init__(Config(), token=None)
        self.outcomes = list(outcomes)
        self.handles: dict[str, Handle] = {}
        self.told: list[str] = []

    def _load(self, role: Role, name: str) -> Starting:
        self.handles[name] = Handle()
        started = Started(name, role, "127.0.0.1:1", epoch=1)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        return Starting(role, name, self.handles[name], Call(True, outcome or started))

    def kill(self, name: str) -> None:
        self.handles[name].watch.done = True

    def step(self) -> list[str]:
        """One look; what it told."""
        self.told = []
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
    cluster._starting[0].ready.done = False
    cluster.kill("decode-0")
    assert cluster.step() == ["-decode-0"]
    assert cluster.step() == ["+decode-0.2"]


def test_a_worker_that_cannot_start_is_an_error_at_the_start() -> None:
    with pytest.raises(ModelError, match="no such model"):
        FakeCluster(("model", "no such model")).start()
