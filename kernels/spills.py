"""Do the kernels compile for chips that need not be there, and do their registers suffice?

    python -m disagg.kernels.spills sm_90                      # all kernels, a row of JSON for each
    python -m disagg.kernels.spills sm_90 low-rank compete     # these

machine_code.py counts the instructions of attention on pages; this is for all other kernels
(measured_kernels.py). A kernel that aborts the compiler takes the process with it.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

from disagg.kernels.machine_code import TARGETS
from disagg.kernels.measured_kernels import SOURCES, TYPES
from disagg.kernels.shape import AMD_COLUMNS, NVIDIA_COLUMNS


@dataclass(frozen=True)
class Spills:
    """One kernel on one target; spill_bytes: of a thread; instructions: of the whole kernel."""

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int


def measure(name: str, target: str) -> Spills:
    """Compile one kernel for one target, in this process, and read the result."""
    if name not in SOURCES:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(SOURCES)}")
    if target not in TARGETS:
        raise ValueError(f"no target {target!r}; there are {', '.join(TARGETS)}")
    chip = TARGETS[target]
    source = SOURCES[name](NVIDIA_COLUMNS if chip.backend == "cuda" else AMD_COLUMNS)
    names = source.kernel.arg_names
    types = {x: _type_of(x) for x in names if x not in source.constants} | source.types
    compiled = triton.compile(
        ASTSource(
            fn=source.kernel,
            signature={x: types.get(x, "constexpr") for x in names},
            constexprs={(names.index(x),): value for x, value in source.constants.items()},
            attrs={
                (names.index(x),): [["tt.divisibility", 16]]
                for x, kind in types.items()
                if isinstance(kind, str)
            },
        ),
        target=chip,
        options={"num_warps": source.num_warps, "enable_fp_fusion": False} | source.options,
    )
    if chip.backend == "cuda":
        registers, spilled, instructions = _read_cubin(compiled.asm["cubin"])
    else:
        registers, spilled, instructions = _read_amdgcn(compiled.asm["amdgcn"])
    return Spills(name, target, registers, spilled, compiled.metadata.shared, instructions)


def _type_of(name: str) -> Any:
    """A name of a type, or a tuple of such."""
    return TYPES.get(name, "*i32" if name.endswith("_ptr") else "i32")


def _read_cubin(cubin: bytes) -> tuple[int, int, int]:
    """Registers, bytes spilled and instructions of NVIDIA machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code, use = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-sass", "-res-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", use.stdout + use.stderr)
    assert found is not None
    return int(found[1]), int(found[2]), len(re.findall(r"/\*[0-9a-f]{4,6}\*/\s+\S", code.stdout))


def _read_amdgcn(code: str) -> tuple[int, int, int]:
    """The same of AMD code."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", code)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", code)
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), 4 * int(spilled[1]), len(re.findall(r"^\t[vs]_\w", code, re.M))


if __name__ == "__main__":
    for kernel in sys.argv[2:] or SOURCES:
        print(json.dumps(asdict(measure(kernel, sys.argv[1]))), flush=True)
