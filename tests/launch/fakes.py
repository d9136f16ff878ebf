"""Workers of a cluster without Ray: calls that are done when a test says so."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

from ray.exceptions import GetTimeoutError

from disagg.config import Config
from disagg.errors import CapacityError, DisaggError
from disagg.launch.actors import Actor
from disagg.launch.ray_cluster import Cluster
from disagg.launch.retry_pauses import RetryPauses
from disagg.launch.start_protocol import failure, success
from disagg.transfer.messages import Role, WorkerInfo

HOST = "192.0.2.2"
LOADING = object()  # an outcome that does not exist yet


@dataclass(eq=False)
class Call:
    """A call through Ray: done or not, its value or error, and its arguments."""

    done: bool = False
    value: Any = None
    arguments: tuple[object, ...] | None = None

    def remote(self, *arguments: object) -> "Call":
        self.arguments = arguments
        return self


@dataclass(eq=False)
class Handle:
    """Ray's handle of an actor. The call of `watch` ends with the actor."""

    watch: Call = field(default_factory=Call)
    stop: Call = field(default_factory=Call)
    assume: Call = field(default_factory=Call)
    meet: Call = field(default_factory=lambda: Call(done=True, value=[]))
    doing: Call = field(default_factory=lambda: Call(done=True, value=""))


class FakeBundles:
    """The room of a worker's ranks, which it waits for.

    words: what it waits for; an error where it waits in vain
    """

    def __init__(self, words: str | CapacityError = ""):
        self.words = words
        self.was_removed = False

    def waits_for(self) -> str:
        if isinstance(self.words, CapacityError):
            raise self.words
        return self.words

    def remove(self) -> None:
        self.was_removed = True


class FakeConnection:
    """A Ray that a test can lose; opening it again always works."""

    def __init__(self) -> None:
        self.gpus: int | None = None
        self.host = "127.0.0.1"
        self.lost = False
        self.num_reopened = 0
        self.words: dict[str, str] = {}  # by process id

    def is_lost(self) -> bool:
        return self.lost

    def reopen(self) -> None:
        self.num_reopened += 1
        self.lost = False

    def last_words(self, pid: str) -> str:
        return self.words.get(pid, "")

    def close(self) -> None:
        pass


class FakeCluster(Cluster):
    """A cluster whose workers load at once, with these outcomes; later ones serve.

    An outcome is None (it serves), LOADING, an info, an error of Ray or one of ours.
    """

    def __init__(self, *outcomes: Any, config: Config | None = None):
        super().__init__(config or Config())
        self._connection = self.connection = FakeConnection()
        self.now_s = 0.0
        self._pauses = RetryPauses(lambda: self.now_s)
        self.outcomes = list(outcomes)
        self.handles: dict[str, Handle] = {}
        self.bundles: dict[str, FakeBundles] = {}  # by worker, of several ranks

    def _load(self, role: Role, name: str) -> Actor:
        self.handles[name] = Handle()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        bundles: Any = self.bundles.get(name)
        actor = Actor(role, name, self.handles[name], Call(), bundles=bundles)
        if outcome is None:
            loaded(actor)
        elif outcome is not LOADING:
            actor.call.done = True
            actor.call.value = reply_of(outcome)
        return actor

    def kill(self, name: str) -> None:
        self.handles[name].watch.done = True

    def step(self, **silent_s: float) -> list[str]:
        """Poll once; returns what it reported: +up and -down.

        silent_s: seconds of silence by worker, with _ for - in its name
        """
        news: list[str] = []
        silence = {name.replace("_", "-"): x for name, x in silent_s.items()}
        self.poll(
            lambda info: news.append(f"+{info.name}"),
            lambda name: news.append(f"-{name}"),
            lambda: silence,
        )
        return news


def loaded(actor: Actor) -> None:
    """End the loading of an actor well."""
    actor.call.done = True
    info = WorkerInfo(actor.name, actor.role, f"{HOST}:1", epoch=1)
    actor.call.value = success(HOST, info)


def reply_of(outcome: object) -> object:
    """What the actor's start returns or raises."""
    if isinstance(outcome, DisaggError):
        return failure(HOST, outcome)
    if isinstance(outcome, WorkerInfo):
        return success(HOST, outcome)
    return outcome


def get(calls: Any, timeout: float | None = None) -> Any:
    """In place of `ray.get`."""
    if isinstance(calls, list):
        return [get(each) for each in calls]
    if not calls.done:
        raise GetTimeoutError
    if isinstance(calls.value, Exception):
        raise calls.value
    return calls.value


def wait(
    calls: list[Call], timeout: float | None = None, num_returns: int = 1
) -> tuple[list[Call], list[Call]]:
    """In place of `ray.wait`."""
    assert calls, "Ray refuses to wait for nothing"
    is_endless = timeout is None and not any(call.done for call in calls)
    assert not is_endless, "this would wait for ever"
    return [call for call in calls if call.done][:num_returns], []


def fake_node(gpus: int) -> Mock:
    """A Ray with one host, in place of the module `ray`."""
    node = {
        "Resources": {"CPU": 2.0, "GPU": float(gpus)},
        "NodeManagerAddress": "",
        "NodeManagerPort": 1,
    }
    module = Mock()
    module.nodes.return_value = [node]
    module.get_runtime_context.return_value.gcs_address = "here:1"
    module.util.get_node_ip_address.return_value = "127.0.0.1"
    return module
