"""What users of Ray type: `ray job submit`, `ray list actors`, `serve deploy`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from disagg.cli.client import complete, get
from disagg.cli.state_file import RunningService, read_state
from tests.cli.conftest import answering, free_port
from tests.processes import ray_head, wait_for

for module in ("aiohttp_cors", "watchfiles"):  # of ray[default], of ray[serve]
    pytest.importorskip(module, reason="pip install 'disagg[dashboard,serve]'")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ASKED = {"prompt": "It was a dark evening", "max_tokens": 8, "ignore_eos": True}


@dataclass
class Head:
    home: Path
    port: int
    dashboard: str

    @property
    def environment(self) -> dict[str, str]:
        mine = {"HOME": str(self.home), "RAY_ADDRESS": f"127.0.0.1:{self.port}"}
        mine |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        return os.environ | mine | {"PYTHONPATH": str(ROOT)}

    def ray(self, program: str, *arguments: str) -> str:
        """What one of Ray's programs says."""
        modules = {"ray": "ray.scripts.scripts", "serve": "ray.serve.scripts"}
        code = f"import sys; from {modules[program]} import main as m; sys.exit(m())"
        if program == "serve":
            code = code.replace("import main", "import cli")
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=self.home, env=self.environment,
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def actors(self) -> dict[str, str]:
        """name -> class of the workers that live."""
        listed = self.ray(
            "ray", "list", "actors", "--format=json", f"--address={self.dashboard}"
        )
        actors = [x for x in json.loads(listed) if x["state"] == "ALIVE"]
        return {
            x["name"]: x["class_name"]
            for x in actors
            if x["class_name"].endswith("Worker")
        }


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    port, dashboard = free_port(), free_port()
    head = Head(tmp_path, port, f"http://127.0.0.1:{dashboard}")
    environment = {k: v for k, v in head.environment.items() if k != "RAY_ADDRESS"}
    with ray_head(port, environment, "--num-cpus=2", f"--dashboard-port={dashboard}"):
        wait_for(
            lambda: answering(RunningService(head.dashboard, 0, ""), "/api/version")
        )
        yield head


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


def test_ray_serve_deploys_it_and_takes_it_back(head, tmp_path):
    port = free_port()
    app = {
        "name": "disagg",
        "import_path": "disagg.serve_app:build_app",
        "route_prefix": "/",
    }
    app["args"] = {"prefill": 1, "decode": 1, "codec": "raw"}
    settings = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [app],
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(settings))
    head.ray("serve", "deploy", "serve.yaml", "--address", head.dashboard)
    service = RunningService(f"http://127.0.0.1:{port}", 0, "")
    wait_for(lambda: answering(service, "/v1/models"))
    pieces: list[str] = []

    answer = complete(service, ASKED, pieces.append)

    assert answer.completion_tokens == 8
    assert "".join(pieces) == answer.text
    assert get(service, "/status")["codec"] == "raw"
    assert set(head.actors()) == {"prefill-0", "decode-0"}

    head.ray("serve", "shutdown", "-y", "--address", head.dashboard)
    wait_for(lambda: not head.actors())
