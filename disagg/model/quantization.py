"""Markers of packed weights in the JSON files of a checkpoint. Does not import torch.

writer               marker
NVIDIA's ModelOpt    hf_quant_config.json, or quantization_config with quant_method "modelopt"
all others           quantization_config in config.json, or in its text_config

Weights are unpacked to the model's dtype while they load, see `disagg.model.packed`. Activations
are not quantized, so scales of activations or of a KV cache are not needed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ModelError
from disagg.model.checkpoint import TensorHeader, read_headers
from disagg.model.describe import named_weights, read_config
from disagg.model.json_file import read_object

MODELOPT = "modelopt"
COMPRESSED = "compressed-tensors"
MODELOPT_FILE = "hf_quant_config.json"
KEYS = ("quantization_config", "compression_config")
MODELOPT_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
)
MIXED = "MIXED_PRECISION"  # of ModelOpt: each layer names its algorithm
COMPRESSED_FORMATS = (
    "dense",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
WORD_BITS = (2, 4, 8)  # widths that divide a byte
PART = re.compile(
    r"(_scale_inv|weight_scale_2|pre_quant_scale|_blocks|_scales"
    r"|(^|[._])weight_(scale|packed|shape|global_scale|zero_point|g_idx)"
    r"|\.(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map))$"
)
# what reading the settings of a format raises where they are nonsense
SETTINGS_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    re.error,
)
PACKED_DTYPES = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")


@dataclass(frozen=True)
class Quantization:
    """The format of a checkpoint's packed weights.

    method:  the writer's name for it, a key of METHODS
    options: the writer's settings
    """

    method: str
    options: Mapping[str, Any]


def read_quantization(path: Path) -> Quantization | None:
    """The format of a model folder's packed weights; None: its weights are plain numbers.

    ModelError for a format that we do not unpack.
    """
    options = _marker(path)
    if not options:
        return None
    method = _method(options)
    check = METHODS.get(method)
    if check is None:
        raise _refusal(path, f"weights in the format {method!r}")
    try:
        reason = check(options)
    except SETTINGS_ERRORS as error:
        raise ModelError(f"{path}: {nonsense(method, error)}") from error
    if reason:
        raise _refusal(path, f"{method} weights with {reason}")
    return Quantization(method, options)


def has_packed_tensors(path: Path) -> bool:
    """Whether the headers of a folder's files show packed weights or parts of them."""
    headers = read_headers(path, named_weights(path))
    return any(is_packed(name, header) for name, header in headers.items())


def is_packed(name: str, header: TensorHeader) -> bool:
    """Whether a tensor is a packed weight, or a part of one."""
    if PART.search(name) or header.dtype.startswith("F8"):
        return True
    return header.dtype in PACKED_DTYPES and name.endswith("weight")


def nonsense(method: str, error: Exception) -> str:
    """What is wrong with settings that cannot be read."""
    return f"settings of {method} make no sense: {type(error).__name__}: {error}"


def _refusal(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path.name or path} has {what}: not supported; "
        f"supported: {', '.join(sorted(METHODS))}"
    )


def _marker(path: Path) -> Mapping[str, Any]:
    """The settings that a folder's files hold; empty if there are none."""
    config = read_config(path)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in KEYS:
            options = part.get(key)
            if options and not isinstance(options, dict):
                raise ModelError(
                    f"{path / 'config.json'}: {key} is {options!r}; expected an object"
                )
            if options:
                return options
    options = read_object(path / MODELOPT_FILE).get("quantization")
    if options and not isinstance(options, dict):
        raise ModelError(
            f"{path / MODELOPT_FILE}: quantization is {options!r}; expected an object"
        )
    return {"quant_method": MODELOPT, **options} if options else {}


def _method(options: Mapping[str, Any]) -> str:
    if options.get("load_in_4bit") or options.get("load_in_8bit"):
        return "bitsandbytes"
    if "quant_algo" in options:  # newer ModelOpt writes other methods' names beside it
        return MODELOPT
    return str(options.get("quant_method", "unknown"))


def _check_modelopt(options: Mapping[str, Any]) -> str:
    algorithm = options.get("quant_algo")
    algorithms = [algorithm]
    if algorithm == MIXED:
        layers = options.get("quantized_layers") or {}
        algorithms = [layer["quant_algo"] for layer in layers.values()]
    others = {x for x in algorithms if x and x not in MODELOPT_ALGORITHMS}
    return f"algorithm {', '.join(sorted(others))}" if others else ""


def _check_compressed(options: Mapping[str, Any]) -> str:
    """Why weights of compressed-tensors are not unpacked; empty if they are."""
    if options.get("transform_config"):
        return "transforms of activations (transform_config)"
    sparsity = options.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        return f"sparsity format {sparsity['format']}"
    status = options.get("quantization_status", "compressed")
    if status != "compressed":
        return f"quantization_status {status}"
    groups = [*(options.get("config_groups") or {}).values()]
    return _check_formats([options, *groups]) or _check_widths(groups)


def _check_formats(parts: list[Mapping[str, Any]]) -> str:
    formats = {part.get("format") for part in parts}
    others = formats - {None, *COMPRESSED_FORMATS}
    return f"format {', '.join(sorted(map(str, others)))}" if others else ""


def _check_widths(groups: list[Mapping[str, Any]]) -> str:
    widths = {_integer_bits(group.get("weights") or {}) for group in groups}
    others = widths - {None, *WORD_BITS}
    return f"integers of {', '.join(map(str, others))} bits" if others else ""


def _integer_bits(weights: Mapping[str, Any]) -> int | None:
    """The bits of a group's integers; None if it has floats."""
    bits = weights.get("num_bits", 8)
    return bits if weights.get("type", "int") == "int" else None


def _check_gptq(options: Mapping[str, Any]) -> str:
    """Why weights of GPTQ are not unpacked; empty if they are."""
    if options.get("bits") not in WORD_BITS:
        return f"{options.get('bits')} bits"
    layout = options.get("checkpoint_format") or options.get("format") or "gptq"
    if options.get("is_marlin_format") or layout not in ("gptq", "gptq_v2"):
        return f"layout {'marlin' if options.get('is_marlin_format') else layout}"
    if options.get("pack_dtype", "int32") != "int32":
        return f"words of {options['pack_dtype']}"
    own = options.get("dynamic") or {}
    return "settings of single layers (dynamic)" if any(own.values()) else ""


def _check_awq(options: Mapping[str, Any]) -> str:
    """Why weights of AWQ are not unpacked; empty if they are."""
    bits = options.get("bits") or options.get("w_bit")
    if bits != 4:
        return f"{bits} bits"
    keys = ("version", "checkpoint_format", "format")
    layout = str(next((options[key] for key in keys if key in options), "gemm")).lower()
    if layout != "gemm":
        return f"layout {layout}"
    return "" if options.get("zero_point", True) else "no zero points"


def _check_fp8(options: Mapping[str, Any]) -> str:
    block = options.get("weight_block_size")
    is_block = isinstance(block, list) and [type(x) for x in block] == [int, int]
    return "" if block is None or is_block else f"weight_block_size {block}"


def _check_nothing(options: Mapping[str, Any]) -> str:
    return ""


METHODS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "awq": _check_awq,
    COMPRESSED: _check_compressed,
    "fbgemm_fp8": _check_nothing,
    "fp8": _check_fp8,
    "gptq": _check_gptq,
    MODELOPT: _check_modelopt,
    "mxfp4": _check_nothing,
}
