"""`serve`, `status`, `stop` and the file by which they find each other."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from disagg.cli.app import run
from disagg.cli.state import State, announced, read_state, write_state
from disagg.config import load_config
from disagg.errors import ConfigError
from tests.cli.conftest import Running


def test_the_state_file_is_for_its_owner_alone(state_file: Path) -> None:
    state = State("http://127.0.0.1:1", os.getpid(), "secret")
    write_state(state_file, state)
    write_state(state_file, state)
    assert stat.S_IMODE(state_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(state_file.parent.stat().st_mode) == 0o700
    assert read_state(state_file) == state


def test_a_state_file_that_others_may_write_is_not_believed(state_file: Path) -> None:
    write_state(state_file, State("http://127.0.0.1:1", os.getpid(), "secret"))
    state_file.chmod(0o666)
    with pytest.raises(ConfigError, match="open to others"):
        read_state(state_file)


def test_a_state_file_of_a_dead_process_tells_of_no_service(state_file: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    write_state(state_file, State("http://127.0.0.1:1", pid, "secret"))
    assert read_state(state_file) is None


def test_a_service_removes_its_own_state_file_and_no_other(state_file: Path) -> None:
    ours = State("http://127.0.0.1:1", os.getpid(), "ours")
    other = State("http://127.0.0.1:2", os.getpid(), "other")
    with announced(state_file, ours):
        assert read_state(state_file) == ours
    assert not state_file.exists()
    with announced(state_file, ours):
        write_state(state_file, other)
    assert read_state(state_file) == other


def test_a_broken_state_file_is_named(state_file: Path) -> None:
    write_state(state_file, State("http://127.0.0.1:1", os.getpid(), "secret"))
    state_file.write_text("{")
    with pytest.raises(ConfigError, match=str(state_file)):
        read_state(state_file)


def test_status_shows_every_worker(
    known: Running, state_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--state-file", str(state_file)]
    assert run(["status", *where]) == 0
    assert "prefill" in capsys.readouterr().out
    assert run(["status", *where, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["workers"]) == 2


def test_stop_asks_the_service_and_waits_for_its_end(
    known: Running, state_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "alive", property(lambda self: not known.stopped.is_set()))
    assert run(["stop", "--state-file", str(state_file)]) == 0
    assert known.stopped.is_set()


def test_stop_with_a_wrong_secret_stops_nothing(
    known: Running, state_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(state_file, State(known.url, os.getpid(), "wrong"))
    assert run(["stop", "--state-file", str(state_file)]) == 1
    assert "token" in capsys.readouterr().err
    assert not known.stopped.is_set()


@pytest.mark.parametrize("command", ["status", "stop"])
def test_without_a_service_there_is_nothing_to_ask(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--state-file", str(tmp_path / "none.json")]) == 8
    assert "disagg serve" in capsys.readouterr().err


def test_show_config_prints_what_config_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--codec", "raw", "--port", "0", "--set", "router.deadline_s=9"]
    assert run(["serve", "--show-config", *flags]) == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    wanted = {"codec": "raw", "server.port": 0, "router.deadline_s": 9.0}
    assert load_config(path) == load_config(None, wanted)


def test_a_port_that_is_taken_is_a_config_error(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    port = running.url.rpartition(":")[2]
    assert run(["serve", "--port", port]) == 2
    assert "cannot listen" in capsys.readouterr().err
    assert threading.active_count() < 10
