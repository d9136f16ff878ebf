"""What users of Ray type: `ray job submit`, `ray list actors`, `serve deploy`."""

import json
import sys
from pathlib import Path

import pytest

from disagg.cli.client import complete, get
from disagg.cli.state_file import read_state
from tests.cli.conftest import answering, free_port
from tests.cluster.head import head
from tests.processes import wait_for

for module in ("aiohttp_cors", "watchfiles"):  # of ray[default], of ray[serve]
    pytest.importorskip(module, reason="pip install 'disagg[dashboard,serve]'")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

__all__ = ["head"]

ASKED = {"prompt": "It was a dark evening", "max_tokens": 8, "ignore_eos": True}


def test_a_job_serves_with_readable_actors_and_its_runtime_env(head, tmp_path):
    state_file = tmp_path / "disagg.json"
    job = [
        "job",
        "submit",
        f"--address={head.dashboard}",
        "--no-wait",
        "--submission-id=disagg",
    ]
    job += [
        "--runtime-env-json",
        json.dumps({"env_vars": {"DISAGG_TEST": "of the job"}}),
        "--",
    ]
    serve = [sys.executable, "-m", "disagg", "serve", "--set", "cluster.address=auto"]
    serve += ["--port=0", f"--state-file={state_file}"]
    head.ray("ray", *job, *serve)
    wait_for(lambda: (state := read_state(state_file)) is not None and state.ready)

    state = read_state(state_file)

    assert complete(state, ASKED, lambda piece: None).completion_tokens == 8
    assert head.actors() == {"prefill-0": "PrefillWorker", "decode-0": "DecodeWorker"}

    for worker in get(state, "/status")["workers"]:
        environment = Path(f"/proc/{worker['pid']}/environ").read_bytes()
        assert b"DISAGG_TEST=of the job" in environment.split(b"\0")

    assert "2.0/2.0 CPU" in head.ray(
        "ray", "status", f"--address=127.0.0.1:{head.port}"
    )

    head.ray("ray", "job", "stop", "disagg", f"--address={head.dashboard}")
    wait_for(lambda: not head.actors())


def test_ray_serve_deploys_it_and_takes_it_back(head):
    service = head.deploy(free_port(), prefill=1, decode=1, codec="raw")
    wait_for(lambda: answering(service, "/v1/models"))
    pieces: list[str] = []

    answer = complete(service, ASKED, pieces.append)

    assert answer.completion_tokens == 8
    assert "".join(pieces) == answer.text
    assert get(service, "/status")["codec"] == "raw"
    assert set(head.actors()) == {"prefill-0", "decode-0"}

    head.ray("serve", "shutdown", "-y", "--address", head.dashboard)
    wait_for(lambda: not head.actors())
    assert not head.replicas()
