"""Sampling defaults that a model brings, for requests that do not set them.

`do_sample: false` in generation_config.json means the most likely token, as in transformers.
Without `do_sample`, the numbers in the file count.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.engine.sequence import SamplingParams
from disagg.errors import ConfigError, ModelError, RequestError
from disagg.model.describe import locate_model
from disagg.model.end_tokens import GENERATION_CONFIG
from disagg.model.json_file import read_object

AUTO = "auto"
NONE = "none"
# names in the file: names of SamplingParams
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(
    model: str | None = None, source: str = AUTO
) -> dict[str, Any]:
    """The sampling defaults of a model, by the names of SamplingParams; empty if it has none.

    source: "auto": generation_config.json of the model; "none": no defaults; else the path of such
            a file, or of a folder with one
    ConfigError for a path without a file, ModelError for values that cannot be used.
    """
    if source == NONE:
        return {}
    file = _file(model, source)
    content = read_object(file)
    defaults = {
        name: content[key]
        for key, name in NAMES.items()
        if content.get(key) is not None
    }
    if content.get("do_sample") is False:
        defaults["temperature"] = 0.0
    if defaults.get("top_k") == -1:  # all tokens, as 0 does
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(
            f"{file}: {error}; model.generation_config: none ignores this file"
        ) from error
    return defaults


def describe_defaults(defaults: Mapping[str, Any]) -> str:
    """Sampling defaults in words, such as "temperature 0.6, top_k 20"."""
    return ", ".join(f"{name} {value}" for name, value in defaults.items())


def _file(model: str | None, source: str) -> Path:
    if source == AUTO:
        return locate_model(model) / GENERATION_CONFIG
    # Path.expanduser raises where no user has that name
    path = Path(os.path.expanduser(source))
    file = path / GENERATION_CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"config key model.generation_config is {source!r}; "
            "expected auto, none, or the path of a generation_config.json"
        )
    return file
