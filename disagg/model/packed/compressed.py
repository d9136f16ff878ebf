"""Weights of compressed-tensors. Each group of the config says how its modules are packed."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from disagg.errors import ModelError
from disagg.model.packed.fp4 import mxfp4_weight, nvfp4_weight
from disagg.model.packed.scaled import (
    FLOATS,
    PER_CHANNEL,
    PER_TENSOR,
    WHOLE,
    Block,
    scaled_weight,
)
from disagg.model.packed.tables import PackedWeight, TensorTable
from disagg.model.packed.words import WordFormat, word_weight

PACKED = "_packed"
PATTERN = "re:"  # the beginning of a target that is a regular expression


def compressed_weights(
    table: TensorTable, options: Mapping[str, Any]
) -> Iterator[PackedWeight]:
    """Weights of compressed-tensors: integers in words, 4-bit floats, and 8-bit numbers."""
    groups = [*(options.get("config_groups") or {}).values()]
    for packed in [*table.ending(f".weight{PACKED}")]:
        name = packed.removesuffix(PACKED)
        yield _packed_weight(table, name, _settings(groups, name))
    for name in [*table.ending(".weight", *FLOATS, "I8")]:
        settings = _settings(groups, name)
        has_zeros = settings.get("symmetric") is False
        yield scaled_weight(table, name, [_block(name, settings)], has_zeros)


def _packed_weight(
    table: TensorTable, name: str, settings: Mapping[str, Any]
) -> PackedWeight:
    packed = name + PACKED
    if settings["type"] == "int":
        form = WordFormat(
            bits=settings["num_bits"],
            group=settings.get("group_size") or WHOLE,
            is_symmetric=settings.get("symmetric") is not False,
            has_order=settings.get("actorder") in (True, "group"),
        )
        return word_weight(table, name, form)
    if settings.get("strategy") == "tensor_group":
        outer = f"{name}_global_scale"
        return nvfp4_weight(table, name, packed, outer, is_divisor=True)
    return mxfp4_weight(table, name, packed)


def _settings(groups: list[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The settings of a weight: those of a group that names its module, or else a class."""
    module = name.removesuffix(".weight")
    by_class = None
    for group in groups:
        for target in group.get("targets", ()):
            if _names(target, module):
                return _weights_of(group, name)
            if target[:1].isupper() and by_class is None:
                by_class = group
    if by_class is None:
        raise ModelError(f"{name} is packed, but no group of the config targets it")
    return _weights_of(by_class, name)


def _names(target: str, module: str) -> bool:
    if target.startswith(PATTERN):
        return re.match(target.removeprefix(PATTERN), module) is not None
    return target == module


def _weights_of(group: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    settings = group.get("weights")
    if not settings:
        raise ModelError(
            f"{name} is packed, but its group of the config does not say how"
        )
    return {"type": "int", **settings}


def _block(name: str, settings: Mapping[str, Any]) -> Block:
    """The size of the blocks of a weight that share a scale."""
    strategy = settings.get("strategy")
    if strategy == "tensor":
        return PER_TENSOR
    if strategy == "channel":
        return PER_CHANNEL
    if strategy == "group":
        return (1, settings["group_size"])
    if strategy == "block":
        height, width = settings["block_structure"]
        return (height, width)
    raise ModelError(f"{name} is packed with the strategy {strategy!r}: not supported")
