"""Decode steps under CUDA graphs: recorded once for each shape, replayed on new inputs.

A decode step of a small batch is hundreds of short kernels that take longer to start than to run. A
CUDA graph starts all of them at once. It can only repeat what it recorded, at the same addresses:
static.py has the buffers and says which steps are alike.

Rows of several codecs are as many recorded steps, one after another. Not recorded are steps with
chunks of prompts or replayed blocks, steps that seal a page which an append cannot seal by itself,
and shapes whose recording failed: they found no memory, or something in them asks the host.

A service records before its first request, for every size that its context allows, and never again:
whatever comes that was not recorded runs as it is. Elsewhere a shape is recorded when it comes.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from disagg.model.attention import Batch
from disagg.model.static import (
    Key,
    Size,
    StaticStep,
    key_of,
    parts_of,
    size_of,
    sizes_of,
)

WARM_UP = (
    3  # runs before a recording: kernels are compiled and workspaces allocated in them
)

log = logging.getLogger(__name__)

StepEvents = Callable[
    [StaticStep], Tensor
]  # logits [bucket, V] of the inputs in the buffers


@dataclass(frozen=True)
class Recording:
    """replay: does the recorded work again; output: where its result then is."""

    replay: Callable[[], object]
    output: Tensor


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: only one runs at a time.

    And one stream: cuBLAS keeps a workspace for each that it ever ran in, 32 MiB on Hopper.
    """

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(self, call: Callable[[], Tensor]) -> Recording:
        """Record a call; RuntimeError if it cannot be."""
        current, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP - 1):
                    call()
                with refused_to_wait():
                    call()
        finally:
            current.wait_stream(
                stream
            )  # what a broken run has started still reads its inputs
        graph = torch.cuda.CUDAGraph()
        # other threads copy pages meanwhile; only what this one does may break a recording
        recording = torch.cuda.graph(graph, self._pool, stream, "thread_local")
        try:
            with recording:
                output = call()
        finally:
            torch.cuda.set_stream(
                current
            )  # a recording that fails leaves its own (torch 2.13)
        return Recording(graph.replay, output)


@contextmanager
def refused_to_wait() -> Iterator[None]:
    """RuntimeError for whatever asks the host. In a recording it would break more than that one:
    torch's allocator then takes it for under way for ever, and gives no memory back (torch 2.13).
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that it does not find all of it
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class DecodeGraphs:
    """The recorded decode steps of a model. Not thread-safe, as the model."""

    def __init__(self, step: StepEvents, recorder: CudaRecorder):
        self._step = step
        self._recorder = recorder
        self._found: dict[
            Key, tuple[StaticStep, Recording] | None
        ] = {}  # None: it cannot be
        self._outputs: dict[torch.Size, Tensor] = {}  # of steps of as many rows
        self._sizes: Callable[[Batch], Iterable[Size]] = lambda part: [size_of(part)]

    def record_sizes(self, context: int) -> None:
        """Record what comes in every size that a context of so many tokens needs; 0: nothing."""
        self._sizes = partial(sizes_of, context=context)

    def clear(self) -> None:
        """Forget all steps, which hold the arenas that they were recorded over."""
        self._found.clear()
        self._outputs.clear()

    def run(self, batch: Batch) -> Tensor | None:
        """The logits of a step: [len(outputs), V] fp32; None where not all of it is recorded."""
        parts = parts_of(batch)
        steps = [(part, *found) for part in parts if (found := self._find(part))]
        if not parts or len(steps) < len(parts):
            return None
        output = steps[0][2].output
        logits = output.new_empty(
            len(batch.outputs) + 1, output.shape[1], dtype=torch.float32
        )
        for part, static, recording in steps:
            static.fill(part)
            recording.replay()
            rows = slice(len(part.tokens))
            logits[static.outputs[rows]] = recording.output[rows].float()
        return logits[:-1]

    def _find(self, part: Batch) -> tuple[StaticStep, Recording] | None:
        """The recorded step that serves a part; recorded now, if it may be."""
        key = key_of(part, size_of(part))
        if key not in self._found:
            for size in self._sizes(part):
                self._record(part, size)
        return self._found.get(key)

    def _record(self, part: Batch, size: Size) -> None:
        if (key := key_of(part, size)) in self._found:
            return
        static = StaticStep(part, size)
        static.fill(
            part
        )  # runs before a recording write what the part itself will write
        try:
            self._found[key] = static, self._recorder.record(lambda: self._run(static))
        except RuntimeError as error:
            log.warning(
                "decode steps of %s rows run without a graph: %s", key[0], error
            )
            self._found[key] = None

    def _run(self, static: StaticStep) -> Tensor:
        """A step, whose logits go where those of others of as many rows go: of a large vocabulary
        each graph would keep megabytes."""
        logits = self._step(static)
        if logits.shape not in self._outputs:  # in a run before the first recording
            self._outputs[logits.shape] = torch.empty_like(logits)
        return self._outputs[logits.shape].copy_(logits)
