"""Linear layers with weights of 8 or 4 bits, on CPUs that have instructions for them.

    int8    weights: a scale for each output; inputs: rounded to 8 bits, a scale for each token
    int4    weights: a scale and a middle for every 32 of an output; inputs as they are. Steps of
            more tokens multiply the same rounded weights as int8 does, or in the model's dtype

A step of few tokens takes as long as its weights take to be read. Rounding inputs takes time too,
so small layers stay in the model's dtype. By measurement (Xeon with AMX, one thread, beside
bfloat16):

    int8    layers of 6 million numbers and more are 1.5 to 2.2 times as fast up to 16 tokens, and
            0.7 to 1.1 times at 512; smaller ones 0.6 to 1.2 times
    int4    layers of 0.8 million and more are 1.5 to 3.0 times as fast with one token, and 1.2 to
            1.8 times with four where they have no int8; with 16 they would take twice as long

The head stays as it is stored: of SmolLM2 it would cause a third of the error, and it is a small
part of a large model. So do the layers of `linear.UNPACKED`, and what is no nn.Linear: experts,
routers and embeddings.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from disagg.config import WEIGHTS
from disagg.errors import ConfigError
from disagg.model.cpu import processor_flags
from disagg.model.host_memory import available_memory
from disagg.model.linear import MEMORY_PART, PackedLinear, linear_layers, packable

# numbers of a layer from which on it is rounded
LEAST_NUMBERS = {"int8": 6_000_000, "int4": 800_000}
# tokens of a step up to which int4 is faster than int8, and than the model's dtype
MAX_ROWS_BESIDE_INT8 = 2
MAX_ROWS = 4
GROUP = 32  # int4 numbers that share a scale
OUTPUTS = 16  # the int4 operator takes multiples of so many
HEADS = ("head", "lm_head", "embed_out")  # names of the layer that computes logits
# one of these names of Linux is needed: without them int8 products overflow, and int4 is slow
UNITS = {
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8"},
    "int4": {"avx512f"},
}
OPERATORS = {
    "int8": "onednn::qlinear_pointwise",
    "int4": "aten::_weight_int4pack_mm_for_cpu",
}
DTYPES = ("float32", "bfloat16")  # of the model
LEAST_SCALE = 1e-12


class Int8Linear(nn.Module):
    """An nn.Linear with int8 weights. `weight` has their shape and the dtype, but no numbers.

    Each token is rounded by itself, so its output does not depend on the others of a step.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        codes, scales = int8_codes(weight)
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self._scales = scales[:, 0].contiguous()
        self._zeros = torch.zeros(len(codes), dtype=torch.int64)
        self.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
        self.bias = linear.bias

    @staticmethod
    def nbytes_of(linear: nn.Linear) -> int:
        """Bytes of a layer's copy."""
        return linear.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        codes, scales = int8_codes(x.reshape(-1, x.shape[-1]))
        products = torch.ops.onednn.qlinear_pointwise(
            codes,
            1.0,  # scale and zero of the input
            0,
            self._packed,
            self._scales,
            self._zeros,
            None,
            1.0,  # scale and zero of the output
            0,
            x.dtype,
            "none",
            [],
            "",
        )
        return _finish(products.mul_(scales), x, self.bias)


class Int4Linear(nn.Module):
    """An nn.Linear with int4 weights for steps of few tokens, and other copies of them for more.

    `weight` has their shape and the dtype, but no numbers.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        codes, scales, middles = int4_codes(linear.weight.detach())
        convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._packed = convert(codes.flatten(1), 1)
        pairs = torch.cat([scales, middles], 2)
        self._scales = pairs.transpose(0, 1).contiguous()
        numbers = torch.addcmul(middles, codes.sub_(8), scales).flatten(1)
        rounded = nn.Linear(linear.in_features, linear.out_features, device="meta")
        rounded.weight = nn.Parameter(numbers, requires_grad=False)
        rounded.bias = linear.bias
        is_large = _is_large(linear, "int8")
        self._many = Int8Linear(rounded) if is_large else PackedLinear(rounded)
        self._max_rows = MAX_ROWS_BESIDE_INT8 if is_large else MAX_ROWS
        self.weight = self._many.weight
        self.bias = linear.bias

    @staticmethod
    def nbytes_of(linear: nn.Linear) -> int:
        """Bytes of a layer's copies."""
        numbers = linear.weight.numel()
        itemsize = linear.weight.itemsize
        scales = 2 * itemsize * numbers // GROUP
        many = numbers if _is_large(linear, "int8") else numbers * itemsize
        return numbers // 2 + scales + many

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > self._max_rows:
            out: Tensor = self._many(x)
            return out
        products = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._packed, GROUP, self._scales
        )
        return _finish(products, x, self.bias)


Quantized = type[Int8Linear] | type[Int4Linear]
Linear = nn.Linear | PackedLinear | Int8Linear | Int4Linear


