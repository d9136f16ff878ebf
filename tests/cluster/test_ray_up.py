"""`ray up cluster/local.yaml`, to the letter, on three hosts: a head, a prefill and a decode worker.

Only what a package index would give is not real: the hosts find this interpreter and this checkout
where `pip install` would have put them. Run it as root: `pytest -m cluster tests/cluster`.
"""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Host, Hosts, missing

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

REPO = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
YAML = "cluster/local.yaml"
ADDRESSES = {"head": "10.0.0.1", "prefill": "10.0.0.2", "decode": "10.0.0.3"}
LAPTOP = "10.0.0.254"
TOKENS = 1500
LEAST_BYTES = 50e6


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three machines as their owner would prepare them, and a laptop with a checkout."""
    assert not missing(), f"this test needs {', '.join(missing())}"
    kept = [REPO, Path(sys.prefix), Path(sys.base_prefix)]
    with Hosts(ADDRESSES | {"laptop": LAPTOP}, kept) as hosts:
        for name in ADDRESSES:
            install(hosts[name])
        laptop = hosts["laptop"].home
        (laptop / ".ssh").mkdir(mode=0o700)
        (laptop / ".ssh" / "id_ed25519").write_text((hosts.keys / "user").read_text())
        (laptop / ".ssh" / "id_ed25519").chmod(0o600)
        (laptop / "cluster").symlink_to(REPO / "cluster")
        (laptop / "build" / "wheel").mkdir(parents=True)
        (laptop / "build" / "wheel" / "disagg.whl").touch()
        yield hosts


def install(host: Host) -> None:
    """What `python3 -m venv` and `pip install` would leave; pip itself has nothing to do."""
    folder = host.home / ".disagg" / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, line in {
        "python": f'exec {BIN}/python "$@"',
        "ray": f'exec {BIN}/ray "$@"',
        "disagg": f'exec {BIN}/python -m disagg "$@"',
        "pip": "true",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    (host.home / ".profile").write_text(f"export PYTHONPATH={REPO}\n")


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[Hosts]:
    """The hosts after `ray up`, with a service that answers."""
    said = on_laptop(hosts, "ray", "up", "-y", YAML, timeout=300)
    print(said)
    wait_for(lambda: ready(hosts), 180)
    yield hosts


def on_laptop(hosts: Hosts, *command: str, timeout: float = 120) -> str:
    return hosts["laptop"].run("env", f"PYTHONPATH={REPO}", *command, timeout=timeout)


def on_head(hosts: Hosts, command: str) -> str:
    """As an operator asks: by `ray exec`."""
    return on_laptop(hosts, "ray", "exec", YAML, command)


def ready(hosts: Hosts) -> bool:
    return '"status": "ok"' in hosts["head"].run(
        "bash", "-c", "curl -s 127.0.0.1:8000/health || true"
    ).replace('":"', '": "')


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds:g} s"
        time.sleep(1)


def test_up(cluster):
    print(on_head(cluster, "disagg status; ray status; ps aux"))
