"""From a spec and the shape of a model's KV to a plan: which codec serves which layers.

"kivi:bits=2"                                 every layer
"0-1:kivi:bits=4;2-:kivi:bits=2"              layers 0 and 1, then the rest
"0,5:raw;1-4:kivi:bits=4,group=32"            lists and ranges
"banded:bits=3|kivi:bits=4"                   the second where the first cannot hold the head dim
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from disagg.codecs.contract import Codec
from disagg.codecs.registry import get_codec
from disagg.errors import ConfigError, quoted
from disagg.kv.plan import LayerGroup, Plan


@dataclass(frozen=True)
class KVShape:
    """What a model's KV cache looks like, per layer.

    num_layers: L · heads: KV heads · head_dim: D · dtype: what the model computes in, "float32"
    windows:    per layer, the tokens a query sees, itself included; None: all of them
    """

    num_layers: int
    heads: int
    head_dim: int
    dtype: str
    windows: tuple[int | None, ...]


def parse_plan(spec: str, shape: KVShape) -> Plan:
    """The plan of a model under a spec.

    UnknownNameError for a codec or option nobody knows; ConfigError where a layer has no codec or
    two, or where a codec cannot hold this head dim and there is no other.
    """
    choices = [
        _codec_of_layer(choice, shape.num_layers, shape.head_dim)
        for choice in spec.split("|")
    ]
    for codec_of in choices[:-1]:
        with suppress(ConfigError):
            return _plan_of(codec_of, shape)
    return _plan_of(choices[-1], shape)


def _plan_of(codec_of: Sequence[Codec], shape: KVShape) -> Plan:
    kinds = list(zip(codec_of, shape.windows, strict=True))
    found, groups = list(dict.fromkeys(kinds)), list[LayerGroup]()
    sizes = shape.heads, shape.head_dim, shape.dtype
    for codec, window in found:
        layers = tuple(i for i, kind in enumerate(kinds) if kind == (codec, window))
        groups.append(codec.layer_group(layers, *sizes, window))
    return Plan(tuple(groups), tuple(map(found.index, kinds)))


def codec_of(group: LayerGroup) -> Codec:
    """The codec that a group's records are written with."""
    return get_codec(group.codec)


def _codec_of_layer(spec: str, num_layers: int, head_dim: int) -> list[Codec]:
    if not spec.strip():
        raise ConfigError(
            "the codec spec is empty; write one such as kivi:bits=2,group=64"
        )
    if not spec.strip()[
        0
    ].isdigit():  # of any script: such a spec names layers, if wrongly
        return [get_codec(spec, head_dim)] * num_layers
    found: dict[int, Codec] = {}
    for part in filter(None, (x.strip() for x in spec.split(";"))):
        layers, _, codec_spec = part.partition(":")
        if not codec_spec.strip():
            raise ConfigError(
                f"{quoted(part)} in {quoted(spec)} names no codec; write 0-3:raw"
            )
        codec = get_codec(codec_spec, head_dim)
        for layer in _layers(layers, num_layers, spec):
            if layer in found:
                raise ConfigError(f"layer {layer} has two codecs in {quoted(spec)}")
            found[layer] = codec
    missing = [layer for layer in range(num_layers) if layer not in found]
    if missing:
        told = f"layers {missing} have no codec in {quoted(spec)}; the model has {num_layers}"
        raise ConfigError(told)
    return [found[layer] for layer in range(num_layers)]


def _layers(text: str, num_layers: int, spec: str) -> list[int]:
    found: list[int] = []
    for item in text.split(","):
        parts = re.fullmatch("([0-9]{1,9})(-?)([0-9]{0,9})", item.strip())
        if parts is None:
            told = f"{quoted(item)} in {quoted(spec)} is no layer or range; write 0, 0-3 or 4-"
            raise ConfigError(told)
        first, dash, last = parts.groups()
        end = int(last or num_layers - 1) if dash else int(first)
        if not int(first) <= end < num_layers:
            raise ConfigError(
                f"{item!r} in {quoted(spec)} is outside the model's layers 0-{num_layers - 1}"
            )
        found.extend(range(int(first), end + 1))
    return found
