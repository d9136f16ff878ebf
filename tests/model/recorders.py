"""Stand-ins for CUDA graphs, which only a GPU has."""

from collections.abc import Callable

import torch
from torch import Tensor

from disagg.model.graphs import Recording


class EagerRecorder:
    """A replay runs the same call again, its result at the same address."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, call: Callable[[], Tensor]) -> Recording:
        self.warm_up(call)
        return self.capture(call)

    def warm_up(self, call: Callable[[], Tensor]) -> None:
        call()

    def capture(self, call: Callable[[], Tensor]) -> Recording:
        self.recorded += 1
        output = call().clone()

        def replay() -> None:
            self.replayed += 1
            output.copy_(call())

        return Recording(replay, output.fill_(torch.nan))
