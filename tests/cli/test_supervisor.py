"""Processes of a service that are replaced, ended and told of new settings. None is real here."""

import queue
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from disagg.cli import children, supervisor
from disagg.cli.children import Pipe, Settings, send_beats
from disagg.cli.supervisor import ChildProcess, Slot, Supervisor, longer
from disagg.config import Config, load_config
from disagg.errors import ConfigError, ModelError, PeerLostError
from disagg.server.service import bind_many
from tests.processes import wait_for

END = object()


class FakePipe:
    """What a child says, and what it is told."""

    def __init__(self) -> None:
        self.said: queue.Queue[Any] = queue.Queue()
        self.told: list[str] = []

    def events(self) -> Iterator[Mapping[str, Any]]:
        while (event := self.said.get()) is not END:
            yield event

    def send(self, event: str) -> None:
        self.told.append(event)

    def limit_silence(self, limit_s: float) -> None:
        pass


class FakeChild:
    """A process that ends when a test or its slot says so."""

    def __init__(self, pid: int):
        self.pid = pid
        self.pipe = FakePipe()
        self.stopped = False

    def say(self, event: str, **fields: Any) -> None:
        self.pipe.said.put({"event": event, **fields})

    def die(self) -> None:
        self.pipe.said.put(END)

    def wait(self) -> int:
        return 0

    def stop(self, limit_s: float) -> None:
        self.stopped = True
        self.die()


