"""What a result file says beside its rows: the command, the versions, the machine."""

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "grpcio", "xxhash", "numpy")
COMMANDS = ("disagg", "__main__.py")  # how programs are called whose commands measure


def result_of(module: str, rows: Iterable[Any], notes: str) -> dict[str, Any]:
    """A result as a JSON object; `rows` are dataclasses, `module` is what measured them."""
    program = Path(sys.argv[0])
    begin = "disagg" if program.name in COMMANDS else f"python -m {module}"
    return {
        "command": " ".join([begin, *sys.argv[1:]]),
        "notes": notes,
        "versions": {"python": platform.python_version()} | {x: version_of(x) for x in PACKAGES},
        "machine": asdict(describe_machine()),
        "rows": [asdict(row) for row in rows],
    }


def version_of(package: str) -> str:
    """Its version; "none" where it is not installed, as on a machine that only runs kernels."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@dataclass(frozen=True)
class Machine:
    """Where it ran; `load` counts the processes that wanted a core during the last minute."""

    system: str
    cores: int
    load: float


def describe_machine() -> Machine:
    """This one, now."""
    return Machine(platform.platform(), os.cpu_count() or 1, round(os.getloadavg()[0], 2))
