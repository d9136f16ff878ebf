"""What the compiler makes of the kernels on chips that need not be there.

The attention kernels are measured, each compiled in a process of its own, because some
configurations abort the compiler and the process with it; of all others it is asked whether they
compile and spill, as many to a process as it survives. The figures are explained in
machine_code.py.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from disagg.bench.machine_code import LOOPS, OTHERS, TARGETS, Row, Spills
from disagg.bench.result import tell

COMPILE_SECONDS = 300.0

T = TypeVar("T")


@dataclass(frozen=True)
class NotCompiled:
    """A kernel that did not compile, with what the compiler said first."""

    kernel: str
    target: str
    reason: str


def compile_all(
    kernels: Iterable[str] = LOOPS, targets: Iterable[str] = tuple(TARGETS)
) -> list[Row | NotCompiled]:
    """The figures of the attention kernels: one row for each kernel and target."""
    return _two_at_once(compile_one, product(kernels, targets))


def compile_one(kernel: str, target: str) -> Row | NotCompiled:
    """The figures of one kernel."""
    lines, reason = _compile("loops", target, kernel)
    if reason:
        return NotCompiled(kernel, target, reason)
    return Row(**json.loads(lines[-1]))


def compile_others(
    targets: Iterable[str] = tuple(TARGETS), kernels: Iterable[str] = tuple(OTHERS)
) -> list[Spills | NotCompiled]:
    """What all other kernels spill: one row for each kernel and target."""
    names, given = tuple(kernels), (("all others", target) for target in targets)
    done = _two_at_once(lambda _, target: _compile_rest(target, names), given)
    return [row for rows in done for row in rows]


def _two_at_once(call: Callable[[str, str], T], given: Iterable[tuple[str, str]]) -> list[T]:
    with ThreadPoolExecutor(2) as pool:
        jobs = [(pair, pool.submit(call, *pair)) for pair in given]
        return [job.result() for _, job in tell(jobs, lambda job: " on ".join(job[0]))]


def _compile_rest(target: str, kernels: tuple[str, ...]) -> list[Spills | NotCompiled]:
    """The rows of one target; where a kernel ends the process, the next one begins behind it."""
    rows: list[Spills | NotCompiled] = []
    while len(rows) < len(kernels):
        rest = kernels[len(rows) :]
        lines, reason = _compile("others", target, *rest)
        rows += [Spills(**json.loads(line)) for line in lines]
        if len(lines) < len(rest):
            rows.append(NotCompiled(rest[len(lines)], target, reason))
    return rows


def _compile(*arguments: str) -> tuple[list[str], str]:
    """What a process without the interpreter of a test printed, and why it failed, if it did."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "disagg.bench.machine_code", *arguments]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        out, said = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        said = f"not done after {COMPILE_SECONDS:.0f} s"
    failed = process.returncode != 0
    return out.splitlines(), (_cause(said) or f"exit code {process.returncode}") if failed else ""


def _cause(said: str) -> str:
    """The first error of a traceback, from which the others follow; else the last line."""
    lines = said.strip().splitlines()
    errors = (line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line))
    return next(errors, lines[-1] if lines else "")
