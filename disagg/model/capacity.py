"""What of a model fits: into pages at all, and how many tokens of it into memory. Reads no weights.

memory │ weights │ arena: pages of all sequences │ workspaces: exact KV of prompts │ the rest │
       └────────────────────────────────── `share` ────────────────────────────────┘
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from disagg.codecs.planning import KVShape, parse_plan
from disagg.codecs.registry import codec_names
from disagg.config import DEFAULT_CODEC
from disagg.errors import ConfigError, ModelError
from disagg.kv.page import RAW_TOKENS
from disagg.kv.plan import Plan
from disagg.model.describe import (
    ModelInfo,
    describe_model,
    locate_model,
    read_config,
    stored_dtype,
)

SUGGESTED = (DEFAULT_CODEC, "fp8", "raw")  # the first that takes the model's heads
WORKSPACE_PART = 3  # at most one in so many bytes is for workspaces
UNSEALED = 4096  # tokens of layers with a window: those of a chunk, and not sealed yet
STORED = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class CodecFit:
    """One codec under a model, in prompts as long as the model's context.

    bytes_per_token: on the mean · tokens: that fit; None: nobody said into what
    refused: why the codec cannot hold this model's heads
    """

    spec: str
    bytes_per_token: float = 0.0
    tokens: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class ModelFit:
    """Whether a model is served, and what its KV takes.

    reason:        why it is not served, in one line
    windows:       layers by the tokens that their queries see; None: all
    weights_bytes: in `dtype`, from the sizes of the files; 0 where there are none
    exact_bytes_per_token: without windows and codecs
    """

    model: str
    architecture: str
    served: bool
    reason: str = ""
    dtype: str = ""
    num_layers: int = 0
    heads: int = 0
    head_dim: int = 0
    context_length: int = 0
    windows: Mapping[int | None, int] = field(default_factory=dict)
    weights_bytes: int = 0
    exact_bytes_per_token: int = 0
    recommended: str = ""
    codecs: tuple[CodecFit, ...] = ()


def kv_shape(info: ModelInfo) -> KVShape:
    """What plans want to know of a model."""
    return KVShape(info.num_layers, info.heads, info.head_dim, info.dtype, info.windows)


def exact_bytes(shape: KVShape, tokens: int) -> int:
    """Exact K and V of a prompt in all layers, as the model computed them."""
    item = getattr(torch, shape.dtype).itemsize
    return 2 * item * tokens * shape.num_layers * shape.heads * shape.head_dim


def rooms_of(plan: Plan, tokens: int, chunk: int) -> list[int]:
    """Tokens whose exact K and V each layer holds while a prompt is computed in chunks."""
    most = max(chunk, RAW_TOKENS)
    return [
        tokens if reach is None else min(tokens, reach + most) for reach in plan.reaches
    ]


def split_memory(nbytes: int, shape: KVShape, context: int) -> tuple[int, int]:
    """Bytes of the arena and of the workspaces, from what there is beside the weights.

    One prompt as long as the context has its workspace, if that is not too large a part.
    """
    rooms = (
        context if x is None else min(context, x + UNSEALED) for x in shape.windows
    )
    whole = exact_bytes(shape, sum(rooms)) // shape.num_layers
    workspace = min(whole, max(0, nbytes) // WORKSPACE_PART)
    return max(0, nbytes) - workspace, workspace


def tokens_that_fit(plan: Plan, nbytes: int, context: int) -> int:
    """Tokens of prompts that are as long as the context, but for the last one."""
    whole, rest = divmod(nbytes, plan.nbytes(context))
    return whole * context + bisect_right(range(1, context), rest, key=plan.nbytes)


def check_model(
    ref: str | None, dtype: str = "auto", memory: int | None = None, share: float = 0.9
) -> ModelFit:
    """All that config.json and the sizes of files tell; ModelError if there is no such model.

    memory: bytes of an accelerator; weights, arena and workspaces take this `share` of it
    """
    path = locate_model(ref)
    config = read_config(path)
    named = config.get("architectures") or [config.get("model_type", "unknown")]
    name, architecture = ref or path.name, str(named[0])
    try:
        info = describe_model(str(path), dtype, device="cuda")
        class_of(info)
    except ModelError as error:
        return ModelFit(
            name, architecture, served=False, reason=" ".join(str(error).split())
        )
    shape, stored = kv_shape(info), stored_dtype(config)
    sizes = [
        sum(file.stat().st_size for file in path.glob(pattern)) for pattern in STORED
    ]
    item = getattr(getattr(torch, stored, None), "itemsize", 4)
    weights = (sizes[0] or sizes[1]) * getattr(torch, info.dtype).itemsize // item
    arena = None
    if memory is not None:
        arena, _ = split_memory(
            int(memory * share) - weights, shape, info.context_length
        )
    suggested = [fit_codec(codec, info, arena) for codec in SUGGESTED]
    fits = [*suggested[:1], *(fit_codec(codec, info, arena) for codec in codec_names())]
    return ModelFit(
        model=name,
        architecture=info.architecture,
        served=True,
        dtype=info.dtype,
        num_layers=info.num_layers,
        heads=info.heads,
        head_dim=info.head_dim,
        context_length=info.context_length,
        windows=dict(Counter(info.windows)),
        weights_bytes=weights,
        exact_bytes_per_token=exact_bytes(shape, 1),
        recommended=next(x.spec for x in suggested if not x.refused),
        codecs=tuple(dict.fromkeys(fits)),  # the default may be one codec's own
    )


def fit_codec(spec: str, info: ModelInfo, arena_bytes: int | None = None) -> CodecFit:
    """What a codec makes of a model's KV."""
    context = info.context_length
    try:
        plan = parse_plan(spec, kv_shape(info))
    except ConfigError as error:
        return CodecFit(spec, refused=str(error))
    tokens = (
        None if arena_bytes is None else tokens_that_fit(plan, arena_bytes, context)
    )
    return CodecFit(plan.spec, plan.nbytes(context) / context, tokens)


def class_of(info: ModelInfo) -> tuple[Any, Any]:
    """The class and the config of a model, as transformers has them.

    ModelError for an architecture that has no place for an attention function of others.
    """
    # slow, seconds: only transformers knows its classes
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(info.path, local_files_only=True)
        model = AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # its checks of a config raise whatever they like
        raise ModelError(f"transformers has no such language model: {error}") from error
    if not model._supports_attention_backend:
        raise ModelError(
            f"{model.__name__} takes no attention function from outside: not supported"
        )
    own = isinstance(
        config, model.config_class
    )  # else it is of a part of what the config tells
    return model, config if own else config.get_text_config()
