"""Deaths are told and the dead replaced, also when a replacement does not start at first."""

import os
import socket
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import RayActorError, RayTaskError

from disagg.config import Config, load_config
from disagg.errors import ConfigError, ModelError, PeerLostError
from disagg.launch import ray_cluster as launch
from disagg.launch.ray_actor import WorkerActor
from disagg.launch.ray_cluster import Actor, Cluster
from disagg.launch.resources import gpu_share, worker_config
from disagg.transfer.messages import Role, WorkerInfo
from disagg.transfer.security import Authority

LOADING = object()  # an outcome that is not there yet


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
    """An actor. `watch` is the call that ends with it."""

    watch: Call = field(default_factory=Call)
    stop: Call = field(default_factory=Call)
    assume: Call = field(default_factory=Call)
    meet: Call = field(default_factory=lambda: Call(done=True, value=[]))
    doing: Call = field(default_factory=lambda: Call(done=True, value=""))


class FakeCluster(Cluster):
    """Workers that start at once, with the outcomes given; then well."""

    def __init__(self, *outcomes: Any, config: Config | None = None):
        super().__init__(config or Config())
        self.outcomes = list(outcomes)
        self.handles: dict[str, Handle] = {}
        self.connected, self.there = 0, True
        self._addresses = [("ray", 1)]
        self.told: list[str] = []

    def _load(self, role: Role, name: str) -> Actor:
        self.handles[name] = Handle()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        actor = Actor(
            role, name, self.handles[name], Call(outcome is not LOADING, outcome)
        )
        if outcome is None:
            self.loaded(actor)
        return actor

    def loaded(self, actor: Actor) -> None:
        """It can be reached."""
        actor.call.done = True
        actor.call.value = WorkerInfo(actor.name, actor.role, "127.0.0.1:1", epoch=1)

    def connect(self) -> None:
        self.connected += 1
        self.there = True

    def kill(self, name: str) -> None:
        self.handles[name].watch.done = True

    def step(self) -> list[str]:
        """One look; what it told."""
        self.told = []
        launch.knock = lambda host, port: self.there  # type: ignore[assignment]
        self.poll(
            lambda up: self.told.append(f"+{up.name}"),
            lambda x: self.told.append(f"-{x}"),
        )
        return self.told


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(calls: Any, timeout: float | None = None) -> Any:
        if isinstance(calls, list):
            return [get(each) for each in calls]
        if isinstance(calls.value, Exception):
            raise calls.value
        return calls.value

    def wait(
        calls: list[Call], timeout: float | None = None
    ) -> tuple[list[Call], list[Call]]:
        assert calls, "Ray refuses to wait for nothing"
        assert timeout is not None or any(call.done for call in calls), (
            "this would be for ever"
        )
        return [call for call in calls if call.done][:1], []

    monkeypatch.setattr(launch, "knock", lambda host, port: True)
    monkeypatch.setattr(launch.ray, "shutdown", lambda: None)
    monkeypatch.setattr(launch.ray, "get", get)
    monkeypatch.setattr(launch.ray, "wait", wait)
    monkeypatch.setattr(launch, "RETRY_S", 0.0)


@pytest.fixture
def cluster(no_ray: None) -> FakeCluster:
    """A prefill and a decode worker that serve."""
    serving = FakeCluster()
    serving.start()
    return serving


def test_a_dead_worker_is_told_of_and_replaced_under_a_new_name(caplog):
    cluster = FakeCluster()
    assert [started.name for started in cluster.start()] == ["prefill-0", "decode-0"]
    assert cluster.step() == []
    cluster.kill("decode-0")
    assert cluster.step() == ["-decode-0"]
    assert caplog.messages == ["decode-0 ended; another one starts"]
    assert cluster.step() == ["+decode-0.1"]
    cluster.kill("decode-0.1")
    assert [cluster.step(), cluster.step()] == [["-decode-0.1"], ["+decode-0.2"]]


RAY_MESSAGE = """The actor died unexpectedly before finishing this task.
\tclass_name: DecodeWorker
\tpid: 31213
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit
detail: Worker unexpectedly exits with a connection error code 2."""


