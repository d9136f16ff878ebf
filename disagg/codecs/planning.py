"""Plans: which codec serves which layers, parsed from a spec for the KV shape of a model.

"kivi:bits=2"                                 every layer
"0-1:kivi:bits=4;2-:kivi:bits=2"              layers 0 and 1, then the rest
"0,5:raw;1-4:kivi:bits=4,group=32"            lists and ranges
"banded:bits=3|kivi:bits=4"                   kivi in layers whose head dim banded cannot hold
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from disagg.codecs.contract import Codec
from disagg.codecs.raw import Raw
from disagg.codecs.registry import get_codec
from disagg.config import AUTO
from disagg.errors import ConfigError, quoted
from disagg.kv.page import EXACT, INT8, Layout
from disagg.kv.plan import LayerGroup, LayerShape, Plan, state_group

ROUNDED = INT8  # the form of states beside KV that is compressed, by default


@dataclass(frozen=True)
class KVShape:
    """What a model's KV cache looks like.

    layers: those with K and V
    dtype:  that the model computes in, "float32"
    states: of each layer that keeps a state, its planes; they are numbered behind those of KV
    rope_switch: as in `Plan`
    state_form: in which states are handed off; AUTO: EXACT with codec raw, else ROUNDED
    """

    layers: tuple[LayerShape, ...]
    dtype: str
    states: tuple[Layout, ...] = ()
    rope_switch: int | None = None
    state_form: str = EXACT

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        heads: int,
        head_dim: int,
        dtype: str,
        windows: Sequence[int | None] = (),
    ) -> "KVShape":
        """The shape of layers with the same heads.

        windows: of each layer; empty: every query sees all tokens
        """
        windows = windows or [None] * num_layers
        layers = tuple(LayerShape(heads, head_dim, window) for window in windows)
        return cls(layers, dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence, whatever its length."""
        return sum(layout.block_bytes for layout in self.states)


def parse_plan(spec: str, shape: KVShape) -> Plan:
    """The plan of a model under a spec.

    UnknownNameError for an unknown codec or option; ConfigError if a layer has no codec or two, or
    if no codec of the spec fits the head dim of a layer.
    """
    choices = [_codecs_by_layer(choice, shape) for choice in spec.split("|")]
    codecs = [
        _first_that_fits(codecs, layer, shape.dtype)
        for *codecs, layer in zip(*choices, shape.layers, strict=True)
    ]
    return _plan_of(codecs, shape)


def makes_plan(spec: str, shape: KVShape) -> bool:
    """Whether a spec fits a model."""
    try:
        parse_plan(spec, shape)
    except ConfigError:
        return False
    return True


def _first_that_fits(codecs: Sequence[Codec], layer: LayerShape, dtype: str) -> Codec:
    """The first codec that can hold a layer, or the last one."""
    for codec in codecs[:-1]:
        with suppress(ConfigError):
            _group_of(codec, (0,), layer, dtype)
            return codec
    return codecs[-1]


def _group_of(
    codec: Codec, layers: tuple[int, ...], shape: LayerShape, dtype: str
) -> LayerGroup:
    """The group of layers of one shape; ConfigError where the codec cannot hold them."""
    group = codec.layer_group(
        layers, shape.heads, shape.head_dim, dtype, shape.window, shape.latent
    )
    return replace(group, chunked=shape.chunked, first_head=shape.first_head)


def _plan_of(codecs: Sequence[Codec], shape: KVShape) -> Plan:
    """Layers with the same codec and shape form a group, and each layer with a state."""
    kinds = list(zip(codecs, shape.layers, strict=True))
    distinct_kinds = list(dict.fromkeys(kinds))
    groups: list[LayerGroup] = []
    for codec, layer_shape in distinct_kinds:
        layers = tuple(
            i for i, kind in enumerate(kinds) if kind == (codec, layer_shape)
        )
        groups.append(_group_of(codec, layers, layer_shape, shape.dtype))
    group_of = [distinct_kinds.index(kind) for kind in kinds]
    form = _state_form(groups, shape)
    for layer, layout in enumerate(shape.states, shape.num_layers):
        group_of.append(len(groups))
        groups.append(state_group(layer, layout, form))
    return Plan(tuple(groups), tuple(group_of), shape.rope_switch)


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
        return [get_codec(spec, layer.head_dim) for layer in shape.layers]
    codecs: dict[int, Codec] = {}
    for part in filter(None, map(str.strip, spec.split(";"))):
        layers, _, codec_spec = part.partition(":")
        if not codec_spec.strip():
            raise ConfigError(
                f"{quoted(part)} in {quoted(spec)} names no codec; write 0-3:raw"
            )
        for layer in _parse_layers(layers, shape.num_layers, spec):
            if layer in codecs:
                raise ConfigError(f"layer {layer} has two codecs in {quoted(spec)}")
            codecs[layer] = get_codec(codec_spec, shape.layers[layer].head_dim)
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
