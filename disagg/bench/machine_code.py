"""What the compiler makes of the kernels, for chips that need not be there.

    python -m disagg.bench.machine_code loops sm_90 kivi-2-4heads    # a row of JSON
    python -m disagg.bench.machine_code others sm_90 low-rank        # a row for each name, or all

The figure that decides decode speed is instructions per element of K and V in the loop over pages:
an H200 reads memory at full speed only below about 3.9 at 4 bit and 2.1 at 2 bit. It is counted in
the disassembly, so it can be held by a test on any machine. Each attention kernel is compiled in a
process of its own, because some configurations abort the compiler and the process with it; of all
others it is asked whether they compile and spill, as many to a process as it survives. Pages are
those of the codecs that are served, of 128 channels where a name says no other number, as
kivi-2-D256-4heads does; queries 32 sequences of 8 KV heads.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from disagg.bench.result import Row, tell
from disagg.codecs import get_codec
from disagg.codecs.alignedkv import AlignedKV, aligned_format
from disagg.codecs.exact import exact_format
from disagg.codecs.quantized import QuantizedCodec, flush_format, prompt_format
from disagg.kernels.formats import AlignedFormat, ExactFormat, PageFormat
from disagg.kernels.gpu import aligned, plan
from disagg.kernels.gpu.append import append_kernel, append_warps
from disagg.kernels.gpu.attend import Chip, attend_kernel, loops_of
from disagg.kernels.gpu.bits import PLAIN, PTX
from disagg.kernels.gpu.encode import (
    CHANNELS,
    encode_blocks,
    encode_side_kernel,
    encode_warps,
    segment_scales_kernel,
)
from disagg.kernels.gpu.lowrank import WARPS as LOW_RANK_WARPS
from disagg.kernels.gpu.lowrank import low_rank_kernel
from disagg.kernels.gpu.reduce import COLUMNS, FEW, MANY, merge_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIM, WIDE = 128, 256
SPECS = {
    "kivi-2": "kivi:bits=2",
    "kivi-4": "kivi:bits=4",
    "gear-l-2": "gear-l:bits=2,backbone=kivi",
    "gear-l-4": "gear-l:bits=4,backbone=kivi",
    "gear-2": "gear:bits=2,backbone=kivi",
    "gear-4": "gear:bits=4",
    "gear": "gear",
    "banded-2": "banded:bits=2",
    "banded-3": "banded:bits=3",
    "kcvt-4": "kcvt:bits=4",
    "ott": "ott",
    "int8": "int8",
    "fp8": "fp8",
    "raw-fp16": "raw:dtype=fp16",
    "raw-bf16": "raw:dtype=bf16",
    "h2o": "h2o",
}
LOOPS = tuple(f"{x}{dim}-{n}heads" for dim in ("", f"-D{WIDE}") for x in SPECS for n in (4, 8))
COMPILE_SECONDS = 300.0


@dataclass(frozen=True)
class CompiledSource:
    """A kernel with its compile-time arguments; types: of arguments that TYPES has otherwise."""

    kernel: triton.JITFunction
    constants: dict[str, Any]
    num_warps: int = 1
    options: dict[str, int | bool] = field(default_factory=dict)
    types: dict[str, Any] = field(default_factory=dict)

    def compile(self, chip: GPUTarget) -> CompiledKernel:
        """For a chip, as it is launched."""
        names = self.kernel.arg_names
        types = {x: _type_of(x) for x in names if x not in self.constants} | self.types
        paths = _paths(tuple(types.get(x, "constexpr") for x in names), names)
        source = ASTSource(
            fn=self.kernel,
            signature={x: types.get(x, "constexpr") for x in names},
            constexprs={(names.index(x),): value for x, value in self.constants.items()},
            attrs={path: [["tt.divisibility", 16]] for path in paths},
        )
        options = {"num_warps": self.num_warps, "enable_fp_fusion": False} | self.options
        return triton.compile(source, target=chip, options=options)


# types of arguments by name; of others, those that end in _ptr are int32 and the rest whole numbers
TYPES: dict[str, Any] = {
    **{f"{name}_ptr": "*fp32" for name in ("q", "o", "lse", "scores", "p", "total")},
    **{f"part_{name}_ptr": "*fp32" for name in ("o", "lse")},
    **{f"{name}_ptr": "*fp16" for name in ("x", "missing", "k", "v")},
    **{f"{name}_ptr": "*u8" for name in ("bytes", "segments", "absent", "arena")},
    "words_ptr": "*i16",
    "levels_ptr": "*i8",
    "scale": "fp32",
    "seed": "i64",
}


def _paths(kinds: Any, names: Sequence[str], at: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where arguments are that are multiples of 16: pointers, and bases."""
    for i, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from _paths(kind, [names[i]] * len(kind), (*at, i))
        elif kind[0] == "*" or names[i].endswith(("base", "bases")):
            yield (*at, i)