class DiedError(RayActorError):
    """Ray's error of a dead process, with its text as Ray 2.60 writes it."""

    def __str__(self) -> str:
        return RAY_MESSAGE


def test_the_log_says_which_process_died(cluster, caplog):
    cluster.handles["decode-0"].watch.value = DiedError()
    cluster.kill("decode-0")
    cluster.step()

    (message,) = caplog.messages
    assert message == (
        "decode-0 ended: its process 31213 at 192.0.2.2 was killed or crashed "
        "(Ray: SYSTEM_ERROR); another one starts"
    )


def test_what_takes_workers_long_is_told_once_while_they_load():
    cluster = FakeCluster(LOADING, LOADING)
    reports, news = [], iter(["", "kernels", "kernels", "steps"])

    def look(*loading: Actor) -> str:
        doing = next(news, None)
        for actor in loading if doing is None else ():
            cluster.loaded(actor)
        cluster.handles["decode-0"].doing.value = doing or ""
        return Cluster._doing(cluster, *loading)

    cluster._doing = look  # type: ignore[method-assign]
    cluster.start(reports.append)
    assert reports == ["kernels", "steps"]


@pytest.mark.parametrize("failure", [RayActorError(), ("model", "the file is gone")])
def test_a_replacement_that_does_not_start_is_tried_again(failure):
    cluster = FakeCluster(None, None, failure, failure)
    cluster.start()
    cluster.kill("prefill-0")
    steps = [cluster.step() for _ in range(4)]
    assert steps == [["-prefill-0"], [], [], ["+prefill-0.3"]]


@pytest.mark.parametrize("early", [(0, 2), (0, 3), (1, 2), (1, 3)])
def test_a_service_starts_with_one_worker_of_each_role_and_tells_of_the_others(early):
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    config = load_config(None, {"cluster.prefill": 2, "cluster.decode": 2})
    outcomes = [None if i in early else LOADING for i in range(4)]
    cluster = FakeCluster(*outcomes, config=config)
    assert [started.name for started in cluster.start()] == [names[i] for i in early]
    assert cluster.step() == []
    for actor in [actor for actor in cluster._actors if actor.info is None]:
        cluster.loaded(actor)
        assert cluster.step() == [f"+{actor.name}"]


@pytest.mark.parametrize(
    ("running", "taken", "next_one"),
    [
        ([], ["prefill-0", "prefill-1", "decode-0"], ".1"),
        (["decode-0.3"], ["prefill-0", "prefill-1", "decode-0.3"], ".4"),
        (["prefill-1", "decode-2.1", "decode-0"], None, ".2"),
        (["prefill-0.2"], ["prefill-0.2", "prefill-0", "decode-0"], ".3"),
    ],
)
def test_a_front_end_takes_over_all_workers_of_its_name(
    running, taken, next_one, monkeypatch
):
    named = [{"name": name, "namespace": "mine"} for name in running]
    named.append({"name": "decode-7", "namespace": "of another"})
    monkeypatch.setattr(
        launch.ray.util, "list_named_actors", lambda all_namespaces: named
    )
    take_kept(monkeypatch)
    flags = {"cluster.address": "any:1", "cluster.name": "mine", "cluster.prefill": 2}
    cluster = FakeCluster(config=load_config(None, flags))
    names = [name for _, name in cluster._initial_names()]
    assert names == (taken or ["prefill-1", "prefill-0", "decode-0", "decode-2.1"])
    cluster._load_another(Role.DECODE)
    assert cluster._actors[-1].name == f"decode-0{next_one}"


