"""What the compiler makes of the kernels, for chips that need not be there.

    python -m disagg.bench.machine_code sm_90 kivi-2-4heads low-rank    # a row of JSON for each

The figure that decides decode speed is instructions per element of K and V in the loop over pages:
an H200 reads memory at full speed only below about 3.9 at 4 bit and 2.1 at 2 bit. It is counted in
the disassembly, so it can be held by a test on any machine. Of all other kernels it is asked
whether they compile and spill. Each is compiled in a process of its own, because some
configurations abort the compiler and the process with it.

What is compiled is what a codec launches: its code runs on tensors without numbers, and launches
are noted instead of made. Heads have 128 channels where a name says no other number, as
kivi-2-D256-4heads does; there are 8 KV heads, and 32 sequences in a step.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
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

from disagg.bench.inputs import LAST_QUERIES, LAYER
from disagg.bench.result import Row, tell
from disagg.codecs import get_codec
from disagg.codecs.contract import Queries
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
HEAD_DIM, WIDE = 128, 256
TOKENS, HEADS = 1 << 14, 8  # of each sequence; of KV
META, CUDA = torch.device("meta"), torch.device("cuda")
PROCESSORS, ARENA_BYTES = (
    132,
    1 << 36,
)  # of an H200; compilers take less for short addresses
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
class Launch:
    """A kernel with its arguments by name, and what the compiler is told."""

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
        given = self.arguments.values()
        return self.kernel.run(*given, grid=(1,), warmup=True, **self.options)


@contextmanager
def noted(chip: GPUTarget) -> Iterator[list[Launch]]:
    """What this block would launch on a chip, in order; nothing is launched.

    It gets tensors of torch's "meta", which have no numbers, and goes the ways of a GPU with them.
    """
    found, nvidia = list[Launch](), chip.backend == "cuda"
    codes = PTX if nvidia else PLAIN
    told = attend.Chip(nvidia, codes, PLAIN if chip.arch == 80 else codes)

    def note(
        kernel: JITFunction, *given: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        found.append(
            Launch(kernel, dict(zip(kernel.arg_names, given, strict=True)), options)
        )

    with (
        patch.object(JITFunction, "run", note),
        patch.object(ops, "on_gpu", lambda _: True),
        patch.object(attend, "chip_of", lambda _: told),
        patch.object(aligned, "TENSOR_COLUMNS", told.columns),
        patch.object(plan, "count_processors", lambda _: PROCESSORS),
    ):
        yield found


class Asked(NamedTuple):
    """The first launch of a kernel under a codec; of an encoder, that of K or of V.

    per_head: query heads of a KV head · sequences: of a step
    """

    spec: str
    kernel: str
    is_v: bool = False
    per_head: int = 4
    sequences: int = 32

    def launch(self, head_dim: int, chip: GPUTarget) -> Launch:
        """With so many channels of a head."""
        made = (
            x
            for x in launches(self, head_dim, chip)
            if x.kernel.__name__ == self.kernel
        )
        return next(x for x in made if x.arguments.get("IS_V", False) == self.is_v)


def launches(asked: Asked, head_dim: int, chip: GPUTarget) -> Iterator[Launch]:
    """Those of one layer: of a prompt, then of a step in which every sequence seals a page."""
    codec = get_codec(asked.spec)
    group = codec.layer_group((LAYER,), HEADS, head_dim, "float16")
    n = next(x for x in count(TOKENS) if group.sealed(x + 1) > group.sealed(x))
    places, arena = (
        GrowingArena(META),
        torch.empty(ARENA_BYTES, dtype=torch.uint8, device=META),
    )
    states = [allocate_group(group, n, places) for _ in range(asked.sequences)]
    growths = [SequenceGrowth(state, n, 1, row) for row, state in enumerate(states)]

    def tokens(number: int) -> list[torch.Tensor]:
        rows = (HEADS, HEADS, HEADS * asked.per_head)
        return [
            torch.empty(number, x, head_dim, dtype=torch.float16, device=META)
            for x in rows
        ]

    new_k, new_v, new_q = tokens(asked.sequences)
    with noted(chip) as written:
        k, v, q = (x.transpose(0, 1) for x in tokens(n))
        queries, at = (
            Queries.of(q[:, -LAST_QUERIES:], HEADS, n),
            upload(RecordIds.of(states[0]), META),
        )
        chunk = PromptChunk(k, v, total=n, queries=queries)
        write_prompt(codec, LayerRecords(group, LAYER, arena), at, chunk)
        planned = plan_step(
            codec, group, growths, take_records(group, growths, places), CUDA
        )
        step = upload(planned, META)
        write_step(codec, step, LAYER, arena, new_k, new_v)
    yield from written
    with noted(chip) as attending:  # which a chip may refuse
        attend_step(step, LAYER, arena, new_q, Softmax(head_dim**-0.5))
    yield from attending


ENCODED = (
    *(
        "kivi-2",
        "kivi-4",
        "gear-l-2",
        "gear-2",
        "gear-4",
        "kcvt-4",
        "ott",
        "int8",
        "fp8",
    ),
    *("banded-2", "banded-3"),
)
OTHERS = {
    **{
        f"encode-{name}-{side}": Asked(SPECS[name], "encode_side_kernel", side == "v")
        for name in ENCODED
        for side in "kv"
    },
    **{
        f"append-{name}": Asked(SPECS[name], "append_kernel")
        for name in ENCODED
        if name != "ott"
    },
    "append": Asked(SPECS["raw-fp16"], "append_kernel"),
    "low-rank": Asked(SPECS["gear-l-2"], "low_rank_kernel"),
    "merge-few": Asked(SPECS["kivi-2"], "merge_kernel"),
    "merge-many": Asked(SPECS["kivi-2"], "merge_kernel", sequences=1),
    "plane-scores": Asked("alignedkv", "plane_scores_kernel"),
    "plane-values": Asked("alignedkv", "plane_values_kernel"),
}
# with 256 channels nothing is appended to what chips of NVIDIA refuse to attend to
REFUSED = ("append-gear-2", "append-gear-4")
OTHERS |= {
    f"{name}-D{WIDE}": asked for name, asked in OTHERS.items() if name not in REFUSED
}
LOOPS = {
    f"{name}{dim}-{heads}heads": Asked(spec, "attend_kernel", per_head=heads)
    for dim in ("", f"-D{WIDE}")
    for name, spec in SPECS.items()
    for heads in (4, 8)
}
KERNELS = LOOPS | OTHERS


def head_dim_of(kernel: str) -> int:
    """The channels of a head that the name of a kernel says."""
    found = re.search(r"-D(\d+)", kernel)
    return int(found[1]) if found else HEAD_DIM


def measure(kernel: str, target: str) -> Row:
    """Compile one kernel for one target, in this process. Bytes that spill are of a thread.

    Of attention it is the loop over pages that counts:
    per_element: instructions of one thread lane for each element of K and V, in all programs that
                 share the heads
    load_bits:   width of the loads that bring in most bytes
    buffers:     pages that can be in flight while one is worked on, plus that one
    """
    chip, head_dim = TARGETS[target], head_dim_of(kernel)
    launch = KERNELS[kernel].launch(head_dim, chip)
    made = launch.compile(chip)
    amd, asm = chip.backend == "hip", made.asm
    found = read_amdgcn(asm["amdgcn"]) if amd else read_cubin(asm["cubin"])
    row = {"kernel": kernel, "target": target}
    used = {"registers": found.registers, "spill_bytes": found.spilled}
    used |= {"shared_bytes": made.metadata.shared}
    if kernel in OTHERS:
        return row | used | {"instructions": len(found.code)}
    pages = launch.arguments["LOOPS"][0]
    exact = isinstance(pages.fmt, ExactFormat)
    slots = pages.fmt.slots * pages.fmt.tile_pages if exact else pages.fmt.tokens
    items, threads = 2 * slots * head_dim, chip.warp_size * made.metadata.num_warps
    loop = over_pages(found.loops, items // (8 * threads))
    row["per_element"] = round(pages.shape.blocks(1) * len(loop) * threads / items, 3)
    return (
        row
        | used
        | {"load_bits": load_width(loop), "buffers": count_buffers(asm["ttgir"])}
    )


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
            subprocess.run(
                [tool, flag, file.name], capture_output=True, text=True, check=True
            )
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
    labels = {
        line.removesuffix(":"): i for i, line in enumerate(lines) if line.endswith(":")
    }
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
    ahead = (
        x for x in loops if count("LDGSTS", x) > 4 and count("HMMA", x) >= products
    )
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


def compile_all(kernels: Iterable[str], targets: Iterable[str]) -> list[Row]:
    """A row of `measure` for each kernel and target; one that does not compile has a `reason`: what
    the compiler said first."""
    with ThreadPoolExecutor(2) as pool:
        cases = list(product(kernels, targets))
        jobs = [pool.submit(_compile, *case) for case in cases]
        told = tell(zip(cases, jobs, strict=True), lambda job: " on ".join(job[0]))
        return [job.result() for _, job in told]


def _compile(kernel: str, target: str) -> Row:
    """The row of one, from a process without the interpreter of a test."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "disagg.bench.machine_code", target, kernel]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=COMPILE_SECONDS,
        )
        if not done.returncode:
            return json.loads(done.stdout)
        reason = _cause(done.stderr) or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        reason = f"not done after {late.timeout:.0f} s"
    return {"kernel": kernel, "target": target, "reason": reason}


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
