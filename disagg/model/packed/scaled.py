"""8-bit numbers with scales: FP8 of DeepSeek, FBGEMM and ModelOpt, FP8 and int8 of others.

    weight        [..., R, C] e4m3, e5m2 or i8
    weight_scale  one number for each block of the weight; also named weight_scale_inv

block     scale                      of
whole     one                        a tensor
row       [R] or [R, 1]              a channel
128, 128  [R / 128, C / 128]         a square, cut short at the ends
1, 32     [R, C / 32]                a group of inputs

weight = (number - weight_zero_point) * weight_scale
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from disagg.errors import ModelError
from disagg.model.packed.grid import Parts, ScaleGrid, as_scale
from disagg.model.packed.tables import PackedWeight, Shape, TensorTable, wrong_shape

FLOATS = ("F8_E4M3", "F8_E5M2")
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
WHOLE = -1  # a block as long as the weight
PER_TENSOR = (WHOLE, WHOLE)
PER_CHANNEL = (1, WHOLE)
SQUARE = (128, 128)
SCALE_ENDINGS = ("_scale_inv", "_scale")

Block = tuple[int, int]


def fp8_weights(
    table: TensorTable, options: Mapping[str, Any]
) -> Iterator[PackedWeight]:
    """FP8 as DeepSeek and transformers write it: squares, or one scale a tensor or a channel."""
    size = options.get("weight_block_size")
    blocks = [PER_TENSOR, PER_CHANNEL] if size is None else [(size[0], size[1])]
    return float_weights(table, blocks)


def fbgemm_weights(
    table: TensorTable, options: Mapping[str, Any]
) -> Iterator[PackedWeight]:
    return float_weights(table, [PER_CHANNEL])


def float_weights(
    table: TensorTable, blocks: Sequence[Block]
) -> Iterator[PackedWeight]:
    """All FP8 weights; each block of one of these sizes has a scale."""
    for name in [*table.ending("", *FLOATS)]:
        is_scale = name.endswith(SCALE_ENDINGS)
        if not is_scale and name not in table.taken:
            yield scaled_weight(table, name, blocks)


def scaled_weight(
    table: TensorTable, name: str, blocks: Sequence[Block], has_zeros: bool = False
) -> PackedWeight:
    """A weight of 8-bit numbers. ModelError if it has no scale, or one of another shape."""
    shape = table.take(name, name, *FLOATS, "I8")
    if len(shape) < 2:
        raise ModelError(f"{name} has the shape {[*shape]}; expected a matrix")
    scale = _scale_name(table, name)
    scale_shape = table.take(scale, name, *SCALES)
    block = _block(scale, scale_shape, shape, blocks)
    parts = {"codes": name, "scale": scale}
    if has_zeros:
        parts["zeros"] = f"{name}_zero_point"
        table.take_shaped(parts["zeros"], name, ("I8",), scale_shape)
    return PackedWeight(name, shape, parts, partial(_unpack, block))


def _scale_name(table: TensorTable, weight: str) -> str:
    names = [weight + ending for ending in SCALE_ENDINGS]
    stored = [name for name in names if name in table.headers]
    if len(stored) != 1:
        number = "both are" if stored else "none is"
        raise ModelError(
            f"{weight} is packed; expected one of {', '.join(names)}, but {number} stored"
        )
    return stored[0]


def _block(name: str, shape: Shape, weight: Shape, blocks: Sequence[Block]) -> Block:
    """The size of the blocks whose scales have a shape; axes of length 1 do not matter."""
    grids = [_grid(weight, block) for block in blocks]
    for block, grid in zip(blocks, grids, strict=True):
        if _squeeze(shape) == _squeeze(grid):
            return block
    raise wrong_shape(name, shape, *grids)


def _grid(weight: Shape, block: Block) -> Shape:
    """The shape of the scales of a weight, with both axes of a block."""
    *stack, rows, columns = weight
    height, width = _sizes((rows, columns), block)
    return (*stack, -(-rows // height), -(-columns // width))


def _sizes(matrix: tuple[int, int], block: Block) -> Block:
    rows, columns = (
        size if length == WHOLE else length
        for size, length in zip(matrix, block, strict=True)
    )
    return rows, columns


def _squeeze(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _unpack(block: Block, parts: Parts, out: Tensor) -> None:
    """Matrix by matrix, if there are several in a stack."""
    rows, columns = out.shape[-2:]
    stack = prod(out.shape[:-2])
    shape = (stack, *_grid((rows, columns), block))
    scales = as_scale(parts["scale"]).reshape(shape)
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = zeros.float().reshape(shape)
    codes = parts["codes"].reshape(stack, rows, columns)
    matrices = out.view(stack, rows, columns)
    for i in range(stack):
        grid = ScaleGrid.tiled(
            scales[i],
            rows,
            _sizes((rows, columns), block),
            None if zeros is None else zeros[i],
        )
        grid.apply(codes[i], matrices[i])
