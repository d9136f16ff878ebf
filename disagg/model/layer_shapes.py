"""The shape of the K and V of each layer, from a config's sizes alone.

Layers may differ in heads and in which tokens a query sees. Some attend to the K and V of an
earlier layer and have none of their own:

    attention of the model   0        1      2        3      4        5      6
    type                     window   full   window   full   window   full   full
    source                   0        1      2        3      2        3      3

What only transformers knows is in the sizes under the names below.
"""

from collections.abc import Mapping
from typing import Any

from disagg.kv.plan import LayerShape

HEADS = "num_key_value_heads"
HEAD_DIM = "head_dim"
# of each layer, where they differ
HEADS_BY_LAYER = "num_key_value_heads_by_layer"
HEAD_DIMS_BY_LAYER = "head_dim_by_layer"
SHARING = "kv_sharing_modes"
REUSE = "reuse"  # such a layer attends to the last layer of its type that has K and V
BY_LAYER = {HEADS: HEADS_BY_LAYER, HEAD_DIM: HEAD_DIMS_BY_LAYER}
# of models that keep latents (MLA): channels of a latent, and of the rotated key beside it
LATENT = "kv_lora_rank"
ROTATED = "qk_rope_head_dim"
# keys of configs whose layers may differ in heads, or may have no K and V of their own
VARYING = ("per_layer_config", "global_head_dim", "num_kv_shared_layers", LATENT)
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
# no windows; KV heads and head dim follow from the other sizes
WHOLE_ATTENTION = ("llama", "gpt2", "opt")


def read_layers(text: Any) -> dict[str, Any]:
    """What differs between the layers of a text config of transformers, under our names."""
    sizes = {}
    if getattr(text, "is_heterogeneous", False):
        layers = list(text.per_layer_config)
        for name, by_layer in BY_LAYER.items():
            sizes[by_layer] = [getattr(layer, name, None) for layer in layers]
    modes = getattr(text, SHARING, None)
    if modes is not None:
        sizes[SHARING] = list(modes)
    return sizes


def layer_shapes(sizes: Mapping[str, Any]) -> tuple[LayerShape, ...]:
    """The shapes of the layers with K and V.

    sizes: the sizes of the model's config, under their usual names
    ValueError for sizes that make no sense.
    """
    query_heads = sizes["num_attention_heads"]
    num_layers = sizes["num_hidden_layers"]
    heads = sizes.get(HEADS) or query_heads
    head_dim = sizes.get(HEAD_DIM) or sizes["hidden_size"] // query_heads
    latent = sizes.get(LATENT) or None
    if latent is not None:
        heads = 1
        head_dim = latent + sizes[ROTATED]
    windows = _windows(sizes)
    types = _layer_types(sizes)
    heads_by_layer = _sizes_by_layer(sizes, HEADS)
    head_dims = _sizes_by_layer(sizes, HEAD_DIM)
    shapes = [
        LayerShape(
            heads=heads_by_layer[index] or heads,
            head_dim=head_dims[index] or head_dim,
            window=windows[index],
            latent=latent,
            chunked=types[index] == CHUNKED and windows[index] is not None,
        )
        for index in range(num_layers)
    ]
    return tuple(shapes[index] for index in _owners(sizes))


def kv_sources(sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Of each attention of the model, which layer with K and V it attends to."""
    owners = _owners(sizes)
    types = _layer_types(sizes)
    last_of_type: dict[str, int] = {}
    sources = []
    for index in range(sizes["num_hidden_layers"]):
        if index in owners:
            last_of_type[types[index]] = owners.index(index)
        sources.append(last_of_type[types[index]])
    return tuple(sources)


def _sizes_by_layer(sizes: Mapping[str, Any], name: str) -> list[int | None]:
    """A size of each layer; None: that of the model."""
    by_layer: list[Any] = sizes.get(BY_LAYER[name]) or []
    for size in by_layer:
        if size is not None and not _is_size(size):
            raise ValueError(
                f"{name} of a layer is {size!r}; expected a number above 0"
            )
    return by_layer or [None] * sizes["num_hidden_layers"]


def _owners(sizes: Mapping[str, Any]) -> list[int]:
    """The layers that have K and V of their own."""
    num_layers = sizes["num_hidden_layers"]
    modes = sizes.get(SHARING) or [None] * num_layers
    return [index for index, mode in enumerate(modes[:num_layers]) if mode != REUSE]


def _windows(sizes: Mapping[str, Any]) -> list[int | None]:
    sliding = sizes.get("sliding_window")
    is_off = sizes.get("use_sliding_window") is False
    if is_off or sizes.get("model_type") in WHOLE_ATTENTION:
        sliding = None
    chunk = sizes.get("attention_chunk_size")
    for name, size in (("sliding_window", sliding), ("attention_chunk_size", chunk)):
        if size is not None and not (_is_size(size) and size > 1):
            raise ValueError(
                f"{name} is {size!r}; expected a number of tokens, at least 2"
            )
    windows = {SLIDING: sliding, CHUNKED: chunk}
    return [windows.get(kind) for kind in _layer_types(sizes)]


def _layer_types(sizes: Mapping[str, Any]) -> list[str]:
    """The type of each layer; layers of one type that is not named may have a window."""
    num_layers = sizes["num_hidden_layers"]
    types: list[str] = sizes.get("layer_types") or [SLIDING] * num_layers
    return types[:num_layers]


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
