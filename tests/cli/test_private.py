"""Real services: processes, Ray, gRPC, HTTP. Nothing stays behind, however they end."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from disagg.cli.client import complete, get
from disagg.cli.state_file import RunningService, read_state
from tests.cli.conftest import PATIENCE_S, wait_for
from tests.papers import make_papers
from tests.processes import lives

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPT = "It was a dark evening in November, and the old house by the river "
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


@dataclass
class Home:
    """A home folder of its own: processes with it in their environment were started by the test.

    tmp: where sessions make their folders; a short path, which sockets need
    started: the commands that run or ran
    """

    folder: Path
    tmp: TemporaryDirectory[str] = field(
        default_factory=lambda: TemporaryDirectory(dir="/tmp")
    )
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of disagg, in a folder with a module that must not be imported."""
        Path(self.tmp.name, "profile.py").write_text(
            "raise SystemExit('of somebody else')"
        )
        environment = {
            **os.environ,
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.folder),
            "TMPDIR": self.tmp.name,
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-P", "-m", "disagg", *arguments]
        process = subprocess.Popen(command, cwd=self.tmp.name, env=environment, **pipes)
        self.started.append(process)
        return process

    def service(self, name: str = "disagg") -> RunningService:
        """Wait for a service whose state file says that it is ready."""
        path = self.folder / f"{name}.json"

        def is_ready() -> bool:
            state = read_state(path)
            return state is not None and state.ready

        def outputs_of_ended() -> list[tuple[str, str]]:
            return [x.communicate() for x in self.started if x.poll() is not None]

        wait_for(is_ready, describe=outputs_of_ended)
        return read_state(path)

    def processes(self) -> dict[int, str]:
        """The command of every process that belongs to this home."""
        commands = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.owns(entry):
                    commands[int(entry.name)] = (entry / "cmdline").read_text()
        return commands

    def owns(self, entry: Path) -> bool:
        """Whether a process has this home, or a file of a session folder open."""
        open_files = [os.readlink(link) for link in (entry / "fd").iterdir()]
        variables = (entry / "environ").read_bytes().split(b"\0")
        has_file = any(name.startswith(f"{self.tmp.name}/dg-") for name in open_files)
        return f"HOME={self.folder}".encode() in variables or has_file

    def pids(self, name: str) -> list[int]:
        """The processes of a program that were started with this home."""
        pids = []
        for pid, command in self.processes().items():
            program, _, _ = command.partition("\0")
            if Path(program).name == name:
                pids.append(pid)
        return pids

    def leftovers(self) -> list[object]:
        """Processes, session folders, files at home."""
        return [*self.processes().values(), *self.sessions(), *self.folder.iterdir()]

    def sessions(self) -> list[Path]:
        return [*Path(self.tmp.name).glob("dg-*")]

    def wait_until_empty(self) -> None:
        wait_for(lambda: not self.leftovers(), describe=self.leftovers)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    try:
        home.wait_until_empty()
    finally:
        for process in home.started:  # of a failed test: its children end with it
            process.kill()
            if not process.stderr.closed:
                print(process.stderr.read())  # shown where the test failed


def test_a_cold_submit_answers_and_leaves_nothing(home):
    process = home.start("submit", PROMPT * 32, "--max-tokens", "16", "--json")

    out, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0, err
    answer = json.loads(out)
    assert answer["completion_tokens"] == 16
    assert answer["kv"]["wire_bytes"] > answer["kv"]["payload_bytes"] > 0
    stages = [line.partition(" s  ")[2].partition(" ")[0] for line in err.splitlines()]
    assert stages == ["starting", "loading"], err  # and no line of a library
    assert home.leftovers() == []


@pytest.mark.slow
def test_ctrl_c_in_mid_stream_leaves_nothing(home):
    process = home.start("submit", PROMPT, "--max-tokens", "4000", "--ignore-eos")
    assert process.stdout.read(1)

    process.send_signal(signal.SIGINT)

    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "error: cancelled"
    assert home.leftovers() == []


def test_a_service_survives_the_death_of_its_workers_and_ray(home):
    """And when it is killed itself, nothing of it stays."""
    process = home.start("serve", "--port", "0")
    state = home.service()
    body = {**BODY, "max_tokens": 200}
    (folder,) = home.sessions()
    assert folder.stat().st_mode & 0o077 == 0  # Ray opens all below it to everybody
    (pid,) = home.pids("raylet")
    command = home.processes()[pid]
    assert "--node_ip_address=127.0.0.1\0" in command  # other addresses may go away
    whole = complete(state, body, lambda piece: None)

    kill_after_pieces(state, body, whole.text, "decode")
    kill_after_pieces(state, body, whole.text, "prefill")
    wait_for(lambda: idle(state), describe=lambda: get(state, "/status"))

    (pid,) = home.pids("raylet")
    os.kill(pid, signal.SIGKILL)
    assert complete(state, body, lambda piece: None).text == whole.text
    wait_for(lambda: home.pids("raylet") not in ([], [pid]))
    wait_for(lambda: sum("pid" in worker for worker in workers(state)) == 2)

    process.kill()
    out, _ = process.communicate()
    assert out == ""  # Ray would print a paragraph for each death
    (home.folder / "disagg.json").unlink()


