"""`serve`, `status`, `stop` and the file by which they find each other."""

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from disagg.cli.output import stages
from disagg.cli.state_file import (
    RunningService,
    announced,
    previous_token,
    read_state,
    write_state,
)
from disagg.config import Config, load_config
from disagg.errors import ConfigError
from disagg.launch.reaper import birth
from disagg.model.describe import INDEX, SINGLE
from disagg.server.service import served_name
from tests.cli.conftest import free_port
from tests.model.tiny import save_tiny


def service(port: int = 1, pid: int = 0) -> RunningService:
    """One that runs unless another process is named."""
    return RunningService(f"http://127.0.0.1:{port}", pid or os.getpid(), "secret")


def test_the_state_file_is_for_its_owner_alone(state_file):
    for _ in range(2):
        write_state(state_file, service())
    assert stat.S_IMODE(state_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(state_file.parent.stat().st_mode) == 0o700
    assert read_state(state_file) == service()


STUCK = """
import ctypes, sys, threading
from disagg.cli import shutdown
shutdown.RAY_STOP_S = 0.1
mutex, stuck = ctypes.create_string_buffer(64), threading.Event()
threading.Thread(target=lambda: stuck.wait() and print("stuck", flush=True), daemon=True).start()
with shutdown.ShutdownGuard(0.0) as guard:
    if sys.argv[1:]:
        guard.started()
        guard.begin()
    sys.setswitchinterval(1000)  # the thread runs when C has let the interpreter go
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    stuck.set()
    lock(mutex)
"""


def test_a_start_that_no_handler_can_end_is_over_soon_after_a_signal():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STUCK], **pipes) as process:
        assert process.stdout.readline() == "stuck\n"
        process.terminate()
        assert process.communicate(timeout=60)[1] == "stopped while Ray started\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_an_end_that_hangs_is_over_in_its_time():
    done = subprocess.run(
        [sys.executable, "-c", STUCK, "ends"], capture_output=True, timeout=60
    )
    assert done.stderr == b"stopped, though Ray answers no more\n"
    assert done.returncode == 1


@pytest.mark.skipif(
    birth(os.getpid()) is None, reason="nobody says when a process started"
)
def test_a_process_with_the_number_of_a_service_that_was_killed_is_not_taken_for_it(
    state_file,
):
    """The first process of a container is number 1 at every start of the container."""
    ours = replace(service(), born=birth(os.getpid()))
    write_state(state_file, replace(ours, born=f"1{ours.born}"))
    assert read_state(state_file) is None
    with announced(state_file, ours):
        assert read_state(state_file) == ours


def test_whoever_reads_a_state_file_while_it_is_written_reads_none_or_all(
    state_file, monkeypatch
):
    states, dump = [], json.dump

    def look(*args):
        states.append(read_state(state_file))
        dump(*args)

    monkeypatch.setattr(json, "dump", look)
    for port in (1, 2):
        write_state(state_file, service(port))
    assert states == [None, service(1)]
    assert [file.name for file in state_file.parent.iterdir()] == [state_file.name]


def test_a_state_file_that_has_no_room_is_told_and_leaves_nothing(
    state_file, monkeypatch
):
    monkeypatch.setattr(json, "dump", lambda *_: os.close(-1))
    with pytest.raises(ConfigError, match=f"{state_file} cannot be written: Bad file"):
        write_state(state_file, service())
    assert not [*state_file.parent.iterdir()]


def test_a_state_file_that_is_broken_or_that_others_may_write_is_not_believed(
    state_file,
):
    write_state(state_file, service())
    state_file.chmod(0o666)
    with pytest.raises(ConfigError, match="open to others"):
        read_state(state_file)
    state_file.chmod(0o600)
    state_file.write_text("{")
    with pytest.raises(ConfigError, match=str(state_file)):
        read_state(state_file)


@pytest.mark.parametrize(
    "wrong", [{"pid": -1}, {"pid": 0}, {"pid": "1"}, {"pid": 1 << 64}, {"url": 5}]
)
def test_no_state_file_makes_stop_signal_all_processes(
    wrong, state_file, monkeypatch, disagg
):
    write_state(state_file, replace(service(), **wrong))
    monkeypatch.setattr(os, "kill", lambda *signal: pytest.fail(f"kill{signal}"))
    assert (
        "cannot be read: no process"
        in disagg("stop --state-file", state_file, code=2).err
    )