def _type_of(name: str) -> Any:
    """A name of a type, or a tuple of such."""
    return TYPES.get(name, "*i32" if name.endswith("_ptr") else "i32")


def head_dim_of(kernel: str) -> int:
    """The channels of a head that the name of a kernel says."""
    found = re.search(r"-D(\d+)", kernel)
    return int(found[1]) if found else HEAD_DIM


def page_format(spec: str, head_dim: int = HEAD_DIM) -> PageFormat | ExactFormat:
    """The pages of a prompt under a codec."""
    codec = get_codec(spec)
    if isinstance(codec, QuantizedCodec):
        return prompt_format(codec, head_dim)
    return exact_format(codec.layer_group((0,), 8, head_dim, "float16").page)


def served_formats(spec: str, head_dim: int = HEAD_DIM) -> list[PageFormat | ExactFormat]:
    """All that a decode step of a codec attends to in one launch, pages of prompts first."""
    codec = get_codec(spec)
    group = codec.layer_group((0,), 8, head_dim, "float16")
    found = [page_format(spec, head_dim)]
    if group.flush_page is not None:
        page = group.flush_page
        quantized = isinstance(codec, QuantizedCodec)
        found.append(flush_format(codec, head_dim) if quantized else exact_format(page))
    if group.kept_limit:
        found.append(exact_format(group.raw, group.side))
    return found if group.page == group.raw else [*found, exact_format(group.raw)]


def attention(
    formats: Sequence[PageFormat | ExactFormat], group: int, chip: GPUTarget
) -> CompiledSource:
    """Attention on pages of all formats for so many query heads of a KV head, as it is launched."""
    nvidia = chip.backend == "cuda"
    float8 = PTX if nvidia and chip.arch != 80 else PLAIN  # as gpu/attend.py chooses
    told = Chip(nvidia, PTX if nvidia else PLAIN, float8)
    loops = loops_of(formats, range(len(formats)), 1, group, told)
    count = len(loops)
    sides = (isinstance(fmt, ExactFormat) and fmt.side is not None for fmt in formats)
    types = {
        "q_ptr": "*fp16",
        "arenas": ("*u8",) * count,
        "tables": tuple((*("*i32",) * 3, "*i32" if side else "constexpr") for side in sides),
        "bases": (("i32", "i32"),) * count,
        "widths": ("i32",) * count,
    }
    constants = {"LOOPS": loops, "COUNT": count}
    options = plan.compile_options(formats[0], nvidia)
    return CompiledSource(attend_kernel, constants, 1, options, types)


