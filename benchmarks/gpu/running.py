"""Runs each step in its own process with a share of the time, and reports the results.

A step is forked from a process that has imported everything and has touched no GPU. Its
rows are on disk as soon as they are there, so one that hangs or dies loses none.
Whatever happens, the next one goes on.

    OUT/gpu.json     rows of all steps, written anew when one ends
    OUT/gpu.log      what they printed, one after another
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.interpreter import mend
from benchmarks.gpu.setting import Setting, Step
from disagg.bench.result import Row, describe_machine, result_of, write

GRACE_S = 5.0  # for a step to finish its row when its time is over
LINES, LOG_LINES = 60, 20  # of the summary, and of the log of a step that failed
STEP_LINES, SHORT_LINES = 10, 3  # of each step; where another one failed
NOTES = "steps in order of value; milliseconds and GB/s (1e9 bytes) unless a name says otherwise"


@dataclass(frozen=True)
class Result:
    """What came of a step.

    ended: "done", "out of time" or "died", with the exit code
    """

    step: Step
    ended: str
    seconds: float
    limit_s: float
    rows: list[Row]
    log: str

    @property
    def failures(self) -> list[str]:
        """What was wrong, in words."""
        of_rows = [
            f"{_name(row)}: {row['failure']}" for row in self.rows if "failure" in row
        ]
        return of_rows if self.ended == "done" else [self.ended, *of_rows]

    def as_row(self) -> Row:
        """For the file."""
        about = {
            "ended": self.ended,
            "seconds": round(self.seconds, 1),
            "limit_s": self.limit_s,
        }
        return about | {"failures": self.failures, "rows": self.rows}


def _name(row: Row) -> str:
    keys = ("case", "codec", "model", "test", "shape", "size")
    return " ".join(str(row[key]) for key in keys if key in row) or "step"


def run_steps(
    steps: Sequence[Step], rehearsal: bool, out: Path, scratch: Path, budget: float
) -> list[Result]:
    """Run steps one after another; what one leaves of the budget the next ones
    share.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").write_text("")
    results, ends = list[Result](), time.monotonic() + budget
    for number, step in enumerate(steps):
        seconds_left = max(0.0, ends - time.monotonic())
        share = step.seconds / sum(x.seconds for x in steps[number:])
        folder = scratch / step.name
        folder.mkdir(parents=True)
        results.append(run_step(step, rehearsal, folder, share * seconds_left))
        keep(results, out)
    return results


def run_step(step: Step, rehearsal: bool, folder: Path, limit_s: float) -> Result:
    """Run one in a process of its own."""
    began = time.monotonic()
    setting = Setting(rehearsal, folder, began + limit_s)
    process = multiprocessing.get_context("fork").Process(
        target=_work, args=(step, setting)
    )
    process.start()
    process.join(limit_s + GRACE_S)
    ended = "done"
    if process.exitcode is None:
        ended = f"out of time after {limit_s:.0f} s"
    elif process.exitcode:
        ended = f"died with exit code {process.exitcode}"
    _end_group(process.pid or 0)
    process.join()
    log, file = folder / "log", folder / "rows.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    text = log.read_text(errors="replace") if log.exists() else ""
    return Result(step, ended, time.monotonic() - began, round(limit_s, 1), rows, text)


def _end_group(pid: int) -> None:
    """End a step and all that it started; it leads a session of its own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _work(step: Step, setting: Setting) -> None:
    os.setsid()
    log = (setting.scratch / "log").open("a", buffering=1)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    if setting.rehearsal:
        torch.set_num_threads(1)
        np.seterr(
            divide="ignore"
        )  # the interpreter takes log2(0) where nothing is seen
        mend()
    rows = list[Row]()
    try:
        for row in step.rows(setting):
            rows.append(row)
            print(row, flush=True)
            _write(rows, setting.scratch / "rows.json")
            if setting.seconds_left < 0:
                break
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # whatever lives on in threads


def _write(rows: Sequence[Row], file: Path) -> None:
    """All or nothing: the process may be killed in between."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(rows))
    beside.replace(file)


def keep(results: Sequence[Result], out: Path) -> None:
    """Write all results so far, and append the log of the last one."""
    steps = {x.step.name: x.as_row() for x in results}
    summary = result_of([], NOTES)
    del summary["rows"]
    write(summary | {"machine": describe_machine(), "steps": steps}, out / "gpu.json")
    last = results[-1]
    with (out / "gpu.log").open("a") as file:
        file.write(
            f"== {last.step.name}: {last.ended}, {last.seconds:.1f} s\n{last.log}\n"
        )


# -- what people read


def summary(results: Sequence[Result]) -> list[str]:
    """At most LINES lines: failures first, with the ends of logs, then a few lines of
    each step.
    """
    failed = [x for x in results if x.failures]
    most = SHORT_LINES if failed else STEP_LINES
    failure_lines = [line for x in results for line in _lines_of_failure(x, most)]
    room = max(0, LINES - len(failure_lines))
    lines = list[str]()
    for number, result in enumerate(failed):
        share = (room - len(lines)) // (len(failed) - number)
        lines += _failed(result)[:share]
    return [_short(line) for line in [*lines, *failure_lines][:LINES]]


def _failed(result: Result) -> list[str]:
    faults = result.failures
    head = f"FAILED {result.step.name}: {len(faults)} of {len(result.rows)} rows"
    tail = result.log.strip().splitlines()[-LOG_LINES:]
    return [head, *(f"  {x}" for x in faults[:5]), *(f"  | {x}" for x in tail)]


def _lines_of_failure(result: Result, most: int) -> list[str]:
    state = "FAILED" if result.failures else "ok"
    head = (
        f"{state:6} {result.step.name}, {result.seconds:.0f} of {result.limit_s:.0f} s"
    )
    try:
        lines = result.step.headline(result.rows)
    except Exception as error:  # of rows that are not all there
        lines = [f"no headline: {type(error).__name__}: {error}"]
    return [head, *(f"       {line}" for line in lines[:most])]


def _short(line: str, most: int = 160) -> str:
    return line if len(line) <= most else f"{line[: most - 1]}…"
