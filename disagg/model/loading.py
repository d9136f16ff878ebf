"""Builds a transformers model from named tensors. Each must be a weight, or known not to be needed.

On the device "meta" a model has shapes but no numbers. That shows within a second whether a
checkpoint has the weights of its model.
"""

import importlib.util
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from disagg.errors import ModelError
from disagg.model.architecture import building
from disagg.model.attention import IMPLEMENTATION
from disagg.model.describe import ModelInfo, read_config
from disagg.model.quantization import Quantization
from disagg.model.storage import Storage

LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    RuntimeError,
    SafetensorError,
)
META = "meta"
# formats that transformers multiplies without unpacking: the package, and the least GPU
KERNELS = {
    "awq": ("gptqmodel", (7, 5)),
    "fp8": ("kernels", (8, 9)),
    "gptq": ("gptqmodel", (7, 5)),
    "mxfp4": ("kernels", (7, 5)),
}
EXAMPLES = 3  # names in an error message
OLD_BUFFER = re.compile(
    r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias|attn\.bias|attention\.bias)$"
)
OTHER_PART = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|image\w*|multi_modal\w*|mm_\w+|embed_vision|embed_audio)\."
)
OTHER_CONFIG = re.compile(r"(vision|audio|image)\w*_config")
DRAFT_PART = re.compile(r"(^|\.)mtp\w*\.")
DRAFT_KEY = re.compile(r"mtp|nextn")
LAYER = re.compile(r"\.layers\.(\d+)\.")


class ShapeOnly:
    """A tensor without numbers, as transformers reads slices of files."""

    def __init__(self, shape: tuple[int, ...]):
        self._shape = shape

    def __getitem__(self, _: object) -> Tensor:
        return torch.empty(self._shape, device=META)


def build_model(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, Any],
    info: ModelInfo,
    device: str,
) -> PreTrainedModel:
    """A model with these tensors, or slices of files, as its weights.

    ModelError if weights are missing or of another shape, or for tensors that are unknown.
    """
    with building():
        try:
            model, report = kind.from_pretrained(
                None,
                config=_without_quantization(config),
                state_dict=dict(tensors),
                **load_options(info, device),
            )
        except LOAD_ERRORS as error:
            raise load_error(info, error) from error
    check_report(report, info)
    return model


def check_storage(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    storage: Storage,
    info: ModelInfo,
) -> int:
    """Bytes of a model's weights in memory; ModelError unless a checkpoint has all of them."""
    tensors = {name: ShapeOnly(shape) for name, shape in storage.shapes.items()}
    model = build_model(kind, config, tensors, info, META)
    weights = {id(x): x.nbytes for x in model.parameters()}  # tied ones once
    return sum(weights.values())


def model_shape(
    kind: type[PreTrainedModel], config: PreTrainedConfig, info: ModelInfo
) -> PreTrainedModel:
    """A model without numbers, from its config alone."""
    with building(), torch.device(META):
        model: PreTrainedModel = kind._from_config(
            _without_quantization(config),
            dtype=getattr(torch, info.dtype),
            attn_implementation=IMPLEMENTATION,
        )
    return model


def stays_packed(
    quantization: Quantization | None, device: str, config: PreTrainedConfig
) -> bool:
    """Whether a kernel of transformers multiplies packed weights on this machine.

    config: of the model's class, which may be of a part of what config.json describes
    """
    if quantization is None or device != "cuda" or not torch.cuda.is_available():
        return False
    if not hasattr(config, "quantization_config"):
        return False
    package, capability = KERNELS.get(quantization.method, ("", (0, 0)))
    if not package or importlib.util.find_spec(package) is None:
        return False
    return torch.cuda.get_device_capability() >= capability


def load_options(info: ModelInfo, device: str) -> dict[str, Any]:
    return {
        "attn_implementation": IMPLEMENTATION,
        "dtype": getattr(torch, info.dtype),
        "device_map": device,
        "output_loading_info": True,
        "local_files_only": True,
        "ignore_mismatched_sizes": True,  # reported, and refused by us
    }


def load_error(info: ModelInfo, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())
    return ModelError(f"cannot load {info.architecture} from {info.path}: {reason}")


def check_report(report: Mapping[str, Any], info: ModelInfo) -> None:
    """ModelError for weights that are missing, of another shape, or unexpected."""
    path = info.path
    missing = sorted(report["missing_keys"])
    config = read_config(path)
    unexpected = sorted(
        name for name in report["unexpected_keys"] if not is_unused(name, config)
    )
    if missing:
        other = f"; it has {_examples(unexpected)} instead" if unexpected else ""
        raise ModelError(
            f"{path} lacks {len(missing)} weights of its model, such as "
            f"{_examples(missing)}{other}"
        )
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{path}: {name} has the shape {[*stored]}; its model's is {[*expected]}"
        )
    if unexpected:
        raise ModelError(
            f"{path} has {len(unexpected)} weights that its model does not know, such as "
            f"{_examples(unexpected)}"
        )


def _examples(names: list[str]) -> str:
    return ", ".join(names[:EXAMPLES])


def is_unused(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor that is not a weight of the model is not needed to serve text.

    These are computed tables of rotary embeddings and old masks, layers that draft tokens, and
    parts for images or sound. transformers itself leaves out more for some architectures.
    """
    text = config.get("text_config") or config
    has_other_parts = any(OTHER_CONFIG.fullmatch(key) for key in config)
    has_drafts = any(DRAFT_KEY.search(key) and text[key] for key in text)
    layer = LAYER.search(name)
    num_layers = text.get("num_hidden_layers", 0)
    is_draft = DRAFT_PART.search(name) or (layer and int(layer[1]) >= num_layers > 0)
    return bool(
        OLD_BUFFER.search(name)
        or (has_other_parts and OTHER_PART.search(name))
        or (has_drafts and is_draft)
    )


def _without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config that does not tell transformers to unpack the weights again."""
    config = deepcopy(config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config
