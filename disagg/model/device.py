"""Where a model computes."""

import torch

from disagg.config import DEVICES, ModelConfig
from disagg.errors import ConfigError
from disagg.model.runner import Runner


def pick_device(wanted: str) -> str:
    """The device meant, "cpu" or "cuda"; "auto" takes a GPU where torch sees one.

    ConfigError for an unknown one and for a GPU that is not there.
    """
    if wanted not in DEVICES:
        raise ConfigError(f"device {wanted!r} is unknown; known: {', '.join(DEVICES)}")
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("device 'cuda' is wanted, and torch sees no GPU here; 'auto' takes a CPU")
    return "cuda" if there and wanted != "cpu" else "cpu"


def load_runner(config: ModelConfig) -> Runner:
    """The configured model on its device; ConfigError and ModelError as the two say."""
    return Runner.load(config.name, config.dtype, pick_device(config.device))
