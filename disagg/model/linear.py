"""Linear layers on a CPU: weights are reordered for oneDNN once, not in every step.

A decode step multiplies a few rows with every weight: reordering takes as long as multiplying. The
operators are those that torch's own compiler calls.
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from disagg.model.host_memory import available_memory

# the weights of these are read from outside: by Mamba 1, by heads that ask latents, by a router
UNPACKED = ("dt_proj", "kv_b_proj", "classifier")
# packed weights of all workers of a host may take one part in this many of what is available
MEMORY_PART = 2
# numbers of rows that kernels are made for; see `padded_rows`
EXACT_ROWS = 16
LEAST_STEP = 8
STEPS = 16
# of a step with a chunk of a prompt, at least: products of one row round otherwise in float32, and
# int4 layers multiply few rows by another operator
PROMPT_ROWS = 16

log = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """An nn.Linear with reordered weights. `weight` has their shape and dtype, but no numbers."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = x.shape[:-1].numel()
        if rows == padded_rows(rows):
            return self._multiply(x)
        out = self._multiply(pad_rows(x.flatten(0, -2)))
        return out[:rows].unflatten(0, x.shape[:-1])

    def _multiply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return out


def padded_rows(rows: int) -> int:
    """The number of rows that a product of so many is computed with: one of few.

    oneDNN makes a kernel for each number of rows and layer: 5 ms for 500 rows in bfloat16, which is
    an eighth of a chunk of a prompt for all layers of a small model. So there are 16 numbers up to
    16, and from there on 8 to 16 for each power of two.
    """
    if rows <= EXACT_ROWS:
        return rows
    step = max(LEAST_STEP, (1 << (rows - 1).bit_length()) // STEPS)
    return -(-rows // step) * step


def unpadded_rows(rows: int) -> int:
    """The largest number of at most `rows` rows that needs no padding."""
    if rows == padded_rows(rows):
        return rows
    step = max(LEAST_STEP, (1 << (rows - 1).bit_length()) // STEPS)
    return rows // step * step


def pad_rows(x: Tensor, rows: int | None = None) -> Tensor:
    """x [N, columns] with rows of zeros behind it; rows: of all, or as `padded_rows`."""
    missing = (rows or padded_rows(len(x))) - len(x)
    return pad(x, (0, 0, 0, missing)) if missing else x


def pack_linears(model: nn.Module, workers: int = 1) -> None:
    """Reorder the weights of a model on a CPU, if oneDNN takes them and there is room for them.

    The process then has its own copy, while mapped weights are shared with its neighbours. Without
    room for the copies of all workers it logs a warning.

    workers: processes of this host that load the same model
    """
    places = packable(model)
    layers = [getattr(parent, name) for parent, name in places]
    if not has_room(layers, workers):
        log.warning(
            "the weights stay as they are stored, so linear layers take 1.3 to 4.5 times as long: "
            "copies for oneDNN need %.1f GB each for %d workers of this host, and may take half "
            "of the available memory; fewer workers or --dtype bfloat16 need less",
            _num_bytes(layers) / 1e9,
            workers,
        )
        return
    layers.clear()
    for parent, name in places:
        # one by one: each original is freed before the next
        setattr(parent, name, PackedLinear(getattr(parent, name)))


def has_room(layers: Iterable[nn.Linear], workers: int = 1) -> bool:
    """Whether this host has room for a copy of these layers in each worker."""
    return _num_bytes(layers) * workers <= available_memory() // MEMORY_PART


def _num_bytes(layers: Iterable[nn.Linear]) -> int:
    return sum(layer.weight.nbytes for layer in layers)


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The plain linear layers: the module that each belongs to, and its name there."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and name not in UNPACKED
    ]


def packable(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The linear layers that can be packed, as of `linear_layers`."""
    return [
        (parent, name)
        for parent, name in linear_layers(model)
        if _is_packable(getattr(parent, name).weight)
    ]


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
