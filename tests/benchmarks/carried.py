"""Do launches on a GPU find what was compiled without one? Asked of a GPU that computes
nothing.

    TRITON_CACHE_DIR=... python -m tests.benchmarks.carried "kivi:bits=4" ...

Each codec goes through the steps of its case with fake CUDA tensors: Triton binds and
specialises the very arguments of every launch, and takes it from the cache or compiles
it. Prints a line of
JSON for each: kernels launched, and those that were compiled.
"""

import json
import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from benchmarks.gpu.cases import Case, equality
from benchmarks.gpu.compiling import Compiles
from benchmarks.gpu.layer import DirtyArena, Layer
from disagg.codecs.seals import Growth, take_records
from disagg.codecs.tables import GroupStep, plan_step, upload
from tests.kernels.launches import DEVICE, FakeLauncher, pretend

ROOM_BYTES = 1 << 30


class PlannedLayer(Layer):
    """A layer whose plans are made of numbers on the host, though all else is fake."""

    def plan(self, m: int) -> GroupStep:
        growths = [
            Growth(state, n, m, row * m)
            for row, (state, n) in enumerate(zip(self.states, self.n, strict=True))
        ]
        with unset_fake_temporarily():
            fresh = take_records(self.group, growths, self.arena)
            planned = plan_step(self.codec, self.group, growths, fresh, DEVICE)
        self.n = [n + m for n in self.n]
        return upload(planned, DEVICE)


def tokens(case: Case, n: int) -> list[Tensor]:
    """k, v [n, H, D] and q [n, Hq, D] of no numbers."""
    rows = (case.heads, case.heads, case.heads * case.per_head)
    dtype = getattr(torch, case.dtype)
    return [torch.empty(n, x, case.head_dim, dtype=dtype, device=DEVICE) for x in rows]


def follow(case: Case) -> None:
    """The steps of a case, as `equality` takes them."""
    room = torch.empty(ROOM_BYTES, dtype=torch.uint8, device=DEVICE)
    layer = PlannedLayer(case, DirtyArena(room, ROOM_BYTES - 128), DEVICE)
    for n in layer.n:
        layer.write_prompt(*(x.transpose(0, 1) for x in tokens(case, n)))
    for m in (1, layer.block()):
        step = layer.plan(m)
        k, v, q = tokens(case, len(step.rows))
        layer.append(step, k, v)
        sinks = torch.empty(q.shape[1], dtype=q.dtype, device=DEVICE)
        layer.attend(step, q, sinks if case.sinks else None)


def main(names: list[str]) -> None:
    pretend()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for case in equality():
        if case.name in names or case.spec in names:
            FakeLauncher.launched.clear()
            compiles = Compiles()
            with compiles.counting(), mode:
                follow(case)
            found = {"launched": FakeLauncher.launched, "compiled": compiles.count}
            print(json.dumps({"case": case.name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
