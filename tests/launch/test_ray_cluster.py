"""Deaths are reported and the dead replaced; workers scale, drain and outlive a front end."""

import os
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from disagg.config import load_config
from disagg.errors import (
    CapacityError,
    ConfigError,
    ModelError,
    OccupiedError,
    PeerLostError,
    VersionError,
)
from disagg.launch import actors, ray_cluster, ray_connection
from disagg.launch.ray_cluster import Cluster
from disagg.launch.retry_pauses import FIRST_PAUSE_S, LONGEST_PAUSE_S
from disagg.launch.worker_names import WorkerNames
from disagg.transfer.messages import Role, WorkerInfo, serves
from tests.launch.fakes import (
    LOADING,
    Call,
    FakeBundles,
    FakeCluster,
    Handle,
    fake_node,
    loaded,
)

pytestmark = pytest.mark.usefixtures("no_ray")
ON_A_CLUSTER = {"cluster.address": "any:1", "cluster.name": "mine"}


def running_actors(monkeypatch, *names: str) -> list[dict[str, str]]:
    """The named actors of a Ray that also runs another service."""
    named = [{"name": name, "namespace": "mine"} for name in names]
    named.append({"name": "decode-7", "namespace": "another"})
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: named)
    return named


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The actors that were killed."""
    handles: list[Handle] = []
    monkeypatch.setattr(ray, "kill", handles.append)
    return handles


# -- start


def test_start_returns_the_workers_that_serve():
    infos = FakeCluster().start()

    assert [info.name for info in infos] == ["prefill-0", "decode-0"]


def test_start_reports_each_stage_of_loading_once(monkeypatch):
    cluster = FakeCluster(LOADING, LOADING)
    stages = iter(["", "kernels", "kernels", "steps"])

    def progress(loading):
        stage = next(stages, None)
        if stage is None:
            for actor in loading:
                loaded(actor)
            return ""
        cluster.handles["decode-0"].doing.value = stage
        return reported(loading)

    reported = actors.progress
    monkeypatch.setattr(actors, "progress", progress)
    reports: list[str] = []

    cluster.start(reports.append)

    assert reports == ["kernels", "steps"]


def test_a_worker_with_slow_links_does_not_hide_those_of_others():
    config = load_config(None, {"cluster.prefill": 2})
    cluster = FakeCluster(None, None, LOADING, config=config)
    slow, fast = [cluster._load(Role.PREFILL, f"prefill-{i}") for i in range(2)]
    for actor in slow, fast:
        actor.enter()
    cluster.handles["prefill-0"].meet = Call()
    cluster.handles["prefill-1"].meet = Call(done=True, value=["link to decode-0"])

    assert actors.measure_links([slow, fast]) == ["prefill-1: link to decode-0"]


@pytest.mark.parametrize("early", [(0, 2), (0, 3), (1, 2), (1, 3)])
def test_start_waits_for_one_worker_of_each_role(early):
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    config = load_config(None, {"cluster.prefill": 2, "cluster.decode": 2})
    outcomes = [None if i in early else LOADING for i in range(4)]
    cluster = FakeCluster(*outcomes, config=config)

    infos = cluster.start()

    assert [info.name for info in infos] == [names[i] for i in early]


def test_workers_that_load_longer_than_the_start_are_reported():
    config = load_config(None, {"cluster.prefill": 2, "cluster.decode": 2})
    cluster = FakeCluster(None, LOADING, None, LOADING, config=config)
    cluster.start()
    assert cluster.step() == []

    for actor in [actor for actor in cluster._actors if actor.info is None]:
        loaded(actor)
        assert cluster.step() == [f"+{actor.name}"]


def test_the_start_raises_the_error_of_a_worker():
    cluster = FakeCluster(ModelError("no such model"))

    with pytest.raises(ModelError, match="no such model"):
        cluster.start()


def test_one_bad_host_does_not_stop_the_start(monkeypatch, key_values, caplog):
    running_actors(monkeypatch)
    counts = {"cluster.prefill": 64, "cluster.decode": 64}
    config = load_config(None, ON_A_CLUSTER | counts)
    cluster = FakeCluster(ConfigError("no module disagg"), config=config)

    infos = cluster.start()

    assert serves([info.role for info in infos])
    assert caplog.messages == [
        "prefill-0 at 192.0.2.2 did not start: no module disagg; trying again in 10 s"
    ]


def test_a_role_without_a_worker_ends_the_start(monkeypatch, key_values, caplog):
    running_actors(monkeypatch)
    config = load_config(None, ON_A_CLUSTER | {"cluster.decode": 2})
    failures = [ModelError("no such model"), ModelError("no such file")]
    cluster = FakeCluster(LOADING, *failures, config=config)

    with pytest.raises(ModelError, match="no such file"):
        cluster.start()

    assert len(caplog.messages) == 1


def test_a_failed_worker_of_the_start_is_tried_again(monkeypatch, key_values):
    running_actors(monkeypatch)
    config = load_config(None, ON_A_CLUSTER | {"cluster.decode": 2})
    cluster = FakeCluster(None, ModelError("gone"), None, config=config)
    cluster.start()

    early = [cluster.step() for _ in range(3)]
    cluster.now_s = 10.0

    assert early == [[], [], []]
    assert [cluster.step(), cluster.step()] == [[], ["+decode-0.1"]]


@pytest.mark.parametrize("cause", [MemoryError, RuntimeError])
def test_the_error_of_a_broken_worker_is_its_last_line(cause):
    """Ray's text is a traceback with colours."""
    trace = "\x1b[36mray::start()\x1b[39m (pid=7)\n  File ...\nMemoryError: 90 TiB"
    failure = RayTaskError("start", trace, cause("90 TiB"), "ray::start", 7, "1.1.1.1")
    cluster = FakeCluster(failure.as_instanceof_cause())

    with pytest.raises(PeerLostError, match=rf"started: {cause.__name__}: 90 TiB$"):
        cluster.start()


