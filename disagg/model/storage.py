"""How the tensors of a checkpoint become the weights of a model, by the headers of its files.

Every tensor is a plain weight, a part of a packed weight, or known not to be needed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ModelError
from disagg.model.checkpoint import TensorHeader, read_headers
from disagg.model.describe import named_weights
from disagg.model.packed.compressed import compressed_weights
from disagg.model.packed.fp4 import expert_weights
from disagg.model.packed.modelopt import modelopt_weights
from disagg.model.packed.scaled import fbgemm_weights, fp8_weights
from disagg.model.packed.tables import PackedWeight, TensorTable
from disagg.model.packed.words import awq_weights, gptq_weights
from disagg.model.quantization import (
    COMPRESSED,
    MODELOPT,
    MODELOPT_FILE,
    SETTINGS_ERRORS,
    Quantization,
    is_packed,
    nonsense,
    read_quantization,
)

Reader = Callable[[TensorTable, Mapping[str, Any]], Iterator[PackedWeight]]

READERS: dict[str, Reader] = {
    "awq": awq_weights,
    COMPRESSED: compressed_weights,
    "fbgemm_fp8": fbgemm_weights,
    "fp8": fp8_weights,
    "gptq": gptq_weights,
    MODELOPT: modelopt_weights,
    "mxfp4": expert_weights,
}
# scales of activations, which we do not quantize, and of KV caches, which our codecs compress
ACTIVATION_SCALE = re.compile(
    r"(^|[._])(input_scale|input_scale_ub|activation_scale|input_global_scale|input_zero_point)$"
)
CACHE_SCALE = re.compile(
    r"\.(kv_scale|[qkv]_(scale|zero_point|global_scale)|k_proj\.(k_bias|output_\w+)"
    r"|v_proj\.(v_bias|output_\w+)|prob_scale)$"
)
EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Storage:
    """The tensors of a checkpoint.

    headers: of all tensors, by name
    plain:   names of tensors that are weights without unpacking
    packed:  weights that are made of several tensors
    """

    quantization: Quantization | None
    headers: Mapping[str, TensorHeader]
    plain: tuple[str, ...]
    packed: tuple[PackedWeight, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight."""
        shapes = {name: self.headers[name].shape for name in self.plain}
        return shapes | {weight.name: weight.shape for weight in self.packed}


def read_storage(path: Path) -> Storage | None:
    """How the weights of a model folder are stored; None: it has no safetensors files.

    ModelError for packed weights that are incomplete, or whose format is not named.
    """
    quantization = read_quantization(path)
    files = named_weights(path)
    if not files:
        if quantization is not None:
            raise ModelError(
                f"{path} has no model.safetensors: packed weights are read from no other files"
            )
        return None
    table = TensorTable(read_headers(path, files))
    packed = []
    try:
        if quantization is not None:
            reader = READERS[quantization.method]
            packed = _read_packed(reader, table, quantization)
            table.taken.update(filter(_is_unneeded_scale, table.headers))
        plain = [name for name in table.headers if name not in table.taken]
        for name in plain:
            _refuse_packed(name, table.headers[name], quantization)
        for weight in packed:
            if weight.name in plain:
                raise ModelError(f"{weight.name} is stored twice: plain and packed")
        storage = Storage(quantization, table.headers, tuple(plain), tuple(packed))
        _check_experts(storage.shapes)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return storage


def _read_packed(
    reader: Reader, table: TensorTable, quantization: Quantization
) -> list[PackedWeight]:
    try:
        return [*reader(table, quantization.options)]
    except SETTINGS_ERRORS as error:
        raise ModelError(nonsense(quantization.method, error)) from error


def _is_unneeded_scale(name: str) -> bool:
    """Whether a tensor is a scale of activations, or of a KV cache."""
    return bool(ACTIVATION_SCALE.search(name) or CACHE_SCALE.search(name))


def _refuse_packed(
    name: str, header: TensorHeader, quantization: Quantization | None
) -> None:
    """ModelError for a tensor that is packed, or a part of a packed weight."""
    if not is_packed(name, header):
        return
    if quantization is None:
        raise ModelError(
            f"{name} is stored as {header.dtype}, and no file says how to read it; expected "
            f"quantization_config in config.json, or {MODELOPT_FILE}"
        )
    raise ModelError(
        f"{name}, stored as {header.dtype}, is not part of any weight in {quantization.method}"
    )


def _check_experts(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ModelError unless each weight of experts is numbered from 0 without a gap.

    They are put into one weight in the order of their numbers, so a gap would shift them. The last
    experts may lack a weight: experts of LongCat that only pass tokens on have no down_proj.
    """
    experts: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            continue
        stack, number, weight = match[1], int(match[2]), match[3]
        experts.setdefault((stack, weight), {})[number] = shape
    for (stack, weight), stacked in experts.items():
        for number in range(max(stacked) + 1):
            if number not in stacked:
                raise ModelError(f"{stack}.{number}.{weight} is missing")
            if stacked[number] != stacked[0]:
                raise ModelError(
                    f"{stack}.{number}.{weight} has the shape {[*stacked[number]]}; "
                    f"that of expert 0 is {[*stacked[0]]}"
                )
