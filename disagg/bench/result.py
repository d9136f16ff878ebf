"""Reports of a benchmark: its progress on stderr, and its result as JSON."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from disagg.errors import ConfigError

PACKAGES = ("torch", "transformers", "triton", "grpcio", "xxhash", "numpy")

INTERVAL_S = 1.0  # between two lines of progress
LEAST_ESTIMATE_S = 2.0  # less is not worth a word

T = TypeVar("T")
Row = dict[str, Any]  # a JSON object


def progress(
    cases: Iterable[T],
    name: Callable[[T], str],
    seconds: Callable[[T], float] | None = None,
) -> Iterator[T]:
    """Yields the cases; writes the number and name of each to stderr, at most once a second.

    seconds: expected time of a case; by default all take equally long
    """
    cases = list(cases)
    expected_s = [seconds(case) if seconds else 1.0 for case in cases]
    trust_s = sum(expected_s) if seconds else 0.0
    began = time.monotonic()
    printed = -INTERVAL_S
    for number, case in enumerate(cases, 1):
        now = time.monotonic()
        if now >= printed + INTERVAL_S:
            printed = now
            past_s, future_s = (
                sum(expected_s[: number - 1]),
                sum(expected_s[number - 1 :]),
            )
            estimate = _estimate(now - began, past_s, future_s, trust_s)
            line = f"{number} of {len(cases)}{estimate}: {name(case)}"
            print(line, file=sys.stderr, flush=True)
        yield case


def _estimate(elapsed_s: float, past_s: float, future_s: float, trust_s: float) -> str:
    """The remaining time, in words; empty before the first measurement.

    past_s, future_s: expected times; scaled to the measured ones, the less the larger `trust_s`
    """
    if not past_s:
        return ""
    left_s = future_s * (elapsed_s + trust_s) / (past_s + trust_s)
    return f", about {left_s:.0f} s left" if left_s >= LEAST_ESTIMATE_S else ""


def announce(line: str) -> None:
    """Write a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def result_of(rows: Iterable[Row], notes: str, **more: Any) -> Row:
    """A result as a JSON object; `more` stands beside the rows."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = version_of(package)
    return {
        "command": " ".join([_program(), *sys.argv[1:]]),
        "notes": notes,
        "versions": versions,
        "machine": describe_machine(),
        **more,
        "rows": [*rows],
    }


def _program() -> str:
    """How this program was called."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return Path(sys.argv[0]).name
    name = spec.name.removesuffix(".__main__")
    return name if name == "disagg" else f"python -m {name}"


def version_of(package: str) -> str:
    """The version of a package; "none" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def describe_machine() -> Row:
    """The host; `load` counts the processes that wanted a core during the last minute."""
    # imports torch: a benchmark checks its arguments before it pays for that
    from disagg.kernels.cpu.library import describe_backend

    return {
        "system": platform.platform(),
        "cores": os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 2),
        "kernels": describe_backend(),
    }


def p99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds."""
    return float(np.percentile(values, 99))


def write(result: Row, path: Path) -> None:
    """As JSON; ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
