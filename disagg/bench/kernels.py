"""`disagg bench kernels`: what attention kernels cost, from machine code, on a CPU or on a GPU.

    python -m disagg.bench.kernels --machine-code --json
    python -m disagg.bench.kernels --device cpu --json
    python -m disagg.bench.kernels --device cuda --json

Machine code needs no GPU. On a CUDA device everything runs in one call: first what must be right,
then decode of every codec and shape against fp16, then encode against a copy.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from disagg.bench.kernel_encode import measure_encode
from disagg.bench.kernel_speed import CPU_SHAPES, CUDA_SHAPES, SPECS, measure_shape
from disagg.bench.machine_code import compile_all
from disagg.bench.paged_layers import Shape
from disagg.bench.provenance import result_of
from disagg.bench.spills import compile_others
from disagg.errors import ConfigError

SECTIONS = ("checks", "rows", "others", "encode")  # of a result, as people read them
DEVICES = ("cpu", "cuda")
NOTES = {
    "machine-code": "instructions of a thread for each element of K and V; no chip was needed",
    "cpu": "what a service runs on a CPU, against torch SDPA, one thread, medians by turns",
    "cuda": "CUDA graphs, cold L2, medians by turns; what torch runs is not captured",
}


@dataclass(frozen=True)
class Options:
    """What is asked for; runs: medians are of this many."""

    machine_code: bool = False
    device: str = "cpu"
    runs: int = 15
    specs: Sequence[str] = SPECS
    shapes: Sequence[Shape] = ()
    targets: Sequence[str] = ()


def measure(options: Options) -> dict[str, Any]:
    """The result as a JSON object; ConfigError for a device that is unknown or not there."""
    if options.device not in DEVICES:
        raise ConfigError(f"device {options.device!r} is unknown; known: {', '.join(DEVICES)}")
    if options.machine_code:
        targets = {"targets": options.targets} if options.targets else {}
        result = result_of("disagg.bench.kernels", compile_all(**targets), NOTES["machine-code"])
        return result | {"others": [asdict(row) for row in compile_others(**targets)]}
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; --machine-code needs none")
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)  # as in a worker; and a second core is not always there
    checks = check_spellings(device) if on_gpu else []
    shapes = options.shapes or (CUDA_SHAPES if on_gpu else CPU_SHAPES)
    decode = [
        speed
        for shape in shapes
        for speed in measure_shape(shape, options.specs, device, options.runs)
    ]
    encode = measure_encode(device, options.runs) if on_gpu else []
    result = result_of("disagg.bench.kernels", decode, NOTES[device.type])
    if on_gpu:
        result["gpu"] = torch.cuda.get_device_name(device)
    return result | {"checks": checks, "encode": [asdict(speed) for speed in encode]}


def check_spellings(device: torch.device) -> list[dict[str, Any]]:
    """What kernels/spellings.py finds; it needs Triton, which a CPU does without."""
    found = import_module("disagg.kernels.spellings").check_spellings(device)
    return [asdict(check) for check in found]


def draw(result: dict[str, Any]) -> None:
    """For people: a table of each section."""
    for rows in filter(None, (result.get(name) for name in SECTIONS)):
        print(table(rows), end="\n\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Text on the left, numbers on the right, a column for every key that some row has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
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


def write(result: dict[str, Any], path: Path) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine-code", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--target", action="append", default=[], help="of the machine code: sm_90")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    result = measure(Options(asked.machine_code, asked.device, asked.runs, targets=asked.target))
    if asked.out:
        write(result, asked.out)
    if asked.json:
        print(json.dumps(result))
    else:
        draw(result)


if __name__ == "__main__":
    main()
