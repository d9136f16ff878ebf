"""Weights of NVIDIA's ModelOpt: FP8 or NVFP4, by the dtype of each weight."""

from collections.abc import Iterator, Mapping
from typing import Any

from disagg.model.packed.fp4 import nvfp4_weight
from disagg.model.packed.scaled import PER_CHANNEL, PER_TENSOR, SQUARE, float_weights
from disagg.model.packed.tables import PackedWeight, TensorTable

BLOCKS = {
    "FP8": [PER_TENSOR],
    "FP8_PER_CHANNEL_PER_TOKEN": [PER_CHANNEL],
    "FP8_PB_WO": [SQUARE],
}
ANY_BLOCK = [PER_TENSOR, PER_CHANNEL, SQUARE]


def modelopt_weights(
    table: TensorTable, options: Mapping[str, Any]
) -> Iterator[PackedWeight]:
    for name in [*table.ending(".weight", "U8")]:
        outer = f"{name}_scale_2"
        yield nvfp4_weight(table, name, name, outer, is_divisor=False)
    blocks = BLOCKS.get(options.get("quant_algo", ""), ANY_BLOCK)
    yield from float_weights(table, blocks)
