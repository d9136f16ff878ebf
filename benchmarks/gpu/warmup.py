"""Before the steps: unpack the carried cache, and compile the missing kernels in parallel."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.compiling import SHARED_BYTES, all_jobs, compile_jobs, unpack
from benchmarks.gpu.setting import Setting
from disagg.bench.result import Row

ARCHIVE = "DISAGG_KERNEL_CACHE"  # of the environment: the archive, where one travelled


def rows(setting: Setting) -> Iterator[Row]:
    """The compiled kernels and times; a failure is reported by the step that needs the kernel."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    began = time.monotonic()
    archive = os.environ.get(ARCHIVE)
    if archive and Path(archive).exists():
        unpack(Path(archive), cache)
    carried = len(list(cache.glob("*/*.cubin")))
    yield {"carried": carried, "unpack_s": time.monotonic() - began}
    if setting.rehearsal:  # an interpreter compiles nothing
        yield {"jobs": len(all_jobs()), "compiled": 0, "compile_s": 0.0}
        return
    began, compiled, failed = time.monotonic(), 0, list[Row]()
    processes = os.cpu_count() or 1
    for row in compile_jobs(
        all_jobs(), _target(), processes, None, setting.seconds_left
    ):
        compiled += row.get("compiled", 0)
        failed += [row] if "reason" in row else []
    yield {"compiled": compiled, "compile_s": time.monotonic() - began}
    yield from failed


def _target() -> str:
    """The chip of this machine, without initialising CUDA: processes are forked later."""
    if shutil.which("nvidia-smi") is None:
        return "sm_90"
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, text=True).stdout
    target = "sm_" + output.partition("\n")[0].strip().replace(".", "")
    return target if target in SHARED_BYTES else "sm_90"


def headline(rows: list[Row]) -> list[str]:
    """How many kernels were carried, and how many compiled."""
    summary: Row = {}
    for row in rows:
        summary |= row
    reasons = sum("reason" in row for row in rows)
    return [
        f"{summary.get('carried', 0)} kernels carried, {summary.get('compiled', 0)} compiled in "
        f"{summary.get('compile_s', 0.0):.0f} s, {reasons} jobs failed"
    ]
