"""A model's sizes, from its config alone: enough to refuse a request before anything heavy starts.

Reads JSON files only. Imports neither torch nor transformers, except for a config that leaves its
sizes to the defaults of its architecture, and for a hybrid model: its layers alone know what they
keep of a sequence. Never touches the network.
"""

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, ModelError, UnknownNameError
from disagg.kv.page import Layout
from disagg.kv.plan import LayerShape
from disagg.model.architecture import SAME_AS, read_architecture
from disagg.model.checkpoint import read_headers
from disagg.model.cpu import has_bfloat16_units
from disagg.model.end_tokens import end_tokens
from disagg.model.json_file import read_object
from disagg.model.layer_shapes import (
    HEADS,
    LATENT,
    ROTATED,
    VARYING,
    WHOLE_ATTENTION,
    kv_sources,
    layer_shapes,
    read_layers,
)
from disagg.model.rotary import Reach, rotary_reach

DEFAULT_MODEL = Path(__file__).parent / "default"
FETCHED_NAMES = ("smollm2",)  # the models of `disagg fetch`
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OTHER_WEIGHTS = "pytorch_model*.bin"

# other names that config.json files use for one size
ALIASES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "decoder_layers"),
    "num_attention_heads": (
        "n_head",
        "num_heads",
        "n_heads",
        "attention_heads",
        "decoder_attention_heads",
    ),
    "hidden_size": ("n_embd", "d_model", "emb_dim"),
    "max_position_embeddings": (
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "model_max_length",
    ),
}
SIZES = (*ALIASES, "vocab_size")
HEAD_SIZES = ("num_key_value_heads", "head_dim")  # others tell, where these are null
SAME_WINDOW = ("mistral", "mixtral", "starcoder2")  # in all layers
CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# beginnings of the keys of layers with a state: state spaces, linear attention, convolutions
STATE_KEYS = ("mamba_", "n_mamba", "ssm_", "time_step_", "linear_", "conv_L_")
STATES_ALONE = (
    "rwkv",
    "xlstm",
)  # models without attention whose config does not say it
ALIBI = ("bloom", "mpt")  # models with ALiBi whose config has no key for it
LEAST_CONTEXT = 2  # tokens: one of a prompt, one of an answer
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# types of layers in hybrid models that attend, with their usual names; then those that do not
HYBRID_ATTENTION = {
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "chunked_attention": "chunked_attention",
    "attention": "full_attention",
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
}
WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba", "moe", "mlp"}
# sizes that some configs of hybrid models compute instead of storing them
COMPUTED = ("num_hidden_layers", "num_key_value_heads", "head_dim", "layer_types")
# beginnings of the keys of sparse attention by an indexer
INDEXER = ("indexer_", "index_topk")
DTYPES = ("float32", "bfloat16", "float16")
SMALL_MODEL_BYTES = 100_000_000  # of weights: below, bfloat16 is no faster on a CPU
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# beginnings and ends of the keys of tokens that stand for images, videos or sound
MEDIA = (
    "media_",
    "image_",
    "video_",
    "vision_",
    "audio_",
    "boi_",
    "eoi_",
    "boa_",
    "eoa_",
)
TOKEN_KEYS = ("_token_id", "_token_index")


@dataclass(frozen=True)
class ModelInfo:
    """The sizes of a decoder-only model.

    layers:         those with K and V, in the order in which the model calls them
    sources:        of each attention of the model, which of these layers it attends to
    dtype:          the one it computes in, such as "float32"
    context_length: tokens of prompt and answer
    max_context:    the limit of `model.context`
    states:         what each layer with a state keeps, in their order; empty: no layer has one
    rope_switch:    the longest text that LongRoPE rotates by its short factors; None: not used
    media_ids:      tokens that stand for images, videos or sound, each with its key in the config
    """

    path: Path
    architecture: str
    layers: tuple[LayerShape, ...]
    sources: tuple[int, ...]
    query_heads: int
    dtype: str
    context_length: int
    max_context: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    states: tuple[Layout, ...] = ()
    rope_switch: int | None = None
    media_ids: tuple[tuple[int, str], ...] = ()


