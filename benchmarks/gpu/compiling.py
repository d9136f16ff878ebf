"""Compiles every kernel of the steps without a GPU: a table of resources, and a cache to carry.

    python -m benchmarks.gpu.compiling --cache DIR --out kernels.json --pack cache.tar.xz

Launches of all cases are noted on tensors without numbers and compiled, each case in a
process of its own, since compilers abort. What Triton finds in its cache it does not
compile again, so a run that was interrupted goes on. On the machine with the GPU the
same call, over a cache that was carried there, compiles what is left on all cores: it
says how much that was.
"""

import argparse
import json
import multiprocessing
import os
import signal
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from benchmarks.gpu import cases
from benchmarks.gpu.cases import Case
from benchmarks.gpu.layer import DirtyArena, Layer, registers, widened
from benchmarks.machine_code import META, TARGETS, Launch, noted, read_cubin
from disagg.bench.result import Row, describe_machine, write
from disagg.kernels.gpu import bits
from disagg.kernels.gpu.plan import MAX_GRID

ARENA_BYTES, ROOM_BYTES = 1 << 36, 1 << 34
CORES = 16  # of a host with a GPU
LIMIT_S = 900.0  # for the launches of one case
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}  # of a block
CARRIED = (".cubin", ".json")  # what Triton reads of its cache to launch a kernel
NOTES = (
    "launches of all steps, by kernel: registers and spilled bytes of a thread, shared bytes of a "
    "block beside what the chip has; seconds of compiling on one shared core, 0 where unknown"
)


@dataclass(frozen=True)
class Job:
    """The launches of a case; most: registers of attention, None: as it is served."""

    case: Case
    most: int | None = None

    @property
    def name(self) -> str:
        return self.case.name + (f" maxnreg {self.most}" if self.most else "")


def jobs_of_steps() -> dict[str, list[Job]]:
    """What each step launches."""
    registers = [Job(Case(x), y) for x in cases.REGISTER_SPECS for y in cases.REGISTERS]
    served = [Job(x) for x in cases.served()]
    models = [Job(x) for x in cases.models()]
    return {
        "equality": [Job(x) for x in cases.equality()],
        "attention": [*served, *registers],
        "truth": models,
        "decode": [Job(Case(spec)) for spec in cases.DECODED],
        "transfer": served,
        "suite": models,
    }


def all_jobs() -> list[Job]:
    """What the steps launch, the most served first."""
    steps = jobs_of_steps()
    order = ("transfer", "truth", "attention", "equality")
    return list(dict.fromkeys(job for step in order for job in steps[step]))


def launches_of(job: Job, target: str) -> Iterator[Launch]:
    """Every launch of a job, in order; some are alike."""
    case, chip = job.case, TARGETS[target]
    with noted(chip) as notes, registers(job.most):
        _ask_chip()
        layer = Layer(case, DirtyArena(torch.empty(ARENA_BYTES, **_META), ROOM_BYTES))
        for n in layer.n:
            k, v, q = (x.transpose(0, 1) for x in _tokens(case, n))
            layer.write_prompt(k, v, q)
        for m in (1, layer.block()):
            step = layer.plan(m)
            k, v, q = _tokens(case, len(step.rows))
            layer.append(step, k, v)
            sinks = torch.empty(q.shape[1], **_META | {"dtype": q.dtype})
            for one in (step, widened(step, MAX_GRID)):
                layer.attend(one, q, sinks if case.sinks else None)
    for launch in notes:
        if job.most is None or launch.kernel.__name__ == "attend_kernel":
            yield launch


def _ask_chip() -> None:
    """The one launch that is asked for its result: how codes are read."""
    with suppress(RuntimeError, NotImplementedError):  # there is none
        bits.takes_subnormals(META, bits.PTX)


_META: dict[str, Any] = {"dtype": torch.uint8, "device": META}


def _tokens(case: Case, n: int) -> list[Tensor]:
    """k, v [n, H, D] and q [n, Hq, D] without numbers."""
    rows = (case.heads, case.heads, case.heads * case.per_head)
    dtype = getattr(torch, case.dtype)
    return [torch.empty(n, x, case.head_dim, dtype=dtype, device=META) for x in rows]


class Compiles:
    """Counts what Triton compiles, and not takes from its cache.

    count, seconds: so far
    """

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def __call__(self, *, cache_hit: bool, times: Any, **_: object) -> None:
        if not cache_hit:
            self.count += 1
            self.seconds += times.total / 1e6

    @contextmanager
    def counting(self) -> Iterator["Compiles"]:
        """Within, every compilation of this process is counted."""
        before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = self
        try:
            yield self
        finally:
            triton.knobs.compilation.listener = before


