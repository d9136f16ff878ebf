"""What the compiler makes of the attention kernels on chips that need not be there.

Each kernel is compiled in a process of its own, because some configurations abort the compiler and
the process with it. The figures are explained in kernels/machine_code.py.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

from disagg.kernels.machine_code import KERNELS, TARGETS, Row

COMPILE_SECONDS = 300.0


@dataclass(frozen=True)
class Failed:
    """A kernel that did not compile, with what the compiler said first."""

    kernel: str
    target: str
    reason: str


def compile_all(
    kernels: Iterable[str] = KERNELS, targets: Iterable[str] = tuple(TARGETS)
) -> list[Row | Failed]:
    """One row for each kernel and target."""
    pairs = list(product(kernels, targets))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: compile_one(*pair), pairs))


def compile_one(kernel: str, target: str) -> Row | Failed:
    """Compile in a fresh process, which the interpreter of a test run does not reach."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "disagg.kernels.machine_code", kernel, target]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Failed(kernel, target, f"not done after {COMPILE_SECONDS:.0f} s")
    if done.returncode != 0:
        return Failed(kernel, target, cause(done.stderr) or f"exit code {done.returncode}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def cause(said: str) -> str:
    """The first error of a traceback, from which the others follow; else the last line."""
    lines = said.strip().splitlines()
    errors = (line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line))
    return next(errors, lines[-1] if lines else "")