def test_a_state_file_of_a_dead_process_tells_of_no_service(state_file):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    write_state(state_file, service(pid=pid))
    assert read_state(state_file) is None
    assert (
        previous_token(state_file) == "secret"
    )  # for clients that resume at the next service


def test_a_service_removes_its_own_state_file_and_no_other(state_file):
    ours, other = service(1), service(2)
    with announced(state_file, ours):
        assert read_state(state_file) == ours
    assert not state_file.exists()
    with announced(state_file, ours):
        write_state(state_file, other)
    assert read_state(state_file) == other


def test_a_service_does_not_take_the_state_file_of_another_one(
    state_file, disagg, monkeypatch
):
    """And it starts nothing: what would is not even imported."""
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)
    first = service()
    write_state(state_file, first)
    output = disagg("serve --state-file", state_file, code=2).err
    for word in (first.url, str(first.pid), "--state-file", "disagg stop"):
        assert word in output
    with (
        pytest.raises(ConfigError, match="a service runs"),
        announced(state_file, first),
    ):
        pass
    assert read_state(state_file) == first


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told_of_before_anything_starts(
    state_file, disagg, monkeypatch
):
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)
    for command in ("serve --state-file", "submit hi --state-file"):
        output = disagg(f"{command} {state_file} --set model.device=cuda", code=2).err
        assert "torch finds no GPU here; 'auto' takes a CPU" in output


class Started:
    """A service that stops as soon as it is asked to wait; its links say when it was ready."""

    url, name, secret, pd_addresses = (
        "http://127.0.0.1:7",
        "tiny",
        "secret",
        ("a door",),
    )

    def __init__(
        self, config: Config, say: Callable[[str], None], secret: str | None = None
    ):
        self.stopped = threading.Event()
        self.stopped.set()
        self._say, self._state_file = say, config.server.state_file

    def __enter__(self) -> "Started":
        self._say("starting a private Ray")
        self._say("loading tiny")
        self.while_loading = self._is_ready()
        return self

    @property
    def links(self) -> tuple[str, ...]:
        return (f"ready: {self.while_loading}, then {self._is_ready()}",)

    def _is_ready(self) -> bool | None:
        state = self._state_file and read_state(Path(self._state_file))
        return state and state.ready

    def __exit__(self, *error: object) -> None:
        pass


HOSTS = [
    ("127.0.0.1", 0),
    ("localhost", 0),
    ("0.0.0.0", 1),
    ("10.0.0.7", 1),
    ("host.example", 1),
    ("0.0.0.0 --api-key sk-1", 0),
]


@pytest.mark.parametrize(("host", "warned"), HOSTS)
def test_serve_says_what_it_does_and_who_may_use_it(
    host, warned, state_file, disagg, monkeypatch
):
    monkeypatch.setattr("disagg.server.service.Service", Started)
    output = disagg(f"serve --host {host} --state-file", state_file).err
    first, second, link, door, *warnings, last = output.splitlines()
    assert re.fullmatch(r" +\d+\.\d s  starting a private Ray \.\.\.", first)
    assert re.fullmatch(r" +\d+\.\d s  loading tiny \.\.\.", second)
    assert (link, door) == ("ready: False, then True", "a door")
    assert last == "serving tiny at http://127.0.0.1:7"
    assert read_state(state_file) is None
    assert [host in line and "without a key" in line for line in warnings] == [
        True
    ] * warned


def test_an_end_is_said_when_it_begins_and_when_it_is_there(
    state_file, disagg, monkeypatch
):
    class Interrupted(Started):
        def __exit__(self, *error: object) -> None:
            signal.raise_signal(signal.SIGINT)  # once more, as `timeout` does
            print("workers end", file=sys.stderr)

        @property
        def links(self) -> tuple[str, ...]:
            signal.raise_signal(signal.SIGINT)
            return ()

    monkeypatch.setattr("disagg.server.service.Service", Interrupted)
    output = disagg("serve --state-file", state_file).err.splitlines()
    assert output[-3:] == ["stopping ...", "workers end", "stopped"]