def test_the_next_front_end_has_as_many_workers_as_were_asked_for(monkeypatch):
    named: list[dict[str, str]] = []
    monkeypatch.setattr(
        launch.ray.util, "list_named_actors", lambda all_namespaces: named
    )
    take_kept(monkeypatch)
    config = load_config(None, {"cluster.address": "any:1"})
    first = FakeCluster(config=config)
    first.start()
    first.scale(None, 2)
    named += [
        {"name": name, "namespace": "disagg"} for name in ("prefill-0", "decode-0")
    ]
    names = [name for _, name in FakeCluster(config=config)._initial_names()]
    assert names == ["prefill-0", "decode-0", "decode-1"]
    named.clear()
    assert (
        len(FakeCluster(config=config)._initial_names()) == 2
    )  # of a service that ended


def test_workers_that_do_both_stay_as_many_as_they_are():
    cluster = FakeCluster(config=load_config(None, {"cluster.colocated": True}))
    assert [started.name for started in cluster.start()] == ["both-0"]
    cluster.step()
    assert list(cluster.handles) == ["both-0"]
    with pytest.raises(ConfigError, match="do both"):
        cluster.scale(None, 2)


def test_an_end_takes_along_what_serves_or_is_its_own(monkeypatch):
    killed: list[Handle] = []
    monkeypatch.setattr(launch.ray, "kill", killed.append)
    cluster = FakeCluster(None, LOADING, LOADING, None)
    names = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    cluster._adopted = names[:2]
    cluster._actors = [cluster._load(Role.DECODE, name) for name in names]
    for actor in cluster._actors[0], cluster._actors[3]:
        cluster._enter(actor)
    cluster.close()
    assert killed == [cluster.handles[name] for name in names if name != "decode-0"]


def test_the_first_front_end_makes_what_the_next_one_finds(monkeypatch):
    take_kept(monkeypatch)

    def agree(**flags: str) -> Authority:
        overrides = {key.replace("_", ".", 1): value for key, value in flags.items()}
        return Cluster(
            load_config(None, {"cluster.address": "any:1"} | overrides)
        )._shared_authority()

    first = agree()
    assert first.certificate
    assert agree() == first
    assert agree(security_plane="token") == Authority(first.token)
    other = agree(cluster_name="other")
    assert other.token != first.token


def test_others_are_watched_while_a_replacement_loads(cluster):
    cluster.kill("prefill-0")
    cluster.step()
    cluster._actors[-1].call.done = False
    cluster.kill("decode-0")
    assert cluster.step() == ["-decode-0"]
    assert cluster.step() == ["+decode-0.2"]


def test_more_workers_load_and_one_of_too_many_changes_what_it_does(cluster, caplog):
    cluster.scale(2, 2)
    assert [cluster.step() for _ in range(3)] == [[], ["+prefill-1.1"], ["+decode-1.2"]]
    cluster.scale(1, 3)
    assert cluster.step() == []
    assert cluster.handles["prefill-1.1"].assume.arguments == (Role.DECODE,)
    cluster.scale(None, 1)
    cluster.step()
    leaving = {
        name
        for name, handle in cluster.handles.items()
        if handle.stop.arguments is not None
    }
    assert leaving == {"prefill-1.1", "decode-1.2"}
    for name in sorted(leaving):
        cluster.kill(name)
        assert cluster.step() == [f"-{name}"]
    assert (cluster.step(), caplog.messages) == ([], [])


def test_a_worker_that_is_wanted_no_more_while_it_loads_ends_without_a_word(
    caplog, monkeypatch
):
    cluster = FakeCluster(None, None, LOADING)
    cluster.start()
    for number in (2, 1):
        cluster.scale(None, number)
        cluster.step()
    loading = cluster._actors[-1]
    assert cluster.handles[loading.name].stop.arguments == (launch.DRAIN_S,)
    loading.call.done, loading.call.value = True, RayActorError()
    assert [cluster.step(), len(cluster._actors), caplog.messages] == [[], 2, []]
    shell = WorkerActor.__new__(WorkerActor)
    shell._loaded = False
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        shell.stop()


def test_too_many_workers_on_one_host_load_a_few_at_a_time_and_can_be_called_off(
    monkeypatch,
):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cluster = FakeCluster(None, None, *[LOADING] * 1000)
    cluster.start()
    cluster.scale(None, 1000)
    cluster.step()
    cluster.step()
    assert len(cluster.handles) == 4
    cluster.scale(None, 1)
    cluster.step()
    stopped = [handle.stop.arguments is not None for handle in cluster.handles.values()]
    assert stopped == [False, False, True, True]


