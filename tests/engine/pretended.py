"""A whole engine on a GPU that need not be there: what it compiles, records and copies.

    python -m tests.engine.pretended kivi:bits=4 banded

On the device everything is torch's fake tensors, see tests/kernels/launches.py; plans and tables
are real. Triton binds and specialises the arguments of every launch, and says what it would compile
for them; nothing is compiled or run. In a layer nothing may come from the host. Prints a line of
JSON: what was compiled at the start, and, while requests were served, what was compiled, how often
a step was recorded, replayed, run eagerly, and tables were copied. Wants a process of its own,
without TRITON_INTERPRET.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from disagg.config import EngineConfig
from disagg.engine import engine as engine_module
from disagg.engine import exact_prefixes
from disagg.engine.arena import DeviceArena, SideStream
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sampler import Sampled
from disagg.engine.sequence import Request, SamplingParams
from disagg.engine.warm import warm_up
from disagg.model import attention
from disagg.model import runner as runner_module
from disagg.model.cache import Workspace
from disagg.model.graphs import Recording
from disagg.model.runner import Runner
from disagg.paged import page_tables as tables
from disagg.paged.page_tables import Upload
from tests.kernels.launches import NoHost, pretend
from tests.model.tiny import save_config

CONTEXT = 10_000  # one row of so many has more units than the merge takes together
ARENA = WORKSPACE = 256 << 20
MODE = FakeTensorMode(allow_non_fake_inputs=True)
counts = Counter[str]()
compiled: dict[str, str] = {}  # names of kernels, by what Triton compiles them for


class Recorder:
    """In place of CUDA graphs: a replay only counts."""

    def record(self, call: Callable[[], Tensor]) -> Recording:
        counts["recorded"] += 1
        return Recording(lambda: counts.update(["replayed"]), call())


def on_device(owner: Any, name: str, counted: str = "other") -> None:
    """What a function computes is fake from here on."""
    call = getattr(owner, name)

    def inside(*args: Any, **kwargs: Any) -> Any:
        counts[counted] += 1
        with MODE:
            return call(*args, **kwargs)

    setattr(owner, name, inside)


def skip(kernel: JITFunction, key: str, *_: Any) -> None:
    """Note what would be compiled, and leave it."""
    compiled[f"{kernel.__name__} {key}"] = kernel.__name__


def fill(self: Upload, tree: Any) -> None:
    """Count the copy, of numbers that are as many as the buffer holds."""
    counts["copied"] += 1
    assert tables._packed(tree).shape == self._buffer.shape


def pretend_all() -> None:
    """From here on engines serve on a GPU that computes nothing."""
    pretend()
    JITFunction._do_compile = skip
    SideStream.__init__ = lambda self, _: setattr(self, "_stream", None)
    for owner, name in (
        (DeviceArena, "zero"),
        (Workspace, "reserve"),
        (engine_module, "make_pool"),
    ):
        on_device(owner, name)
    on_device(exact_prefixes.ExactPrefixes, "_read")
    on_device(Upload, "__init__", "copied")
    Upload.fill = fill
    Workspace.largest = lambda _: []  # no layer has numbers
    on_device(Runner, "_logits", "eager")
    attend = attention.BatchAttention.attend

    def in_layer(*args: Any) -> Tensor:
        with NoHost():
            return attend(*args)

    attention.BatchAttention.attend = in_layer
    attention.attend_exact = lambda q, *_: torch.empty_like(q)
    runner_module.CudaRecorder = Recorder
    engine_module.measure_memory = lambda *_: (ARENA, WORKSPACE)
    engine_module.choose = lambda ready, *_: [[Sampled(5)]] * len(ready)
    engine_module.wait_for_kernels = exact_prefixes.wait_for_kernels = lambda _: None


def serve(engine: Engine, jobs: Sequence[tuple[int, int, int, str]]) -> None:
    """Jobs of so many tokens in the prompt, of which another engine knows, and in the answer."""
    for i, (tokens, emitted, most, codec) in enumerate(jobs):
        params = SamplingParams(max_tokens=emitted + most, ignore_eos=True)
        request = Request(str(i), (1,) * tokens, params, codec)
        engine.submit(Prefill(request, emitted=(5,) * emitted))
    while not engine.idle:
        for failed in engine.step().failed:
            raise failed.error


def main(codecs: list[str]) -> None:
    pretend_all()
    with TemporaryDirectory() as folder, MODE:
        save_config("llama", Path(folder), head_dim=64, max_position_embeddings=CONTEXT)
        runner = Runner.random(folder, "float16", "cuda")
    engine = Engine(runner, EngineConfig(arena_bytes=ARENA))
    warm_up(engine, runner, codecs, 4, lambda _: None)
    start = dict(compiled)
    counts.clear()
    serve(engine, [(70, 0, 80, codec) for codec in codecs])
    serve(engine, [(600 + 70 * i, 20, 40, codec) for i, codec in enumerate(codecs)])
    serve(
        engine,
        [(9000, 0, 3, codecs[0]), (2500, 0, 30, codecs[-1]), (2500, 0, 20, codecs[-1])],
    )
    later = [name for key, name in compiled.items() if key not in start]
    print(json.dumps({"start": Counter(start.values()), "requests": later, **counts}))


if __name__ == "__main__":
    main(sys.argv[1:])
