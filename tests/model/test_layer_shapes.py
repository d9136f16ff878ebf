"""Shapes of layers from sizes that make sense, and errors for others."""

from typing import Any

import pytest

from disagg.kv.plan import LayerShape
from disagg.model.layer_shapes import layer_shapes

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
}


def test_sizes_of_a_layer_stand_before_those_of_the_model() -> None:
    by_layer = {"head_dim_by_layer": [None, 64], "num_key_value_heads_by_layer": [4, 1]}

    narrow, wide = layer_shapes(SIZES | by_layer)

    assert narrow == LayerShape(heads=4, head_dim=32, window=64)
    assert wide == LayerShape(heads=1, head_dim=64)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("head_dim_by_layer", [32, -1], "head_dim of a layer is -1"),
        ("head_dim_by_layer", [32, "64"], "head_dim of a layer is '64'"),
        ("num_key_value_heads_by_layer", [0, 2], "num_key_value_heads of a layer is 0"),
        ("sliding_window", 1, "sliding_window is 1; expected .* at least 2"),
        ("attention_chunk_size", "64", "attention_chunk_size is '64'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    key: str, value: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        layer_shapes(SIZES | {key: value})