def compile_job(job: Job, target: str, measured: Set[str] | None) -> Iterator[Row]:
    """A row for each kernel of a job, with its resources unless its hash is known.

    known: hashes; None: measure no resources, but build launchers
    """
    hashes = set[str]()
    for launch in launches_of(job, target):
        compiles = Compiles()
        with compiles.counting():
            kernel = launch.compile(TARGETS[target])
        if kernel.hash in hashes:
            continue
        hashes.add(kernel.hash)
        row = {"kernel": kernel.metadata.name, "case": job.name, "hash": kernel.hash}
        row |= {"compiled": compiles.count, "seconds": round(compiles.seconds, 1)}
        if measured is None:
            _build_launcher(kernel)
        elif kernel.hash not in measured:
            row |= _needs(kernel, target)
        yield row


def _needs(kernel: CompiledKernel, target: str) -> Row:
    """The resources of a program."""
    code = read_cubin(kernel.asm["cubin"])
    return {
        "registers": code.registers,
        "spill_bytes": code.spilled,
        "shared_bytes": kernel.metadata.shared,
        "shared_limit": SHARED_BYTES[target],
        "instructions": len(code.code),
    }


def _build_launcher(kernel: CompiledKernel) -> None:
    """What Triton has a C compiler make of a signature, where there is a driver to
    link.
    """
    if torch.version.cuda and torch.cuda.is_available():
        from triton.backends.nvidia.driver import CudaLauncher  # links the driver

        with suppress(Exception):  # the first launch says why
            CudaLauncher(kernel.src, kernel.metadata)


# -- in processes


@dataclass
class Running:
    """A process that compiles a job, and until when it may."""

    job: Job
    process: BaseProcess
    until: float


def compile_jobs(
    jobs: Sequence[Job],
    target: str,
    processes: int,
    measured: set[str] | None = None,
    seconds: float = 1e9,
) -> Iterator[Row]:
    """Rows of `compile_job` as they come, and one with a `reason` where a job failed.

    measured: hashes of kernels that were measured before; new ones are added
    seconds:  for all jobs together; jobs that have not started by then are skipped
    """
    deadline = time.monotonic() + seconds
    waiting = list(jobs)
    running: dict[Connection, Running] = {}
    while waiting or running:
        while waiting and len(running) < processes and time.monotonic() < deadline:
            pipe, process = _start(waiting.pop(0), target, measured, deadline)
            running[pipe] = process
        if not running:
            return
        for ready in wait(list(running), 1.0):
            assert isinstance(ready, Connection)
            yield from _receive(ready, running, measured)
        for pipe, process in list(running.items()):
            if time.monotonic() > process.until:
                process.process.kill()
                yield from _end(running.pop(pipe), "its time was over")


def _start(
    job: Job, target: str, measured: Set[str] | None, deadline: float
) -> tuple[Connection, Running]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(False)
    process = context.Process(target=_work, args=(job, target, measured, theirs))
    process.start()
    theirs.close()
    until = min(deadline, time.monotonic() + LIMIT_S)
    return ours, Running(job, process, until)


def _receive(
    pipe: Connection, running: dict[Connection, Running], measured: set[str] | None
) -> Iterator[Row]:
    """The next row of a process; its end, if it has sent all."""
    try:
        row = pipe.recv()
    except EOFError:
        yield from _end(running.pop(pipe))
        return
    if measured is not None and "registers" in row:
        measured.add(row["hash"])
    yield row


def _work(job: Job, target: str, measured: Set[str] | None, pipe: Connection) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        for row in compile_job(job, target, measured):
            pipe.send(row)
        pipe.send({"case": job.name, "done": True})
    except Exception as error:
        pipe.send(
            {"case": job.name, "reason": f"{type(error).__name__}: {error}"[:500]}
        )


def _end(running: Running, reason: str = "") -> Iterator[Row]:
    running.process.join()
    code = running.process.exitcode
    if reason or code:
        yield {"case": running.job.name, "reason": reason or f"exit code {code}"}


# -- the cache that travels


def pack(cache: Path, archive: Path, hashes: Iterable[str] = ()) -> int:
    """Put a Triton cache into an archive, but only what a launch reads; its bytes.

    hashes: of the kernels; empty: all that are there
    """
    names = {_folder_of(x) for x in hashes}
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for file in sorted(cache.glob("*/*")):
            carried = file.suffix in CARRIED and (
                not names or file.parent.name in names
            )
            if carried:
                tar.add(file, file.relative_to(cache))
    return archive.stat().st_size