def measure_loop(kernel: str, target: str) -> Row:
    """Compile one attention kernel for one target, in this process: its loop over pages.

    per_element: instructions of one thread lane for each element of K and V, in all programs that
                 share the heads
    spill_bytes: of a thread; load_bits: width of the loads that bring in most bytes
    buffers:     pages that can be in flight while one is worked on, plus that one
    """
    chip = TARGETS[target]
    name, _, width = kernel.rpartition("-")
    head_dim = head_dim_of(name)
    formats = served_formats(SPECS[name.removesuffix(f"-D{head_dim}")], head_dim)
    fmt = formats[0]
    source = attention(formats, int(width.removesuffix("heads")), chip)
    compiled, blocks = source.compile(chip), source.constants["LOOPS"][0].shape.blocks(1)
    slots = fmt.slots * fmt.tile_pages if isinstance(fmt, ExactFormat) else fmt.tokens
    items, threads = 2 * slots * head_dim, chip.warp_size * compiled.metadata.num_warps
    if chip.backend == "cuda":
        code, registers, spilled = read_cubin(compiled.asm["cubin"])
        loop = pipelined(code, items // (8 * threads))
    else:
        loop, registers, spilled = read_amdgcn(compiled.asm["amdgcn"])
    return {
        "kernel": kernel,
        "target": target,
        "per_element": round(blocks * len(loop) * threads / items, 3),
        "registers": registers,
        "spill_bytes": spilled,
        "shared_bytes": compiled.metadata.shared,
        "load_bits": load_width(loop),
        "buffers": count_buffers(compiled.asm["ttgir"]),
    }


def measure_spills(kernel: str, target: str) -> Row:
    """Compile one of the other kernels for one target, in this process.

    spill_bytes: of a thread; instructions: of the whole kernel
    """
    chip, head_dim = TARGETS[target], head_dim_of(kernel)
    compiled = OTHERS[kernel](head_dim, chip).compile(chip)
    if chip.backend == "cuda":
        code, registers, spilled = read_cubin(compiled.asm["cubin"])
        count = len(code)
    else:
        text = compiled.asm["amdgcn"]
        registers, spilled = _amd_registers(text)
        count = len(re.findall(r"^\t[vs]_\w", text, re.M))
    return {
        "kernel": kernel,
        "target": target,
        "registers": registers,
        "spill_bytes": spilled,
        "shared_bytes": compiled.metadata.shared,
        "instructions": count,
    }


def _encode(name: str, is_v: bool, head_dim: int, chip: GPUTarget) -> CompiledSource:
    fmt = page_format(SPECS[name], head_dim)
    assert isinstance(fmt, PageFormat)
    side = fmt.v if is_v else fmt.k
    constants: dict[str, Any] = {"FMT": fmt, "IS_V": is_v, "BAND": 0}
    constants["BLOCKS"] = encode_blocks(side)
    if fmt.valid is None:
        constants["absent_ptr"] = None
    along = "row" if is_v else "column"  # a stride of 1 is known to the compiler
    constants |= {f"stride_{along}": 1, f"missing_{along}": 1}
    return CompiledSource(encode_side_kernel, constants, encode_warps(side))


def _scales(name: str, head_dim: int, chip: GPUTarget) -> CompiledSource:
    fmt = page_format(SPECS[name], head_dim)
    assert isinstance(fmt, PageFormat)
    constants = {"SIDE": fmt.k, "BYTES": fmt.segment_bytes, "CHANNELS": CHANNELS}
    return CompiledSource(segment_scales_kernel, constants | {"stride_channel": 1}, 4)


def _low_rank(head_dim: int, chip: GPUTarget) -> CompiledSource:
    fmt = page_format(SPECS["gear-l-2"], head_dim)
    return CompiledSource(low_rank_kernel, {"FMT": fmt}, LOW_RANK_WARPS)


def _append(name: str, head_dim: int, chip: GPUTarget) -> CompiledSource:
    codec = get_codec(SPECS[name])
    raw = exact_format(codec.layer_group((0,), 8, head_dim, "float16").raw)
    fmt = codec.seal_format(head_dim)
    codes = isinstance(fmt, PageFormat)
    constants = {"RAW": raw, "DTYPE": tl.float16, "FMT": fmt, "CODES": codes}
    constants["BANDS"] = len(fmt.k_sides) if isinstance(fmt, PageFormat) else 0
    types = {"segments_ptr": "*i32", "k_ptr": "*fp16", "v_ptr": "*fp16"}
    return CompiledSource(append_kernel, constants, append_warps(fmt), types=types)


def _merge(units: int, num_warps: int, head_dim: int, chip: GPUTarget) -> CompiledSource:
    constants = {"D": head_dim, "UNITS": units, "COLUMNS": COLUMNS, "SINKS": 0}
    return CompiledSource(merge_kernel, constants, num_warps)


def _planes(kernel: str, head_dim: int, chip: GPUTarget) -> CompiledSource:
    columns = plan.NVIDIA_COLUMNS if chip.backend == "cuda" else plan.AMD_COLUMNS
    fmt: AlignedFormat = aligned_format(AlignedKV().page_layout(head_dim), head_dim)
    constants = {"FMT": fmt, "SHAPE": plan.shape_of(fmt, 1, 4, columns)}
    return CompiledSource(getattr(aligned, kernel), constants, 4 * plan.warps_of(head_dim))


ENCODED = (
    *("kivi-2", "kivi-4", "gear-l-2", "gear-2", "gear-4", "kcvt-4", "ott", "int8", "fp8"),
    *("banded-2", "banded-3"),
)
OTHERS: dict[str, Callable[[int, GPUTarget], CompiledSource]] = {
    **{
        f"encode-{name}-{side}": partial(_encode, name, side == "v")
        for name in ENCODED
        for side in "kv"
    },
    **{f"append-{name}": partial(_append, name) for name in (*ENCODED, "h2o") if name != "ott"},
    "append": partial(_append, "raw-fp16"),
    "segment-scales": partial(_scales, "kcvt-4"),
    "segment-scales-sparse": partial(_scales, "gear-4"),
    "low-rank": _low_rank,
    "merge-few": partial(_merge, FEW, 1),
    "merge-many": partial(_merge, MANY, 4),
    "plane-scores": partial(_planes, "plane_scores_kernel"),
    "plane-values": partial(_planes, "plane_values_kernel"),
}
OTHERS |= {f"{name}-D{WIDE}": source for name, source in OTHERS.items()}


def read_cubin(cubin: bytes) -> tuple[list[tuple[int, str]], int, int]:
    """(address and text of every instruction, registers, bytes spilled) of NVIDIA machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code, use = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-sass", "-res-usage")
        )
    lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", code.stdout)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", use.stdout + use.stderr)
    assert usage is not None
    found = [(int(address, 16), instruction) for address, instruction in lines]
    return found, int(usage[1]), int(usage[2])


def pipelined(code: list[tuple[int, str]], products: int) -> list[str]:
    """The shortest loop that loads ahead and does so many matrix products: one over other pages
    does fewer, and one with masks, for the ends of a sequence, is longer."""
    places = {address: i for i, (address, _) in enumerate(code)}
    text = [instruction for _, instruction in code]
    loops = []
    for i, instruction in enumerate(text):
        found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if found and places.get(int(found[1], 16), i) < i:
            loops.append(text[places[int(found[1], 16)] : i + 1])

    def count(name: str, loop: list[str]) -> int:
        return sum(name in x for x in loop)

    ahead = (x for x in loops if count("LDGSTS", x) > 4 and count("HMMA", x) >= products)
    return min(ahead, key=len)


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
    loop = next(loop for loop in loops if any("mfma" in x for x in loop))
    return loop, *_amd_registers(code)


def _amd_registers(code: str) -> tuple[int, int]:
    """(registers, bytes spilled) of AMD code."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", code)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", code)
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), 4 * int(spilled[1])


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
    """The least number of buffers of any 2-D tile that the first loop loads ahead in shared memory:
    the one over pages of prompts."""
    tile = r"ttg\.local_alloc\s.*?memdesc<(\d+)x\d{2,}x\d{2,}x(?:i8|i16|f16|bf16)"
    found = re.findall(tile, ttgir.partition("scf.for")[0])
    return min((int(count) for count in found), default=1)


