"""Decode steps under CUDA graphs: recorded once for each shape, replayed on new inputs.

A decode step of a small batch is hundreds of short kernels that take longer to start than to run. A
CUDA graph starts all of them at once. It can only repeat what it recorded, at the same addresses:
static.py has the buffers and says which steps are alike.

Not recorded are steps with chunks of prompts or replayed blocks, steps that seal a page which an
append cannot seal by itself, and shapes whose recording failed: something in them asks the host.
Where one found no memory it is tried again later.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.model.attention import Batch
from disagg.model.static import Key, StaticStep, is_plain, key_of

MOST_SHAPES = 256  # recorded at one time; the one unused for longest makes room
LATER = 1000  # steps after one that found no memory to be recorded
WARM_UP = 3  # runs before a recording: kernels are compiled and workspaces allocated in them

log = logging.getLogger(__name__)

Step = Callable[[StaticStep], Tensor]  # logits [bucket, V] of the inputs in the buffers


@dataclass(frozen=True)
class Recording:
    """replay: does the recorded work again; output: where its result then is."""

    replay: Callable[[], object]
    output: Tensor


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Tensor]) -> Recording:
        """Record a call; RuntimeError if it cannot be."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    call()
        finally:
            current.wait_stream(stream)  # what a broken run has started still reads its inputs
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads copy pages meanwhile; only what this one does may break a recording
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = call()
        finally:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own (torch 2.13)
        return Recording(graph.replay, output)


class DecodeGraphs:
    """The recorded decode steps of a model. Not thread-safe, as the model."""

    def __init__(self, step: Step, recorder: CudaRecorder):
        self._step = step
        self._recorder = recorder
        self._found: OrderedDict[Key, tuple[StaticStep, Recording]] = OrderedDict()
        self._refused: dict[Key, float] = {}  # the step from which it may be tried again
        self._steps = 0

    def accepts(self, batch: Batch) -> bool:
        """Whether `run` can serve this batch: it is recorded, or has been recorded now."""
        if not is_plain(batch):
            return False
        key, self._steps = key_of(batch), self._steps + 1
        if key not in self._found and self._steps >= self._refused.get(key, 0):
            self._record(key, batch)
        return key in self._found

    def run(self, batch: Batch) -> Tensor:
        """The step of an accepted batch: logits [len(outputs), V] fp32."""
        key = key_of(batch)
        static, recording = self._found[key]
        self._found.move_to_end(key)
        static.fill(batch)
        recording.replay()
        return recording.output[static.outputs[: len(batch.outputs)]].float()

    def _record(self, key: Key, batch: Batch) -> None:
        static = StaticStep(batch)
        static.fill(batch)  # runs before a recording write what the batch itself will write
        try:
            recording = self._recorder.record(lambda: self._step(static))
        except RuntimeError as error:
            log.warning("decode steps of %s rows run without a graph: %s", key[0], error)
            full = isinstance(error, torch.OutOfMemoryError)
            self._refused[key] = self._steps + LATER if full else math.inf
            return
        if len(self._found) >= MOST_SHAPES:
            self._found.popitem(last=False)
        self._found[key] = static, recording
