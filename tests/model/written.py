"""How much operations of torch write."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disagg.model.states.scattered import ScatteredStates

aten = torch.ops.aten


class WrittenBytes(TorchDispatchMode):
    """Counts the bytes that operations write, also within one on scattered states."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if ScatteredStates in types:
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        if func is aten.index_copy_.default:
            *_, source = args
            self.nbytes += source.nbytes
        elif not func.is_view and func.overloadpacket is not aten.empty:
            self.nbytes += output.nbytes
        return output