def test_a_worker_leaves_when_the_one_in_its_place_serves_under_its_name(cluster):
    cluster.drain("decode-0")
    stop = cluster.handles["decode-0"].stop
    assert (cluster.step(), stop.arguments) == ([], None)
    assert (cluster.step(), stop.arguments) == (["+decode-0.1"], (launch.DRAIN_S,))
    cluster.kill("decode-0")
    assert [cluster.step(), cluster.step()] == [["-decode-0"], []]


def test_a_worker_that_leaves_when_the_next_front_end_comes_ends_without_a_word(caplog):
    cluster = FakeCluster(
        None, WorkerInfo("decode-0", Role.NONE, "127.0.0.1:1", epoch=1)
    )
    cluster.start()
    assert [cluster.step(), cluster.step()] == [[], ["+decode-0.1"]]
    cluster.kill("decode-0")
    assert [cluster.step(), cluster.step(), caplog.messages] == [["-decode-0"], [], []]


def test_a_front_end_takes_over_though_a_worker_ends_meanwhile():
    cluster = FakeCluster(None, RayActorError())
    cluster._adopted = ["prefill-0", "decode-0"]
    assert [started.name for started in cluster.start()] == ["prefill-0"]
    assert [cluster.step(), cluster.step()] == [[], ["+decode-0.1"]]


def test_what_cannot_be_wanted_is_refused_by_name(cluster):
    with pytest.raises(ConfigError, match="0 decode"):
        cluster.scale(1, 0)
    cluster._gpus = 2
    with pytest.raises(
        ConfigError, match="this host has 2 GPUs, room for 2 of 3 workers"
    ):
        cluster.scale(None, 2)
    assert cluster.target_counts == {"prefill": 1, "decode": 1}
    with pytest.raises(ConfigError, match="'decode-7'; known: decode-0, prefill-0"):
        cluster.drain("decode-7")


def test_a_worker_that_breaks_says_what_broke_it_and_not_where():
    where = "\x1b[36mray::start()\x1b[39m (pid=7)\n  File ...\nMemoryError: 90 TiB"
    for error in (MemoryError("90 TiB"), RuntimeError("90 TiB")):
        failure = RayTaskError("start", where, error, "ray::start", 7, "1.1.1.1")
        with pytest.raises(
            PeerLostError, match=rf"started: {type(error).__name__}: 90 TiB$"
        ):
            FakeCluster(failure.as_instanceof_cause()).start()


def test_a_worker_that_cannot_start_is_an_error_at_the_start():
    with pytest.raises(ModelError, match="no such model"):
        FakeCluster(("model", "no such model")).start()


def test_a_lost_ray_starts_anew_with_all_workers_as_often_as_they_serve_between(
    cluster,
):
    for i in range(1, 2 * launch.RESTARTS):
        cluster.there = False
        ups = [x for _ in range(3) for x in cluster.step()]
        assert cluster.connected == i
        assert [x[0] for x in ups] == ["-", "-", "+", "+"]
        assert sum(x.startswith("+prefill-0.") for x in ups) == 1
        assert sum(x.startswith("+decode-0.") for x in ups) == 1


def test_a_ray_that_is_lost_before_anything_serves_is_not_started_for_ever(cluster):
    cluster.outcomes = [LOADING] * 2 * launch.RESTARTS
    for _ in range(launch.RESTARTS):
        cluster.there = False
        cluster.step()
    cluster.there = False
    with pytest.raises(PeerLostError, match="4 times"):
        cluster.step()


def test_a_busy_ray_is_there(monkeypatch):
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        assert launch.knock(host, port)
        monkeypatch.setattr(socket, "create_connection", late)
        assert launch.knock(host, port)
        monkeypatch.undo()
    assert not launch.knock(host, port)


