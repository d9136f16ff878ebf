"""Do all other kernels compile for chips that need not be there, and do they spill?

Those of attention on codes are in machine_code.py. A process compiles as many as it can; where one
takes the process down, the next process begins behind it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from disagg.bench.machine_code import COMPILE_SECONDS, Failed, cause
from disagg.kernels.machine_code import TARGETS
from disagg.kernels.measured_kernels import SOURCES
from disagg.kernels.spills import Spills


def compile_others(
    targets: Iterable[str] = tuple(TARGETS), kernels: Iterable[str] = tuple(SOURCES)
) -> list[Spills | Failed]:
    """One row for each kernel and target."""
    names = tuple(kernels)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda target: compile_target(target, names), targets)
        return [row for rows in found for row in rows]


def compile_target(target: str, kernels: tuple[str, ...]) -> list[Spills | Failed]:
    """The rows of one target, in the order of `kernels`."""
    rows: list[Spills | Failed] = []
    while len(rows) < len(kernels):
        rest = kernels[len(rows) :]
        made, reason = _compile(target, rest)
        rows += made
        if len(made) < len(rest):
            rows.append(Failed(rest[len(made)], target, reason))
    return rows


def _compile(target: str, kernels: tuple[str, ...]) -> tuple[list[Spills], str]:
    """Rows until one fails, and what was said then; the interpreter of a test does not reach it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "disagg.kernels.spills", target, *kernels]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        out, err = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        err = f"not done after {COMPILE_SECONDS:.0f} s"
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    said = cause(err) or f"exit code {process.returncode}"
    return [Spills(**row) for row in rows], said
