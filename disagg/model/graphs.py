"""Decode steps under CUDA graphs: recorded once for each shape, replayed on new inputs.

A decode step of a small batch is hundreds of short kernels that take longer to start than to run. A
CUDA graph starts all of them at once. It can only repeat its recording, at the same addresses:
static.py has the buffers and says which steps can share a recording.

Each codec of a step is a recording of its own; they run one after another. So are sequences with
drafts, which feed several tokens. These steps are not recorded: steps with chunks of prompts or
long replayed blocks, steps that seal a page which an append cannot seal by itself, and shapes whose
recording failed (no memory, or a call that waits for the host).

A service records before its first request, for every size that its context allows, and never again:
other steps run without a graph. Elsewhere a shape is recorded when it comes for the first time.

A group of ranks records its collectives too. A rank that replays beside one that does not, or that
replays another step, would wait for ever. So rank 0 chooses and its order says what; a recording
that fails on one rank is on none (`GroupRecorder`); and a rank without the chosen one ends.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from disagg.errors import RanksLostError
from disagg.model.attention import Batch, PartSizes, Size
from disagg.model.rank_group import RankGroup
from disagg.model.static import (
    Key,
    StaticStep,
    key_of,
    parts_of,
    size_of,
    sizes_of,
)

WARM_UP = (
    3  # runs before a recording, in which kernels are compiled and workspaces allocated
)

log = logging.getLogger(__name__)

# logits [bucket, V] of the inputs in the buffers
RunStep = Callable[[StaticStep], Tensor]


@dataclass(frozen=True)
class Recording:
    """replay: does the recorded work again; output: the tensor that then holds its result."""

    replay: Callable[[], object]
    output: Tensor


class Recorder(Protocol):
    """Records calls; each raises RuntimeError if a call cannot be recorded."""

    def record(self, call: Callable[[], Tensor]) -> Recording:
        """`warm_up`, then `capture`."""

    def warm_up(self, call: Callable[[], Tensor]) -> None:
        """Run a call until it compiles and allocates nothing more."""

    def capture(self, call: Callable[[], Tensor]) -> Recording:
        """Record a call, which runs when it is replayed."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: only one runs at a time.

    They share one stream too: cuBLAS keeps a workspace for each stream, 32 MiB on Hopper.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, call: Callable[[], Tensor]) -> Recording:
        """Record a call; RuntimeError if it cannot be."""
        self.warm_up(call)
        return self.capture(call)

    def warm_up(self, call: Callable[[], Tensor]) -> None:
        """Run a call until it compiles and allocates nothing more; RuntimeError if it waits."""
        current = torch.cuda.current_stream()
        stream = self._stream
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP - 1):
                    call()
                with refused_to_wait():
                    call()
        finally:
            # kernels that a broken run has started still read its inputs
            current.wait_stream(stream)

    def capture(self, call: Callable[[], Tensor]) -> Recording:
        """Record a call, which runs when it is replayed."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        # other threads copy pages meanwhile, and NCCL's asks whether collectives have ended; only
        # calls of this one may break a recording
        recording = torch.cuda.graph(graph, self._pool, self._stream, "thread_local")
        try:
            with recording:
                output = call()
        finally:
            # a recording that fails leaves its own stream current (torch 2.13)
            torch.cuda.set_stream(current)
        return Recording(graph.replay, output)


class GroupRecorder:
    """Records a step on all ranks of a group, or on none.

    What can break on one rank runs while no other waits for it: compilers and memory in a first
    warm-up, whose collectives are of this rank alone; the recording, in which none is run. Between
    them is a warm-up of all ranks: NCCL connects them before the recording.
    """

    def __init__(self, recorder: Recorder, group: RankGroup, device: torch.device):
        self._recorder = recorder
        self._group = group
        self._device = device

    def together(self) -> AbstractContextManager[None]:
        """RuntimeError on all ranks where one raises it."""
        return self._group.all_or_none(self._device)

    def record(self, call: Callable[[], Tensor]) -> Recording:
        """Record a call with collectives; RuntimeError on all ranks if one cannot."""
        with self.together(), self._group.alone():
            self._recorder.warm_up(call)
        self._recorder.warm_up(call)
        with self.together():
            return self._recorder.capture(call)


@contextmanager
def refused_to_wait() -> Iterator[None]:
    """RuntimeError for a call that waits for the host.

    In a recording it would break later ones too: torch's allocator would take the recording for
    unfinished for ever, and give no memory back (torch 2.13).
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that it misses some calls
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class DecodeGraphs:
    """The recorded decode steps of a model. Not thread-safe, as the model."""

    def __init__(
        self,
        run_step: RunStep,
        recorder: Recorder | GroupRecorder,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """together: around what may raise RuntimeError on one rank of a group"""
        self._run_step = run_step
        self._recorder = recorder
        self._together = together
        # None: it cannot be recorded
        self._recorded: dict[Key, tuple[StaticStep, Recording] | None] = {}
        # logits by their shape: steps with equally many rows share them
        self._outputs: dict[torch.Size, Tensor] = {}
        self._sizes: Callable[[Batch], Iterable[Size]] = lambda part: [size_of(part)]

    def record_sizes(self, context: int) -> None:
        """Record new shapes in every size that a context of `context` tokens needs; 0: none."""
        self._sizes = partial(sizes_of, context=context)

    def clear(self) -> None:
        """Forget all recordings; they hold the arenas that they were recorded over."""
        self._recorded.clear()
        self._outputs.clear()

    def choose(self, batch: Batch) -> tuple[PartSizes, ...]:
        """The recorded steps that serve a batch, and those to record before; for `recordings`."""
        return tuple(map(self._choose, parts_of(batch)))

    def _choose(self, part: Batch) -> PartSizes:
        size = size_of(part)
        if key_of(part, size) in self._recorded:
            return PartSizes(size)
        sizes = self._sizes(part)
        new = tuple(x for x in sizes if key_of(part, x) not in self._recorded)
        return PartSizes(size if size in new else None, new)

    def run(self, batch: Batch) -> Tensor | None:
        """The logits of a step: [len(outputs), V] fp32; None if some of it is not recorded.

        batch: with its `recordings`
        """
        if not batch.recordings:
            return None
        parts = parts_of(batch)
        steps = []
        for part, sizes in zip(parts, batch.recordings, strict=True):
            for size in sizes.new:
                self._record(part, size)
            recorded = self._find(part, sizes.size)
            if recorded is not None:
                steps.append((part, *recorded))
        if len(steps) < len(parts):
            return None
        _, _, first = steps[0]
        # one row more: rows without an output write their logits there
        logits = first.output.new_empty(
            len(batch.outputs) + 1, first.output.shape[1], dtype=torch.float32
        )
        for part, static, recording in steps:
            static.fill(part)
            recording.replay()
            rows = slice(len(part.tokens))
            logits[static.outputs[rows]] = recording.output[rows].float()
        return logits[:-1]

    def _find(
        self, part: Batch, size: Size | None
    ) -> tuple[StaticStep, Recording] | None:
        """The recorded step of this size; None if it could not be recorded."""
        if size is None:
            return None
        key = key_of(part, size)
        if key not in self._recorded:
            raise RanksLostError(
                f"rank 0 replays a step of {key[0]} rows and {size[0]} tokens, which is not "
                "recorded on this rank"
            )
        return self._recorded[key]

    def _record(self, part: Batch, size: Size) -> None:
        key = key_of(part, size)
        if key in self._recorded:
            return
        try:
            with self._together():
                static = StaticStep(part, size)
                # runs before a recording write to the pages of the part; no state advances
                static.fill(part, dry=True)
            recording = self._recorder.record(lambda: self._run(static))
            self._recorded[key] = (static, recording)
        except RuntimeError as error:
            log.warning(
                "decode steps of %s rows run without a graph: %s", key[0], error
            )
            self._recorded[key] = None

    def _run(self, static: StaticStep) -> Tensor:
        """A step; its logits are copied to a tensor that all steps with as many rows share.

        With tensors of their own, graphs would keep megabytes each, if the vocabulary is large.
        """
        logits = self._run_step(static)
        if logits.shape not in self._outputs:  # in a run before the first recording
            self._outputs[logits.shape] = torch.empty_like(logits)
        return self._outputs[logits.shape].copy_(logits)
