"""The arena of a worker: one uint8 tensor that kernels read and a pool that hands out its pages."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from disagg.config import EngineConfig
from disagg.errors import ConfigError
from disagg.model.capacity import split_memory
from disagg.model.runner import Runner
from disagg.page import ARENA_UNIT, RAW_TOKENS, align
from disagg.plan import Plan
from disagg.pool import DEFAULT_SLAB_BYTES, Copies, HostArena, Pool

CPU_ARENA_BYTES = 256 << 20
SPARE = 20  # one part of so many of a GPU is left to activations, whoever else has memory there
WRITES = 8  # under way at most; each holds a frame in pinned memory
RECORDS_PER_SLAB = 4  # of the largest record; fewer would waste the ends of slabs


class DeviceArena:
    """An arena in the memory of an accelerator.

    Bytes leave and arrive on streams of their own, beside the kernels: one gather and one copy for
    all that is staged, one copy and one scatter for all that is written, through pinned memory.
    Fresh bytes wait for the kernels that write them, so all others leave on another stream. Nobody
    waits for bytes that arrive but the device: kernels and copies that are started later.
    """

    on_host = False

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._fresh, self._lasting, self._arriving = (SideStream(tensor.device) for _ in range(3))
        self._under_way: deque[Callable[[], None]] = deque()  # writes; each call waits for one

    @property
    def nbytes(self) -> int:
        return self._tensor.numel()

    def read(self, start: int, nbytes: int) -> memoryview:
        (data,) = self.stage([(start, nbytes)])()
        return data

    def stage(self, spans: Sequence[tuple[int, int]], fresh: bool = False) -> Copies:
        if not spans:
            return list
        sizes = [nbytes for _, nbytes in spans]
        host = self._host_bytes(sum(sizes))
        stream = self._fresh if fresh else self._lasting
        if not fresh:
            stream.behind(self._arriving)
        with stream.after_the_kernels() if fresh else stream.beside_the_kernels():
            parts = [self._tensor[start : start + nbytes] for start, nbytes in spans]
            host.copy_(torch.cat(parts), non_blocking=True)
            copied = stream.mark()

        def wait() -> list[memoryview]:
            copied()
            return [part.numpy().data for part in host.split(sizes)]

        return wait

    def write(self, places: Sequence[tuple[int, memoryview | bytes]]) -> None:
        """The caller waits for no copy but one of long ago: its loop serves others meanwhile."""
        if not places:  # of which torch copies no list
            return
        sizes = [len(data) for _, data in places]
        host = self._host_bytes(sum(sizes))
        HostArena(host.numpy().data).write(
            list(zip(accumulate(sizes, initial=0), (data for _, data in places), strict=False))
        )
        with self._arriving.beside_the_kernels():
            there = host.to(self._tensor.device, non_blocking=True).split(sizes)
            pages = [self._tensor[start : start + len(data)] for start, data in places]
            torch._foreach_copy_(pages, there)
            self._under_way.append(self._arriving.mark())
        self._arriving.before_the_kernels()
        if len(self._under_way) > WRITES:
            self._under_way.popleft()()

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Before whatever is written there later; kernels that are started later see it."""
        if not spans:
            return
        with self._arriving.beside_the_kernels():
            torch._foreach_zero_([self._tensor[start : start + n] for start, n in spans])
        self._arriving.before_the_kernels()

    def _host_bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._tensor.is_cuda)


class SideStream:
    """Work of a device beside the kernels of an engine. On a CPU everything is in order anyway.

    The kernels of all threads are in one stream, the device's own.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside_the_kernels(self) -> torch.cuda.StreamContext:
        """What is started within runs in this stream."""
        return torch.cuda.stream(self._stream)

    def after_the_kernels(self) -> torch.cuda.StreamContext:
        """The same, after the kernels that this thread has started so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self.beside_the_kernels()

    def behind(self, other: "SideStream") -> None:
        """What is started here later waits for what is in another stream now."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def before_the_kernels(self) -> None:
        """Kernels that this thread starts later wait for what is in this stream now."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """The call returns when all that is in this stream now is done."""
        return (lambda: None) if self._stream is None else self._stream.record_event().synchronize


def wait_for_kernels(device: torch.device) -> None:
    """Return when all that this thread has started on a device is done; on a CPU it is anyway."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def make_pool(nbytes: int, slab_bytes: int, device: torch.device) -> tuple[Pool, Tensor]:
    """A pool over `nbytes` of a device, and the same bytes as the tensor that kernels read.

    On a host by way of numpy, which asks for huge pages: frames enter and leave them faster.
    """
    size = align(nbytes, ARENA_UNIT)
    if device.type == "cpu":
        buffer = np.empty(size, np.uint8)
        return Pool(HostArena(buffer.data), slab_bytes), torch.from_numpy(buffer)
    tensor = torch.empty(size, dtype=torch.uint8, device=device)
    return Pool(DeviceArena(tensor), slab_bytes), tensor


def check_slabs(nbytes: int, slab_bytes: int, plans: Iterable[Plan], context: int) -> None:
    """ConfigError for an arena without a slab for each shape of the records of a plan."""
    for plan in plans:
        if (shapes := len(plan.records(context))) * slab_bytes > nbytes:
            raise ConfigError(
                f"config key engine.arena_bytes is {nbytes}; {plan.spec} has records of "
                f"{shapes} shapes, which want at least {shapes * slab_bytes}"
            )


def measure_memory(config: EngineConfig, runner: Runner) -> tuple[int, int]:
    """Bytes of the arena and of the workspaces: as configured, else as there is memory."""
    device = runner.device
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        mine = int(config.memory_share * total) - torch.cuda.memory_reserved(device)
        there = min(free - total // SPARE, mine)
        arena, workspace = split_memory(there, runner.shape, runner.info.context_length)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        arena, workspace = CPU_ARENA_BYTES, int(config.memory_share * memory) // 8
    return config.arena_bytes or arena, config.workspace_bytes or workspace


def slab_bytes_for(layers: int, heads: int, head_dim: int) -> int:
    """Slabs that hold some records of any codec: the largest is about 16 exact fp32 tokens."""
    record = layers * heads * RAW_TOKENS * head_dim * 2 * 4
    return align(max(DEFAULT_SLAB_BYTES, RECORDS_PER_SLAB * record), ARENA_UNIT)
