"""Placement groups on a cluster end with their workers, whichever process is killed.

One namespaced host with a Ray of its own. Run it as root: `pytest -m cluster tests/cluster`.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import wait_for
from tests.cluster.hosts import Host, joined, missing
from tests.cluster.test_ray_up import REPO, healthy, in_shell, install

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

ADDRESS = "10.0.0.1"
ORPHAN_S = 4
SERVE = (
    f"disagg serve --codec raw --prefill-ranks 2 --set cluster.address={ADDRESS}:6379 "
    f"--set cluster.orphan_s={ORPHAN_S} --set cluster.rank_timeout_s=5"
)
LIST_GROUPS = f"""
import json, ray
from ray.util import placement_group_table
ray.init("{ADDRESS}:6379", logging_level="ERROR", log_to_driver=False)
print(json.dumps([x for x in placement_group_table().values() if x["state"] != "REMOVED"]))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host with Ray, which has two cores."""
    assert not missing(), f"this test needs {', '.join(missing())}"
    shared_paths = [REPO, Path(sys.prefix), Path(sys.base_prefix)]
    with joined({"solo": ADDRESS}, shared_paths) as hosts:
        solo = hosts["solo"]
        install(solo)
        lines = ["PATH=$HOME/.disagg/venv/bin:$PATH", "RAY_worker_niceness=0"]
        exports = "".join(f"export {line}\n" for line in lines)
        (solo.home / ".bashrc").write_text(exports)
        (solo.home / "groups.py").write_text(LIST_GROUPS)
        options = "--include-dashboard=false --object-store-memory=100000000"
        in_shell(
            solo,
            f"ray start --head --node-ip-address={ADDRESS} --num-cpus=2 {options}",
        )
        yield solo


def serve(host: Host, options: str = "") -> None:
    """In the background; returns when it answers."""
    in_shell(host, f"nohup {SERVE} {options} > serve.log 2>&1 < /dev/null &")
    wait_for(lambda: healthy(host), 300)


def kill(host: Host, pattern: str) -> None:
    in_shell(host, f"pkill -9 -f '{pattern}'")


def groups(host: Host) -> list[dict[str, Any]]:
    return list(json.loads(in_shell(host, "python groups.py").splitlines()[-1]))


def status(host: Host) -> dict[str, Any]:
    return dict(json.loads(in_shell(host, "disagg status --json").splitlines()[-1]))


def prefill_pid(host: Host) -> int:
    """Of rank 0; 0 if none answers."""
    workers = status(host)["workers"]
    return next((x.get("pid", 0) for x in workers if x["role"] == "prefill"), 0)


def has_no_workers(host: Host) -> bool:
    return not any(re.match(r"ray::\w+(Worker|Rank)\b", x) for x in host.processes())


def test_the_group_of_a_crashed_service_is_found_by_the_next(host):
    serve(host, f"--set cluster.orphan_s={100}")
    pid = prefill_pid(host)
    (before,) = groups(host)
    kill(host, "[d]isagg serve")

    serve(host, f"--set cluster.orphan_s={100}")

    assert prefill_pid(host) == pid
    assert groups(host) == [before]
    in_shell(host, "disagg stop")
    wait_for(lambda: has_no_workers(host) and not groups(host), 90)


def test_a_crashed_service_leaves_no_group_after_a_while(host):
    serve(host)
    kill(host, "[d]isagg serve")

    wait_for(lambda: has_no_workers(host), 60)

    assert not groups(host)


def test_a_group_without_a_service_ends_with_its_rank_0(host):
    serve(host, f"--set cluster.orphan_s={300}")
    kill(host, "[d]isagg serve")

    kill(host, "ray::[P]refillWorker")

    wait_for(lambda: not groups(host), 60)
    kill(host, "ray::[D]ecodeWorker")
    wait_for(lambda: has_no_workers(host), 60)


def test_a_frozen_rank_is_replaced_and_leaves_nothing(host):
    serve(host)
    pid = prefill_pid(host)
    in_shell(host, "pkill -STOP -f 'ray::[P]refillRank'")
    in_shell(host, "disagg submit --max-tokens 4 'It was a dark evening' || true")

    wait_for(lambda: prefill_pid(host) not in (0, pid), 300)

    assert len(groups(host)) == 1
    frozen = in_shell(host, "ps -eo stat=,args= | grep '^T.*ray::' || true")
    assert not frozen
    in_shell(host, "disagg stop")
    wait_for(lambda: has_no_workers(host) and not groups(host), 90)


def test_a_group_that_no_host_can_take_is_an_error(host):
    options = "--set cluster.gpus=2 > refused.log 2>&1"
    in_shell(host, f"{SERVE} {options} || true")

    log = (host.home / "refused.log").read_text()
    print(log)
    assert "prefill-0 waits for room: 2 ranks on one host, each with" in log
    assert "no room: 2 ranks on one host, each with" in log
    assert f"1 GPU; in all, used or free, the hosts have: {ADDRESS}" in log
    assert not groups(host)
