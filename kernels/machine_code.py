"""What the compiler makes of the kernels, for chips that need not be there.

    python -m disagg.kernels.machine_code quantized-2bit-4heads sm_90       # one row, as JSON

The figure that decides decode speed is instructions per element of K and V in the loop over pages:
an H200 reads memory at full speed only below about 3.9 at 4 bit and 2.1 at 2 bit. It is counted in
the disassembly, so it can be held by a test on any machine. Some configurations abort the compiler
and the process with it: compile each in a process of its own.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from disagg.kernels.bits import PLAIN, PTX
from disagg.kernels.formats_exact import ExactFormat
from disagg.kernels.formats_paged import PagedFormat
from disagg.kernels.measured_formats import HEAD_DIM, PIECES, exact_format, piece_format
from disagg.kernels.piece_attention import attend_pieces_kernel
from disagg.kernels.raw_attention import attend_raw_kernel
from disagg.kernels.shape import (
    AMD_COLUMNS,
    NVIDIA_COLUMNS,
    compile_options,
    piece_shape,
    pipeline_stages,
    raw_shape,
    tile_slots,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEADS = 8  # KV heads; their number does not reach the loop
KERNELS = tuple(
    f"{kind}-{width}heads"
    for kind in (
        "quantized-2bit",
        "quantized-4bit",
        "raw-float16",
        "raw-bfloat16",
        "dropped-float16",
        "lowrank-2bit",
        "lowrank-4bit",
        "sparse-2bit",
        "sparse-4bit",
        "rows-8bit",
        "float-8bit",
    )
    for width in (4, 8)
)

ABSENT = {  # arguments that are None, by kind of exact tokens
    "raw": ("sides_ptr",),
    "dropped": ("sides_ptr", "span_lo_ptr"),
}


@dataclass(frozen=True)
class Row:
    """The loop over pages of one kernel on one target.

    per_element: instructions of one thread lane for each element of K and V
    spill_bytes: of a thread; load_bits: width of the loads that bring in most bytes
    buffers:     pages that can be in flight while one is worked on, plus that one
    """

    kernel: str
    target: str
    per_element: float
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: int
    buffers: int


def measure(kernel: str, target: str) -> Row:
    """Compile one kernel for one target, in this process, and read the result."""
    if kernel not in KERNELS:
        raise ValueError(f"no kernel {kernel!r}; there are {', '.join(KERNELS)}")
    if target not in TARGETS:
        raise ValueError(f"no target {target!r}; there are {', '.join(TARGETS)}")
    chip = TARGETS[target]
    compiled, elements = compile_kernel(kernel, chip)
    if chip.backend == "cuda":
        loop, registers, spilled = read_cubin(compiled.asm["cubin"])
    else:
        loop, registers, spilled = read_amdgcn(compiled.asm["amdgcn"])
    return Row(
        kernel=kernel,
        target=target,
        per_element=round(len(loop) * chip.warp_size / elements, 3),
        registers=registers,
        spill_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        load_bits=load_width(loop),
        buffers=count_buffers(compiled.asm["ttgir"]),
    )


def compile_kernel(kernel: str, chip: GPUTarget) -> tuple[triton.compiler.CompiledKernel, int]:
    """The kernel with one warp, as paged_attention.py launches it, and the elements of a page."""
    kind, form, width = kernel.split("-")
    columns = NVIDIA_COLUMNS if chip.backend == "cuda" else AMD_COLUMNS
    queries = (32, 1, HEADS * int(width.removesuffix("heads")))
    types = {
        "q_ptr": "*fp32", "pages_ptr": "*i32", "lo_ptr": "*i32", "hi_ptr": "*i32",
        "span_lo_ptr": "*i32", "span_hi_ptr": "*i32", "o_ptr": "*fp32", "lse_ptr": "*fp32",
        "scale": "fp32", "base": "i32", "batch": "i32", "width": "i32",
    }  # fmt: skip
    fmt: ExactFormat | PagedFormat
    if kind in PIECES:
        function = attend_pieces_kernel
        fmt = piece_format(kind, int(form.removesuffix("bit")))
        types |= {"words_ptr": "*i16", "segments_ptr": "*i32", "segment_base": "i32", "runs": "i32"}
        can_read = kind != "float" or chip.arch != 80  # as paged_pieces.py chooses
        constants = {
            "SHAPE": piece_shape(queries, HEADS, fmt, columns, queries[0]),
            "SPELLING": PTX if chip.backend == "cuda" and can_read else PLAIN,
        }
    else:
        function = attend_raw_kernel
        fmt = exact_format(kind, form)
        types["arena_ptr"] = "*fp16" if form == "float16" else "*bf16"
        types |= {"sides_ptr": "*i32", "side_base": "i32"}
        operand = tl.float16 if form == "float16" else tl.bfloat16
        constants = {"SHAPE": raw_shape(queries, HEADS, columns), "OPERAND": operand}
        constants["PRECISION"] = "tf32x3" if chip.backend == "cuda" else "ieee"
        constants |= dict.fromkeys(ABSENT[kind])
        types = {name: kind for name, kind in types.items() if name not in constants}
    constants |= {"FMT": fmt, "STAGES": pipeline_stages(fmt, chip.backend == "cuda")}
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*") or name in ("base", "side_base", "segment_base")
        },
    )
    options = compile_options(fmt, chip.backend == "cuda")
    compiled = triton.compile(source, target=chip, options=options)
    return compiled, tile_slots(fmt) * HEAD_DIM * 2


def read_cubin(cubin: bytes) -> tuple[list[str], int, int]:
    """(instructions of the loop over pages, registers, bytes spilled) of NVIDIA machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        )
        use = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", code.stdout)
    places = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    text = [instruction for _, instruction in lines]
    jumps = []
    for i, instruction in enumerate(text):
        found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if found and places.get(int(found[1], 16), i) < i:
            jumps.append(text[places[int(found[1], 16)] : i + 1])
    usage = re.search(r"REG:(\d+) STACK:(\d+)", use.stdout + use.stderr)
    assert usage is not None
    return pipelined(jumps), int(usage[1]), int(usage[2])


