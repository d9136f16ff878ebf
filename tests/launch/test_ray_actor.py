"""What a worker's process does with the calls of its service."""

import os
import threading
from unittest.mock import Mock

import pytest

from disagg.config import Config, load_config
from disagg.errors import ModelError, OccupiedError, VersionError
from disagg.launch import rank_actor, rank_bundles, ray_actor
from disagg.launch.rank_actor import RankActor
from disagg.launch.ray_actor import WorkerActor
from disagg.launch.start_protocol import info_of, settings_message
from disagg.transfer.messages import Role, WorkerInfo

INFO = WorkerInfo("decode-0", Role.DECODE, "127.0.0.1:1", epoch=1)


class ServingActor(WorkerActor):
    """An actor whose worker serves at once. error: what its load raises instead."""

    def __init__(self, config: Config, error: Exception | None = None):
        super().__init__(settings_message(config), "decode", "decode-0", None)
        self.error = error
        self.num_loads = 0

    def _await_call(self) -> None:
        pass  # it would end the process of the tests

    def _load(self, address: str) -> None:
        self.num_loads += 1
        if self.error:
            raise self.error
        self._worker = Mock(info=INFO)

    def _end_with_worker(self) -> None:
        pass


@pytest.fixture(autouse=True)
def timer(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """In place of the timer that ends the process."""
    timer = Mock()
    monkeypatch.setattr(threading, "Timer", timer)
    return timer


def test_a_second_start_finds_the_worker_loaded():
    actor = ServingActor(Config())
    settings = settings_message(Config())

    replies = [actor.start("127.0.0.1", settings) for _ in range(2)]

    assert [info_of(reply) for reply in replies] == [INFO, INFO]
    assert actor.num_loads == 1


def test_a_setting_of_the_front_end_does_not_matter_to_a_worker():
    actor = ServingActor(Config())
    flags = {"router.max_queue": 7, "server.api_key": "x", "cluster.decode": 2}
    other = settings_message(load_config(None, flags))

    assert info_of(actor.start("127.0.0.1", other)) == INFO


def test_other_settings_of_a_worker_are_named():
    actor = ServingActor(Config())
    actor.start("127.0.0.1", settings_message(Config()))
    other = settings_message(load_config(None, {"engine.max_sequences": 7}))

    with pytest.raises(
        OccupiedError, match=r"other settings \(engine.max_sequences\), until 60 s"
    ):
        info_of(actor.start("127.0.0.1", other))


def test_a_worker_of_another_service_is_refused():
    actor = ServingActor(Config())
    settings = settings_message(Config())
    actor.start("127.0.0.1", settings)
    actor._worker.wait_alone.return_value = False

    with pytest.raises(OccupiedError, match="works for another service"):
        info_of(actor.start("127.0.0.1", settings))


def test_a_worker_that_cannot_load_ends_its_process(timer):
    actor = ServingActor(Config(), ModelError("no such model"))

    with pytest.raises(ModelError, match="no such model"):
        info_of(actor.start("127.0.0.1", settings_message(Config())))

    timer.assert_called_once()


def test_a_worker_that_breaks_ends_its_process(timer):
    actor = ServingActor(Config(), MemoryError())

    with pytest.raises(MemoryError):
        actor.start("127.0.0.1", settings_message(Config()))

    timer.assert_called_once()


def test_a_new_worker_of_another_version_ends_its_process(timer):
    actor = ServingActor(Config())

    with pytest.raises(VersionError):
        info_of(actor.start("127.0.0.1", {"version": 0}))

    timer.assert_called_once()


def test_a_worker_that_is_stopped_while_it_loads_ends_at_once(monkeypatch):
    actor = ServingActor(Config())
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))

    with pytest.raises(SystemExit):
        actor.stop()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the end of a process does: "room" is freed, and its "exit"."""
    steps: list[str] = []
    monkeypatch.setattr(rank_bundles, "leave", lambda: steps.append("room"))

    def leave_process(code: int) -> None:
        steps.append("exit")
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave_process)
    return steps


@pytest.mark.parametrize(("ranks", "steps"), [(1, ["exit"]), (2, ["room", "exit"])])
def test_a_worker_that_ends_frees_the_room_of_its_ranks(ended, ranks, steps):
    actor = ServingActor(load_config(None, {"cluster.decode_ranks": ranks}))
    actor._worker = Mock()

    with pytest.raises(SystemExit):
        WorkerActor._end_with_worker(actor)

    assert ended == steps


def test_a_worker_that_no_front_end_calls_ends(ended, monkeypatch):
    actor = ServingActor(Config())
    monkeypatch.setattr(ray_actor, "FORGOTTEN_S", 0.0)

    with pytest.raises(SystemExit):
        actor._end_if_forgotten()


def test_a_worker_that_was_called_does_not_end(ended):
    actor = ServingActor(Config())
    actor.start("127.0.0.1", settings_message(Config()))

    actor._end_if_forgotten()

    assert not ended


@pytest.mark.parametrize(
    ("was_ended", "steps"), [(True, ["exit"]), (False, ["room", "exit"])]
)
def test_a_follower_frees_the_room_of_a_rank_0_that_broke(
    ended, monkeypatch, was_ended, steps
):
    monkeypatch.setattr(rank_actor, "_reach", lambda *_: (Mock(), Mock()))
    monkeypatch.setattr(rank_actor, "follow", lambda *_: was_ended)

    with pytest.raises(SystemExit):
        RankActor().follow(Mock(), settings_message(Config()), None)

    assert ended == steps


def test_a_follower_that_cannot_reach_rank_0_says_why(ended):
    """Ray tells rank 0 what is raised, and rank 0 its service."""
    settings = settings_message(Config()) | {"version": 99}

    with pytest.raises(VersionError, match="version 99 of the start messages"):
        RankActor().follow(Mock(), settings, None)

    assert not ended


def test_a_watch_says_whether_its_worker_has_ended():
    actor = ServingActor(Config())
    actor._worker = Mock(wait=Mock(side_effect=[False, True]))

    assert actor.watch() is True


def test_the_watch_of_a_front_end_ends_when_the_next_one_watches():
    actor = ServingActor(Config())

    def next_front_end(timeout_s: float) -> bool:
        actor._num_watches += 1
        return False

    actor._worker = Mock(wait=next_front_end)

    assert actor.watch() is False
