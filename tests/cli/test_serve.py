"""`serve`, `status`, `stop`, and the state file that leads to a running service."""

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
from unittest.mock import Mock

import pytest
import torch

from disagg.cli.output import stages
from disagg.cli.serve import reload_settings
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


def test_a_signal_ends_a_start_that_hangs_in_c():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STUCK], **pipes) as process:
        assert process.stdout.readline() == "stuck\n"
        process.terminate()
        assert process.communicate(timeout=60)[1] == "stopped while Ray started\n"

    assert process.returncode == 128 + signal.SIGTERM


def test_an_end_that_hangs_is_cut_off():
    command = [sys.executable, "-c", STUCK, "ends"]

    process = subprocess.run(command, capture_output=True, timeout=60)

    assert process.stderr == b"stopped; Ray did not answer\n"
    assert process.returncode == 1


@pytest.mark.skipif(
    birth(os.getpid()) is None, reason="the system does not say when a process started"
)
def test_a_reused_process_id_is_no_running_service(state_file):
    """The first process of a container is number 1 at every start of the container."""
    ours = replace(service(), born=birth(os.getpid()))
    write_state(state_file, replace(ours, born=f"1{ours.born}"))

    assert read_state(state_file) is None

    with announced(state_file, ours):
        assert read_state(state_file) == ours


def test_a_state_file_is_written_whole_or_not_at_all(state_file, monkeypatch):
    states = []  # that were read while a file was written
    dump = json.dump

    def read_and_dump(*arguments):
        states.append(read_state(state_file))
        dump(*arguments)

    monkeypatch.setattr(json, "dump", read_and_dump)

    for port in (1, 2):
        write_state(state_file, service(port))

    assert states == [None, service(1)]
    assert [file.name for file in state_file.parent.iterdir()] == [state_file.name]


def test_a_state_file_that_cannot_be_written_is_an_error(state_file, monkeypatch):
    """And nothing of it stays."""
    monkeypatch.setattr(json, "dump", lambda *_: os.close(-1))

    with pytest.raises(ConfigError, match=f"{state_file} cannot be written: Bad file"):
        write_state(state_file, service())
    assert not [*state_file.parent.iterdir()]


def test_a_state_file_that_others_may_write_is_refused(state_file):
    write_state(state_file, service())
    state_file.chmod(0o666)

    with pytest.raises(ConfigError, match="open to others"):
        read_state(state_file)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused(mode, state_file):
    """Another user could put a file of his own in place of ours."""
    write_state(state_file, service())
    state_file.parent.chmod(mode)

    for use in (read_state, lambda path: write_state(path, service())):
        with pytest.raises(ConfigError, match="may be written by others"):
            use(state_file)


def test_a_folder_whose_files_others_cannot_rename_is_fine(state_file):
    """Such as /tmp."""
    state_file.parent.mkdir()
    state_file.parent.chmod(0o1777)

    write_state(state_file, service())

    assert read_state(state_file) == service()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("which", ["file", "folder", "link to the folder"])
def test_nothing_of_another_user_is_taken_for_ours(which, state_file, tmp_path):
    write_state(state_file, service())
    link = tmp_path / "link"
    link.symlink_to(state_file.parent)
    foreign = {"file": state_file, "folder": state_file.parent}.get(which, link)
    os.chown(foreign, 65534, 65534, follow_symlinks=False)

    with pytest.raises(ConfigError, match="belongs to another user"):
        read_state(link / state_file.name)


def test_a_link_in_place_of_a_state_file_is_not_followed(state_file, tmp_path):
    other = tmp_path / "other" / "disagg.json"
    write_state(other, service())
    state_file.parent.mkdir(mode=0o700)
    state_file.symlink_to(other)

    with pytest.raises(ConfigError, match="cannot be read"):
        read_state(state_file)


