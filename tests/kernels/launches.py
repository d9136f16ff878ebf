"""Launches of Triton kernels up to the machine code of a chip that need not be there.

    python -m tests.kernels.launches '{"spec": "kivi:bits=4"}' '{"spec": "ott", "sequences": 3}'

Tensors are torch's fake ones on a CUDA device: shapes, strides and addresses without numbers. So
the code takes the ways it takes on a GPU, Triton binds and specialises the very arguments of every
launch and compiles that for sm_90, or CAPABILITY, and any operation that needs a number raises.
In place of the launch the arguments are held against the parameters of the compiled kernel. Prints
a line of JSON for each scenario: what was launched, what was compiled anew for it, and the error
that ended it, or "".
Needs a process of its own, without TRITON_INTERPRET.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from disagg.codecs import get_codec
from disagg.codecs.contract import Codec, Prompt, Queries
from disagg.kernels.gpu import bits
from disagg.kernels.view import Softmax
from disagg.kv.plan import LayerGroup
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
from disagg.paged.page_tables import GroupStep, plan_step, upload

DEVICE = torch.device("cuda:0")
ADDRESS = 1 << 40  # of every storage: aligned, as those of torch are
CAPABILITY = int(os.environ.get("CAPABILITY", "90"))
SHARED_KIB = {
    80: 163,
    89: 99,
    90: 227,
    100: 227,
    120: 99,
}  # that a program on a chip can have
GRID = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)  # programs at most
LAYERS, LAYER = (0, 3), 3  # the second of two, which no codec skips
CUDA, META, DEVICE_TYPES = 1, 14, 21  # of c10::DeviceType
UPLOADS = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.index_put_.default,
)  # of one number too


@dataclass(frozen=True)
class Scenario:
    """Prompts of one layer, and steps with their numbers of tokens; the first seals pages."""

    spec: str
    sequences: int = 1
    prompt: int = 300
    heads: int = 2
    per_head: int = 3
    head_dim: int = 64
    dtype: str = "float16"
    steps: tuple[int, ...] = (1, 1)
    latent: int | None = None


class FakeLauncher:
    """In place of Triton's launcher: holds arguments against the parameters of the kernel."""

    launched: ClassVar[list[str]] = []
    compiled: ClassVar[list[str]] = []
    approximate: ClassVar[set[str]] = set()  # that divide without rounding

    def __init__(self, source: Any, metadata: Any):
        self.name, self.types = metadata.name, tuple(source.signature.values())
        self.compiled.append(self.name)

    def __call__(
        self, x: int, y: int, z: int, stream: int, ptx: str, *rest: Any
    ) -> None:
        _packed, _metadata, _enter, _leave, *arguments = rest
        parameters = list(flatten(self.types, tuple(arguments)))
        if "div.full" in ptx:
            self.approximate.add(self.name)
        head = ptx[ptx.index(".entry") :]
        expected = re.findall(r"\.param \.[a-z](\d+)", head[: head.index(")")])
        bits = [
            "64" if kind[0] == "*" else kind.lstrip("ifp") for kind, _ in parameters
        ]
        scratch = ["64", "64"]
        assert bits + scratch == expected, (
            f"{self.name} takes {expected}, not {parameters}"
        )
        for kind, value in parameters:
            assert fits(kind, value), f"{self.name}: {value} is no {kind}"
        grid = x, y, z
        assert all(0 < n <= most for n, most in zip(grid, GRID, strict=True)), (
            self.name,
            grid,
        )
        self.launched.append(self.name)


class FakeDriver:
    launcher_cls = FakeLauncher

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_KIB[CAPABILITY] << 10}

    def load_binary(
        self, name: str, cubin: bytes, *_: int
    ) -> tuple[str, None, int, int, int]:
        """(module, function, registers, spilled, threads at most)."""
        assert cubin.startswith(b"\x7fELF"), f"{name} is no machine code"
        return name, None, 0, 0, 1024

    def unload_module(self, module: str) -> None:
        pass


