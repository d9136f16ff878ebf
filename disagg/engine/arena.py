"""The arena of a worker: one uint8 tensor that kernels read and a pool that hands out its pages."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from disagg.config import EngineConfig
from disagg.errors import ConfigError
from disagg.kv.arena import Copies, HostArena
from disagg.kv.page import ARENA_UNIT, align
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.model.capacity import split_memory
from disagg.model.host_memory import total_memory
from disagg.model.runner import Runner

# on a CPU the arenas of all workers take one part in so many of the memory, within these limits
ARENA_PART = 8
LEAST_ARENA_BYTES = 256 << 20
MOST_ARENA_BYTES = 8 << 30
STATES_PART = 4  # and states up to one part in 4 of it
# rows of a decode step, where the setting leaves them to the arena
LEAST_ROWS = 64
MOST_ROWS = 256
ROW_TOKENS = 1024  # that the arena has for each row
SPARE_PART = 20  # one part in this many of a GPU's memory is left to activations
MAX_WRITES = 8  # in flight; each holds a frame in pinned memory

log = logging.getLogger(__name__)


class DeviceArena:
    """An arena in the memory of an accelerator.

    Bytes leave and arrive on streams of their own, beside the kernels, through pinned memory: one
    gather and one copy for all spans of a call to `stage`, one copy and one scatter for all of a
    call to `write`. Fresh bytes wait for the kernels that write them, so others leave on a stream
    of their own. Only the device waits for bytes that arrive: kernels and copies started later.
    """

    on_host = False

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._fresh = SideStream(tensor.device)
        self._lasting = SideStream(tensor.device)
        self._arriving = SideStream(tensor.device)
        self._writes: deque[Callable[[], None]] = (
            deque()
        )  # in flight; a call waits for one

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
        if fresh:
            stream = self._fresh
            running = stream.after_the_kernels()
        else:
            stream = self._lasting
            stream.after(self._arriving)
            running = stream.beside_the_kernels()
        with running:
            parts = [self._tensor[start : start + nbytes] for start, nbytes in spans]
            host.copy_(torch.cat(parts), non_blocking=True)
            wait_for_copy = stream.mark()

        def wait() -> list[memoryview]:
            wait_for_copy()
            return [part.numpy().data for part in host.split(sizes)]

        return wait

    def write(self, pieces: Sequence[tuple[int, memoryview | bytes]]) -> None:
        """Start the copies. The caller waits only where MAX_WRITES are in flight, for the oldest:
        its event loop serves others meanwhile."""
        if not pieces:  # torch refuses empty lists
            return
        sizes = [len(data) for _, data in pieces]
        host = self._host_bytes(sum(sizes))
        host_places = []
        host_start = 0
        for _, data in pieces:
            host_places.append((host_start, data))
            host_start += len(data)
        HostArena(host.numpy().data).write(host_places)
        with self._arriving.beside_the_kernels():
            parts = host.to(self._tensor.device, non_blocking=True).split(sizes)
            pages = [self._tensor[start : start + len(data)] for start, data in pieces]
            torch._foreach_copy_(pages, parts)
            self._writes.append(self._arriving.mark())
        self._arriving.before_the_kernels()
        if len(self._writes) > MAX_WRITES:
            wait_for_oldest = self._writes.popleft()
            wait_for_oldest()

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fill spans with zeros, before later writes to them and kernels started later."""
        if not spans:
            return
        parts = [self._tensor[start : start + nbytes] for start, nbytes in spans]
        with self._arriving.beside_the_kernels():
            torch._foreach_zero_(parts)
        self._arriving.before_the_kernels()

    def _host_bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._tensor.is_cuda)


