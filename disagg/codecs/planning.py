"""Plans: which codec serves which layers, parsed from a spec for the KV shape of a model.

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
from disagg.codecs.raw import Raw
from disagg.codecs.registry import get_codec
from disagg.config import AUTO
from disagg.errors import ConfigError, quoted
from disagg.kv.page import EXACT, INT8, Layout
from disagg.kv.plan import LayerGroup, Plan, state_group

ROUNDED = INT8  # the form of states beside KV that is compressed, by default


@dataclass(frozen=True)
class KVShape:
    """What a model's KV cache looks like, per layer.

    num_layers: L, with K and V · heads: KV heads · head_dim: D
    dtype:      that the model computes in, "float32"
    windows:    per layer, the tokens a query sees, itself included; None: all of them
    states:     of each layer that keeps a state, its planes; they are numbered behind those of KV
    state_form: in which these states are handed off; AUTO: EXACT with codec raw, else ROUNDED
    """

    num_layers: int
    heads: int
    head_dim: int
    dtype: str
    windows: tuple[int | None, ...]
    states: tuple[Layout, ...] = ()
    state_form: str = EXACT

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence, whatever its length."""
        return sum(layout.block_bytes for layout in self.states)


def parse_plan(spec: str, shape: KVShape) -> Plan:
    """The plan of a model under a spec.

    UnknownNameError for an unknown codec or option; ConfigError if a layer has no codec or two, or
    if no codec of the spec fits this head dim.
    """
    *choices, last = (_codecs_by_layer(choice, shape) for choice in spec.split("|"))
    for codecs in choices:
        with suppress(ConfigError):
            return _plan_of(codecs, shape)
    return _plan_of(last, shape)


def _plan_of(codecs: Sequence[Codec], shape: KVShape) -> Plan:
    """Layers with the same codec and window form a group, and each layer with a state."""
    kinds = list(zip(codecs, shape.windows, strict=True))
    distinct_kinds = list(dict.fromkeys(kinds))
    groups: list[LayerGroup] = []
    for codec, window in distinct_kinds:
        layers = tuple(i for i, kind in enumerate(kinds) if kind == (codec, window))
        group = codec.layer_group(
            layers, shape.heads, shape.head_dim, shape.dtype, window
        )
        groups.append(group)
    group_of = [distinct_kinds.index(kind) for kind in kinds]
    form = _state_form(groups, shape)
    for layer, layout in enumerate(shape.states, shape.num_layers):
        group_of.append(len(groups))
        groups.append(state_group(layer, layout, form))
    return Plan(tuple(groups), tuple(group_of))


def _state_form(groups: Sequence[LayerGroup], shape: KVShape) -> str:
    """The form in which states are handed off beside these groups of K and V."""
    if shape.state_form != AUTO:
        return shape.state_form
    is_exact = all(isinstance(codec_of(group), Raw) for group in groups)
    return EXACT if is_exact else ROUNDED


def codec_of(group: LayerGroup) -> Codec:
    """The codec that a group's records are written with."""
    return get_codec(group.codec)


def _codecs_by_layer(spec: str, shape: KVShape) -> list[Codec]:
    """The codec of each layer."""
    text = spec.strip()
    if not text:
        raise ConfigError(
            "the codec spec is empty; write one such as kivi:bits=2,group=64"
        )
    # a spec that begins with a digit, of any script, names layers
    if not text[0].isdigit():
        return [get_codec(spec, shape.head_dim)] * shape.num_layers
    codecs: dict[int, Codec] = {}
    for part in filter(None, map(str.strip, spec.split(";"))):
        layers, _, codec_spec = part.partition(":")
        if not codec_spec.strip():
            raise ConfigError(
                f"{quoted(part)} in {quoted(spec)} names no codec; write 0-3:raw"
            )
        codec = get_codec(codec_spec, shape.head_dim)
        for layer in _parse_layers(layers, shape.num_layers, spec):
            if layer in codecs:
                raise ConfigError(f"layer {layer} has two codecs in {quoted(spec)}")
            codecs[layer] = codec
    missing = [layer for layer in range(shape.num_layers) if layer not in codecs]
    if missing:
        raise ConfigError(
            f"layers {missing} have no codec in {quoted(spec)}; "
            f"the model has {shape.num_layers}"
        )
    return [codecs[layer] for layer in range(shape.num_layers)]


def _parse_layers(text: str, num_layers: int, spec: str) -> list[int]:
    """The layers that "0,2-3,7-" names, in its order."""
    layers: list[int] = []
    for item in text.split(","):
        match = re.fullmatch("([0-9]{1,9})(-?)([0-9]{0,9})", item.strip())
        if match is None:
            raise ConfigError(
                f"{quoted(item)} in {quoted(spec)} is not a layer or range; "
                f"write 0, 0-3 or 4-"
            )
        first_text, dash, last_text = match.groups()
        first = int(first_text)
        last = int(last_text or num_layers - 1) if dash else first
        if not first <= last < num_layers:
            raise ConfigError(
                f"{item!r} in {quoted(spec)} is outside the model's layers 0-{num_layers - 1}"
            )
        layers.extend(range(first, last + 1))
    return layers