def compile_all(
    kernels: Iterable[str] = LOOPS, targets: Iterable[str] = tuple(TARGETS)
) -> list[Row]:
    """A row of `measure_loop` for each kernel and target; one that does not compile has a `reason`:
    what the compiler said first."""
    return _two_at_once((x, "loops", y, (x,)) for x, y in product(kernels, targets))


def compile_others(
    targets: Iterable[str] = tuple(TARGETS), kernels: Sequence[str] = tuple(OTHERS)
) -> list[Row]:
    """The same of all other kernels: rows of `measure_spills`; a process for each head dim."""
    names = {dim: tuple(x for x in kernels if head_dim_of(x) == dim) for dim in (HEAD_DIM, WIDE)}
    given = product(targets, names.items())
    return _two_at_once((f"others of {d}", "others", x, some) for x, (d, some) in given)


def _two_at_once(given: Iterable[tuple[str, str, str, tuple[str, ...]]]) -> list[Row]:
    """The rows of (name, kind, target, kernels), in order."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            (f"{name} on {target}", pool.submit(_compile_each, kind, target, kernels))
            for name, kind, target, kernels in given
        ]
        return [row for _, job in tell(jobs, lambda job: job[0]) for row in job.result()]


def _compile_each(kind: str, target: str, kernels: tuple[str, ...]) -> list[Row]:
    """The rows of one target; where a kernel ends the process, the next one begins behind it."""
    rows: list[Row] = []
    while len(rows) < len(kernels):
        rest = kernels[len(rows) :]
        lines, reason = _compile(kind, target, *rest)
        rows += map(json.loads, lines)
        if len(lines) < len(rest):
            rows.append({"kernel": rest[len(lines)], "target": target, "reason": reason})
    return rows


def _compile(*arguments: str) -> tuple[list[str], str]:
    """What a process without the interpreter of a test printed, and why it failed, if it did."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "disagg.bench.machine_code", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired as late:  # what it has are bytes, even of text
        return (late.stdout or b"").decode().splitlines(), f"not done after {late.timeout:.0f} s"
    cause = (_cause(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""
    return done.stdout.splitlines(), cause


def _cause(said: str) -> str:
    """The first error of a traceback, from which the others follow; else the last line."""
    lines = said.strip().splitlines()
    errors = (line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line))
    return next(errors, lines[-1] if lines else "")


def main(kind: str, target: str, *names: str) -> None:
    """Print a row of JSON for each kernel."""
    known, measure = (LOOPS, measure_loop) if kind == "loops" else (tuple(OTHERS), measure_spills)
    if target not in TARGETS:
        raise ValueError(f"no target {target!r}; there are {', '.join(TARGETS)}")
    for name in names or known:
        if name not in known:
            raise ValueError(f"no kernel {name!r}; there are {', '.join(known)}")
        print(json.dumps(measure(name, target)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
