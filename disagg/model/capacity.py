"""Whether a model fits into pages, and how many of its tokens fit into memory. Reads no weights.

memory │ weights │ arena: pages of all sequences │ workspaces: exact KV of prompts │ the rest │
       └────────────────────────────────── `share` ────────────────────────────────┘
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from disagg.codecs.planning import KVShape, parse_plan
from disagg.codecs.registry import codec_names
from disagg.config import AUTO, DEFAULT_CODEC
from disagg.errors import ConfigError, ModelError
from disagg.kv.page import BF16, EXACT, INT8, RAW_TOKENS
from disagg.kv.plan import LayerShape, Plan, RecordShape
from disagg.kv.slabs import SlabAllocator, choose_slab_bytes
from disagg.model.architecture import language_model, read_architecture
from disagg.model.describe import (
    ModelInfo,
    architecture_of,
    check_weights,
    describe_model,
    locate_model,
    read_config,
    stored_dtype,
)
from disagg.model.forward import forward_shape
from disagg.model.loading import check_storage, model_shape, stays_packed
from disagg.model.quantization import read_quantization
from disagg.model.quantized_linear import has_large_layers, usable_weights
from disagg.model.shards import check_ranks, local_info
from disagg.model.states.records import scratch_bytes
from disagg.model.storage import read_storage

# the first of these that takes the model's heads is recommended
SUGGESTED = (DEFAULT_CODEC, "fp8", "raw")
WORKSPACE_PART = 3  # workspaces get at most one part in this many
UNSEALED = 4096  # tokens of a chunk in layers with a window
STORED = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class CodecFit:
    """One codec under a model, in prompts as long as the model's context.

    bytes_per_token: mean of such a prompt, without its states
    state_tokens: how many tokens of KV take as many bytes as the states of one sequence, both as
             they are handed off by default
    tokens:  how many fit, if this is the only codec that is served; None: the memory is not known
    refused: why the codec cannot hold this model's heads
    """

    spec: str
    bytes_per_token: float = 0.0
    tokens: int | None = None
    refused: str = ""
    state_tokens: int = 0


@dataclass(frozen=True)
class ModelFit:
    """Whether a model can be served, and the size of its KV.

    reason:        why it is not served, in one line
    max_context:   the limit of `model.context`
    eos_ids:       the tokens that end an answer
    heads, head_dim: KV heads of the first layer, and their channels
    head_sizes:    number of layers by "KV heads x channels"
    latent:        of these channels, those of a latent; 0: K and V are stored
    windows:       number of layers by the tokens that their queries see; None: all
    dtype:         that an accelerator computes in · cpu_dtype: the CPU of this host, by the weights
    cpu_weights:   what `model.weights` may be on this host's CPU
    weights_bytes: in `dtype`, from the sizes of the files; 0 where there are none
    config_weights_bytes: where there are none and a memory is given, of the model that config.json
                   describes; 0 for packed ones
    exact_bytes_per_token: without windows and codecs
    num_states:    layers that keep a state; `num_layers` are those with K and V
    state_bytes:   of these states of one sequence, whatever its length
    wire_state_bytes: of the same states at a hand-off, by their form
    """

    model: str
    architecture: str
    served: bool
    reason: str = ""
    dtype: str = ""
    cpu_dtype: str = ""
    cpu_weights: tuple[str, ...] = ()
    num_layers: int = 0
    heads: int = 0
    head_dim: int = 0
    context_length: int = 0
    max_context: int = 0
    eos_ids: tuple[int, ...] = ()
    head_sizes: Mapping[str, int] = field(default_factory=dict)
    latent: int = 0
    windows: Mapping[int | None, int] = field(default_factory=dict)
    weights_bytes: int = 0
    config_weights_bytes: int = 0
    exact_bytes_per_token: int = 0
    num_states: int = 0
    state_bytes: int = 0
    wire_state_bytes: Mapping[str, int] = field(default_factory=dict)
    recommended: str = ""
    codecs: tuple[CodecFit, ...] = ()


def kv_shape(info: ModelInfo, state: str = EXACT) -> KVShape:
    """The shape of a model's KV, for plans; state: the form of its states at a hand-off."""
    return KVShape(info.layers, info.dtype, info.states, info.rope_switch, state)