def read_amdgcn(code: str) -> tuple[list[str], int, int]:
    """(vector instructions of the loop over pages, registers, bytes spilled) of AMD code.

    Of the loops that multiply matrices the first is it: the other, for the ends of a sequence,
    comes behind it. Loops within, of loads whose lanes differ, are counted as if run once.
    """
    lines = [line.split(";")[0].strip() for line in code.splitlines()]
    labels = {line.removesuffix(":"): i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        found = re.match(r"s_c?branch\w*\s+(\S+)", line)
        if found and labels.get(found[1], i) < i:
            body = lines[labels[found[1]] : i]
            loops.append([x for x in body if re.match(r"(v|ds|global|buffer)_", x)])
    registers = re.search(r"\.vgpr_count:\s*(\d+)", code)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", code)
    assert registers is not None
    assert spilled is not None
    loop = next(loop for loop in loops if any("mfma" in x for x in loop))
    return loop, int(registers[1]), 4 * int(spilled[1])


def pipelined(loops: list[list[str]]) -> list[str]:
    """The loop that loads ahead; a loop with masks, for the ends of a sequence, does not."""
    return max(loops, key=lambda loop: (sum("LDGSTS" in x for x in loop) > 4, -len(loop)))


def load_width(loop: list[str]) -> int:
    """Bits a thread loads at once, for most of the bytes that the loop loads from memory."""
    nbytes: Counter[int] = Counter()
    for instruction in loop:
        name = instruction.split()[1 if instruction.startswith("@") else 0]
        if name.startswith("LDG"):
            bits = next((int(x) for x in name.split(".") if x in ("64", "128")), 32)
        elif "_load_" in name:
            bits = 32 * int(name[-1]) if re.search(r"x\d$", name) else 32
        else:
            continue
        nbytes[bits] += bits
    return nbytes.most_common(1)[0][0]


def count_buffers(ttgir: str) -> int:
    """The least number of buffers of any 2-D tile that is loaded ahead in shared memory."""
    found = re.findall(
        r"ttg\.local_alloc\s.*?memdesc<(\d+)x\d{2,}x\d{2,}x(?:i8|i16|f16|bf16)", ttgir
    )
    return min((int(count) for count in found), default=1)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], sys.argv[2]))))
