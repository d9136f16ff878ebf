"""The steps on a GPU that computes nothing: does it find what was compiled without one?

    TRITON_CACHE_DIR=... python -m tests.benchmarks.carried "int8 8x4-D128-float16" ...

Cases whose names begin so go through the step of equality with fake CUDA tensors: a tensor of
another device raises as on a GPU, Triton binds and specialises the very arguments of every launch,
and takes the kernel from its cache or compiles it. Prints a line of JSON for each: kernels
launched, and how many were compiled.
"""

import json
import sys
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from benchmarks.gpu import equality
from benchmarks.gpu.cases import Case
from benchmarks.gpu.cases import equality as all_cases
from benchmarks.gpu.compiling import Compiles
from benchmarks.gpu.layer import DirtyArena, Layer
from disagg.kernels.gpu.plan import MAX_GRID
from disagg.paged.page_tables import GroupStep, plan_step, upload
from tests.kernels.launches import DEVICE, FakeLauncher, pretend

ARENA_BYTES, ROOM_BYTES = 60 << 30, 1 << 29


class PlannedLayer(Layer):
    """A layer whose plans are made of numbers on the host, though all else is fake."""

    def plan(self, m: int) -> GroupStep:
        with unset_fake_temporarily():
            growths, fresh = self.grow(m)
            planned = plan_step(self.codec, self.group, growths, fresh, DEVICE)
        return upload(planned, DEVICE)


def follow(case: Case) -> dict[str, object]:
    """What the step of equality launches for a case, and compiles."""
    FakeLauncher.launched.clear()
    compiles = Compiles()
    room = torch.empty(ARENA_BYTES, dtype=torch.uint8, device=DEVICE)
    with compiles.counting():
        equality.run(case, DirtyArena(room, ROOM_BYTES), MAX_GRID)
    launched = list(FakeLauncher.launched)
    return {"case": case.name, "launched": launched, "compiled": compiles.count}


def main(names: list[str]) -> None:
    pretend()
    patches = (
        patch.object(equality, "Layer", PlannedLayer),
        patch.object(torch.cuda, "synchronize", lambda _=None: None),
    )
    with patches[0], patches[1], FakeTensorMode(allow_non_fake_inputs=True):
        for case in all_cases():
            if case.name.startswith(tuple(names)):
                print(json.dumps(follow(case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
