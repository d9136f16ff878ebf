"""Linear layers of a CPU: weights laid once as oneDNN multiplies them, not anew in every step.

A decode step multiplies a few rows with every weight: laying takes as long as multiplying. The
operators are those that torch's own compiler calls.
"""

import os

import torch
from torch import Tensor, nn

MEMORY_PART = (
    8  # weights above one in so many bytes of the host stay as they are, maybe mapped
)


class PackedLinear(nn.Module):
    """What an nn.Linear computes. `weight` tells shape and dtype and has no numbers."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )


def pack_linears(model: nn.Module) -> None:
    """Lay the weights of a model on a CPU, where oneDNN takes them and there is room for them.

    They are this process's own from then on, where mapped ones are shared with its neighbours.
    """
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_packable(child.weight)
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    nbytes = sum(getattr(parent, name).weight.nbytes for parent, name in found)
    if nbytes * MEMORY_PART <= memory:
        for parent, name in found:  # one by one: what was laid is let go
            setattr(parent, name, PackedLinear(getattr(parent, name)))


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
