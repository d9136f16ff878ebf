"""The work of decoding on a GPU, counted in machine code; needs no GPU.

    python -m benchmarks.machine_code --target sm_90 --json --out FILE
    python -m benchmarks.machine_code sm_90 kivi-2-4heads low-rank    # a row of JSON for each

The figure that decides decode speed is instructions per element of K and V in the loop over pages:
an H200 reads memory at full speed only below about 3.9 at 4 bit and 2.1 at 2 bit. It is counted in
the disassembly, so a test can check it on any machine. All other kernels are only checked for
compiling and for spills. Each is compiled in its own process, because some configurations crash the
compiler.

The kernels are those that codecs launch: their code runs on meta tensors, and launches are recorded
instead of executed. Heads have 128 channels unless the name says another number, as
kivi-2-D256-4heads does; there are 8 KV heads, and 32 sequences in a step. Names with `latent` have
one KV head of 512 + 64 channels and 16 query heads.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from typer import Option

from benchmarks import command
from disagg.bench.inputs import LAST_QUERIES, LAYER
from disagg.bench.result import Row, progress, result_of
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.codecs import get_codec
from disagg.codecs.contract import Queries
from disagg.errors import UnknownNameError
from disagg.kernels import ops
from disagg.kernels.formats import ExactFormat
from disagg.kernels.gpu import aligned, attend, plan
from disagg.kernels.gpu.bits import PLAIN, PTX
from disagg.kernels.view import Softmax
from disagg.kv.state import allocate_group
from disagg.paged.append import RecordIds, SequenceGrowth, take_records
from disagg.paged.compressed_kv import GrowingArena
from disagg.paged.layer import (
    LayerRecords,
    PromptChunk,
    attend_step,
    write_prompt,
    write_step,
)
from disagg.paged.page_tables import plan_step, upload

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIM = 128
WIDE = 256
TOKENS = 1 << 14  # of each sequence
HEADS = 8  # of KV
META = torch.device("meta")
CUDA = torch.device("cuda")
PROCESSORS = 132  # of an H200
ARENA_BYTES = 1 << 36  # compilers take less for short addresses
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
ROOT = Path(__file__).resolve().parent.parent
NOTES = "instructions of a thread for each element of K and V; no chip was needed"


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments by name, and its compile options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int | bool]

    def compile(self, chip: GPUTarget) -> CompiledKernel:
        """For a chip, as Triton does before it launches there."""
        driver = SimpleNamespace(
            get_current_target=lambda: chip,
            get_current_device=lambda: chip,
            get_current_stream=lambda _: 0,
        )
        triton.runtime.driver.set_active(driver)
        values = self.arguments.values()
        return self.kernel.run(*values, grid=(1,), warmup=True, **self.options)


@contextmanager
def noted(chip: GPUTarget) -> Iterator[list[Launch]]:
    """The launches of this block on a chip, in order; nothing is launched.

    The block gets tensors of torch's "meta", which have no numbers, and takes the paths of a GPU.
    """
    launches = list[Launch]()
    nvidia = chip.backend == "cuda"
    codes = PTX if nvidia else PLAIN
    target = attend.Chip(nvidia, codes, PLAIN if chip.arch == 80 else codes)

    def record(
        kernel: JITFunction, *values: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        arguments = dict(zip(kernel.arg_names, values, strict=True))
        launches.append(Launch(kernel, arguments, options))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(ops, "on_gpu", lambda _: True),
        patch.object(attend, "chip_of", lambda _: target),
        patch.object(aligned, "TENSOR_COLUMNS", target.columns),
        patch.object(plan, "count_processors", lambda _: PROCESSORS),
    ):
        yield launches


class LaunchRequest(NamedTuple):
    """The first launch of a kernel under a codec; of an encoder, that of K or of V.

    per_head: query heads of a KV head
    sequences: of a step
    latent: channels of it, and the KV heads are one; 0: there are K and V
    """

    spec: str
    kernel: str
    is_v: bool = False
    per_head: int = 4
    sequences: int = 32
    latent: int = 0

    def launch(self, head_dim: int, chip: GPUTarget) -> Launch:
        """The launch with this head dim."""
        for launch in launches(self, head_dim, chip):
            is_v = launch.arguments.get("IS_V", False)
            if launch.kernel.__name__ == self.kernel and is_v == self.is_v:
                return launch
        raise AssertionError(f"{self.spec} never launches {self.kernel}")


def launches(
    request: LaunchRequest, head_dim: int, chip: GPUTarget
) -> Iterator[Launch]:
    """Those of one layer: of a prompt, then of a step in which every sequence seals a page."""
    codec = get_codec(request.spec)
    latent = request.latent or None
    heads = 1 if latent else HEADS
    group = codec.layer_group((LAYER,), heads, head_dim, "float16", latent=latent)
    n = next(x for x in count(TOKENS) if group.sealed(x + 1) > group.sealed(x))
    records = GrowingArena(META)
    arena = torch.empty(ARENA_BYTES, dtype=torch.uint8, device=META)
    states = [allocate_group(group, n, records) for _ in range(request.sequences)]
    growths = [SequenceGrowth(state, n, 1, row) for row, state in enumerate(states)]

    def empty(tokens: int, heads: int) -> torch.Tensor:
        return torch.empty(tokens, heads, head_dim, dtype=torch.float16, device=META)

    query_heads = heads * request.per_head
    with noted(chip) as prompt_and_append:
        k = empty(n, heads).transpose(0, 1)
        v = k[..., :latent] if latent else empty(n, heads).transpose(0, 1)
        q = empty(n, query_heads).transpose(0, 1)
        queries = Queries.of(q[:, -LAST_QUERIES:], heads, n)
        at = upload(RecordIds.of(states[0]), META)
        chunk = PromptChunk(k, v, total=n, queries=queries)
        write_prompt(codec, LayerRecords(group, LAYER, arena), at, chunk)
        new_records = take_records(group, growths, records)
        step = upload(plan_step(codec, group, growths, new_records, CUDA), META)
        new_k = empty(request.sequences, heads)
        new_v = new_k[..., :latent] if latent else empty(request.sequences, heads)
        write_step(codec, step, LAYER, arena, new_k, new_v)
    yield from prompt_and_append
    with noted(chip) as attending:  # which a chip may refuse
        new_q = empty(request.sequences, query_heads)
        attend_step(step, LAYER, arena, new_q, Softmax(head_dim**-0.5))
    yield from attending


ENCODED = (
    "kivi-2",
    "kivi-4",
    "gear-l-2",
    "gear-2",
    "gear-4",
    "kcvt-4",
    "ott",
    "int8",
    "fp8",
    "banded-2",
    "banded-3",
)
# with 256 channels nothing is appended to what chips of NVIDIA refuse to attend to
REFUSED = ("append-gear-2", "append-gear-4")


def _encoders_and_appends() -> dict[str, LaunchRequest]:
    kernels = {}
    for name in ENCODED:
        spec = SPECS[name]
        for side in "kv":
            encode = LaunchRequest(spec, "encode_side_kernel", is_v=side == "v")
            kernels[f"encode-{name}-{side}"] = encode
    for name in ENCODED:
        if name != "ott":
            kernels[f"append-{name}"] = LaunchRequest(SPECS[name], "append_kernel")
    return kernels


OTHERS = {
    **_encoders_and_appends(),
    "append": LaunchRequest(SPECS["raw-fp16"], "append_kernel"),
    "low-rank": LaunchRequest(SPECS["gear-l-2"], "low_rank_kernel"),
    "merge-few": LaunchRequest(SPECS["kivi-2"], "merge_kernel"),
    "merge-many": LaunchRequest(SPECS["kivi-2"], "merge_kernel", sequences=1),
    "plane-scores": LaunchRequest("alignedkv", "plane_scores_kernel"),
    "plane-values": LaunchRequest("alignedkv", "plane_values_kernel"),
}
OTHERS |= {
    f"{name}-D{WIDE}": launch for name, launch in OTHERS.items() if name not in REFUSED
}
LATENT, ROTATED = 512, 64  # channels of DeepSeek's MLA
LATENT_SPECS = {
    "raw-fp16": "raw:dtype=fp16",
    "raw-bf16": "raw:dtype=bf16",
    "int8": "int8",
    "fp8": "fp8",
    "pertoken-4": "pertoken:bits=4",
    "kivi-2": "kivi:bits=2",
    "kivi-4": "kivi:bits=4",
    "kcvt-4": "kcvt:bits=4",
}
LATENT_KERNELS = {
    "attend": "attend_kernel",
    "encode": "encode_side_kernel",
    "append": "append_kernel",
}
LATENTS = {
    f"{kind}-latent-{name}": LaunchRequest(spec, kernel, per_head=16, latent=LATENT)
    for name, spec in LATENT_SPECS.items()
    for kind, kernel in LATENT_KERNELS.items()
    if kind != "encode" or not name.startswith("raw")
}
LATENTS |= {
    "query-latent": LaunchRequest(
        "raw:dtype=fp16", "scale_query_kernel", per_head=16, latent=LATENT
    )
}
OTHERS |= LATENTS
LOOPS = {
    f"{name}{dim}-{heads}heads": LaunchRequest(spec, "attend_kernel", per_head=heads)
    for dim in ("", f"-D{WIDE}")
    for name, spec in SPECS.items()
    for heads in (4, 8)
}
KERNELS = LOOPS | OTHERS


def head_dim_of(kernel: str) -> int:
    """The channels of a head, by the name of a kernel."""
    if kernel in LATENTS:
        return LATENT + ROTATED
    match = re.search(r"-D(\d+)", kernel)
    return int(match[1]) if match else HEAD_DIM


def measure(kernel: str, target: str) -> Row:
    """Compile one kernel for one target, in this process. Bytes that spill are of a thread.

    Of attention only the loop over pages counts:
    per_element: instructions of one thread lane for each element of K and V, in all programs that
                 share the heads
    load_bits:   width of the loads that bring in most bytes
    buffers:     pages that can be in flight while one is worked on, plus that one
    """
    chip = TARGETS[target]
    head_dim = head_dim_of(kernel)
    launch = KERNELS[kernel].launch(head_dim, chip)
    compiled = launch.compile(chip)
    if chip.backend == "hip":
        assembly = read_amdgcn(compiled.asm["amdgcn"])
    else:
        assembly = read_cubin(compiled.asm["cubin"])
    row: Row = {
        "kernel": kernel,
        "target": target,
        "registers": assembly.registers,
        "spill_bytes": assembly.spilled,
        "shared_bytes": compiled.metadata.shared,
    }
    if kernel in OTHERS:
        row["instructions"] = len(assembly.code)
        return row
    pages = launch.arguments["LOOPS"][0]
    if isinstance(pages.fmt, ExactFormat):
        tokens = pages.fmt.slots * pages.fmt.tile_pages
    else:
        tokens = pages.fmt.tokens
    elements = 2 * tokens * head_dim
    threads = chip.warp_size * compiled.metadata.num_warps
    loop = over_pages(assembly.loops, elements // (8 * threads))
    instructions = pages.shape.blocks(1) * len(loop) * threads
    row["per_element"] = round(instructions / elements, 3)
    row["load_bits"] = load_width(loop)
    row["buffers"] = count_buffers(compiled.asm["ttgir"])
    return row


@dataclass(frozen=True)
class Assembly:
    """What a compiler made of a kernel: instructions, those of each loop, and what they need."""

    code: list[str]
    loops: list[list[str]]
    registers: int
    spilled: int


def read_cubin(cubin: bytes) -> Assembly:
    """NVIDIA machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = _disassemble("-sass", file.name)
        usage = _disassemble("-res-usage", file.name)
    lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", sass.stdout)
    code = [instruction for _, instruction in lines]
    index_of = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, instruction in enumerate(code):
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        target = index_of.get(int(branch[1], 16), i) if branch else i
        if target < i:
            loops.append(code[target : i + 1])
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert match is not None
    return Assembly(code, loops, registers=int(match[1]), spilled=int(match[2]))