@pytest.mark.parametrize(
    ("command", "number", "status", "last"),
    [
        (["serve"], signal.SIGTERM, 0, "stopped"),
        (["serve"], signal.SIGHUP, 0, "stopped"),
        (["submit", "Once"], signal.SIGTERM, 130, "error: cancelled"),
    ],
)
def test_a_signal_while_workers_load_ends_the_service(
    command, number, status, last, state_file, disagg, monkeypatch
):
    """Though Ray took it when it started."""
    taken = []

    class Loading(Started):
        def __enter__(self) -> "Loading":
            signal.signal(number, lambda *_: taken.append(number))
            self._say("loading tiny")
            signal.raise_signal(number)
            return self

    monkeypatch.setattr("disagg.server.service.Service", Loading)
    before = signal.getsignal(number)
    try:
        output = disagg(*command, "--state-file", state_file, code=status).err
    finally:
        signal.signal(number, before)
    assert output.splitlines()[-2:] == ["stopping ...", last]
    assert not taken
    assert not state_file.exists()


def test_a_terminal_gets_one_line_that_changes(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("disagg.cli.output._owns_terminal", lambda: True)
    with stages() as say:
        say(f"loading [tiny] {'and more ' * 9}")
    before, label, _ = terminal.getvalue().partition("loading [tiny]")
    assert label
    assert "0:00:00" in before


def test_the_model_has_the_name_that_was_chosen_or_that_of_its_folder(tmp_path):
    (tmp_path / "llama").mkdir()
    folder = str(tmp_path / "llama")
    for values, name in (
        ({}, "default"),
        ({"model.name": folder}, "llama"),
        ({"model.name": f"{folder}/"}, "llama"),
        ({"model.name": "meta/llama"}, "meta/llama"),
        ({"model.name": folder, "server.served_model_name": "mine"}, "mine"),
        ({"server.served_model_name": str(tmp_path)}, str(tmp_path)),
    ):
        assert served_name(load_config(None, values)) == name


def lose_a_part(model: Path) -> None:
    """Of the weights, which an index says are two files."""
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (model / SINGLE).rename(model / parts[0])
    (model / INDEX).write_text(
        json.dumps({"weight_map": dict(zip("ab", parts, strict=True))})
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: (model / SINGLE).unlink(), "no *.safetensors, *.bin"),
        (lose_a_part, "no model-00002-of-00002.safetensors"),
        (
            lambda model: (model / "tokenizer.json").unlink(),
            "no tokenizer that can be read",
        ),
        (
            lambda model: (model / "chat_template.jinja").write_bytes(b"\xff"),
            "jinja is no text",
        ),
        (
            lambda model: (model / "tokenizer_config.json").write_text(
                '{"chat_template": 5}'
            ),
            "tokenizer_config.json is no text",
        ),
    ],
    ids=["weights", "a-part", "tokenizer", "template", "template-in-config"],
)
def test_a_model_with_a_bad_file_is_refused_before_anything_starts(
    spoil, message, state_file, disagg, monkeypatch, tmp_path
):
    model = save_tiny("llama", tmp_path / "model")
    spoil(model)
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)
    assert (
        message
        in disagg("serve --state-file", state_file, "--model", model, code=3).err
    )


@pytest.mark.parametrize("name", ["a\udcff", "a\nb", "x" * 2000])
def test_a_name_that_no_answer_can_carry_is_refused(name):
    with pytest.raises(ConfigError, match="no client can call"):
        served_name(load_config(None, {"server.served_model_name": name}))


def test_status_shows_every_worker(announced_service, state_file, disagg):
    where = "--state-file", state_file
    printed = disagg("status", *where).out
    assert "prefill" in printed
    assert printed.endswith("decode: 1 of 2; more load, or wait for a place\n")
    assert "prefill:" not in printed
    assert len(json.loads(disagg("status", *where, "--json").out)["workers"]) == 2


def test_stop_asks_the_service_waits_for_its_end_and_tells(
    announced_service, state_file, disagg, monkeypatch
):
    monkeypatch.setattr(
        RunningService,
        "alive",
        property(lambda self: not announced_service.stopped.is_set()),
    )
    output = disagg("stop --state-file", state_file).err
    assert announced_service.stopped.is_set()
    assert f"stopping the service at {announced_service.url}" in output