def locate_model(ref: str | None = None) -> Path:
    """The folder of a model.

    ref: a path, a model of `disagg fetch`, or a name in the Hugging Face cache; None or "default":
         the packaged model
    """
    if ref is None:
        return DEFAULT_MODEL
    # Path.expanduser raises where no user has that name
    folder = Path(os.path.expanduser(ref))
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"model {ref!r} is a file; expected a folder with config.json")
    if ref == DEFAULT_MODEL.name:
        return DEFAULT_MODEL
    if ref in FETCHED_NAMES:
        fetched = fetched_folder(ref)
        if not fetched.is_dir():
            raise ModelError(
                f"model {ref!r} is not here yet; `disagg fetch {ref}` fetches it"
            )
        return fetched
    snapshot = _cached_snapshot(ref)
    if snapshot is None:
        raise _no_model(ref)
    return snapshot


def _no_model(ref: str) -> ModelError:
    """The error for an unknown path or name, with the way to get the model."""
    if ref.startswith(("/", ".", "~")):
        return ModelError(
            f"no model {ref!r}: no such folder; expected one with config.json"
        )
    close = get_close_matches(ref.lower(), FETCHED_NAMES, 1)
    command = f"disagg fetch {close[0]}" if close else f"hf download {ref}"
    return ModelError(
        f"no model {ref!r}: no such folder, and not in the Hugging Face cache; "
        f"`{command}` fetches one by name"
    )


def fetched_folder(name: str) -> Path:
    """Where `disagg fetch` puts a model; UnknownNameError for one that it does not know."""
    if name not in FETCHED_NAMES:
        raise UnknownNameError.of("model to fetch", name, FETCHED_NAMES)
    return user_cache() / "models" / name


def user_cache() -> Path:
    """The folder of this project in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "disagg"


def describe_model(
    ref: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    context: int | None = None,
) -> ModelInfo:
    """The sizes of a model, by name or path.

    dtype:   "auto" (as of `ModelConfig`), "float32", "bfloat16" or "float16"
    context: maximum tokens of a prompt with its answer; None: the default of the model
    ModelError if there is none, or if its config says that we cannot serve it. ConfigError for a
    context that is too long for it.
    """
    path = locate_model(ref)
    config = read_config(path)
    try:
        refuse_unsupported(config)
        refuse_own_code(config)
        sizes = _complete(config, path)
        reach = rotary_reach(sizes)
        computed_dtype = _dtype(dtype, device, config, path)
        return ModelInfo(
            path=path,
            architecture=architecture_of(config),
            layers=layer_shapes(sizes),
            sources=kv_sources(sizes),
            query_heads=sizes["num_attention_heads"],
            dtype=computed_dtype,
            context_length=_context_length(reach, context),
            max_context=reach.most,
            vocab_size=sizes["vocab_size"],
            eos_ids=end_tokens(path, config, sizes["vocab_size"]),
            states=_states(path, sizes, computed_dtype),
            rope_switch=reach.switch,
            media_ids=_media_ids(config),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'} makes no sense: {error}") from error


def architecture_of(config: dict[str, Any]) -> Any:
    """The name of a config's architecture, or that of its model type."""
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return names[0]
    return config.get("model_type", "unknown")


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder; ModelError where it is missing or no JSON object."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{path} has no config.json, so it is not a Hugging Face model"
        )
    return read_object(file)


def named_weights(path: Path) -> list[str]:
    """The safetensors of a model folder: one file, or those that its index names, or none."""
    if (path / SINGLE).is_file():
        return [SINGLE]
    weight_map = read_object(path / INDEX).get("weight_map", {})
    try:
        names = sorted({Path(name).name for name in weight_map.values()})
    except (AttributeError, TypeError) as error:
        raise ModelError(
            f"{path / INDEX}: weight_map is no object of file names: {error}"
        ) from error
    return names


def check_weights(path: Path) -> None:
    """ModelError for a model folder without weights, or without some files that its index names."""
    names = named_weights(path)
    missing = [name for name in names if not (path / name).is_file()]
    has_others = any(path.glob(OTHER_WEIGHTS))
    if missing or not (names or has_others):
        names = missing[:3] or [SINGLE, INDEX, OTHER_WEIGHTS]
        raise ModelError(
            f"{path} lacks weights of its model: there is no {', '.join(names)}"
        )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ModelError(f"text_config is {text!r}; expected an object")
    return text


def refuse_own_code(config: dict[str, Any]) -> None:
    """Raise ModelError for a model whose class is code in its repository, which we never run.

    Where transformers knows the type of the model, its own class is used.
    """
    if "auto_map" not in config:
        return
    # slow, a second
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type", "unknown")
    if kind not in CONFIG_MAPPING_NAMES and kind not in SAME_AS:
        raise ModelError(
            f"{kind} needs code from its own repository (auto_map), which is never run, and "
            f"transformers has no model type {kind!r}: not supported"
        )