def test_a_service_with_tls_finishes_answers_before_it_stops(home, tmp_path_factory):
    papers = make_papers(tmp_path_factory.mktemp("papers"))
    files = {"ca": "ca", "certificate": "peer", "key": "peer.key"}
    sets = [f"security.{key}={papers / name}" for key, name in files.items()]
    sets.append(f"server.drain_s={PATIENCE_S}")
    options = [x for each in sets for x in ("--set", each)]
    process = home.start("serve", "--port", "0", *options)
    state = home.service()
    stop = at_piece(5, lambda: process.send_signal(signal.SIGTERM))

    answer = complete(state, {**BODY, "max_tokens": 100}, stop)
    _, err = process.communicate(timeout=PATIENCE_S)

    assert answer.completion_tokens == 100
    assert process.returncode == 0
    assert any("gRPC over TLS" in line for line in err.splitlines())
    assert err.splitlines()[-1] == "stopped"


@pytest.mark.slow
def test_a_worker_that_freezes_for_ever_is_replaced(home):
    """Its stream goes on with the same text, and its process is gone."""
    settings = ("--set", "cluster.replace_s=8", "--set", "router.silence_s=2")
    process = home.start("serve", "--port", "0", *settings)
    state = home.service()
    body = {**BODY, "max_tokens": 200}
    expected = complete(state, body, lambda piece: None).text
    (victim,) = [w["pid"] for w in workers(state) if w["role"] == "decode"]
    freeze = at_piece(20, lambda: os.kill(victim, signal.SIGSTOP))

    answer = complete(state, body, freeze)

    assert answer.text == expected
    assert answer.completion_tokens == 200
    wait_for(lambda: not lives(victim))
    wait_for(lambda: idle(state))
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert re.search(r"decode-0 at 127.0.0.1 was silent for \d+ s and is killed", err)


@pytest.mark.slow
def test_keys_change_on_sighup(home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    keys = folder / "keys"
    keys.write_text("one\n")
    config = folder / "service.yaml"
    config.write_text(f"server: {{api_key_file: {keys}}}\n")
    process = home.start("serve", "--port", "0", "--config", str(config))
    state = home.service()
    assert models_status(state, "one") == 200

    keys.write_text("two\n")
    config.write_text(f"codec: raw\nserver: {{api_key_file: {keys}}}\n")
    process.send_signal(signal.SIGHUP)

    wait_for(lambda: models_status(state, "two") == 200)
    assert models_status(state, "one") == 401
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "these settings need a restart to change: codec\n" in err


def models_status(state: RunningService, key: str) -> int:
    """The status of a request with a key."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{state.url}/v1/models", headers=headers).status_code


def kill_after_pieces(
    state: RunningService, body: dict[str, Any], expected: str, role: str
) -> None:
    """kill -9 a worker in mid-answer: the text is the same, no piece is lost or repeated."""

    def kill() -> None:
        (victim,) = [w for w in workers(state) if w["role"] == role]
        os.kill(victim["pid"], signal.SIGKILL)

    answer = complete(state, body, at_piece(20, kill))
    assert answer.text == expected
    assert answer.completion_tokens == 200
    wait_for(lambda: live_roles(state) == {"prefill", "decode"})


def live_roles(state: RunningService) -> set[str]:
    return {worker["role"] for worker in workers(state) if "pid" in worker}


def at_piece(number: int, act: Callable[[], None]) -> Callable[[str], None]:
    """A consumer of the pieces of an answer that calls `act` at the n-th."""
    numbers = count(1)

    def show(piece: str) -> None:
        if next(numbers) == number:
            act()

    return show


def workers(state: RunningService) -> list[dict[str, Any]]:
    return list(get(state, "/status")["workers"])


def idle(state: RunningService) -> bool:
    """Whether the router has no request and no worker counts work; memory and caches stay."""
    stays = {"arena_bytes", "cached_pages", "cached_bytes"}
    report = get(state, "/status")
    if report["requests"] or report["queued"]:
        return False
    for worker in report["workers"]:
        for name, value in worker["gauges"].items():
            if value and name not in stays:
                return False
    return True