def test_stop_waits_for_a_service_that_ends_already(
    announced_service, state_file, disagg, monkeypatch
):
    """Its HTTP goes before the rest of it."""
    write_state(state_file, replace(service(free_port()), ready=True))
    alive = [False, True, True]
    monkeypatch.setattr(RunningService, "alive", property(lambda self: alive.pop()))
    disagg("stop --state-file", state_file)
    assert not alive


def test_submit_waits_for_a_service_that_starts(
    running, state_file, disagg, monkeypatch
):
    starting = RunningService(running.url, os.getpid(), "secret")
    write_state(state_file, starting)
    become_ready = partial(write_state, state_file, replace(starting, ready=True))
    monkeypatch.setattr("disagg.cli.serve.time.sleep", lambda seconds: become_ready())
    output = disagg("submit Once --state-file", state_file).err
    assert f"waiting for the service at {running.url}" in output


def test_submit_says_when_the_service_that_it_waits_for_ends(
    state_file, disagg, monkeypatch
):
    write_state(state_file, service())
    monkeypatch.setattr(
        "disagg.cli.serve.time.sleep", lambda seconds: state_file.unlink()
    )
    assert (
        "no service runs" in disagg("submit Once --state-file", state_file, code=8).err
    )


def test_stop_ends_a_service_that_starts(state_file, disagg):
    code = "import signal; signal.sigwait([signal.SIGTERM])"
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print(flush=True); "
    command = [sys.executable, "-c", code.replace("; ", f"; {block}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        threading.Thread(target=process.wait).start()
        assert process.stdout.readline()
        write_state(state_file, service(pid=process.pid))
        disagg("stop --state-file", state_file)
        assert process.wait() == 0


def test_services_of_other_names_have_state_files_of_their_own(
    disagg, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("disagg.server.service.Service", Started)
    write_state(tmp_path / "disagg.json", service())
    disagg("serve", code=2)
    disagg("serve --name other")
    disagg("serve --name ../other", code=2)


@pytest.mark.parametrize("command", ["status", "stop"])
def test_without_a_service_there_is_nothing_to_ask(command, tmp_path, disagg):
    assert (
        "disagg serve"
        in disagg(command, "--state-file", tmp_path / "none.json", code=8).err
    )


def test_show_config_prints_what_config_reads(tmp_path, disagg):
    flags = "--codec raw --port 0 --set router.deadline_s=9 --served-model-name mine"
    path = tmp_path / "config.yaml"
    path.write_text(disagg(f"serve --show-config {flags}").out)
    settings = {"codec": "raw", "server.port": 0, "router.deadline_s": 9.0}
    settings |= {"server.served_model_name": "mine"}
    assert load_config(path) == load_config(None, settings)


def test_an_empty_key_in_the_environment_is_not_taken_for_none(disagg, monkeypatch):
    monkeypatch.setenv("DISAGG_API_KEY", "")
    assert (
        json.loads(disagg("serve --show-config --json").out)["server"]["api_key"] == ""
    )


def test_auto_chooses_among_codecs_that_are_listed_with_their_options(disagg):
    listed = "fp8,kivi:bits=4,residual=64,0-1:raw;2-:banded:bits=3"
    flags = f"--codec auto --codecs {listed} --error-budget 0.2 --json"
    config = json.loads(disagg(f"serve --show-config {flags}").out)
    assert config["codecs"] == [
        "fp8",
        "kivi:bits=4,residual=64",
        "0-1:raw;2-:banded:bits=3",
    ]
    assert (config["codec"], config["router"]["error_budget"]) == ("auto", 0.2)
    assert "none are listed" in disagg("serve --codec auto", code=2).err


def test_a_port_that_is_taken_is_a_config_error(running, state_file, disagg):
    port = running.url.rpartition(":")[2]
    assert (
        "cannot listen"
        in disagg("serve --port", port, "--state-file", state_file, code=2).err
    )
    assert threading.active_count() < 10


def test_the_model_may_be_named_without_a_flag_but_not_twice(disagg):
    flags = "serve small --dtype bfloat16 --prefill 2 --decode 3 --show-config --json"

    config = json.loads(disagg(flags).out)

    assert config["model"] == {"name": "small", "dtype": "bfloat16", "device": "auto"}
    assert (config["cluster"]["prefill"], config["cluster"]["decode"]) == (2, 3)
    assert "give one of them" in disagg("serve small --model large", code=2).err