def refuse_unsupported(config: dict[str, Any]) -> None:
    """Raise ModelError if pages cannot serve the attention that a config describes."""
    text = _text_config(config)
    kind = config.get("model_type", "unknown")
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"architectures is {names!r}; expected a list")
    if names and not any(name.endswith(CAUSAL_HEADS) for name in names):
        raise ModelError(f"{names[0]} is not a language model that continues text")
    if config.get("is_encoder_decoder") or text.get("add_cross_attention"):
        raise ModelError(
            f"{kind} is an encoder-decoder model; decoder-only ones can be served"
        )
    reason = _unsupported_attention(text, kind) or _unsupported_layers(text)
    if reason:
        raise ModelError(f"{kind} {reason}: not supported")


def _unsupported_attention(text: dict[str, Any], kind: str) -> str:
    """A way in which the model attends that pages cannot serve; empty if there is none."""
    if kind in STATES_ALONE:
        return "has no attention layer"
    if text.get("alibi") or kind in ALIBI:
        return "adds to scores by distance (ALiBi)"
    return ""


def _unsupported_layers(text: dict[str, Any]) -> str:
    """Layers whose state is not K and V of their own; empty if there are none."""
    for key in text:
        if key.startswith(INDEXER) and text[key]:
            return (
                "attends only to tokens that an indexer picks, by keys of its own for each "
                f"token ({key}), which pages do not hold"
            )
    other_types = set(text.get("layer_types") or []) - WITHOUT_ATTENTION
    other_types -= HYBRID_ATTENTION.keys()
    if other_types:
        return f"has layers of type {', '.join(sorted(other_types))}"
    if text.get("cross_attention_layers"):
        return "attends to images in separate layers (cross_attention_layers)"
    return ""


def _cached_snapshot(name: str) -> Path | None:
    """The snapshot of a model in the Hugging Face cache; None: it is not there."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE", f"{home}/hub")))
    model = cache / f"models--{name.replace('/', '--')}"
    main = model / "refs" / "main"
    if not main.is_file():
        return None
    snapshot = model / "snapshots" / main.read_text().strip()
    return snapshot if snapshot.is_dir() else None


def _complete(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The text model's sizes under their usual names, defaults of its architecture filled in."""
    sizes = _rename(_text_config(config))
    if not _explicit(sizes):
        sizes = _complete_by_transformers(path)
        refuse_unsupported(sizes)
    if _is_hybrid(sizes):
        sizes |= _attending_layers(sizes, config)
    needed = [*SIZES, *(name for name in HEAD_SIZES if sizes.get(name) is not None)]
    needed += [LATENT, ROTATED] if sizes.get(LATENT) else []
    missing = [name for name in needed if not _is_size(sizes.get(name))]
    if missing:
        raise ModelError(f"{path / 'config.json'} says no usable {', '.join(missing)}")
    return sizes


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _complete_by_transformers(path: Path) -> dict[str, Any]:
    """The sizes of a model with the defaults that only transformers knows."""
    text = read_architecture(path).get_text_config()
    sizes = _rename(text.to_dict()) | read_layers(text)
    # LongCat counts its attentions in a property: two for each of `num_layers`
    sizes["num_hidden_layers"] = getattr(text, "num_hidden_layers", None)
    if _is_hybrid(sizes | {"layer_types": getattr(text, "layer_types", None)}):
        for name in COMPUTED:
            if sizes.get(name) is None:
                sizes[name] = getattr(text, name, None)
    if not hasattr(type(text), "sliding_window"):
        # a left-over key: the architecture has no windows
        sizes["sliding_window"] = None
    return sizes


def _is_hybrid(sizes: dict[str, Any]) -> bool:
    """Whether some layers may keep a state instead of K and V, or beside them."""
    if any(key.startswith(STATE_KEYS) for key in sizes):
        return True
    return bool(set(sizes.get("layer_types") or []) - SUPPORTED_LAYERS)