def _finish(products: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Products [rows, out] with the bias, in the shape of the input."""
    if bias is not None:
        products += bias
    return products.view(*x.shape[:-1], -1)


def int8_codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -127 to 127 of rows [N, in], and a scale for each row [N, 1] fp32."""
    largest = rows.abs().amax(1, keepdim=True).float()
    scales = largest.div_(127).clamp_min_(LEAST_SCALE)
    return torch.div(rows, scales).round_().to(torch.int8), scales


def int4_codes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15 [out, groups, 32] int32; scales and numbers of code 8 [out, groups, 1]."""
    groups = weight.unflatten(1, (-1, GROUP)).float()
    least, most = groups.aminmax(dim=2, keepdim=True)
    scales = ((most - least) / 15).clamp_min_(LEAST_SCALE).to(weight.dtype)
    middles = (least + 8 * scales).to(weight.dtype)
    codes = ((groups - middles) / scales).round_().add_(8)
    return codes.clamp_(0, 15).to(torch.int32), scales, middles


def check_weights_setting(weights: str | None, device: str, dtype: str) -> None:
    """ConfigError unless `model.weights` can be used on this device, processor and torch."""
    if weights is None:
        return
    setting = f"model.weights is {weights}"
    if device != "cpu":
        raise ConfigError(
            f"{setting}, which is for CPUs, and the device is {device}; expected null, and for "
            "smaller weights a checkpoint that is quantized already"
        )
    if dtype not in DTYPES:
        raise ConfigError(
            f"{setting} and the model's dtype {dtype}; expected {' or '.join(DTYPES)}"
        )
    if UNITS[weights].isdisjoint(processor_flags()):
        units = ", ".join(sorted(UNITS[weights]))
        raise ConfigError(
            f"{setting}, and this processor has none of {units}; expected null"
        )
    if not _has_operators(weights):
        raise ConfigError(
            f"{setting}, and torch {torch.__version__} has no {OPERATORS[weights]} here; "
            "expected null, or a torch 2.13 for x86"
        )


def usable_weights(device: str, dtype: str) -> tuple[str, ...]:
    """The values of `model.weights` that this host takes for a model's dtype."""
    usable = []
    for weights in WEIGHTS:
        try:
            check_weights_setting(weights, device, dtype)
        except ConfigError:
            continue
        usable.append(weights)
    return tuple(usable)


def _has_operators(weights: str) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return OPERATORS[weights] in torch._C._dispatch_get_all_op_names()


def quantize_linears(model: nn.Module, weights: str, workers: int = 1) -> None:
    """Round the weights of the large linear layers of a model on a CPU.

    workers: processes of this host that load the same model
    ConfigError for a model without such layers, and where memory has no room for all workers.
    """
    check_layer_sizes(model, weights)
    layers = [
        (parent, name, kind)
        for parent, name in packable(model)
        if (kind := _kind_of(getattr(parent, name), name, weights)) is not None
    ]
    nbytes = sum(kind.nbytes_of(getattr(parent, name)) for parent, name, kind in layers)
    if nbytes * workers > available_memory() // MEMORY_PART:
        raise ConfigError(
            f"model.weights is {weights}: copies need {nbytes / 1e9:.1f} GB each for {workers} "
            "workers of this host, and may take half of the available memory; expected fewer "
            "workers, or null"
        )
    for parent, name, kind in layers:
        # one by one: each original is freed before the next
        setattr(parent, name, kind(getattr(parent, name)))


def check_layer_sizes(model: nn.Module, weights: str) -> None:
    """ConfigError unless a linear layer of a model, which may have no numbers, is large enough."""
    if not has_large_layers(model, weights):
        raise ConfigError(
            f"model.weights is {weights}, and no linear layer of this model is of the size from "
            f"which on that is faster, {LEAST_NUMBERS[weights]:,} numbers; expected null"
        )


def has_large_layers(model: nn.Module, weights: str) -> bool:
    """Whether `model.weights` rounds any layer of a model."""
    return any(
        _kind_of(getattr(parent, name), name, weights) is not None
        for parent, name in linear_layers(model)
    )


def _kind_of(linear: nn.Linear, name: str, weights: str) -> Quantized | None:
    """What takes the place of a linear layer; None: nothing."""
    if name in HEADS:
        return None
    takes_int4 = linear.in_features % GROUP == 0 and linear.out_features % OUTPUTS == 0
    if weights == "int4" and takes_int4 and _is_large(linear, "int4"):
        return Int4Linear
    return Int8Linear if _is_large(linear, "int8") else None


def _is_large(linear: nn.Linear, weights: str) -> bool:
    return linear.weight.numel() >= LEAST_NUMBERS[weights]


def quantized_part(model: nn.Module) -> str:
    """Which of a model's linear layers are rounded, in words."""
    sizes = Counter[bool]()
    counts = Counter[bool]()
    for linear in _linears(model):
        is_quantized = isinstance(linear, Int8Linear | Int4Linear)
        sizes[is_quantized] += linear.weight.numel()
        counts[is_quantized] += 1
    part = sizes[True] / sizes.total()
    return f"{counts[True]} of {counts.total()} linear layers ({part:.1%} of their numbers)"


def _linears(model: nn.Module) -> Iterator[Linear]:
    for child in model.children():
        if isinstance(child, Linear):
            yield child
        else:
            yield from _linears(child)
