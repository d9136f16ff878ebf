"""Workers of two ranks by `ray up`, on namespaced hosts: on one host, and spread over two.

Run it as root: `pytest -m cluster tests/cluster/test_ray_up_ranks.py -s`.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from disagg.llm import LLM, SamplingParams
from tests.cli.conftest import wait_for
from tests.cluster.hosts import Hosts, joined, missing
from tests.cluster.test_ray_up import (
    LAPTOP,
    REPO,
    YAML,
    in_shell,
    install,
    on_laptop,
    ray_exec,
    submitted,
    workers,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

ADDRESSES = {
    "head": "10.0.0.1",
    "prefill": "10.0.0.2",
    "decode": "10.0.0.3",
    "spare": "10.0.0.4",
}
PROMPT = " ".join(["It was a dark evening in November, and the old house"] * 12)
TOKENS = 24
SERVICE = """
codec: raw
cluster: {{prefill: 1, decode: 1, pools: true, prefill_ranks: 2, rank_placement: {}}}
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Four machines as their owner would prepare them, and a laptop with a checkout."""
    assert not missing(), f"this test needs {', '.join(missing())}"
    shared_paths = [REPO, Path(sys.prefix), Path(sys.base_prefix)]
    with joined(ADDRESSES | {"laptop": LAPTOP}, shared_paths) as hosts:
        for name in ADDRESSES:
            install(hosts[name])
        laptop = hosts["laptop"].home
        (laptop / ".ssh").mkdir(mode=0o700)
        (laptop / ".ssh" / "id_ed25519").write_text((hosts.keys / "user").read_text())
        (laptop / ".ssh" / "id_ed25519").chmod(0o600)
        shutil.copytree(REPO / "cluster", laptop / "cluster")
        (laptop / "build" / "wheel").mkdir(parents=True)
        (laptop / "build" / "wheel" / "disagg.whl").touch()
        yield hosts


@pytest.fixture(scope="module")
def expected() -> str:
    """The greedy answer of one process."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    (completion,) = LLM(codec="raw").generate([PROMPT], params)
    return str(completion.text)


def up(hosts: Hosts, prefill: Sequence[str], placement: str, units: int) -> None:
    """`ray up` with two prefill ranks; each of these hosts has room for so many."""
    folder = hosts["laptop"].home / "cluster"
    (folder / "service.yaml").write_text(SERVICE.format(placement))
    text = (REPO / YAML).read_text()
    addresses = [ADDRESSES[name] for name in [*prefill, "decode"]]
    marks = " ".join(f"-e {ADDRESSES[name]}" for name in prefill)
    for old, new in {
        "worker_ips: [10.0.0.2, 10.0.0.3]": f"worker_ips: [{', '.join(addresses)}]",
        "-e 10.0.0.2": marks,
        "gpus ? gpus : 1": f"gpus ? gpus : {units}",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "local.yaml").write_text(text)
    on_laptop(hosts, "ray", "up", "-y", YAML)


def down(hosts: Hosts) -> None:
    on_laptop(hosts, "ray", "down", "-y", YAML)
    wait_for(lambda: not any(hosts[name].processes() for name in ADDRESSES), 60)


def answer(hosts: Hosts) -> dict[str, Any]:
    options = f"--json --temperature 0 --max-tokens {TOKENS} --ignore-eos"
    return submitted(ray_exec(hosts, f"disagg submit {options} '{PROMPT}'"))


def groups(hosts: Hosts) -> list[dict[str, Any]]:
    """The placement groups that Ray has, with the host of each bundle."""
    script = (
        "import json, ray; from ray.util import placement_group_table as table;"
        "ray.init(address='auto', logging_level='ERROR', log_to_driver=False);"
        "print(json.dumps([x for x in table().values() if x['state'] != 'REMOVED']))"
    )
    output = in_shell(hosts["head"], f'python -c "{script}"')
    return list(json.loads(output.splitlines()[-1]))


def test_two_ranks_on_one_host_hand_over_to_another(hosts, expected):
    up(hosts, ["prefill"], "pack", units=2)

    reply = answer(hosts)

    prefill = workers(hosts)["prefill-0"]
    print("\n", in_shell(hosts["head"], "disagg status"), reply["kv"])
    assert reply["text"] == expected
    assert reply["kv"]["wire_bytes"] > 0
    assert prefill["rank_hosts"] == [ADDRESSES["prefill"]] * 2
    (group,) = groups(hosts)
    assert group["strategy"] == "STRICT_PACK"
    assert group["bundles"]["1"]["prefill"] == 1.0


def test_a_killed_follower_is_replaced_with_its_worker(hosts, expected):
    before = workers(hosts)["prefill-0"]["pid"]
    in_shell(hosts["prefill"], "pkill -9 -f 'ray::[P]refillRank'")

    wait_for(lambda: before not in pids(hosts) and "prefill" in roles(hosts), 180)

    assert answer(hosts)["text"] == expected
    assert len(groups(hosts)) == 1


def test_ray_down_leaves_no_process_of_a_group(hosts):
    down(hosts)


def test_two_ranks_on_two_hosts_hand_over_to_a_third(hosts, expected):
    up(hosts, ["prefill", "spare"], "spread", units=1)

    reply = answer(hosts)

    (prefill,) = [x for x in workers(hosts).values() if x["role"] == "prefill"]
    print("\n", in_shell(hosts["head"], "disagg status"), reply["kv"])
    assert reply["text"] == expected
    assert reply["kv"]["wire_bytes"] > 0
    spread = {ADDRESSES["prefill"], ADDRESSES["spare"]}
    assert set(prefill["rank_hosts"]) == spread


def test_a_killed_rank_0_takes_its_followers_on_other_hosts_along(hosts, expected):
    before = pids(hosts)
    for name in ("prefill", "spare"):
        in_shell(hosts[name], "pkill -9 -f 'ray::[P]refillWorker' || true")

    wait_for(lambda: pids(hosts) - before and "prefill" in roles(hosts), 180)

    assert answer(hosts)["text"] == expected
    assert len(groups(hosts)) == 1
    down(hosts)


def pids(hosts: Hosts) -> set[int]:
    """Of the prefill workers that answer."""
    reports = workers(hosts).values()
    return {x["pid"] for x in reports if x["role"] == "prefill" and "pid" in x}


def roles(hosts: Hosts) -> set[str]:
    """Of the workers that answer."""
    return {x["role"] for x in workers(hosts).values() if "pid" in x}
