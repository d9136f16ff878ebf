"""What a benchmark says: how far it is, a result for files, a table for people.

It knows neither what is measured nor the command line.
"""

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
from disagg.kernels.cpu.library import describe_backend

PACKAGES = ("torch", "transformers", "triton", "grpcio", "xxhash", "numpy")

TELL_S = 1.0

T = TypeVar("T")
Row = dict[str, Any]  # a JSON object


def tell(cases: Iterable[T], name: Callable[[T], str]) -> Iterator[T]:
    """The cases one by one; stderr has the number and name of each, once a second at most."""
    every, told = list(cases), -TELL_S
    for number, case in enumerate(every, 1):
        if time.monotonic() >= told + TELL_S:
            told = time.monotonic()
            print(
                f"{number} of {len(every)}: {name(case)}", file=sys.stderr, flush=True
            )
        yield case


def result_of(rows: Iterable[Row], notes: str, **more: Any) -> Row:
    """A result as a JSON object; `more` stands beside the rows."""
    return {
        "command": " ".join([_program(), *sys.argv[1:]]),
        "notes": notes,
        "versions": {"python": platform.python_version()}
        | {x: version_of(x) for x in PACKAGES},
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
    """Its version; "none" where it is not installed, as on a machine that only runs kernels."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def describe_machine() -> Row:
    """Where it runs; `load` counts the processes that wanted a core during the last minute."""
    machine = {"system": platform.platform(), "cores": os.cpu_count() or 1}
    return machine | {
        "load": round(os.getloadavg()[0], 2),
        "kernels": describe_backend(),
    }


def p99(values: Sequence[float]) -> float:
    """What one value in a hundred is above."""
    return float(np.percentile(values, 99))


def write(result: Row, path: Path) -> None:
    """As JSON; ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def tables(result: Row) -> str:
    """What people read of a result: its rows, and what it has beside them that are rows too."""
    beside = (x for name, x in result.items() if name != "rows" and isinstance(x, list))
    return "\n\n".join(map(table, filter(None, (result["rows"], *beside))))


def table(rows: Sequence[Row], keys: Sequence[str] = ()) -> str:
    """Text on the left, numbers on the right, a column for every key that some row has."""
    keys = keys or list(dict.fromkeys(key for row in rows for key in row))
    lines = [[key.replace("_", " ") for key in keys]]
    for row in rows:
        lines.append([_cell(row.get(key, "")) for key in keys])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [any(isinstance(row.get(key), str) for row in rows) for key in keys]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
