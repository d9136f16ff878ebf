"""Codecs by spec string: `get_codec("kivi:bits=2,group=64,residual=64")`."""

from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from typing import Any

from disagg.codecs.alignedkv import AlignedKV
from disagg.codecs.banded import Banded
from disagg.codecs.contract import Codec
from disagg.codecs.decoquant import DecoQuant
from disagg.codecs.fp8 import Fp8
from disagg.codecs.gear import Gear, GearL
from disagg.codecs.h2o import H2O
from disagg.codecs.int8 import Int8
from disagg.codecs.kcvt import Kcvt
from disagg.codecs.kivi import Kivi
from disagg.codecs.ott import Ott
from disagg.codecs.pertoken import PerToken
from disagg.codecs.raw import Raw
from disagg.errors import ConfigError, UnknownNameError, quoted

CODEC_CLASSES = (
    AlignedKV,
    Banded,
    DecoQuant,
    Fp8,
    Gear,
    GearL,
    H2O,
    Int8,
    Kcvt,
    Kivi,
    Ott,
    PerToken,
    Raw,
)
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in CODEC_CLASSES}
MAX_OPTION_CHARS = 64  # of key and value, which errors repeat
GROUPS = (64, 32, 16)  # channels that share a scale, unless a spec says how many


def codec_names(head_dim: int | None = None) -> list[str]:
    """All names of codecs; with a head dim, those whose defaults fit it."""
    return sorted(name for name in CODECS if head_dim is None or holds(name, head_dim))


def holds(spec: str, head_dim: int) -> bool:
    """Whether a codec fits this head dim."""
    try:
        get_codec(spec, head_dim).page_layout(head_dim)
    except ConfigError:
        return False
    return True


@lru_cache(maxsize=1024)
def get_codec(spec: str, head_dim: int | None = None) -> Codec:
    """The codec of a spec; options that it omits have their defaults.

    head_dim: where the spec names no group, the largest of GROUPS that divides it is taken

    UnknownNameError lists the known codecs or options; ConfigError names an invalid value.
    """
    name, _, tail = spec.strip().partition(":")
    if name not in CODECS:
        raise UnknownNameError.of("codec", name, CODECS)
    codec = CODECS[name]
    options = _parse_options(codec, tail, spec)
    has_group = any(field.name == "group" for field in fields(codec))
    if has_group and head_dim is not None and "group" not in options:
        for group in GROUPS:
            with suppress(ConfigError):
                instance = codec(**options | {"group": group})
                instance.page_layout(head_dim)
                return instance
    return codec(**options)


def _parse_options(codec: type[Codec], text: str, spec: str) -> dict[str, Any]:
    """The options "key=value,..." of a spec."""
    name = codec.name
    types = {field.name: field.type for field in fields(codec)}
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        if len(part) > MAX_OPTION_CHARS:
            raise ConfigError(f"codec {name} has no option as long as {quoted(part)}")
        key, equals, value = part.partition("=")
        key = key.strip()
        if key == "sink" and codec.no_sink:
            raise ConfigError(f"codec {name} has no sink: {codec.no_sink}")
        if key not in types:
            raise UnknownNameError.of(f"option of codec {name}", key, types)
        if not equals:
            raise ConfigError(
                f"option {key!r} of codec {name} has no value; write {key}=..."
            )
        if key in options:
            raise ConfigError(
                f"option {key!r} of codec {name} is given twice in {quoted(spec)}"
            )
        options[key] = _parse_value(name, key, value.strip(), types[key])
    return options


def _parse_value(name: str, key: str, text: str, kind: object) -> int | float | str:
    if kind in (str, "str"):
        return text
    number = float if kind in (float, "float") else int
    try:
        return number(text)
    except ValueError as error:
        raise ConfigError(
            f"option {key} of codec {name} is {text!r}; expected a number ({number.__name__})"
        ) from error
