"""Integers of 2, 4 or 8 bits in words of 32, the lowest bits first.

                    words run along  zeros              scale
GPTQ                inputs           qzeros             [groups, out]
AWQ                 outputs          qzeros             [groups, out]
compressed-tensors  inputs           weight_zero_point  [out, groups]

Inputs of a group are neighbours, unless g_idx has the group of each input. GPTQ's first layout
stores zero points minus 1. AWQ stores eight neighbours in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from disagg.model.packed.grid import Parts, ScaleGrid, split_words
from disagg.model.packed.tables import (
    PackedWeight,
    TensorTable,
    group_count,
    matrix_shape,
    wrong_shape,
)

WORD_BITS = 32
AWQ_BITS = 4
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight neighbours is in a word
SCALES = ("F16", "BF16", "F32")
WORDS = ("I32",)


def gptq_weights(
    table: TensorTable, options: Mapping[str, Any]
) -> Iterator[PackedWeight]:
    """Weights of GPTQ, with g_idx and zero points."""
    bits = options["bits"]
    group = options.get("group_size", -1)
    layout = options.get("checkpoint_format") or options.get("format") or "gptq"
    unpack = partial(_unpack_gptq, bits, layout == "gptq")
    for words in [*table.ending(".qweight")]:
        module = words.removesuffix(".qweight")
        name = f"{module}.weight"
        parts = _parts(module, "qweight", "qzeros", "scales", "g_idx")
        shape = matrix_shape(words, table.take(words, name, *WORDS))
        inputs = shape[0] * WORD_BITS // bits
        outputs = shape[1]
        groups = group_count(words, inputs, group)
        zeros = (groups, outputs * bits // WORD_BITS)
        table.take_shaped(parts["qzeros"], name, WORDS, zeros)
        table.take_shaped(parts["scales"], name, SCALES, (groups, outputs))
        table.take_shaped(parts["g_idx"], name, ("I32", "I64"), (inputs,))
        yield PackedWeight(name, (outputs, inputs), parts, unpack)


def awq_weights(
    table: TensorTable, options: Mapping[str, Any]
) -> Iterator[PackedWeight]:
    """Weights of AWQ in its layout "gemm"."""
    group = options.get("group_size") or options.get("q_group_size") or -1
    for words in [*table.ending(".qweight")]:
        module = words.removesuffix(".qweight")
        name = f"{module}.weight"
        parts = _parts(module, "qweight", "qzeros", "scales")
        inputs, width = matrix_shape(words, table.take(words, name, *WORDS))
        outputs = width * WORD_BITS // AWQ_BITS
        groups = group_count(words, inputs, group)
        table.take_shaped(parts["qzeros"], name, WORDS, (groups, width))
        table.take_shaped(parts["scales"], name, SCALES, (groups, outputs))
        yield PackedWeight(name, (outputs, inputs), parts, _unpack_awq)


def _parts(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}.{name}" for name in names}


@dataclass(frozen=True)
class WordFormat:
    """How compressed-tensors packs the integers of a weight.

    group: inputs of a scale; -1: all
    is_symmetric: without zero points
    has_order: whether g_idx has the group of each input
    """

    bits: int
    group: int
    is_symmetric: bool
    has_order: bool


def word_weight(table: TensorTable, name: str, form: WordFormat) -> PackedWeight:
    """A weight of compressed-tensors in words."""
    words = f"{name}_packed"
    rows, width = matrix_shape(words, table.take(words, name, *WORDS))
    inputs = width * WORD_BITS // form.bits
    groups = group_count(words, inputs, form.group)
    parts = {"words": words, "scale": f"{name}_scale", "shape": f"{name}_shape"}
    grid = (rows, groups)
    table.take_shaped(parts["scale"], name, SCALES, grid)
    table.take_shaped(parts["shape"], name, ("I64", "I32"), (2,))
    if not form.is_symmetric:
        parts["zeros"] = f"{name}_zero_point"
        packed = (-(-rows * form.bits // WORD_BITS), groups)
        table.take_shaped(parts["zeros"], name, WORDS, packed)
    if form.has_order:
        parts["g_idx"] = f"{name}_g_idx"
        table.take_shaped(parts["g_idx"], name, WORDS, (inputs,))
    unpack = partial(_unpack_words, form, parts["shape"])
    return PackedWeight(name, (rows, inputs), parts, unpack)


def _unpack_gptq(bits: int, is_less_one: bool, parts: Parts, out: Tensor) -> None:
    zeros = parts["qzeros"]
    if is_less_one:  # a single addition, which also undoes borrows between numbers
        ones = sum(1 << place for place in range(0, WORD_BITS, bits))
        zeros = zeros + ones
    grid = _scale_grid(parts["scales"].T, split_words(zeros, bits).T, parts["g_idx"])
    grid.apply(split_words(parts["qweight"].T, bits), out)


def _unpack_awq(parts: Parts, out: Tensor) -> None:
    codes = _sort_neighbours(split_words(parts["qweight"], AWQ_BITS)).T.contiguous()
    zeros = _sort_neighbours(split_words(parts["qzeros"], AWQ_BITS)).T
    _scale_grid(parts["scales"].T, zeros, inputs=len(parts["qweight"])).apply(
        codes, out
    )


def _sort_neighbours(codes: Tensor) -> Tensor:
    """AWQ's numbers in the order of the outputs."""
    numbers = torch.empty_like(codes)
    count = len(AWQ_PLACES)
    for i, place in enumerate(AWQ_PLACES):
        numbers[:, i::count] = codes[:, place::count]
    return numbers


def _unpack_words(form: WordFormat, name: str, parts: Parts, out: Tensor) -> None:
    rows, inputs = out.shape
    stored_shape = tuple(parts["shape"].tolist())
    if stored_shape != (rows, inputs):
        raise wrong_shape(f"the weight of {name}", stored_shape, (rows, inputs))
    scale = parts["scale"]
    if form.is_symmetric:
        zeros = torch.full_like(scale, 1 << (form.bits - 1))
    else:
        zeros = split_words(parts["zeros"].T, form.bits).T[:rows]
    grid = _scale_grid(scale, zeros, parts.get("g_idx"), inputs)
    grid.apply(split_words(parts["words"], form.bits), out)


def _scale_grid(
    scale: Tensor, zeros: Tensor, groups: Tensor | None = None, inputs: int = 0
) -> ScaleGrid:
    """The grid of scales and zeros [out, groups].

    groups: the group of each input; None: the inputs of a group are neighbours
    """
    outputs = torch.arange(len(scale), device=scale.device)
    order = None if groups is None else groups.long()
    if order is not None and int(order.min()) < 0:
        raise ValueError("g_idx has a negative group")
    width = inputs // scale.shape[1]
    return ScaleGrid(scale.float(), outputs, width, order, zeros.float())