PRIVATE_PLACES = [
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


@pytest.mark.parametrize(("flags", "gpus", "message"), PRIVATE_PLACES)
def test_workers_without_room_on_a_private_ray_are_refused(
    flags, gpus, message, monkeypatch
):
    monkeypatch.setattr(ray_connection, "ray", fake_node(gpus))
    cluster = Cluster(load_config(None, flags), Mock(token="t", folder=""))

    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        cluster.connect()


# -- deaths


def test_a_dead_worker_is_reported_and_replaced_under_a_new_name(cluster, caplog):
    cluster.kill("decode-0")

    assert [cluster.step(), cluster.step()] == [["-decode-0"], ["+decode-0.1"]]
    assert caplog.messages == ["decode-0 ended; another one starts"]


def test_a_replacement_is_replaced_too(cluster):
    cluster.kill("decode-0")
    cluster.step()
    cluster.step()

    cluster.kill("decode-0.1")

    assert [cluster.step(), cluster.step()] == [["-decode-0.1"], ["+decode-0.2"]]


def test_nothing_is_reported_while_all_workers_serve(cluster):
    assert cluster.step() == []


class DiedError(RayActorError):
    """Ray's error of a dead process, with its text as Ray 2.60 writes it."""

    def __str__(self) -> str:
        return RAY_MESSAGE


RAY_MESSAGE = """The actor died unexpectedly before finishing this task.
\tclass_name: DecodeWorker
\tpid: 31213
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit
detail: Worker unexpectedly exits with a connection error code 2."""


def test_the_log_says_which_process_died(cluster, caplog):
    cluster.handles["decode-0"].watch.value = DiedError()
    cluster.kill("decode-0")

    cluster.step()

    assert caplog.messages == [
        "decode-0 ended: its process 31213 at 192.0.2.2 was killed or crashed "
        "(Ray: SYSTEM_ERROR); another one starts"
    ]


def test_the_log_has_what_a_dead_worker_wrote(cluster, caplog):
    cluster.handles["decode-0"].watch.value = DiedError()
    cluster.connection.words = {"31213": "Thread 0x7f:\n  in a_kernel"}
    cluster.kill("decode-0")

    cluster.step()

    assert caplog.messages[-1] == (
        "decode-0 wrote before it ended:\nThread 0x7f:\n  in a_kernel"
    )


FAILURES = [RayActorError(), ModelError("the file is gone")]


@pytest.mark.parametrize("failure", FAILURES, ids=["of Ray", "of ours"])
def test_a_replacement_that_does_not_start_is_tried_again(failure):
    cluster = FakeCluster(None, None, failure, failure)
    cluster.start()
    cluster.kill("prefill-0")
    steps = []

    for _ in range(6):
        steps.append(cluster.step())
        cluster.now_s += LONGEST_PAUSE_S

    assert steps == [["-prefill-0"], [], [], [], [], ["+prefill-0.3"]]


def test_failed_starts_are_tried_after_growing_pauses(caplog):
    """The log says which host it was, and why."""
    failure = ModelError("the file is gone")
    cluster = FakeCluster(None, None, failure, failure, failure)
    cluster.start()
    cluster.kill("prefill-0")
    attempts = []

    for now_s in range(0, 100, 5):
        cluster.now_s = now_s
        num_handles = len(cluster.handles)
        cluster.step()
        if len(cluster.handles) > num_handles:
            attempts.append(now_s)

    assert attempts == [0, 15, 40, 85]  # 5 s later each has failed
    assert caplog.messages[1:] == [
        f"prefill-0.{number} at 192.0.2.2 did not start: the file is gone; "
        f"trying again in {pause_s} s"
        for number, pause_s in [(1, 10), (2, 20), (3, 40)]
    ]


def test_a_worker_that_crashes_again_and_again_waits_between(cluster, caplog):
    for name in "decode-0", "decode-0.1", "decode-0.2":
        cluster.kill(name)
        cluster.step()
        cluster.step()

    assert caplog.messages[-1] == "decode-0.2 ended; another one starts in 10 s"
    assert list(cluster.handles)[-1] == "decode-0.2"
    cluster.now_s = FIRST_PAUSE_S
    assert [cluster.step(), cluster.step()] == [[], ["+decode-0.3"]]


def test_a_place_that_pauses_does_not_keep_another_empty():
    config = load_config(None, {"cluster.decode": 2})
    cluster = FakeCluster(None, None, None, ModelError("gone"), config=config)
    cluster.start()
    cluster.step()
    cluster.kill("decode-0")
    cluster.step()
    cluster.step()

    cluster.kill("decode-1")

    assert [cluster.step(), cluster.step()] == [["-decode-1"], ["+decode-1.2"]]


def test_the_watch_rests_while_every_place_pauses(monkeypatch):
    cluster = FakeCluster(None, None, ModelError("gone"), ModelError("gone"))
    cluster.start()
    rests: list[float] = []
    monkeypatch.setattr(cluster._closing, "wait", rests.append)
    for name in list(cluster.handles):
        cluster.kill(name)
    for _ in range(4):
        cluster.step()
    assert rests == []

    cluster.step()

    assert rests == [ray_cluster.CHECK_S]


def test_a_drained_worker_stays_while_its_replacement_fails():
    cluster = FakeCluster(None, None, ModelError("gone"))
    cluster.start()

    cluster.drain("decode-0")
    for _ in range(3):
        cluster.step()

    assert stopped(cluster) == []


# -- silence

SILENT_LINE = (
    "decode-0 at 192.0.2.2 was silent for 61 s and is killed; another one starts"
)


def test_a_silent_worker_is_killed_and_replaced(cluster, killed, caplog):
    news = cluster.step(decode_0=61.0)

    assert news == ["-decode-0"]
    assert killed == [cluster.handles["decode-0"]]
    assert caplog.messages == [SILENT_LINE]
    assert cluster.step() == ["+decode-0.1"]


def test_a_worker_that_is_silent_for_a_shorter_time_stays(cluster, killed):
    assert cluster.step(decode_0=59.0) == []
    assert killed == []


def test_replace_s_sets_how_long_a_worker_may_be_silent(killed):
    cluster = FakeCluster(config=load_config(None, {"cluster.replace_s": 5}))
    cluster.start()

    cluster.step(prefill_0=6.0)

    assert killed == [cluster.handles["prefill-0"]]


def test_a_loading_worker_is_never_silent(cluster, killed):
    cluster.outcomes = [LOADING]
    cluster.scale(None, 2)
    cluster.step()

    cluster.step(**{"decode_1.1": 100.0})

    assert killed == []


# -- a lost Ray


def test_others_are_watched_while_a_replacement_loads(cluster):
    cluster.kill("prefill-0")
    cluster.step()
    cluster._actors[-1].call.done = False

    cluster.kill("decode-0")

    assert [cluster.step(), cluster.step()] == [["-decode-0"], ["+decode-0.2"]]


def test_a_lost_ray_restarts_with_all_workers(cluster):
    """As often as it is lost, if workers serve in between."""
    for i in range(1, 2 * ray_cluster.RESTARTS):
        cluster.connection.lost = True
        news = [line for _ in range(3) for line in cluster.step()]

        assert cluster.connection.num_reopened == i
        assert [line[0] for line in news] == ["-", "-", "+", "+"]
        assert sum(line.startswith("+prefill-0.") for line in news) == 1
        assert sum(line.startswith("+decode-0.") for line in news) == 1


def test_a_ray_lost_before_a_worker_serves_is_given_up(cluster):
    cluster.outcomes = [LOADING] * 2 * ray_cluster.RESTARTS
    for _ in range(ray_cluster.RESTARTS):
        cluster.connection.lost = True
        cluster.step()
    cluster.connection.lost = True

    with pytest.raises(PeerLostError, match="4 times"):
        cluster.step()


# -- the next front end


@pytest.mark.parametrize(
    ("running", "expected", "replacement"),
    [
        ([], ["prefill-0", "prefill-1", "decode-0"], "decode-1.1"),
        (["decode-0.3"], ["prefill-0", "prefill-1", "decode-0.3"], "decode-1.4"),
        (
            ["prefill-1", "decode-2.1", "decode-0"],
            ["prefill-1", "prefill-0", "decode-0", "decode-2.1"],
            "decode-1.2",
        ),
        (["prefill-0.2"], ["prefill-0.2", "prefill-0", "decode-0"], "decode-1.3"),
    ],
    ids=["none", "a replacement", "more than asked for", "a prefill worker"],
)
def test_a_front_end_takes_over_all_workers_of_its_name(
    running, expected, replacement, monkeypatch, key_values
):
    running_actors(monkeypatch, *running)
    config = load_config(None, ON_A_CLUSTER | {"cluster.prefill": 2})
    cluster = FakeCluster(config=config)

    cluster.start()

    assert list(cluster.handles) == expected
    cluster._load_more(Role.DECODE, 1)
    assert cluster._actors[-1].name == replacement


def test_the_next_front_end_keeps_the_scaled_counts(monkeypatch, key_values):
    running_actors(monkeypatch)
    config = load_config(None, ON_A_CLUSTER)
    first = FakeCluster(config=config)
    first.start()
    first.scale(None, 2)
    running_actors(monkeypatch, "prefill-0", "decode-0")

    second = FakeCluster(config=config)
    second.start()

    assert list(second.handles) == ["prefill-0", "decode-0", "decode-1"]


def test_the_counts_of_a_service_that_ended_do_not_stay(monkeypatch, key_values):
    running_actors(monkeypatch)
    config = load_config(None, ON_A_CLUSTER)
    first = FakeCluster(config=config)
    first.start()
    first.scale(None, 2)

    second = FakeCluster(config=config)
    second.start()

    assert len(second.handles) == 2


def test_an_adopted_worker_that_ends_meanwhile_is_replaced(monkeypatch, key_values):
    running_actors(monkeypatch, "prefill-0", "decode-0")
    cluster = FakeCluster(None, RayActorError(), config=load_config(None, ON_A_CLUSTER))

    infos = cluster.start()

    assert [info.name for info in infos] == ["prefill-0"]
    assert [cluster.step(), cluster.step()] == [[], ["+decode-0.1"]]


def test_close_kills_workers_that_serve_or_are_its_own(killed):
    """A worker of another front end, which still serves that one, stays."""
    cluster = FakeCluster(None, LOADING, LOADING, None)
    names = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    cluster._names = WorkerNames(names[:2])
    cluster._actors = [cluster._load(Role.DECODE, name) for name in names]
    for actor in cluster._actors[0], cluster._actors[3]:
        actor.enter()

    cluster.close()

    assert killed == [cluster.handles[name] for name in names if name != "decode-0"]


# -- scaling and draining


def test_scaling_up_loads_workers(cluster):
    cluster.scale(2, 2)

    steps = [cluster.step() for _ in range(3)]

    assert steps == [[], ["+prefill-1.1"], ["+decode-1.2"]]


def test_a_surplus_worker_changes_its_role(cluster):
    cluster.scale(2, 2)
    for _ in range(3):
        cluster.step()

    cluster.scale(1, 3)

    assert cluster.step() == []
    assert cluster.handles["prefill-1.1"].assume.arguments == (Role.DECODE,)


def test_surplus_workers_leave_without_a_word_in_the_log(cluster, caplog):
    cluster.scale(1, 3)
    for _ in range(3):
        cluster.step()

    cluster.scale(None, 1)
    cluster.step()

    leaving = stopped(cluster)
    assert leaving == ["decode-1.1", "decode-2.2"]
    for name in leaving:
        cluster.kill(name)
        assert cluster.step() == [f"-{name}"]
    assert cluster.step() == []
    assert caplog.messages == []


def test_a_loading_worker_that_is_surplus_ends_without_a_word(caplog):
    cluster = FakeCluster(None, None, LOADING)
    cluster.start()
    for count in (2, 1):
        cluster.scale(None, count)
        cluster.step()
    loading = cluster._actors[-1]
    stop = cluster.handles[loading.name].stop

    loading.call.done = True
    loading.call.value = RayActorError()

    assert stop.arguments == (ray_cluster.DRAIN_S,)
    assert cluster.step() == []
    assert len(cluster._actors) == 2
    assert caplog.messages == []


def test_a_private_ray_loads_a_few_workers_at_a_time(monkeypatch):
    """So that the rest can be called off."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cluster = FakeCluster(None, None, *[LOADING] * 1000)
    cluster.start()
    cluster.scale(None, 1000)
    cluster.step()
    cluster.step()
    assert len(cluster.handles) == 4

    cluster.scale(None, 1)
    cluster.step()

    assert stopped(cluster) == ["decode-1.1", "decode-2.2"]


def test_a_drained_worker_leaves_once_its_replacement_serves(cluster):
    cluster.drain("decode-0")

    assert cluster.step() == []
    assert stopped(cluster) == []
    assert cluster.step() == ["+decode-0.1"]
    assert stopped(cluster) == ["decode-0"]
    assert cluster.handles["decode-0"].stop.arguments == (ray_cluster.DRAIN_S,)


def test_the_end_of_a_drained_worker_is_reported(cluster):
    cluster.drain("decode-0")
    cluster.step()
    cluster.step()

    cluster.kill("decode-0")

    assert [cluster.step(), cluster.step()] == [["-decode-0"], []]


def test_a_worker_that_was_leaving_already_ends_without_a_word(caplog):
    leaving = WorkerInfo("decode-0", Role.NONE, "127.0.0.1:1", epoch=1)
    cluster = FakeCluster(None, leaving)
    cluster.start()
    assert [cluster.step(), cluster.step()] == [[], ["+decode-0.1"]]

    cluster.kill("decode-0")

    assert [cluster.step(), cluster.step()] == [["-decode-0"], []]
    assert caplog.messages == []


def test_workers_that_do_both_cannot_be_scaled():
    cluster = FakeCluster(config=load_config(None, {"cluster.colocated": True}))
    cluster.start()
    cluster.step()

    with pytest.raises(ConfigError, match="do both"):
        cluster.scale(None, 2)

    assert list(cluster.handles) == ["both-0"]


def test_a_count_of_zero_is_refused(cluster):
    with pytest.raises(ConfigError, match="0 decode"):
        cluster.scale(1, 0)


def test_a_count_without_room_is_refused(cluster):
    cluster.connection.gpus = 2

    with pytest.raises(
        ConfigError, match="this host has 2 GPUs, room for 2 of 3 workers"
    ):
        cluster.scale(None, 2)

    assert cluster.target_counts == {"prefill": 1, "decode": 1}


def test_draining_an_unknown_worker_is_refused(cluster):
    with pytest.raises(ConfigError, match="'decode-7'; known: decode-0, prefill-0"):
        cluster.drain("decode-7")


def stopped(cluster: FakeCluster) -> list[str]:
    """The workers that were asked to stop, in order of their names."""
    handles = sorted(cluster.handles.items())
    return [name for name, handle in handles if handle.stop.arguments is not None]


# -- room for the ranks of a worker


def waiting_cluster(words: str | CapacityError) -> FakeCluster:
    """A decode worker that serves, and a prefill worker whose ranks wait for room."""
    cluster = FakeCluster(LOADING)
    cluster.bundles["prefill-0"] = FakeBundles(words)
    return cluster


def test_the_start_says_what_room_a_worker_waits_for(monkeypatch):
    cluster = waiting_cluster("2 ranks on one host")
    reports: list[str] = []

    def report(stage: str) -> None:
        reports.append(stage)
        assert cluster.lacks_room == {"prefill-0": "2 ranks on one host"}
        cluster.bundles["prefill-0"].words = ""
        loaded(cluster._actors[0])

    cluster.start(report)

    assert reports == ["prefill-0 waits for room: 2 ranks on one host"]


def test_the_start_raises_that_no_host_has_room(killed):
    cluster = waiting_cluster(CapacityError("no room: 2 ranks on one host"))

    with pytest.raises(CapacityError, match="2 ranks on one host"):
        cluster.start()

    assert cluster.bundles["prefill-0"].was_removed


def test_a_worker_that_waits_in_vain_is_tried_again_later(cluster, killed, caplog):
    cluster.bundles["decode-0.1"] = FakeBundles(CapacityError("no room: 2 ranks"))
    cluster.outcomes.append(LOADING)
    cluster.kill("decode-0")
    cluster.step()

    cluster.step()

    assert cluster.bundles["decode-0.1"].was_removed
    assert [actor.name for actor in cluster._actors] == ["prefill-0"]
    assert "decode-0.1 did not start: no room: 2 ranks; trying" in caplog.messages[-1]


def test_what_room_a_replacement_waits_for_is_logged_once(cluster, caplog):
    cluster.bundles["decode-0.1"] = FakeBundles("2 ranks on one host")
    cluster.outcomes.append(LOADING)
    cluster.kill("decode-0")

    for _ in range(3):
        cluster.step()

    assert cluster.lacks_room == {"decode-0.1": "2 ranks on one host"}
    messages = [x for x in caplog.messages if "waits for room" in x]
    assert messages == ["decode-0.1 waits for room: 2 ranks on one host"]


@pytest.fixture
def group(no_ray: None) -> FakeCluster:
    """A prefill worker of several ranks and a decode worker that serve."""
    serving = FakeCluster()
    serving.bundles["prefill-0"] = FakeBundles()
    serving.start()
    return serving


def test_the_room_of_a_dead_worker_is_free_for_the_next(group):
    group.kill("prefill-0")

    group.step()

    assert group.bundles["prefill-0"].was_removed


def test_the_room_of_a_silent_worker_is_freed(group, killed):
    group.step(prefill_0=1000.0)

    assert group.bundles["prefill-0"].was_removed


def test_the_room_of_a_worker_that_left_is_freed(group):
    group.drain("prefill-0")
    group.step()
    group.step()

    group.kill("prefill-0")
    group.step()

    assert group.bundles["prefill-0"].was_removed


def test_a_service_that_stops_frees_the_room_of_its_workers(group, killed):
    group.close()

    assert group.bundles["prefill-0"].was_removed


def test_the_room_of_a_worker_that_cannot_load_is_freed(no_ray):
    cluster = FakeCluster(ModelError("no such model"))
    cluster.bundles["prefill-0"] = FakeBundles()

    with pytest.raises(ModelError):
        cluster.start()

    assert cluster.bundles["prefill-0"].was_removed


@pytest.mark.parametrize(
    "refusal", [OccupiedError("works for another"), VersionError("version 2")]
)
def test_a_worker_that_refuses_this_service_keeps_its_room(
    refusal, killed, monkeypatch, key_values
):
    """It serves another one: without its placement group its ranks would end."""
    running_actors(monkeypatch, "prefill-0")
    cluster = FakeCluster(refusal, config=load_config(None, ON_A_CLUSTER))
    cluster.bundles["prefill-0"] = FakeBundles()

    with pytest.raises(type(refusal)):
        cluster.start()
    cluster.close()

    assert not cluster.bundles["prefill-0"].was_removed
    assert cluster.handles["prefill-0"] not in killed


def test_a_worker_that_another_service_took_over_keeps_its_room(group, killed, caplog):
    """This service was frozen until the next one came."""
    group.handles["prefill-0"].watch.value = False
    group.kill("prefill-0")

    news = group.step()
    group.close()

    assert news == ["-prefill-0"]
    assert not group.bundles["prefill-0"].was_removed
    assert group.handles["prefill-0"] not in killed
    assert caplog.messages[0].endswith("works for another service now")


def test_a_worker_that_leaves_while_it_waits_for_room_gets_none(group, killed):
    group.outcomes.append(LOADING)
    group.bundles["prefill-1.1"] = FakeBundles("2 ranks on one host")
    group.scale(2, None)
    for _ in range(2):
        group.step()
    assert group.lacks_room

    group.scale(1, None)
    group.step()

    assert killed == [group.handles["prefill-1.1"]]
    assert group.bundles["prefill-1.1"].was_removed
    assert group.handles["prefill-1.1"].stop.arguments is None


def test_a_worker_that_leaves_is_not_tried_again_for_lack_of_room(
    group, killed, caplog
):
    group.outcomes.append(LOADING)
    group.bundles["prefill-1.1"] = FakeBundles(CapacityError("no room: 2 ranks"))
    group.scale(2, None)
    group._adjust()
    group.scale(1, None)

    group._adjust()
    group.step()

    assert not [x for x in caplog.messages if "no room" in x]
    assert killed


def test_groups_that_an_earlier_service_left_are_removed_without_ranks(
    monkeypatch, key_values
):
    """The next service may have workers of one rank."""
    removed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(ray_cluster, "remove_abandoned", lambda *x: removed.append(x))
    running_actors(monkeypatch, "decode-0")

    FakeCluster(config=load_config(None, ON_A_CLUSTER)).start()

    assert removed == [("mine", ["decode-0"])]
