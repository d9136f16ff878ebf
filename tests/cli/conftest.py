"""A real HTTP server on a free port, with a fake behind it, for commands that need a service."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from disagg.cli.client import get
from disagg.cli.state_file import RunningService, write_state
from disagg.errors import PeerLostError, UnknownNameError
from disagg.server.app import create_app
from disagg.server.service import bind
from tests.processes import PATIENCE_S as PATIENCE_S
from tests.processes import wait_for as wait_for
from tests.server.conftest import KV, FakeRouter, completions_of

STATS = {
    **KV,
    "codec": "kivi:bits=4",
    "tokens": 300,
    "fp16_bytes": 4000,
    "fp8_bytes": 2000,
    "wire_bytes": 1000,
    "resident_bytes": 800,
}


class FakeWorkerPool:
    """A worker pool that records its calls; it has one worker, "d"."""

    def __init__(self) -> None:
        self.target_counts = {"prefill": 1, "decode": 2}
        self.lacks_room: dict[str, str] = {}
        self.calls: list[object] = []

    def scale(self, prefill: int | None, decode: int | None) -> None:
        self.calls.append((prefill, decode))

    def drain(self, name: str) -> None:
        if name != "d":
            raise UnknownNameError.of("worker", name, ["d"])
        self.calls.append(name)


@dataclass
class Running:
    url: str
    router: FakeRouter
    stopped: threading.Event
    worker_pool: FakeWorkerPool
    defaults: dict[str, float]  # sampling of the model's authors


@pytest.fixture
def running() -> Iterator[Running]:
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    stopped = threading.Event()
    worker_pool = FakeWorkerPool()
    router = FakeRouter()
    router.kv = STATS
    defaults: dict[str, float] = {}
    completions = completions_of(
        router, context_length=200, longest_token=10, defaults=defaults
    )
    app = create_app(
        completions, "secret", lambda now: stopped.set(), worker_pool=worker_pool
    )
    config = uvicorn.Config(
        app, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()

    url = f"http://127.0.0.1:{port}"
    yield Running(url, router, stopped, worker_pool, defaults)

    server.should_exit = True
    thread.join()
    listening.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with bind("127.0.0.1", 0) as listening:
        return listening.getsockname()[1]


def answering(service: RunningService, path: str) -> bool:
    try:
        return bool(get(service, path))
    except PeerLostError:
        return False


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C works as at a terminal, in new processes too; in the background it is ignored.

    Set here and not between fork and exec, where the threads of gRPC complain.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "private" / "disagg.json"


@pytest.fixture
def announced_service(running: Running, state_file: Path) -> Running:
    """The service, announced in a state file under the id of this process."""
    service = RunningService(running.url, os.getpid(), "secret", ready=True)
    write_state(state_file, service)
    return running
