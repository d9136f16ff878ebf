"""A Ray of one node with its dashboard, and the programs of Ray that its users call."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.cli.state_file import RunningService
from tests.cli.conftest import answering, free_port
from tests.processes import ray_head, wait_for

ROOT = Path(__file__).parents[2]


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
        return {
            actor["name"]: actor["class_name"]
            for actor in self._alive()
            if actor["class_name"].endswith("Worker")
        }

    def replicas(self) -> dict[int, str]:
        """pid -> deployment of the replicas of Ray Serve that live."""
        kinds = {
            actor["pid"]: actor["class_name"].split(":") for actor in self._alive()
        }
        return {
            pid: kind[-1] for pid, kind in kinds.items() if kind[0] == "ServeReplica"
        }

    def _alive(self) -> list[dict[str, Any]]:
        listed = self.ray(
            "ray", "list", "actors", "--format=json", f"--address={self.dashboard}"
        )
        return [actor for actor in json.loads(listed) if actor["state"] == "ALIVE"]

    def deploy(self, port: int, prefix: str = "/", **args: Any) -> RunningService:
        """The service as an application of Ray Serve; it may not answer yet."""
        app = {
            "name": "disagg",
            "import_path": "disagg.serve_app:build_app",
            "route_prefix": prefix,
            "args": args,
        }
        settings = {
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [app],
        }
        (self.home / "serve.yaml").write_text(yaml.safe_dump(settings))
        self.ray("serve", "deploy", "serve.yaml", "--address", self.dashboard)
        return RunningService(f"http://127.0.0.1:{port}{prefix.rstrip('/')}", 0, "")


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
