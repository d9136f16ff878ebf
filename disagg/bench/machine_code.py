"""What the compiler makes of the kernels, for chips that need not be there.

    python -m disagg.bench.machine_code sm_90 kivi-2-4heads low-rank    # a row of JSON for each

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


def attention(spec: str, group: int, head_dim: int, chip: GPUTarget) -> CompiledSource:
    """Attention on all pages of a codec for so many query heads of a KV head, as it is launched."""
    formats = served_formats(spec, head_dim)
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


def measure(kernel: str, target: str) -> Row:
    """Compile one kernel for one target, in this process. Bytes that spill are of a thread.

    Of attention it is the loop over pages that counts:
    per_element: instructions of one thread lane for each element of K and V, in all programs that
                 share the heads
    load_bits:   width of the loads that bring in most bytes
    buffers:     pages that can be in flight while one is worked on, plus that one
    """
    chip, head_dim = TARGETS[target], head_dim_of(kernel)
    source = KERNELS[kernel](head_dim, chip)
    made = source.compile(chip)
    amd, asm = chip.backend == "hip", made.asm
    found = read_amdgcn(asm["amdgcn"]) if amd else read_cubin(asm["cubin"])
    row = {"kernel": kernel, "target": target}
    used = {"registers": found.registers, "spill_bytes": found.spilled}
    used |= {"shared_bytes": made.metadata.shared}
    if kernel in OTHERS:
        return row | used | {"instructions": len(found.code)}
    pages = source.constants["LOOPS"][0]
    exact = isinstance(pages.fmt, ExactFormat)
    slots = pages.fmt.slots * pages.fmt.tile_pages if exact else pages.fmt.tokens
    items, threads = 2 * slots * head_dim, chip.warp_size * made.metadata.num_warps
    loop = over_pages(found.loops, items // (8 * threads))
    row["per_element"] = round(pages.shape.blocks(1) * len(loop) * threads / items, 3)
    return row | used | {"load_bits": load_width(loop), "buffers": count_buffers(asm["ttgir"])}


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
Source = Callable[[int, GPUTarget], CompiledSource]  # for so many channels of a head
OTHERS: dict[str, Source] = {
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
LOOPS: dict[str, Source] = {
    f"{name}{dim}-{heads}heads": partial(attention, spec, heads)
    for dim in ("", f"-D{WIDE}")
    for name, spec in SPECS.items()
    for heads in (4, 8)
}
KERNELS = LOOPS | OTHERS


@dataclass(frozen=True)
class Assembly:
    """What a compiler made of a kernel: instructions, those of each loop, and what they need."""

    code: list[str]
    loops: list[list[str]]
    registers: int
    spilled: int


def read_cubin(cubin: bytes) -> Assembly:
    """NVIDIA machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told, use = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-sass", "-res-usage")
        )
    lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", told.stdout)
    places = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    code, loops = [instruction for _, instruction in lines], []
    for i, instruction in enumerate(code):
        found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if found and places.get(int(found[1], 16), i) < i:
            loops.append(code[places[int(found[1], 16)] : i + 1])
    usage = re.search(r"REG:(\d+) STACK:(\d+)", use.stdout + use.stderr)
    assert usage is not None
    return Assembly(code, loops, int(usage[1]), int(usage[2]))


def read_amdgcn(text: str) -> Assembly:
    """AMD code: of its loops vector instructions, of all of it scalar ones too."""
    lines = [line.split(";")[0].strip() for line in text.splitlines()]
    labels = {line.removesuffix(":"): i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        found = re.match(r"s_c?branch\w*\s+(\S+)", line)
        if found and labels.get(found[1], i) < i:
            body = lines[labels[found[1]] : i]
            loops.append([x for x in body if re.match(r"(v|ds|global|buffer)_", x)])
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
    assert registers is not None
    assert spilled is not None
    code = [line for line in lines if re.match(r"[vs]_\w", line)]
    return Assembly(code, loops, int(registers[1]), 4 * int(spilled[1]))


def over_pages(loops: list[list[str]], products: int) -> list[str]:
    """The loop over whole pages of prompts, which does so many matrix products on NVIDIA chips.

    There it is the shortest that loads ahead: one over other pages does fewer products, and one
    with masks, for the ends of a sequence, is longer. Of AMD code it is the first that multiplies
    matrices: the other comes behind it. Loops within, of loads whose lanes differ, are counted as
    if run once.
    """

    def count(name: str, loop: list[str]) -> int:
        return sum(name in x for x in loop)

    if amd := [loop for loop in loops if count("mfma", loop)]:
        return amd[0]
    ahead = (x for x in loops if count("LDGSTS", x) > 4 and count("HMMA", x) >= products)
    return min(ahead, key=len)


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
    """A row of `measure` for each kernel of attention and target; one that does not compile has a
    `reason`: what the compiler said first."""
    return _two_at_once((x, y, (x,)) for x, y in product(kernels, targets))


def compile_others(
    targets: Iterable[str] = tuple(TARGETS), kernels: Sequence[str] = tuple(OTHERS)
) -> list[Row]:
    """The same of all other kernels: a process for each head dim."""
    names = {dim: tuple(x for x in kernels if head_dim_of(x) == dim) for dim in (HEAD_DIM, WIDE)}
    given = product(targets, names.items())
    return _two_at_once((f"others of {dim}", target, some) for target, (dim, some) in given)


def _two_at_once(given: Iterable[tuple[str, str, tuple[str, ...]]]) -> list[Row]:
    """The rows of (name, target, kernels), in order."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            (f"{name} on {target}", pool.submit(_compile_each, target, kernels))
            for name, target, kernels in given
        ]
        return [row for _, job in tell(jobs, lambda job: job[0]) for row in job.result()]


def _compile_each(target: str, kernels: tuple[str, ...]) -> list[Row]:
    """The rows of one target; where a kernel ends the process, the next one begins behind it."""
    rows: list[Row] = []
    while len(rows) < len(kernels):
        rest = kernels[len(rows) :]
        lines, reason = _compile(target, *rest)
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


def main(target: str, *names: str) -> None:
    """Print a row of JSON for each kernel."""
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"no kernel {name!r}; there are {', '.join(KERNELS)}")
        print(json.dumps(measure(name, target)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