PLACES = [
    (0, 1, 1, 0),
    (2, 1, 1, 1),
    (8, 1, 1, 1),
    (1, 1, 1, 1 / 2),
    (4, 2, 4, 1 / 2),
    (3, 3, 4, 1 / 3),
]


@pytest.mark.parametrize(("gpus", "prefill", "decode", "share"), PLACES)
def test_every_worker_finds_a_place_on_the_gpus(gpus, prefill, decode, share):
    flags = {"cluster.prefill": prefill, "cluster.decode": decode}
    assert gpu_share(gpus, load_config(None, flags)) == share
    assert not gpus or gpus * int(1 / share) >= prefill + decode
    assert gpu_share(gpus, load_config(None, flags | {"model.device": "cpu"})) == 0.0


ON_OUR_RAY = [
    (
        {"cluster.gpus": 1},
        0,
        "gpus is 1; this host has 0 GPUs, room for 0 of 2 workers",
    ),
    ({"cluster.gpus": 1}, 1, "room for 1 of 2"),
    ({"cluster.gpus": 2}, 3, "room for 1 of 2"),
    ({"cluster.gpus": 0.6}, 1, "room for 1 of 2"),
    ({"cluster.pools": True}, 8, "cluster.pools is true on a private Ray"),
    ({"cluster.gpus": 1}, 2, ""),
    ({"cluster.gpus": 0.1, "cluster.decode": 9}, 1, ""),
    ({"cluster.gpus": 0}, 0, ""),
    ({}, 0, ""),
]


@pytest.mark.parametrize(("flags", "gpus", "message"), ON_OUR_RAY)
def test_workers_that_would_wait_for_ever_on_our_ray_are_refused(
    flags, gpus, message, monkeypatch
):
    node = {
        "Resources": {"CPU": 2.0, "GPU": float(gpus)},
        "NodeManagerAddress": "",
        "NodeID": "",
    }
    monkeypatch.setattr(launch.ray, "init", Mock())
    monkeypatch.setattr(launch.ray, "nodes", lambda: [node | {"NodeManagerPort": 1}])
    monkeypatch.setattr(
        launch.ray, "get_runtime_context", lambda: Mock(gcs_address="here:1")
    )
    monkeypatch.setattr(launch.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        Cluster(load_config(None, flags), Mock(token="t", folder="")).connect()


POOLS = {"cluster.prefill": 4, "cluster.decode": 4, "cluster.pools": True}


SHARED = [
    ({"cluster.decode": 2}, {}, 4),
    ({"cluster.decode": 2}, {"CPU": 6.0}, 2),
    ({"cluster.decode": 20}, {}, 1),
    ({"engine.torch_threads": 7}, {}, 7),
    (POOLS, {"prefill": 1}, 12),
    (POOLS, {"decode": 2, "CPU": 12.0}, 6),
    (POOLS, {"decode": 8}, 3),
    (POOLS, {"prefill": 1, "decode": 2}, 4),
    (POOLS, {}, 12),
]


@pytest.mark.parametrize(("flags", "resources", "threads"), SHARED)
def test_the_cores_of_a_host_are_shared_by_workers_that_fit(
    flags, resources, threads, monkeypatch
):
    """Of pools as many as fit there."""
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    engine = worker_config(
        load_config(None, flags | {"engine.memory_share": 0.8}), 0.5, resources
    ).engine
    assert (engine.memory_share, engine.torch_threads) == (0.4, threads)


def take_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What front ends keep in Ray stays here."""
    stored: dict[tuple[str, bytes], bytes] = {}

    def put(
        key: bytes, value: str, overwrite: bool = True, namespace: str = ""
    ) -> None:
        if overwrite or (namespace, key) not in stored:
            stored[namespace, key] = value.encode()

    get = "_internal_kv_get"
    monkeypatch.setattr(
        launch.internal_kv, get, lambda key, namespace: stored.get((namespace, key))
    )
    monkeypatch.setattr(launch.internal_kv, "_internal_kv_put", put)


def late(*arguments: object, **options: object) -> None:
    raise TimeoutError