def head_size(layer: LayerShape) -> str:
    """KV heads and their channels, as "8x128"."""
    return f"{layer.heads}x{layer.head_dim}"


def exact_bytes(shape: KVShape, rooms: Sequence[int]) -> int:
    """Bytes of exact K and V, as the model computed them.

    rooms: tokens of each layer
    """
    itemsize: int = getattr(torch, shape.dtype).itemsize
    pairs = zip(shape.layers, rooms, strict=True)
    return itemsize * sum(layer.values_per_token * room for layer, room in pairs)


def rooms_of(plan: Plan, tokens: int, chunk: int) -> list[int]:
    """Tokens whose exact K and V each layer holds while a prompt is computed in chunks."""
    chunk = max(chunk, RAW_TOKENS)
    return [
        tokens if reach is None else min(tokens, reach + chunk)
        for reach in plan.reaches
    ]


def split_memory(nbytes: int, shape: KVShape, context: int) -> tuple[int, int]:
    """Bytes of the arena and of the workspaces, from those beside the weights.

    One prompt as long as the context has its workspace, if that is not too large a part.
    """
    nbytes = max(0, nbytes)
    windows = [layer.window for layer in shape.layers]
    rooms = [
        context if window is None else min(context, window + UNSEALED)
        for window in windows
    ]
    longest_prompt = exact_bytes(shape, rooms)
    workspace = min(longest_prompt, nbytes // WORKSPACE_PART)
    return nbytes - workspace, workspace


def wire_state_bytes(shape: KVShape) -> dict[str, int]:
    """Bytes of the states of one sequence at a hand-off, by their form; empty: it has none."""
    forms = (EXACT, BF16, INT8) if shape.states else ()
    plans = [parse_plan("raw", replace(shape, state_form=form)) for form in forms]
    return {
        form: plan.wire_state_bytes for form, plan in zip(forms, plans, strict=True)
    }


def slab_bytes_for(
    shape: KVShape, plans: Sequence[Plan], arena_bytes: int, context: int
) -> int:
    """The size of the slabs of an arena that is to hold prompts under these plans.

    A slab also holds a record of any other codec, and three of 16 exact fp32 tokens or of a state.
    """
    values_per_token = sum(layer.values_per_token for layer in shape.layers)
    exact_page = 4 * RAW_TOKENS * values_per_token
    largest_record = max(exact_page, scratch_bytes(shape.states))
    prompts = [plan.records(plan.full(context)) for plan in plans]
    return choose_slab_bytes(arena_bytes, largest_record, prompts)


class Room(Protocol):
    """An arena of slabs."""

    def has_room(self, records: Mapping[RecordShape, int]) -> bool:
        """Whether all these records fit into what is free."""


def tokens_that_fit(plan: Plan, room: Room, context: int) -> int:
    """Tokens of prompts as long as the context, the last of which may be shorter.

    The last one also needs the records that only its hand-off needs.
    """
    full = plan.full(context)
    prompt = plan.resident_records(full)
    handoff = plan.records(full) - prompt

    def is_too_much(tokens: int) -> bool:
        num_prompts, rest = divmod(tokens, context)
        records = Counter[RecordShape](handoff)
        records.update(plan.resident_records(rest) if rest else {})
        for record, count in prompt.items():
            records[record] += num_prompts * count
        return not room.has_room(records)

    most = context
    while not is_too_much(most):
        most *= 2
    # whole prompts first: tokens of a short one may take more room than those of a long one
    num_prompts = bisect_left(
        range(most // context), True, key=lambda x: is_too_much((x + 1) * context)
    )
    whole = num_prompts * context
    rest = bisect_left(range(1, context), True, key=lambda x: is_too_much(whole + x))
    return whole + rest


def check_model(
    ref: str | None,
    dtype: str = "auto",
    memory: int | None = None,
    share: float = 0.9,
    context: int | None = None,
    ranks: int = 1,
) -> ModelFit:
    """A model as config.json and the headers of its files show it; ModelError if there is none.

    context: as of `describe_model`
    memory: bytes of an accelerator; weights, arena and workspaces take this `share` of it
    ranks:  accelerators that share it; tokens are then those that fit on each of them
    """
    path = locate_model(ref)
    config = read_config(path)
    name = ref or path.name
    try:
        info = describe_model(str(path), dtype, device="cuda", context=context)
        weights = _weights_bytes(info, config)
        check_ranks(class_of(info)[1], info, ranks)
    except ModelError as error:
        return ModelFit(
            model=name,
            architecture=str(architecture_of(config)),
            served=False,
            reason=" ".join(str(error).split()),
        )
    shape = kv_shape(info)
    local = local_info(info, ranks)
    arena = None
    config_weights = 0
    if memory is not None:
        config_weights = 0 if weights else _config_weights_bytes(info)
        usable = int(memory * share)
        arena = _arena_of_rank(usable, weights + config_weights, info, ranks)
    cpu_dtype = _cpu_dtype(info, dtype, weights)
    suggested = [fit_codec(codec, local, arena) for codec in SUGGESTED]
    others = [fit_codec(codec, local, arena) for codec in codec_names()]
    return ModelFit(
        model=name,
        architecture=info.architecture,
        served=True,
        dtype=info.dtype,
        cpu_dtype=cpu_dtype,
        cpu_weights=_cpu_weights(info, cpu_dtype),
        num_layers=len(info.layers),
        heads=info.layers[0].heads,
        head_dim=info.layers[0].head_dim,
        head_sizes=dict(Counter(head_size(layer) for layer in info.layers)),
        latent=info.layers[0].latent or 0,
        context_length=info.context_length,
        max_context=info.max_context,
        eos_ids=info.eos_ids,
        windows=dict(Counter(layer.window for layer in info.layers)),
        weights_bytes=weights,
        config_weights_bytes=config_weights,
        exact_bytes_per_token=exact_bytes(shape, [1] * shape.num_layers),
        num_states=len(shape.states),
        state_bytes=shape.state_bytes,
        wire_state_bytes=wire_state_bytes(shape),
        recommended=next(x.spec for x in suggested if not x.refused),
        # without duplicates: the default spec may be that of a codec itself
        codecs=tuple(dict.fromkeys([suggested[0], *others])),
    )


def layers_of(info: ModelInfo) -> nn.Module:
    """The layers that compute a model on a CPU, without numbers."""
    return forward_shape(model_shape(*class_of(info), info))


def _arena_of_rank(usable: int, weights: int, info: ModelInfo, ranks: int) -> int:
    """Bytes of the arena of each rank, from those that it may use and the weights of all."""
    room = usable - _weights_of_rank(weights, info, ranks)
    shape = kv_shape(local_info(info, ranks))
    arena, _ = split_memory(room, shape, info.context_length)
    return arena


def _cpu_dtype(info: ModelInfo, dtype: str, weights: int) -> str:
    """What a CPU computes a model in; "" where its weights are not known."""
    return describe_model(str(info.path), dtype, "cpu").dtype if weights else ""


def _cpu_weights(info: ModelInfo, dtype: str) -> tuple[str, ...]:
    """What `model.weights` may be on this host's CPU for a model, computed in a dtype."""
    usable = usable_weights("cpu", dtype)
    if not usable:
        return ()
    layers = layers_of(info)
    return tuple(weights for weights in usable if has_large_layers(layers, weights))


def check_ranks_of(ref: str | None, ranks: int, dtype: str = "auto") -> None:
    """ModelError unless so many ranks can share a model, by name or path; loads nothing."""
    if ranks < 1:
        raise ConfigError(f"ranks are {ranks}; expected at least 1")
    info = describe_model(ref, dtype)
    _, config = class_of(info)
    check_ranks(config, info, ranks)


def _weights_bytes(info: ModelInfo, config: dict[str, Any]) -> int:
    """Bytes of a folder's weights on a GPU; 0: it has none.

    ModelError for packed weights that we cannot unpack, and for weights of another model.
    """
    kind, transformers_config = class_of(info)
    quantization = read_quantization(info.path)
    if not any(file for pattern in STORED for file in info.path.glob(pattern)):
        return 0
    check_weights(info.path)
    safetensors, others = (
        sum(file.stat().st_size for file in info.path.glob(pattern))
        for pattern in STORED
    )
    storage = read_storage(info.path)
    if storage is None:
        stored = getattr(torch, stored_dtype(config, info.path), None)
        stored_itemsize = getattr(stored, "itemsize", 4)
        return others * getattr(torch, info.dtype).itemsize // stored_itemsize
    nbytes = check_storage(kind, transformers_config, storage, info)
    return (
        safetensors
        if stays_packed(quantization, "cuda", transformers_config)
        else nbytes
    )


def _config_weights_bytes(info: ModelInfo) -> int:
    """Bytes of the weights of a folder that has only their sizes; 0 where they would be packed."""
    if read_quantization(info.path) is not None:
        return 0
    model = model_shape(*class_of(info), info)
    return sum(weight.nbytes for weight in model.parameters())


def _weights_of_rank(nbytes: int, info: ModelInfo, ranks: int) -> int:
    """Bytes of the weights that one rank has: the whole embedding, and its share of the others.

    nbytes: of all weights
    """
    _, config = class_of(info)
    itemsize = getattr(torch, info.dtype).itemsize
    embedding = min(nbytes, config.vocab_size * config.hidden_size * itemsize)
    return embedding + (nbytes - embedding) // ranks


def fit_codec(spec: str, info: ModelInfo, arena_bytes: int | None = None) -> CodecFit:
    """The size of a model's KV under a codec."""
    context = info.context_length
    shape = kv_shape(info, AUTO)
    try:
        plan = parse_plan(spec, shape)
    except ConfigError as error:
        return CodecFit(spec, refused=str(error))
    tokens = None
    if arena_bytes is not None:
        slab_bytes = slab_bytes_for(shape, [plan], arena_bytes, context)
        tokens = 0
        if slab_bytes <= arena_bytes:
            slabs = SlabAllocator(arena_bytes, slab_bytes)
            tokens = tokens_that_fit(plan, slabs, context)
    length = plan.full(context)
    bytes_per_token = (plan.resident_bytes(length) - plan.state_bytes) / length
    codecs = {group.codec for group in plan.paged}
    return CodecFit(
        spec=codecs.pop() if len(codecs) == 1 else spec,
        bytes_per_token=bytes_per_token,
        tokens=tokens,
        state_tokens=round(plan.wire_state_bytes / bytes_per_token),
    )


def class_of(info: ModelInfo) -> tuple[Any, Any]:
    """The class and the config of a model in transformers; with its vision part if it sees images.

    ModelError for an architecture that takes no attention function from outside.
    """
    whole = read_architecture(info.path)
    _check_sizes(whole.get_text_config(), info)
    model, config = language_model(whole)
    # of many hybrid models the flag is wrong; the probe of their weights is right
    if not model._supports_attention_backend and not info.states:
        raise ModelError(
            f"{model.__name__} takes no attention function from outside: not supported"
        )
    return model, config


def _check_sizes(config: Any, info: ModelInfo) -> None:
    """ModelError if transformers reads other sizes from config.json than we do.

    The class of a model with several parts reads its language model only from `text_config`;
    without that key it silently takes its own defaults.
    """
    sizes = {
        "num_attention_heads": info.query_heads,
        "vocab_size": info.vocab_size,
    }
    if not info.states:  # else some of its layers do not attend
        sizes["num_hidden_layers"] = len(info.sources)
    windows = [layer.window for layer in info.layers if layer.window]
    window = max(windows, default=None)
    if window is not None:
        sizes["sliding_window"] = window
    for name, size in sizes.items():
        other = getattr(config, name, size)
        if other != size:
            raise ModelError(
                f"config.json says {name} {size}, but transformers takes {other} for "
                f"{info.architecture}: it does not read this form of config"
            )
