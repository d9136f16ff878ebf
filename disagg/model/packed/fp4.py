"""4-bit floats (e2m1), two in a byte, the even one in the low bits.

         group  scale of a group  further scale
NVFP4    16     e4m3              weight_scale_2 (ModelOpt), times; weight_global_scale
                                  (compressed-tensors), divided by
MXFP4    32     e8m0 in a byte    none

gpt-oss stores experts as `<weight>_blocks` [experts, out, groups, 16] and `<weight>_scales`
[experts, out, groups]; its weights are [experts, in, out].
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from disagg.errors import ModelError
from disagg.model.packed.grid import Parts, ScaleGrid, as_scale, split_bytes
from disagg.model.packed.tables import (
    PackedWeight,
    TensorTable,
    group_count,
    matrix_shape,
)

NV_GROUP = 16
MX_GROUP = 32
PER_BYTE = 2
BITS = 4
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-x for x in MAGNITUDES))
ONE = ((), (1,))  # the shapes of one number


def nvfp4_weight(
    table: TensorTable, name: str, packed: str, outer: str, is_divisor: bool
) -> PackedWeight:
    """A weight in NVFP4.

    packed: name of the tensor with the numbers
    outer:  name of the scale of all groups, by which their scales are multiplied or divided
    """
    rows, columns = _matrix(table, name, packed)
    scale = f"{name}_scale"
    groups = group_count(packed, columns, NV_GROUP)
    table.take_shaped(scale, name, ("F8_E4M3",), (rows, groups))
    table.take_shaped(outer, name, ("F32",), *ONE)
    parts = {"codes": packed, "scale": scale, "outer": outer}
    unpack = partial(_unpack_nvfp4, is_divisor)
    return PackedWeight(name, (rows, columns), parts, unpack)


def mxfp4_weight(table: TensorTable, name: str, packed: str) -> PackedWeight:
    """A weight in MXFP4 of compressed-tensors."""
    rows, columns = _matrix(table, name, packed)
    scale = f"{name}_scale"
    groups = group_count(packed, columns, MX_GROUP)
    table.take_shaped(scale, name, ("U8", "F8_E8M0"), (rows, groups))
    parts = {"codes": packed, "scale": scale}
    return PackedWeight(name, (rows, columns), parts, _unpack_mxfp4)


def expert_weights(
    table: TensorTable, options: Mapping[str, Any]
) -> Iterator[PackedWeight]:
    """The experts of gpt-oss, all of a layer in one weight."""
    for blocks in [*table.ending("_blocks")]:
        name = blocks.removesuffix("_blocks")
        shape = table.take(blocks, name, "U8")
        if len(shape) != 4 or shape[-1] * PER_BYTE != MX_GROUP:
            raise ModelError(
                f"{blocks} has the shape {[*shape]}; expected [experts, outputs, groups, 16]"
            )
        experts, outputs, groups, _ = shape
        scales = f"{name}_scales"
        table.take_shaped(scales, name, ("U8",), shape[:-1])
        inputs = groups * MX_GROUP
        parts = {"codes": blocks, "scale": scales}
        yield PackedWeight(name, (experts, inputs, outputs), parts, _unpack_experts)


def _matrix(table: TensorTable, name: str, packed: str) -> tuple[int, int]:
    """Rows and columns of the weight that a packed tensor holds."""
    rows, half = matrix_shape(packed, table.take(packed, name, "U8"))
    return rows, half * PER_BYTE


def _unpack_nvfp4(is_divisor: bool, parts: Parts, out: Tensor) -> None:
    outer = parts["outer"].float().reshape(())
    scale = as_scale(parts["scale"])
    scale = scale / outer if is_divisor else scale * outer
    _unpack_groups(parts["codes"], scale, NV_GROUP, out)


def _unpack_mxfp4(parts: Parts, out: Tensor) -> None:
    _unpack_groups(parts["codes"], as_scale(parts["scale"]), MX_GROUP, out)


def _unpack_experts(parts: Parts, out: Tensor) -> None:
    scales = as_scale(parts["scale"])
    codes = parts["codes"].flatten(-2)
    for i, matrix in enumerate(out):  # written through a view [out, in]
        _unpack_groups(codes[i], scales[i], MX_GROUP, matrix.T)


def _unpack_groups(data: Tensor, scale: Tensor, group: int, out: Tensor) -> None:
    """out: [R, C], from bytes [R, C / 2] and scales [R, C / group]"""
    grid = ScaleGrid.tiled(scale, len(out), (1, group))
    values = torch.tensor(VALUES, device=data.device)
    grid.apply(split_bytes(data, BITS), out, values)