def _folder_of(key: str) -> str:
    """The folder of a kernel in the cache of Triton."""
    from triton.runtime.cache import (
        _base32,
    )  # not public; the layout is checked by a test

    return str(_base32(key))


def unpack(archive: Path, cache: Path) -> None:
    """Fill a cache from an archive."""
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(cache, filter="data")


# -- the table


def table(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """One row for every kernel, with the first case that launches it; and what
    failed.
    """
    kernels, failed = dict[str, Row](), dict[str, Row]()
    for row in rows:
        case = row["case"]
        if "reason" in row:
            failed[case] = row
        elif "done" in row:  # now; an earlier run was interrupted
            failed.pop(case, None)
        elif "registers" in row or row["hash"] in kernels:
            first = kernels.setdefault(row["hash"], dict(row))
            first["seconds"] = max(first["seconds"], row["seconds"])
    hidden = ("hash", "compiled")
    shown = [
        {k: v for k, v in row.items() if k not in hidden} for row in kernels.values()
    ]
    return shown, list(failed.values())


def result_of(rows: Sequence[Row], target: str) -> Row:
    """The table as a JSON object."""
    kernels, failed = table(rows)
    done = sum("done" in row for row in rows)
    summary = {
        "jobs": f"{done} of {len(all_jobs())}",
        "kernels": len(kernels),
        "seconds": round(sum(x["seconds"] for x in kernels)),
        "spilling": sum(x["spill_bytes"] > 0 for x in kernels),
        "most_shared_bytes": max((x["shared_bytes"] for x in kernels), default=0),
        "over_limit": sum(x["shared_bytes"] > x["shared_limit"] for x in kernels),
    }
    versions = {x: version(x) for x in ("torch", "triton")}
    machine = describe_machine()
    about: Row = {
        "notes": NOTES,
        "target": target,
        "versions": versions,
        "machine": machine,
    }
    about |= {"summary": summary, "steps": estimates(rows), "failed": failed}
    return about | {"rows": kernels}


def estimates(rows: Sequence[Row]) -> Row:
    """What each step would compile that came first to a machine without a cache.

    kernels: of the step · core_s: seconds of compiling on one core, as measured here
    cold_s:  on CORES of them; with the cache that travels it is 0
    """
    estimates: Row = {}
    seconds = dict[str, float]()
    for row in rows:
        if "hash" in row:
            key = row["hash"]
            seconds[key] = max(seconds.get(key, 0.0), row["seconds"])
    for step, jobs in jobs_of_steps().items():
        names = {job.name for job in jobs}
        own = {x["hash"] for x in rows if "hash" in x and x["case"] in names}
        total = sum(seconds[x] for x in own)
        longest = max((seconds[x] for x in own), default=0.0)
        cold = max(longest, total / CORES)
        estimates[step] = {"kernels": len(own), "core_s": round(total)}
        estimates[step]["cold_s"] = round(cold)
    return estimates


def main() -> None:
    """Compile, write the table, pack the cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cache", type=Path, required=True, help="a cache folder of Triton"
    )
    parser.add_argument("--out", type=Path, help="where the table is written, as JSON")
    parser.add_argument(
        "--pack", type=Path, help="where the cache is packed, as .tar.xz"
    )
    parser.add_argument("--target", choices=SHARED_BYTES, default="sm_90")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="go on another time")
    parser.add_argument(
        "--match", default="", help="only jobs whose names contain this"
    )
    options = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(options.cache.resolve())
    rows = compile_rest(options)
    if options.out:
        write(result_of(rows, options.target), options.out)
    if options.pack:
        keys = [x["hash"] for x in rows if "hash" in x]
        print(f"{pack(options.cache, options.pack, keys):,} bytes in {options.pack}")


def compile_rest(options: argparse.Namespace) -> list[Row]:
    """Compile the jobs that earlier runs have not finished; the rows of all runs."""
    log = options.cache / "rows.jsonl"
    rows = read_log(log)
    done = {x["case"] for x in rows if "done" in x}
    jobs = [x for x in all_jobs() if x.name not in done and options.match in x.name]
    options.cache.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        measured = {row["hash"] for row in rows if "registers" in row}
        for row in compile_jobs(
            jobs, options.target, options.processes, measured, options.seconds
        ):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            print(row, flush=True)
    return rows


def read_log(log: Path) -> list[Row]:
    """The rows that runs before this one wrote."""
    return [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []


if __name__ == "__main__":
    main()