class Nursery:
    """Starts children, and keeps them all."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.events: list[str] = []
        self.slot = Slot("door 0", self._spawn, self._note)

    def _spawn(self) -> FakeChild:
        self.children.append(FakeChild(len(self.children)))
        return self.children[-1]

    def _note(self, event: Mapping[str, Any]) -> None:
        self.events.append(event["event"])

    def wait_for_children(self, number: int) -> None:
        wait_for(lambda: len(self.children) == number)


@pytest.fixture
def nursery(monkeypatch) -> Iterator[Nursery]:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    nursery = Nursery()
    nursery.slot.start()
    nursery.wait_for_children(1)
    yield nursery
    nursery.slot.stop(1.0)


def test_a_process_that_ends_is_replaced(nursery):
    nursery.children[0].say("serving")
    nursery.children[0].die()

    nursery.wait_for_children(2)


def test_a_process_that_leaves_is_replaced_while_it_lives(nursery):
    nursery.children[0].say("leaving")

    nursery.wait_for_children(2)

    assert not nursery.children[0].stopped


def test_a_process_that_leaves_drains_once_another_one_serves(nursery):
    nursery.children[0].say("leaving")
    nursery.wait_for_children(2)
    assert nursery.children[0].pipe.told == []

    nursery.children[1].say("serving")

    wait_for(lambda: nursery.children[0].pipe.told == ["drain"])


def test_a_slot_ends_its_process_and_those_that_leave(nursery):
    nursery.children[0].say("leaving")
    nursery.wait_for_children(2)

    nursery.slot.stop(1.0)

    assert all(child.stopped for child in nursery.children)
    assert len(nursery.children) == 2


def test_a_slot_is_up_with_the_first_process_that_serves(nursery):
    nursery.children[0].say("serving", links=["a", "b"])

    assert nursery.slot.up.result(10)["links"] == ["a", "b"]


def test_the_error_of_a_start_keeps_its_name(nursery):
    nursery.children[0].say("failed", reason="model", message="no weights")

    with pytest.raises(ModelError, match="no weights"):
        nursery.slot.up.result(10)


def test_a_process_that_ends_before_it_serves_is_an_error(nursery):
    nursery.children[0].die()

    with pytest.raises(PeerLostError, match="door 0 ended with status 0 at its start"):
        nursery.slot.up.result(10)


def test_a_slot_that_refuses_requests_replaces_no_process(nursery):
    nursery.slot.refuse()
    nursery.children[0].die()

    nursery.slot.stop(1.0)

    assert nursery.children[0].pipe.told == ["refuse"]
    assert len(nursery.children) == 1


def test_a_slot_is_idle_when_all_its_processes_are(nursery):
    nursery.children[0].say("leaving")
    nursery.wait_for_children(2)
    nursery.children[1].say("idle")
    wait_for(lambda: "idle" in nursery.events)
    assert not nursery.slot.is_idle

    nursery.children[0].say("idle")

    wait_for(lambda: nursery.slot.is_idle)


def test_words_of_a_process_that_leaves_still_count(nursery):
    nursery.children[0].say("leaving")
    nursery.wait_for_children(2)
    nursery.children[0].say("stop")

    wait_for(lambda: "stop" in nursery.events)


def test_all_living_processes_are_told(nursery):
    nursery.children[0].say("leaving")
    nursery.wait_for_children(2)

    nursery.slot.send("reload")

    assert [child.pipe.told for child in nursery.children] == [["reload"]] * 2


def test_pauses_grow_up_to_a_limit():
    pauses = [0.0]
    for _ in range(10):
        pauses.append(longer(pauses[-1]))

    assert pauses[1:4] == [0.5, 1.0, 2.0]
    assert pauses[-1] == supervisor.MAX_PAUSE_S


def test_doors_and_ports_of_workers_exclude_each_other():
    config = load_config(None, {"server.doors": 2, "server.pd_ports": 0})

    with pytest.raises(ConfigError, match="doors is 2 with --pd-ports"):
        Supervisor(config)


def test_a_supervisor_checks_keys_before_it_starts_anything():
    config = load_config(None, {"server.doors": 2, "server.api_key": ""})

    with pytest.raises(ConfigError, match="api_key is empty"):
        Supervisor(config)


def test_an_address_of_another_service_is_not_shared():
    with ExitStack() as stack:
        sockets = bind_many("127.0.0.1", 0, 2)
        for each in sockets:
            stack.enter_context(each)
        port = sockets[0].getsockname()[1]

        with pytest.raises(ConfigError, match="cannot listen"):
            bind_many("127.0.0.1", port, 2)


def test_the_sockets_of_all_doors_have_one_address():
    sockets = bind_many("127.0.0.1", 0, 3)

    addresses = {each.getsockname() for each in sockets}
    for each in sockets:
        each.close()

    assert len(addresses) == 1


def test_settings_survive_their_file(tmp_path):
    flags = {"codec": "raw", "server.api_key": "sk", "cluster.ports": [7000, 7010]}
    settings = Settings(load_config(None, flags), "secret", tmp_path)

    settings.write()

    assert Settings.read(tmp_path) == settings


def test_the_file_of_settings_is_for_its_owner_alone(tmp_path):
    settings = Settings(Config(), "secret", tmp_path)

    settings.write()
    settings.write()

    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_a_side_that_is_silent_for_too_long_counts_as_gone():
    ours, theirs = socket.socketpair()
    parent, child = Pipe(ours), Pipe(theirs)
    child.send("serving")

    parent.limit_silence(0.05)

    assert [event["event"] for event in parent.events()] == ["serving"]
    child.close()


def test_beats_go_through_the_event_loop_until_it_ends(monkeypatch):
    monkeypatch.setattr(children, "BEAT_S", 0.01)
    ours, theirs = socket.socketpair()
    parent, child = Pipe(ours), Pipe(theirs)
    calls = []

    def call_soon(call) -> None:
        if len(calls) == 3:
            child.close()
            raise RuntimeError("the loop has ended")
        calls.append(call)
        call()

    send_beats(child, call_soon)

    assert [event["event"] for event in parent.events()] == ["beat"] * 3


def test_a_process_without_a_word_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "LINGER_S", 0.1)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(supervisor, "command", lambda *arguments: sleeper)
    child = ChildProcess("door", tmp_path, 0)

    assert child.wait() == -signal.SIGKILL


def test_a_pipe_carries_events_until_the_other_side_is_gone():
    ours, theirs = socket.socketpair()
    parent, child = Pipe(ours), Pipe(theirs)

    child.send("stage", text="loading")
    child.send("serving")
    child.close()

    assert list(parent.events()) == [
        {"event": "stage", "text": "loading"},
        {"event": "serving"},
    ]
    parent.send("stop")  # nobody is there; no error