def _attending_layers(sizes: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The number and the types of the layers of a hybrid model that attend.

    all_types: of all its layers
    """
    types = sizes.get("layer_types") or []
    attending = [HYBRID_ATTENTION[x] for x in types if x in HYBRID_ATTENTION]
    if types and not attending:
        kind = config.get("model_type", "unknown")
        raise ModelError(f"{kind} has no attention layer: not supported")
    if not attending:
        return {}
    return {
        "num_hidden_layers": len(attending),
        "layer_types": attending,
        "all_types": types,
    }


def _states(path: Path, sizes: dict[str, Any], dtype: str) -> tuple[Layout, ...]:
    """What each layer with a state keeps, as the model itself says on the meta device."""
    if "all_types" not in sizes:
        return ()
    # slow, seconds
    from disagg.model.states.layouts import describe_states

    states = describe_states(path, dtype)
    other_types = set(sizes["all_types"]) - SUPPORTED_LAYERS
    if other_types and not states:
        kind = sizes.get("model_type", "unknown")
        names = ", ".join(sorted(other_types))
        raise ModelError(f"{kind} has layers of type {names}: not supported")
    return states


def _rename(config: dict[str, Any]) -> dict[str, Any]:
    """A config with its sizes under their usual names too."""
    sizes = {}
    for name, aliases in ALIASES.items():
        for alias in reversed(aliases):
            if alias in config:
                sizes[name] = config[alias]
    attention = config.get("attn_config")
    if isinstance(attention, dict) and attention.get("kv_n_heads"):
        sizes[HEADS] = attention["kv_n_heads"]  # DBRX
    return {**sizes, **config}


def _explicit(sizes: dict[str, Any]) -> bool:
    """Whether nothing depends on defaults that only transformers knows."""
    if any(name not in sizes for name in SIZES) or _is_hybrid(sizes):
        return False
    if any(sizes.get(name) for name in VARYING):
        return False
    kind = sizes.get("model_type")
    if kind in WHOLE_ATTENTION:
        return True
    if "num_key_value_heads" not in sizes or "head_dim" not in sizes:
        return False
    if sizes.get("layer_types"):
        return True
    if "sliding_window" not in sizes:
        return False
    return sizes["sliding_window"] is None or kind in SAME_WINDOW


def _context_length(reach: Reach, context: int | None) -> int:
    if context is None:
        return reach.default
    if type(context) is not int or context < LEAST_CONTEXT:
        raise ConfigError(
            f"config key model.context is {context!r}; "
            f"expected a number of tokens, at least {LEAST_CONTEXT}"
        )
    if context > reach.most:
        raise ConfigError(
            f"config key model.context is {context}; "
            f"at most {reach.most} tokens, the reach of this model's positions"
        )
    return context


def stored_dtype(config: dict[str, Any], path: Path) -> str:
    """The dtype of a checkpoint's numbers, or of those that it keeps unquantized.

    It is named by the config or its `text_config`, or else the dtype of most bytes of the weights.
    """
    for part in (config, _text_config(config)):
        name = str(part.get("dtype") or part.get("torch_dtype"))
        name = name.removeprefix("torch.")
        if name in DTYPES:
            return name
    return _most_common_dtype(path) or _assumed_dtype(config)


def _most_common_dtype(path: Path) -> str | None:
    """The floating-point dtype of most bytes of a folder's safetensors; None: there are none."""
    names = [name for name in named_weights(path) if (path / name).is_file()]
    sizes = dict.fromkeys(STORED_DTYPES, 0)
    for header in read_headers(path, names).values():
        if header.dtype in sizes:
            sizes[header.dtype] += header.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    return STORED_DTYPES[most] if sizes[most] else None


def _assumed_dtype(config: dict[str, Any]) -> str:
    """For a folder without weights: the unquantized part of a quantized model is bfloat16."""
    parts = (config, _text_config(config))
    is_quantized = any("quantization_config" in part for part in parts)
    return "bfloat16" if is_quantized else "float32"


def _dtype(dtype: str, device: str, config: dict[str, Any], path: Path) -> str:
    if dtype == "auto":
        stored = stored_dtype(config, path)
        return stored if device != "cpu" else _cpu_dtype(stored, path)
    if dtype not in DTYPES:
        names = ", ".join(DTYPES)
        raise ModelError(f"dtype {dtype!r} is unknown; known: auto, {names}")
    return dtype


def _cpu_dtype(stored: str, path: Path) -> str:
    """The dtype in which a CPU computes a model best.

    In bfloat16 answers depend more on the batch than in float32, so it has to be worth it.
    """
    if stored != "bfloat16" or not has_bfloat16_units():
        return "float32"
    files = [*path.glob("*.safetensors"), *path.glob(OTHER_WEIGHTS)]
    nbytes = sum(file.stat().st_size for file in files)
    return "float32" if nbytes < SMALL_MODEL_BYTES else "bfloat16"


def _media_ids(config: dict[str, Any]) -> tuple[tuple[int, str], ...]:
    """The tokens that a config names for inputs other than text."""
    return tuple(
        (value, key)
        for key, value in config.items()
        if key.startswith(MEDIA) and key.endswith(TOKEN_KEYS) and type(value) is int
    )
