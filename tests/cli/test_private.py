"""The real thing: processes, Ray, gRPC, HTTP. Whatever ends it, nothing of it is left."""

import json
import os
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

import pytest

from disagg.cli.client import complete, get
from disagg.cli.state_file import RunningService, read_state
from tests.cli.conftest import PATIENCE_S, wait_for
from tests.papers import make_papers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPT = "It was a dark evening in November, and the old house by the river "
ASKED = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


@dataclass
class Home:
    """A home folder of its own: what carries it in its environment was started by the test.

    tmp: where sessions make their folders; short, or they would not
    """

    folder: Path
    tmp: TemporaryDirectory[str] = field(
        default_factory=lambda: TemporaryDirectory(dir="/tmp")
    )
    begun: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of ours, where a module of another one lies in the way."""
        Path(self.tmp.name, "profile.py").write_text(
            "raise SystemExit('of somebody else')"
        )
        environment = dict.fromkeys(("HOME", "XDG_RUNTIME_DIR"), str(self.folder))
        environment["TMPDIR"] = self.tmp.name
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-P", "-m", "disagg", *arguments]
        process = subprocess.Popen(
            command, cwd=self.tmp.name, env=os.environ | environment, **pipes
        )
        self.begun.append(process)
        return process

    def service(self, name: str = "disagg") -> RunningService:
        """The one that says in the state file that it is ready, soon."""
        path = self.folder / f"{name}.json"
        ready = lambda: (state := read_state(path)) is not None and state.ready  # noqa: E731
        wait_for(
            ready,
            describe=lambda: [
                x.communicate() for x in self.begun if x.poll() is not None
            ],
        )
        return read_state(path)

    def processes(self) -> dict[int, str]:
        """Whoever has this home, or a file of a session folder open, and its command."""
        result = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.started(entry):
                    result[int(entry.name)] = (entry / "cmdline").read_text()
        return result

    def started(self, entry: Path) -> bool:
        opened = [os.readlink(link) for link in (entry / "fd").iterdir()]
        variables = (entry / "environ").read_bytes().split(b"\0")
        ours = any(name.startswith(f"{self.tmp.name}/dg-") for name in opened)
        return f"HOME={self.folder}".encode() in variables or ours

    def pids(self, name: str) -> list[int]:
        """The processes of a program that were started with this home."""
        commands = self.processes().items()
        return [
            pid
            for pid, output in commands
            if Path(output.partition("\0")[0]).name == name
        ]

    def first_operand(self) -> list[object]:
        """Processes, session folders, files at home."""
        return [*self.processes().values(), *self.sessions(), *self.folder.iterdir()]

    def sessions(self) -> list[Path]:
        return [*Path(self.tmp.name).glob("dg-*")]

    def empties(self) -> None:
        """Nothing is left, soon."""
        wait_for(lambda: not self.left(), describe=self.left)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    result = Home(tmp_path)
    yield result
    try:
        result.empties()
    finally:
        for (
            process
        ) in result.begun:  # of a test that failed: all of it ends with its process
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
    assert stages == ["starting", "loading"], (
        err
    )  # and nothing that a library has to say
    assert home.left() == []


@pytest.mark.slow
def test_ctrl_c_in_mid_stream_leaves_nothing(home):
    process = home.start("submit", PROMPT, "--max-tokens", "4000", "--ignore-eos")
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "error: cancelled"
    assert home.left() == []


def test_a_service_survives_its_workers_and_its_ray_and_takes_all_along_when_it_is_killed(
    home,
):
    process = home.start("serve", "--port", "0")
    state, request_body = home.service(), ASKED | {"max_tokens": 200}
    (folder,) = home.sessions()
    assert folder.stat().st_mode & 0o077 == 0  # Ray opens what is below to everybody
    (pid,) = home.pids("raylet")
    assert (
        "--node_ip_address=127.0.0.1\0" in home.processes()[pid]
    )  # others may go away
    whole = complete(state, request_body, lambda piece: None)

    kill_after_pieces(state, request_body, whole.text, "decode")
    kill_after_pieces(state, request_body, whole.text, "prefill")
    wait_for(lambda: idle(state), describe=lambda: get(state, "/status"))

    (pid,) = home.pids("raylet")
    os.kill(pid, signal.SIGKILL)
    assert complete(state, request_body, lambda piece: None).text == whole.text
    wait_for(lambda: home.pids("raylet") not in ([], [pid]))
    wait_for(lambda: len([worker for worker in workers(state) if "pid" in worker]) == 2)

    process.kill()
    out, _ = process.communicate()
    assert out == ""  # Ray would say a paragraph of each death
    (home.folder / "disagg.json").unlink()


def test_a_service_with_tls_that_is_asked_to_stop_lets_answers_end(
    home, tmp_path_factory
):
    papers = make_papers(tmp_path_factory.mktemp("papers"))
    files = {"ca": "ca", "certificate": "peer", "key": "peer.key"}
    sets = [f"security.{key}={papers / name}" for key, name in files.items()]
    sets.append(f"cluster.grace_s={PATIENCE_S}")
    options = [x for each in sets for x in ("--set", each)]
    process = home.start("serve", "--port", "0", *options)
    state = home.service()
    stop = at_piece(5, lambda: process.send_signal(signal.SIGTERM))
    answer = complete(state, ASKED | {"max_tokens": 100}, stop)
    assert answer.completion_tokens == 100
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert any("gRPC over TLS" in line for line in err.splitlines())
    assert err.splitlines()[-1] == "stopped"


def kill_after_pieces(
    state: RunningService, request_body: dict[str, Any], expected: str, role: str
) -> None:
    """kill -9 of a worker in mid-answer: the text is the same, no piece lost or doubled."""

    def kill() -> None:
        (victim,) = [w for w in workers(state) if w["role"] == role]
        os.kill(victim["pid"], signal.SIGKILL)

    answer = complete(state, request_body, at_piece(20, kill))
    assert answer.text == expected
    assert answer.completion_tokens == 200
    wait_for(
        lambda: (
            {w["role"] for w in workers(state) if "pid" in w} == {"prefill", "decode"}
        )
    )


def at_piece(number: int, act: Callable[[], None]) -> Callable[[str], None]:
    """What is shown the pieces of an answer, and acts at the n-th."""
    numbers = count(1)
    return lambda piece: act() if next(numbers) == number else None


def workers(state: RunningService) -> list[dict[str, Any]]:
    return list(get(state, "/status")["workers"])


def idle(state: RunningService) -> bool:
    gauges = [worker["gauges"] for worker in workers(state)]
    stays = {"arena_bytes", "cached_pages", "cached_bytes"}
    return not any(
        v for each in gauges for name, v in each.items() if name not in stays
    )