def _disassemble(flag: str, file: str) -> "subprocess.CompletedProcess[str]":
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run(
        [tool, flag, file], capture_output=True, text=True, check=True
    )


def read_amdgcn(text: str) -> Assembly:
    """AMD code: of its loops vector instructions, of all of it scalar ones too."""
    lines = [line.split(";")[0].strip() for line in text.splitlines()]
    index_of = {
        line.removesuffix(":"): i for i, line in enumerate(lines) if line.endswith(":")
    }
    loops = []
    for i, line in enumerate(lines):
        branch = re.match(r"s_c?branch\w*\s+(\S+)", line)
        target = index_of.get(branch[1], i) if branch else i
        if target < i:
            loops.append(_matching(r"(v|ds|global|buffer)_", lines[target:i]))
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
    assert registers is not None
    assert spilled is not None
    code = _matching(r"[vs]_\w", lines)
    return Assembly(
        code, loops, registers=int(registers[1]), spilled=4 * int(spilled[1])
    )


def _matching(pattern: str, lines: Iterable[str]) -> list[str]:
    return [line for line in lines if re.match(pattern, line)]


def over_pages(loops: list[list[str]], products: int) -> list[str]:
    """The loop over whole pages of prompts, with this many matrix products on NVIDIA chips.

    There it is the shortest that loads ahead: one over other pages does fewer products, and one
    with masks, for the ends of a sequence, is longer. Of AMD code it is the first that multiplies
    matrices: the other follows it. Loops within, of loads whose lanes differ, are counted as
    if run once.
    """

    def count(name: str, loop: list[str]) -> int:
        return sum(name in instruction for instruction in loop)

    amd_loops = [loop for loop in loops if count("mfma", loop)]
    if amd_loops:
        return amd_loops[0]
    whole_pages = [
        loop
        for loop in loops
        if count("LDGSTS", loop) > 4 and count("HMMA", loop) >= products
    ]
    return min(whole_pages, key=len)


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
    counts = re.findall(tile, ttgir.partition("scf.for")[0])
    return min((int(count) for count in counts), default=1)


