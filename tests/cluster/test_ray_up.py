"""`ray up cluster/local.yaml`, to the letter, on three hosts: a head, a prefill and a decode one.

Only what a package index would give is not real: the hosts find this interpreter and this checkout
where `pip install` would have put them. Run it as root: `pytest -m cluster tests/cluster`.
"""

import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import wait_for
from tests.cluster.hosts import Host, Hosts, joined, missing

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

REPO = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
YAML = "cluster/local.yaml"
ADDRESSES = {"head": "10.0.0.1", "prefill": "10.0.0.2", "decode": "10.0.0.3"}
LAPTOP = "10.0.0.254"
SSH = "-i .ssh/id_ed25519 -o StrictHostKeyChecking=no"
ASKED = "--max-tokens 8 'It was a dark evening'"
PROMPT_CHARACTERS = 5000
LEAST_BYTES = 50e6


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three machines as their owner would prepare them, and a laptop with a checkout."""
    assert not missing(), f"this test needs {', '.join(missing())}"
    shared_paths = [REPO, Path(sys.prefix), Path(sys.base_prefix)]
    with joined(ADDRESSES | {"laptop": LAPTOP}, shared_paths) as hosts:
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
def cluster(hosts: Hosts) -> Hosts:
    """The hosts after `ray up`, which returns when the service answers."""
    since = time.monotonic()
    on_laptop(hosts, "ray", "up", "-y", YAML)
    print(f"\nray up: {time.monotonic() - since:.1f} s")
    return hosts


def test_a_prompt_is_answered_on_the_head_across_two_hosts(cluster: Hosts) -> None:
    answer = submitted(ray_exec(cluster, f"disagg submit --json {ASKED}"))

    assert answer["completion_tokens"] == 8
    assert {
        name: worker["address"].partition(":")[0]
        for name, worker in workers(cluster).items()
    } == {"prefill-0": ADDRESSES["prefill"], "decode-0": ADDRESSES["decode"]}


def test_a_laptop_reaches_the_service_through_ssh(cluster: Hosts) -> None:
    tunnel = f"ssh -fN {SSH} -L 8000:127.0.0.1:8000 ubuntu@{ADDRESSES['head']} > /dev/null 2>&1"
    cluster["laptop"].run("sh", "-c", tunnel)
    command = f"python -m disagg submit --json --url http://127.0.0.1:8000 {ASKED}"

    answer = submitted(on_laptop(cluster, "sh", "-c", command))

    assert answer["completion_tokens"] == 8


def test_bytes_on_the_wire_are_those_that_are_reported(cluster: Hosts) -> None:
    head, prefill = cluster["head"], cluster["prefill"]
    pid = workers(cluster)["prefill-0"]["pid"]
    before, reported, prompts = acked(prefill, pid, ADDRESSES["decode"]), 0, 0
    while reported < LEAST_BYTES:
        (head.home / "prompt").write_text(shuffled_story(prompts))
        output = in_shell(
            head, "disagg submit --json --codec raw --max-tokens 2 @prompt"
        )
        reported += submitted(output)["kv"]["wire_bytes"]
        prompts += 1
    acked_bytes = acked(prefill, pid, ADDRESSES["decode"]) - before

    print(
        f"\n{prompts} prompts: {reported:,} bytes reported, {acked_bytes:,} acked, "
        f"x{acked_bytes / reported:.4f}"
    )

    assert acked_bytes == pytest.approx(reported, rel=0.02)


def test_a_killed_service_comes_back_and_finds_its_workers(cluster: Hosts) -> None:
    before = {name: worker["pid"] for name, worker in workers(cluster).items()}
    in_shell(cluster["head"], "pkill -9 -f 'm [d]isagg serve'")
    since = time.monotonic()
    wait_for(lambda: not healthy(cluster["head"]), 10)
    wait_for(lambda: healthy(cluster["head"]), 60)

    print(f"\nserves again after {time.monotonic() - since:.1f} s")

    assert {name: worker["pid"] for name, worker in workers(cluster).items()} == before
    assert (
        submitted(ray_exec(cluster, f"disagg submit --json {ASKED}"))[
            "completion_tokens"
        ]
        == 8
    )


def test_a_host_whose_ray_dies_is_started_again_and_works_again(cluster: Hosts) -> None:
    before = workers(cluster)["decode-0"]["pid"]
    in_shell(cluster["decode"], "pkill -9 raylet")
    since = time.monotonic()
    wait_for(lambda: healthy(cluster["head"]) and decode_pids(cluster) - {before}, 180)

    print(f"\nanother decode worker after {time.monotonic() - since:.1f} s")

    assert (
        submitted(ray_exec(cluster, f"disagg submit --json {ASKED}"))[
            "completion_tokens"
        ]
        == 8
    )


def test_ray_up_again_starts_everything_anew_once(cluster: Hosts) -> None:
    before = decode_pids(cluster)
    since = time.monotonic()
    on_laptop(cluster, "ray", "up", "-y", YAML)

    print(f"\na second ray up: {time.monotonic() - since:.1f} s")

    assert not decode_pids(cluster) & before

    for name in ADDRESSES:
        keepers = [line for line in cluster[name].processes() if "keep.py hold" in line]
        assert len(keepers) == 1

    assert (
        submitted(ray_exec(cluster, f"disagg submit --json {ASKED}"))[
            "completion_tokens"
        ]
        == 8
    )


def test_ray_down_leaves_no_process_on_any_host(cluster: Hosts) -> None:
    since = time.monotonic()
    on_laptop(cluster, "ray", "down", "-y", YAML)
    down_s = time.monotonic() - since
    wait_for(lambda: not any(cluster[name].processes() for name in ADDRESSES), 30)
    print(
        f"\nray down: {down_s:.1f} s, nothing left after {time.monotonic() - since:.1f} s"
    )


def on_laptop(hosts: Hosts, *command: str) -> str:
    """With the checkout that an operator has."""
    return hosts["laptop"].run("env", f"PYTHONPATH={REPO}", *command, timeout=300)


def ray_exec(hosts: Hosts, command: str) -> str:
    return on_laptop(hosts, "ray", "exec", YAML, command)


def in_shell(host: Host, command: str) -> str:
    """As who logs in there."""
    return host.run("bash", "--login", "-c", f". ~/.bashrc; {command}")


def submitted(output: str) -> dict[str, Any]:
    """The answer among what Ray and ssh say."""
    (line,) = [line for line in output.splitlines() if line.startswith('{"text"')]
    return dict(json.loads(line))


def workers(hosts: Hosts) -> dict[str, dict[str, Any]]:
    """name -> what `disagg status` says of it."""
    output = in_shell(hosts["head"], "disagg status --json").splitlines()[-1]
    return {worker["name"]: worker for worker in json.loads(output)["workers"]}


def decode_pids(hosts: Hosts) -> set[int]:
    """Of the decode workers that answer."""
    reports = workers(hosts).values()
    return {
        worker["pid"]
        for worker in reports
        if worker["role"] == "decode" and "pid" in worker
    }


def healthy(host: Host) -> bool:
    probe = "curl -s -o /dev/null -w %{http_code} http://127.0.0.1:8000/ready || true"
    return host.run("sh", "-c", probe) == "200"


def acked(host: Host, pid: int, peer: str) -> int:
    """Bytes of one process that a peer has acknowledged, over the connections that are open."""
    total = 0
    for line in host.run("ss", "-tniOpH").splitlines():
        to_peer = re.search(rf"\s\S*?{re.escape(peer)}\]?:\d+\s", line)
        if to_peer and f"pid={pid}," in line:
            total += int(re.search(r"bytes_acked:(\d+)", line)[1])  # type: ignore[index]
    return total


def shuffled_story(seed: int) -> str:
    """A prompt of its own: words in another order share no page with those of another seed."""
    words = (REPO / "docs" / "story.txt").read_text().split() * 2
    random.Random(seed).shuffle(words)
    return " ".join(words)[:PROMPT_CHARACTERS]
