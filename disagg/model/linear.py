"""Linear layers on a CPU: weights are reordered for oneDNN once, not in every step.

A decode step multiplies a few rows with every weight: reordering takes as long as multiplying. The
operators are those that torch's own compiler calls.
"""

import os

import torch
from torch import Tensor, nn

# the weights of these are read from outside: Mamba 1 multiplies by them itself
UNPACKED = ("dt_proj",)
MEMORY_PART = (
    8  # weights larger than one part in this many of the host's memory stay as they are
)


class PackedLinear(nn.Module):
    """An nn.Linear with reordered weights. `weight` has their shape and dtype, but no numbers."""

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
    """Reorder the weights of a model on a CPU, if oneDNN takes them and there is room for them.

    The process then has its own copy, while mapped weights are shared with its neighbours.
    """
    if not has_room(model):
        return
    linears = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_packable(child.weight)
        if name not in UNPACKED
    ]
    for parent, name in linears:  # one by one: each original is freed before the next
        setattr(parent, name, PackedLinear(getattr(parent, name)))


def has_room(model: nn.Module) -> bool:
    """Whether the host has room for a copy of a model's linear layers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    linears = (module for module in model.modules() if type(module) is nn.Linear)
    nbytes = sum(linear.weight.nbytes for linear in linears)
    return nbytes * MEMORY_PART <= memory


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