def test_a_file_is_checked_by_the_descriptor_that_is_read(state_file, monkeypatch):
    """A name that points to another file after the check gives that file to nobody."""
    write_state(state_file, service(1))
    fstat = os.fstat

    def swap_and_stat(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            state_file.unlink()
            state_file.write_text("{}")
        return status

    monkeypatch.setattr(os, "fstat", swap_and_stat)

    state = read_state(state_file)

    assert state == service(1)


def test_a_broken_state_file_is_refused(state_file):
    write_state(state_file, service())
    state_file.write_text("{")

    with pytest.raises(ConfigError, match=str(state_file)):
        read_state(state_file)


@pytest.mark.parametrize(
    "wrong", [{"pid": -1}, {"pid": 0}, {"pid": "1"}, {"pid": 1 << 64}, {"url": 5}]
)
def test_stop_signals_nothing_by_a_wrong_state_file(
    wrong, state_file, monkeypatch, disagg
):
    write_state(state_file, replace(service(), **wrong))
    monkeypatch.setattr(os, "kill", lambda *signal: pytest.fail(f"kill{signal}"))

    error = disagg("stop --state-file", state_file, code=2).err

    assert "cannot be read: process" in error


def test_a_state_file_of_a_dead_process_is_no_service(state_file):
    """Its token stays, for clients that resume at the next service."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

    write_state(state_file, service(pid=pid))

    assert read_state(state_file) is None
    assert previous_token(state_file) == "secret"


def test_a_service_removes_its_own_state_file_and_no_other(state_file):
    ours = service(1)
    other = service(2)

    with announced(state_file, ours):
        assert read_state(state_file) == ours
    assert not state_file.exists()

    with announced(state_file, ours):
        write_state(state_file, other)
    assert read_state(state_file) == other


def test_serve_refuses_the_state_file_of_another_service(
    state_file, disagg, monkeypatch
):
    """And it starts nothing: the module that would is not even imported."""
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)
    first = service()
    write_state(state_file, first)

    error = disagg("serve --state-file", state_file, code=2).err

    for word in (first.url, str(first.pid), "--state-file", "disagg stop"):
        assert word in error
    assert read_state(state_file) == first


def test_a_service_is_not_announced_over_another_one(state_file):
    first = service()
    write_state(state_file, first)

    with (
        pytest.raises(ConfigError, match="a service is already running"),
        announced(state_file, first),
    ):
        pass

    assert read_state(state_file) == first


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["serve", "submit hi"])
def test_a_missing_gpu_is_an_error_before_anything_starts(
    command, state_file, disagg, monkeypatch
):
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)
    options = f"--state-file {state_file} --set model.device=cuda"

    error = disagg(f"{command} {options}", code=2).err

    assert "torch finds no GPU here; 'auto' takes a CPU" in error


class StoppedService:
    """A service that stops as soon as it waits; its links say when it was ready."""

    url = "http://127.0.0.1:7"
    name = "tiny"
    secret = "secret"
    pd_addresses = ("a port",)

    def __init__(
        self, config: Config, say: Callable[[str], None], secret: str | None = None
    ):
        self.stopped = threading.Event()
        self.stopped.set()
        self._say = say
        self._state_file = config.server.state_file

    def __enter__(self) -> "StoppedService":
        self._say("starting a private Ray")
        self._say("loading tiny")
        self.while_loading = self._is_ready()
        return self

    @property
    def links(self) -> tuple[str, ...]:
        return (f"ready: {self.while_loading}, then {self._is_ready()}",)

    def _is_ready(self) -> bool | None:
        if not self._state_file:
            return None
        state = read_state(Path(self._state_file))
        return state.ready if state else None

    def __exit__(self, *error: object) -> None:
        pass

    def end_now(self) -> None:
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
def test_serve_prints_its_progress_its_addresses_and_warnings(
    host, warned, state_file, disagg, monkeypatch
):
    monkeypatch.setattr("disagg.server.service.Service", StoppedService)

    output = disagg(f"serve --host {host} --state-file", state_file).err

    first, second, link, address, *warnings, last = output.splitlines()
    assert re.fullmatch(r" +\d+\.\d s  starting a private Ray \.\.\.", first)
    assert re.fullmatch(r" +\d+\.\d s  loading tiny \.\.\.", second)
    assert link == "ready: False, then True"
    assert address == "a port"
    assert last == "serving tiny at http://127.0.0.1:7"
    assert read_state(state_file) is None
    assert len(warnings) == warned
    assert all(host in line and "without a key" in line for line in warnings)


def test_the_beginning_and_the_end_of_a_stop_are_printed(
    state_file, disagg, monkeypatch
):
    class Interrupted(StoppedService):
        def __exit__(self, *error: object) -> None:
            signal.raise_signal(signal.SIGINT)  # once more, as `timeout` does
            print("workers end", file=sys.stderr)

        @property
        def links(self) -> tuple[str, ...]:
            signal.raise_signal(signal.SIGINT)
            return ()

    monkeypatch.setattr("disagg.server.service.Service", Interrupted)

    lines = disagg("serve --state-file", state_file).err.splitlines()

    assert lines[-3:] == ["stopping ...", "workers end", "stopped"]


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
    """Though Ray replaces the handler when it starts."""
    taken_by_ray = []

    class Loading(StoppedService):
        def __enter__(self) -> "Loading":
            signal.signal(number, lambda *_: taken_by_ray.append(number))
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
    assert not taken_by_ray
    assert not state_file.exists()


def test_settings_that_cannot_be_read_again_change_nothing(capsys):
    service = Mock()

    def read_settings() -> Config:
        raise ConfigError("config file service.yaml is not YAML")

    reload_settings(service, read_settings)

    service.reload.assert_not_called()
    error = capsys.readouterr().err
    assert error == "settings not read again: config file service.yaml is not YAML\n"


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


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "default"),
        ({"model.name": "{folder}/llama"}, "llama"),
        ({"model.name": "{folder}/llama/"}, "llama"),
        ({"model.name": "meta/llama"}, "meta/llama"),
        ({"model.name": "{folder}/llama", "server.served_model_name": "mine"}, "mine"),
        ({"server.served_model_name": "{folder}"}, "{folder}"),
    ],
)
def test_a_model_is_served_under_its_chosen_name_or_its_folder(
    settings, name, tmp_path
):
    (tmp_path / "llama").mkdir()
    settings = {key: x.format(folder=tmp_path) for key, x in settings.items()}

    config = load_config(None, settings)

    assert served_name(config) == name.format(folder=tmp_path)


def lose_weights(model: Path) -> None:
    (model / SINGLE).unlink()


def lose_a_part(model: Path) -> None:
    """One of the two files of weights that the index lists."""
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": dict(zip("ab", parts, strict=True))}
    (model / SINGLE).rename(model / parts[0])
    (model / INDEX).write_text(json.dumps(index))


def lose_the_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def spoil_the_template(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"\xff")


def spoil_the_template_in_the_config(model: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"chat_template": 5}')


def break_the_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% if %}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_weights, "there is no model.safetensors"),
        (lose_a_part, "no model-00002-of-00002.safetensors"),
        (lose_the_tokenizer, "no tokenizer that can be read"),
        (spoil_the_template, "jinja is not text"),
        (break_the_template, "is not Jinja, line 1"),
        (spoil_the_template_in_the_config, "tokenizer_config.json is not text"),
    ],
)
def test_a_model_with_a_bad_file_is_refused_before_a_start(
    spoil, message, state_file, disagg, monkeypatch, tmp_path
):
    model = save_tiny("llama", tmp_path / "model")
    spoil(model)
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)

    error = disagg("serve --state-file", state_file, "--model", model, code=3).err

    assert message in error


def test_serve_tells_the_sampling_of_the_models_authors(
    state_file, disagg, monkeypatch, tmp_path
):
    monkeypatch.setattr("disagg.server.service.Service", StoppedService)
    model = save_tiny("llama", tmp_path / "model")
    file = model / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20}')
    command = ("serve --state-file", state_file, "--model", model)
    none = ("--set", "model.generation_config=none")

    by_default = disagg(*command).err
    turned_off = disagg(*command, *none).err
    file.write_text('{"temperature": "hot"}')
    refusal = disagg(*command, code=3).err

    words = "sampling defaults of the model: temperature 0.6, top_k 20"
    assert words in by_default
    assert "unless a request" not in turned_off
    assert "temperature is 'hot'" in refusal


def test_serve_tells_how_it_reads_calls_and_thoughts(
    state_file, disagg, monkeypatch, tmp_path
):
    monkeypatch.setattr("disagg.server.service.Service", StoppedService)
    template = tmp_path / "template.jinja"
    template.write_text("<tool_call>{{ messages[0].content }}")
    command = ("serve --state-file", state_file, "--chat-template", template)

    printed = disagg(*command, "--reasoning-parser", "think").err

    assert "parser of tool calls: hermes (auto)\n" in printed
    assert "parser of thoughts: think (think)\n" in printed


@pytest.mark.parametrize("option", ["--tool-parser", "--reasoning-parser"])
def test_a_parser_that_does_not_exist_is_refused_at_once(option, state_file, disagg):
    error = disagg("serve --state-file", state_file, option, "qwen", code=2).err

    assert "'qwen'" in error
    assert "none" in error


def test_a_context_beyond_the_models_reach_is_refused_at_once(state_file, disagg):
    error = disagg(
        "serve --set model.context=4096 --state-file", state_file, code=2
    ).err

    assert "model.context is 4096" in error
    assert "at most 2048 tokens" in error


@pytest.mark.parametrize("name", ["a\udcff", "a\nb", "x" * 2000])
def test_a_name_that_no_answer_can_carry_is_refused(name):
    config = load_config(None, {"server.served_model_name": name})

    with pytest.raises(ConfigError, match="model name"):
        served_name(config)


def test_status_shows_every_worker(announced_service, state_file, disagg):
    printed = disagg("status --state-file", state_file).out
    as_json = disagg("status --json --state-file", state_file).out

    assert "prefill" in printed
    assert printed.endswith("decode: 1 of 2; more are loading or wait for resources\n")
    assert "prefill:" not in printed
    assert len(json.loads(as_json)["workers"]) == 2


def test_stop_waits_for_the_end_of_the_service_and_says_so(
    announced_service, state_file, disagg, monkeypatch
):
    stopped = announced_service.stopped
    alive = property(lambda self: not stopped.is_set())
    monkeypatch.setattr(RunningService, "alive", alive)

    error = disagg("stop --state-file", state_file).err

    assert stopped.is_set()
    assert f"stopping the service at {announced_service.url}" in error


def test_stop_waits_for_a_service_that_ends_already(
    announced_service, state_file, disagg, monkeypatch
):
    """Its HTTP server ends before its process."""
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

    error = disagg("submit Once --state-file", state_file).err

    assert f"waiting for the service at {running.url}" in error


def test_submit_says_when_the_service_that_it_waits_for_ends(
    state_file, disagg, monkeypatch
):
    write_state(state_file, service())
    monkeypatch.setattr(
        "disagg.cli.serve.time.sleep", lambda seconds: state_file.unlink()
    )

    error = disagg("submit Once --state-file", state_file, code=8).err

    assert "no service is running" in error


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


def test_a_service_of_another_name_has_its_own_state_file(
    disagg, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("disagg.server.service.Service", StoppedService)
    write_state(tmp_path / "disagg.json", service())

    disagg("serve", code=2)
    disagg("serve --name other")
    disagg("serve --name ../other", code=2)


@pytest.mark.parametrize("command", ["status", "stop"])
def test_without_a_service_the_error_says_how_to_start_one(command, tmp_path, disagg):
    error = disagg(command, "--state-file", tmp_path / "none.json", code=8).err

    assert "disagg serve" in error


def test_show_config_prints_what_config_reads(tmp_path, disagg):
    flags = "--codec raw --port 0 --set router.deadline_s=9 --served-model-name mine"
    flags += " --chat-template own.jinja"
    settings = {
        "codec": "raw",
        "server.port": 0,
        "router.deadline_s": 9.0,
        "server.served_model_name": "mine",
        "server.chat_template": "own.jinja",
    }
    path = tmp_path / "config.yaml"

    path.write_text(disagg(f"serve --show-config {flags}").out)

    assert load_config(path) == load_config(None, settings)


@pytest.mark.parametrize("form", ["", "--json"])
def test_show_config_prints_no_secret(form, disagg):
    flags = f"--api-key hidden1 --set server.metrics_key=hidden2 {form}"

    out = disagg(f"serve --show-config {flags}").out

    assert "hidden" not in out
    assert out.count("***") == 2


def test_an_empty_key_in_the_environment_is_a_key(disagg, monkeypatch):
    monkeypatch.setenv("DISAGG_API_KEY", "")

    config = json.loads(disagg("serve --show-config --json").out)

    assert config["server"]["api_key"] == ""


def test_auto_chooses_among_the_listed_codecs(disagg):
    codecs = ["fp8", "kivi:bits=4,residual=64", "0-1:raw;2-:banded:bits=3"]
    flags = f"--codec auto --codecs {','.join(codecs)} --error-budget 0.2 --json"

    config = json.loads(disagg(f"serve --show-config {flags}").out)

    assert config["codecs"] == codecs
    assert config["codec"] == "auto"
    assert config["router"]["error_budget"] == 0.2


def test_auto_without_a_list_of_codecs_is_refused(disagg):
    output = disagg("serve --codec auto", code=2)

    assert "none are listed" in output.err


def test_a_port_that_is_taken_is_a_config_error(running, state_file, disagg):
    port = running.url.rpartition(":")[2]

    error = disagg("serve --port", port, "--state-file", state_file, code=2).err

    assert "cannot listen" in error
    assert threading.active_count() < 10


def test_the_model_may_be_named_without_a_flag(disagg):
    flags = "serve small --dtype bfloat16 --prefill 2 --decode 3 --show-config --json"

    config = json.loads(disagg(flags).out)

    model = config["model"]
    assert (model["name"], model["dtype"]) == ("small", "bfloat16")
    assert config["cluster"]["prefill"] == 2
    assert config["cluster"]["decode"] == 3


def test_a_model_named_with_and_without_a_flag_is_refused(disagg):
    output = disagg("serve small --model large", code=2)

    assert "two models" in output.err
