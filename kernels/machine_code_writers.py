"""What the compiler makes of the kernels that seal pages, for chips that need not be there.

    python -m disagg.kernels.machine_code_writers encode-2bit-k sm_90        # one row, as JSON

These kernels run once for a page, not once for a token, so what counts is that they compile for
every chip without spilling. As in machine_code.py, each is compiled in a process of its own.
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

from disagg.kernels.encode import CHANNELS, encode_side_kernel, encode_warps, segment_scales_kernel
from disagg.kernels.formats_paged import Side
from disagg.kernels.lowrank import WARPS, low_rank_kernel
from disagg.kernels.machine_code import TARGETS
from disagg.kernels.measured_formats import HEAD_DIM, piece_format

TYPES = {  # of arguments by name; other names that end in _ptr are int32, the rest whole numbers
    "x_ptr": "*fp16",
    "missing_ptr": "*fp16",
    "bytes_ptr": "*u8",
    "segments_ptr": "*u8",
    "start_ptr": "*fp32",
}


@dataclass(frozen=True)
class Source:
    """A kernel with its compile-time arguments, as encode.py and its neighbours launch it."""

    kernel: triton.JITFunction
    constants: dict[str, Any]
    num_warps: int


@dataclass(frozen=True)
class WriterRow:
    """One kernel on one target; spill_bytes: of a thread; instructions: of the whole kernel."""

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int


def _encode(kind: str, bits: int, is_v: bool) -> Source:
    fmt = piece_format(kind, bits)
    side = fmt.v if is_v else fmt.k
    constants = {"SIDE": side, "BLOCK": fmt.block_bytes, "SEGMENT": fmt.segment_bytes}
    along = "row" if is_v else "column"  # a stride of 1 is known to the compiler
    constants |= {f"stride_{along}": 1, f"missing_{along}": 1}
    return Source(encode_side_kernel, constants, encode_warps(side))


def _scales(side: Side) -> Source:
    constants = {"SIDE": side, "BYTES": 4 * HEAD_DIM, "CHANNELS": CHANNELS, "stride_channel": 1}
    return Source(segment_scales_kernel, constants, 4)


SOURCES = {
    **{
        f"encode-{name}-{side}": _encode(kind, bits, side == "v")
        for name, kind, bits in (
            ("2bit", "quantized", 2),
            ("4bit", "quantized", 4),
            ("int8", "rows", 8),
            ("fp8", "float", 8),
            ("lowrank-2bit", "lowrank", 2),
            ("sparse-2bit", "sparse", 2),
        )
        for side in "kv"
    },
    "segment-scales": _scales(piece_format("quantized", 4).k),
    "segment-scales-sparse": _scales(piece_format("sparse", 4).k),
    "low-rank": Source(low_rank_kernel, {"FMT": piece_format("lowrank", 2)}, WARPS),
}


def measure(name: str, target: str) -> WriterRow:
    """Compile one kernel for one target, in this process, and read the result."""
    if name not in SOURCES:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(SOURCES)}")
    if target not in TARGETS:
        raise ValueError(f"no target {target!r}; there are {', '.join(TARGETS)}")
    source, chip = SOURCES[name], TARGETS[target]
    names = source.kernel.arg_names
    types = {x: _type_of(x) for x in names if x not in source.constants}
    compiled = triton.compile(
        ASTSource(
            fn=source.kernel,
            signature={x: types.get(x, "constexpr") for x in names},
            constexprs={(names.index(x),): value for x, value in source.constants.items()},
            attrs={(names.index(x),): [["tt.divisibility", 16]] for x in types},
        ),
        target=chip,
        options={"num_warps": source.num_warps, "enable_fp_fusion": False},
    )
    if chip.backend == "cuda":
        registers, spilled, instructions = _read_cubin(compiled.asm["cubin"])
    else:
        registers, spilled, instructions = _read_amdgcn(compiled.asm["amdgcn"])
    return WriterRow(name, target, registers, spilled, compiled.metadata.shared, instructions)


def _type_of(name: str) -> str:
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
    print(json.dumps(asdict(measure(sys.argv[1], sys.argv[2]))))