class NoHost(TorchDispatchMode):
    """Refuses what takes time in a layer, and what no graph can repeat: tables of the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in (*args, result):
            if (
                isinstance(x, Tensor)
                and x.device != DEVICE
                and (x.dim() or func in UPLOADS)
            ):
                raise RuntimeError(f"{func} of a tensor on {x.device}, in a layer")
        return result


def flatten(types: tuple, values: tuple) -> Iterator[tuple[str, Any]]:
    """(type, value) of the parameters of a kernel, as the launchers of Triton find them."""
    assert len(types) == len(values), f"{values} for {types}"
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from flatten(kind, value)
        elif kind != "constexpr":
            yield kind, value


def fits(kind: str, value: Any) -> bool:
    """Whether a launcher can make this a parameter of this type."""
    if kind[0] == "*":
        return isinstance(value, Tensor) and value.device == DEVICE
    if kind[0] == "i":
        return isinstance(value, int) and abs(value) < 1 << (int(kind[1:]) - 1)
    return isinstance(value, float)


def pretend() -> None:
    """From here on there is a GPU that computes nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * DEVICE_TYPES).in_dll(library, registry)
    if not guards[
        CUDA
    ]:  # a torch for CPUs; the guard of meta tensors, which does nothing, will do
        guards[CUDA] = guards[META]
    torch.cuda.get_device_properties = lambda _=None: SimpleNamespace(
        multi_processor_count=132
    )
    torch.cuda.get_device_capability = lambda _=None: divmod(CAPABILITY, 10)
    FakeTensor.data_ptr = lambda self: (
        ADDRESS + self.storage_offset() * self.element_size()
    )
    triton.runtime.driver.set_active(FakeDriver())
    load, ask = CompiledKernel._init_handles, bits.takes_subnormals

    def load_text(kernel: CompiledKernel) -> None:
        load(kernel)
        kernel.function = kernel.asm["ptx"]

    def ask_and_agree(device: torch.device, unpack_mode: str) -> bool:
        try:
            return ask(device, unpack_mode)
        except (
            DataDependentOutputException
        ):  # the one question, asked before anything is recorded
            return True

    CompiledKernel._init_handles = load_text
    bits.takes_subnormals = ask_and_agree


def follow(scenario: Scenario) -> None:
    codec, heads, head_dim = get_codec(scenario.spec), scenario.heads, scenario.head_dim
    latent = scenario.latent
    group = codec.layer_group(LAYERS, heads, head_dim, scenario.dtype, latent=latent)
    arena, dtype = GrowingArena(DEVICE), getattr(torch, scenario.dtype)

    def tokens(count: int, rows: int) -> Tensor:
        return torch.empty(count, rows, head_dim, dtype=dtype, device=DEVICE)

    states, lengths, rows = [], [], heads * scenario.per_head
    for i in range(scenario.sequences):
        n = full_tail(group, scenario.prompt * (i + 1))
        k, v, q = (tokens(n, x).transpose(0, 1) for x in (heads, heads, rows))
        v = v if latent is None else k[..., :latent]
        if i == 0:
            whole = slice(group.sealed(n))
            prompt = Prompt(n, k, Queries.of(q[:, -8:], heads, n))
            codec.encode(k[:, whole], v[:, whole], 0, LAYER, prompt, None)
        states.append(allocate_group(group, n, arena))
        at = upload(RecordIds.of(states[i]), DEVICE)
        with NoHost():
            records = LayerRecords(group, LAYER, arena.bytes)
            chunk = PromptChunk(k, v, total=n, queries=prompt.queries)
            write_prompt(codec, records, at, chunk)
        lengths.append(n)
    for m in scenario.steps:
        growths = [
            SequenceGrowth(states[i], n, m, i * m) for i, n in enumerate(lengths)
        ]
        with unset_fake_temporarily():  # plans are made of numbers on the host
            fresh = take_records(group, growths, arena)
            planned = plan_step(codec, group, growths, fresh, DEVICE)
        step = upload(planned, DEVICE)
        new = (tokens(x, len(step.rows)).transpose(0, 1) for x in (heads, heads, rows))
        k, v, q = new
        v = v if latent is None else k[..., :latent]
        with NoHost():
            take_step(codec, step, arena.bytes, k, v, q)
        lengths = [n + m for n in lengths]


def take_step(
    codec: Codec, step: GroupStep, arena: Tensor, k: Tensor, v: Tensor, q: Tensor
) -> None:
    write_step(codec, step, LAYER, arena, k, v)
    attend_step(step, LAYER, arena, q, Softmax(0.1))


def full_tail(group: LayerGroup, n: int) -> int:
    """The least number of tokens from n on with which the next one seals a page."""
    while group.sealed(n + 1) == group.sealed(n):
        n += 1
    return n


def main(scenarios: list[str]) -> None:
    pretend()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for text in scenarios:
        FakeLauncher.launched.clear()
        FakeLauncher.compiled.clear()
        FakeLauncher.approximate.clear()
        error = ""
        try:
            with mode:  # the same for all: what is computed once for a device stays
                follow(Scenario(**json.loads(text)))
        except Exception as raised:  # report it, and go on with the next scenario
            error = f"{type(raised).__name__}: {raised}"
        report = {
            "launched": FakeLauncher.launched,
            "compiled": FakeLauncher.compiled,
            "approximate": sorted(FakeLauncher.approximate),
            "error": error,
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