def compile_all(kernels: Iterable[str], targets: Iterable[str]) -> list[Row]:
    """A row of `measure` for each kernel and target; one that does not compile has a `reason`: the
    first error of the compiler."""
    with ThreadPoolExecutor(2) as pool:
        cases = list(product(kernels, targets))
        jobs = [pool.submit(_compile, *case) for case in cases]
        finished = progress(
            zip(cases, jobs, strict=True), lambda case: " on ".join(case[0])
        )
        return [job.result() for _, job in finished]


def _compile(kernel: str, target: str) -> Row:
    """The row of one kernel, from a process without the interpreter of a test."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    try:
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.machine_code", target, kernel],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            timeout=COMPILE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        reason = f"not done after {error.timeout:.0f} s"
        return {"kernel": kernel, "target": target, "reason": reason}
    if process.returncode == 0:
        return json.loads(process.stdout)
    reason = _cause(process.stderr) or f"exit code {process.returncode}"
    return {"kernel": kernel, "target": target, "reason": reason}


def _cause(stderr: str) -> str:
    """The first error of a traceback, from which the others follow; else the last line."""
    lines = stderr.strip().splitlines()
    for line in lines:
        if re.match(r"[\w.]*(Error|Exception): ", line):
            return line
    return lines[-1] if lines else ""


def read_machine_code(targets: Sequence[str] = tuple(TARGETS)) -> Row:
    """Figures of all kernels for these targets; UnknownNameError for an unknown one."""
    if unknown := set(targets) - set(TARGETS):
        raise UnknownNameError.of("target", min(unknown), TARGETS)
    rows = compile_all(LOOPS, targets)
    others = compile_all(OTHERS, targets)
    return result_of(rows, NOTES, others=others)


def machine_code(
    target: list[str] | None = Option(
        None, "--target", help="GPU, such as sm_90; default: all."
    ),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count instructions, registers and spills of GPU kernels in machine code."""
    show(read_machine_code(**without_none(targets=target)), out, as_json)


def main(target: str, *names: str) -> None:
    """Print a row of JSON for each kernel."""
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"no kernel {name!r}; there are {', '.join(KERNELS)}")
        print(json.dumps(measure(name, target)), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in TARGETS:
        main(*sys.argv[1:])
    else:
        command.main(machine_code, "machine_code")
