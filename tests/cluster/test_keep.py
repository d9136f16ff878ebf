"""The watchman of a host: it starts a command again, ends with Ray, and there is one of it."""

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "cluster" / "keep.py"


@pytest.fixture(scope="module")
def keep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("keep", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("looks", "gone_at"),
    [
        pytest.param([(1, "open"), (900, "open")], None, id="open"),
        pytest.param([(1, "refused"), (4, "refused"), (6, "refused")], 6, id="stopped"),
        pytest.param(
            [(4, "refused"), (5, "open"), (9, "refused")], None, id="started-again"
        ),
        pytest.param(
            [(30, "silent"), (80, "silent"), (95, "silent")], 95, id="unreachable"
        ),
        pytest.param(
            [(80, "silent"), (82, "refused"), (86, "refused")],
            86,
            id="back-without-ray",
        ),
    ],
)
def test_ray_is_gone_after_refusals_or_a_long_silence(keep, looks, gone_at):
    watch = keep.Watch(0.0)
    gone = [now for now, answer in looks if not watch.look(answer, now)]

    assert gone == ([] if gone_at is None else [gone_at])


def test_a_port_is_open_or_refuses(keep):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert keep.knock("127.0.0.1", port) == "open"
    assert keep.knock("127.0.0.1", port) == "refused"


@pytest.mark.parametrize(
    ("command", "starts"),
    [(["true"], [0.0]), (["false"], [0.0, 1.0, 2.0, 3.5, 6.0])],
    ids=["told-to-end", "failed"],
)
def test_a_command_that_fails_is_started_again_later_and_later(keep, command, starts):
    supervised, started, last = keep.KeptCommand(command), [], None
    for now in (0.5 * step for step in range(20)):
        supervised.look(now)
        if supervised.process is not None and supervised.process is not last:
            last = supervised.process
            last.wait()
            started.append(now)

    assert started == starts


def test_a_newer_keeper_replaces_the_older_and_stop_ends_it(tmp_path):
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        work = 'echo $$ >> "$HOME/pids"; exec sleep 60'
        run = [sys.executable, str(SCRIPT), "run", address, "sh", "-c", work]
        subprocess.run(run, env=environment, check=True)
        first = pids(tmp_path, 1)
        subprocess.run(run, env=environment, check=True)
        second = pids(tmp_path, 2)
        assert not alive(first[0])
        subprocess.run(
            [sys.executable, str(SCRIPT), "stop"], env=environment, check=True
        )
        assert not alive(second[1])


def pids(folder: Path, count: int) -> list[int]:
    """Those that the commands wrote, once so many have."""
    while True:
        path = folder / "pids"
        lines = path.read_text().split() if path.exists() else []
        if len(lines) == count:
            return [int(pid) for pid in lines]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