class SideStream:
    """A stream of a device beside the kernels of an engine; on a CPU there is none.

    The kernels of all threads are in one stream, the device's default stream.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside_the_kernels(self) -> torch.cuda.StreamContext:
        """A context: work started within it runs in this stream."""
        return torch.cuda.stream(self._stream)

    def after_the_kernels(self) -> torch.cuda.StreamContext:
        """The same context, after the kernels that this thread has started so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self.beside_the_kernels()

    def after(self, other: "SideStream") -> None:
        """Work started here later waits for the work in another stream now."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def before_the_kernels(self) -> None:
        """Kernels that this thread starts later wait for the work in this stream now."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """A function that returns when the work in this stream now is done."""
        if self._stream is None:
            return lambda: None
        return self._stream.record_event().synchronize


def wait_for_kernels(device: torch.device) -> None:
    """Return when all work that this thread has started on a device is done; on a CPU, at once."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def make_pool(
    nbytes: int, slab_bytes: int, device: torch.device, scratch: int = 0
) -> tuple[Pool, Tensor]:
    """A pool over `nbytes` of a device, and the same bytes as the tensor that kernels read.

    Behind them the tensor has `scratch` more, which belong to no page: padded rows and steps
    that are recorded write there.

    """
    tensor = make_arena(nbytes, scratch, device)
    return Pool(view_arena(tensor, scratch), slab_bytes), tensor


def make_arena(nbytes: int, scratch: int, device: torch.device) -> Tensor:
    """The memory of an arena with `scratch` bytes behind it, which are 0.

    On a host numpy allocates it, which asks for huge pages: frames enter and leave them faster.
    """
    size = align(nbytes, ARENA_UNIT)
    if device.type == "cpu":
        tensor = torch.from_numpy(np.empty(size + scratch, np.uint8))
    else:
        tensor = torch.empty(size + scratch, dtype=torch.uint8, device=device)
    tensor[size:] = 0
    return tensor


def view_arena(tensor: Tensor, scratch: int) -> HostArena | DeviceArena:
    """The bytes of an arena as hand-offs read and write them, without those behind it."""
    pages = tensor[: len(tensor) - scratch]
    if pages.device.type == "cpu":
        return HostArena(pages.numpy().data)
    return DeviceArena(pages)


def check_slabs(
    nbytes: int, slab_bytes: int, plans: Iterable[Plan], context: int
) -> None:
    """ConfigError for an arena without a slab for each shape of the records of a plan."""
    for plan in plans:
        num_shapes = len(plan.records(plan.full(context)))
        needed = num_shapes * slab_bytes
        if needed > nbytes:
            raise ConfigError(
                f"config key engine.arena_bytes is {nbytes}; {plan.spec} has records of "
                f"{num_shapes} shapes, which want at least {needed}"
            )


def measure_memory(config: EngineConfig, runner: Runner) -> tuple[int, int]:
    """Bytes of the arena and of the workspaces: as configured, else by the memory of the device."""
    device = runner.device
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = int(config.memory_share * total) - torch.cuda.memory_reserved(device)
        usable = min(free - total // SPARE_PART, share)
        arena, workspace = split_memory(
            usable, runner.shape, runner.info.context_length
        )
    else:
        memory = total_memory()
        # the pages of an arena take memory when they are first written
        share = int(config.memory_share * memory)
        arena = max(LEAST_ARENA_BYTES, min(share // ARENA_PART, MOST_ARENA_BYTES))
        states = (config.max_sequences or LEAST_ROWS) * runner.shape.state_bytes
        arena += min(states, memory // STATES_PART)
        workspace = share // ARENA_PART
    arena = config.arena_bytes or arena
    _warn_of_few_states(arena, config.max_sequences, runner.shape.state_bytes)
    return arena, config.workspace_bytes or workspace


def max_rows(
    config: EngineConfig, device: torch.device, plan: Plan, arena_bytes: int
) -> int:
    """Sequences in a decode step: as configured, else those that the arena of a CPU has room for.

    A GPU records steps of every size at start, so its default is a small one.
    """
    if config.max_sequences is not None:
        return config.max_sequences
    if device.type == "cuda":
        return LEAST_ROWS
    rows = arena_bytes // plan.nbytes(ROW_TOKENS)
    return max(LEAST_ROWS, min(rows, MOST_ROWS))


def _warn_of_few_states(
    arena: int, max_sequences: int | None, state_bytes: int
) -> None:
    """Log how many sequences of a hybrid model fit, if their states alone limit them."""
    max_sequences = max_sequences or LEAST_ROWS
    if max_sequences * state_bytes > arena:
        log.warning(
            "an arena of %d bytes holds the states of %d sequences, %d bytes each; "
            "engine.max_sequences is %d",
            arena,
            arena // state_bytes,
            state_bytes,
            max_sequences,
        )
