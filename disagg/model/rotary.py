"""How many positions the rotary embedding of a model has, by its config alone.

scaling     default                                        limit of `model.context`
none        max_position_embeddings                        the same
yarn        factor x original length, or                   the same
            max_position_embeddings if that is more
llama3,     max_position_embeddings                        factor x original length, if that is more
linear
dynamic     up to where frequencies begin to depend on     factor x original length, or
            the length of the text                         max_position_embeddings if that is more
longrope    factor x original length, or                   the same
            max_position_embeddings if that is more

A config has `rope_scaling` (older) or `rope_parameters`, for all layers or for each type of layer.
The key of the scaling is `rope_type` or `type`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_LENGTH = "max_position_embeddings"
ORIGINAL_LENGTH = "original_max_position_embeddings"
WINDOWED = "sliding_attention"  # positions farther apart than the window never meet
STRETCHING = ("linear", "dynamic", "llama3")
# the scalings that transformers computes, with the keys that each needs
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
# max_position_embeddings is already the stretched length, or scaling depends on each text's length
NEVER_LONGER = ("gemma3", "gemma3_text", "phimoe")


@dataclass(frozen=True)
class Reach:
    """Lengths in tokens, of prompt and answer.

    default: without `model.context`
    most:    the limit of `model.context`
    switch:  the longest text that LongRoPE rotates by its short factors; None: it is not used.
             Where types of layers have scalings of their own, no text is longer
    """

    default: int
    most: int
    switch: int | None = None


def rotary_reach(sizes: Mapping[str, Any]) -> Reach:
    """How long a text of a model may be.

    sizes: the sizes of its config, under their usual names
    ValueError for a scaling that transformers does not compute.
    """
    by_type = _by_type(sizes)
    reaches = {kind: _reach(rope, sizes) for kind, rope in by_type.items()}
    switches = [x.switch for x in reaches.values() if x.switch is not None]
    reaches.pop(WINDOWED, None)
    defaults = [x.default for x in reaches.values()] or [sizes[MAX_LENGTH]]
    switches_by_type = bool(switches) and "" not in by_type
    if switches_by_type or sizes.get("model_type") in NEVER_LONGER:
        default = min(switches + defaults)
        return Reach(default, default)
    return Reach(
        default=min(defaults),
        most=min([x.most for x in reaches.values()] or defaults),
        switch=min(switches, default=None),
    )


def _by_type(sizes: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rotary parameters by type of layer; under "" where all layers have the same.

    transformers prefers the older key.
    """
    rope = sizes.get("rope_scaling") or sizes.get("rope_parameters") or {}
    by_type: dict[str, Mapping[str, Any]] = {
        kind: value for kind, value in rope.items() if isinstance(value, dict)
    }
    return by_type or {"": rope}


def _reach(rope: Mapping[str, Any], sizes: Mapping[str, Any]) -> Reach:
    length = sizes[MAX_LENGTH]
    kind = _kind(rope, str(sizes.get("model_type")))
    original = rope.get(ORIGINAL_LENGTH) or sizes.get(ORIGINAL_LENGTH) or length
    stretched = max(length, int(_factor(rope) * original))
    if kind == "yarn":
        return Reach(stretched, stretched)
    if kind == "longrope":
        # architectures differ in which key counts
        keys = (rope.get(ORIGINAL_LENGTH), sizes.get(ORIGINAL_LENGTH), length)
        return Reach(stretched, stretched, switch=min(key for key in keys if key))
    return Reach(length, stretched if kind in STRETCHING else length)


def _kind(rope: Mapping[str, Any], model_type: str) -> str:
    """The name of a scaling; some architectures have older names for it."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if model_type.startswith("phi3") and kind in ("su", "yarn"):
        kind = "longrope"
    elif "vl" in model_type and kind == "mrope":
        kind = "default"
    if kind not in SCALINGS:
        known_names = ", ".join(SCALINGS)
        raise ValueError(f"rope scaling {kind!r} is unknown; known: {known_names}")
    missing = [key for key in SCALINGS[kind] if key not in rope]
    if missing:
        raise ValueError(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    return kind


def _factor(rope: Mapping[str, Any]) -> float:
    factor = rope.get("factor")
    if factor is None:
        return 1.0
    is_number = type(factor) in (int, float)
    if not is_number or not 0 < factor < math.inf:
        raise ValueError(
            f"the factor of rope scaling is {factor!r}; expected a number above 0"
        )
    return float(factor)
