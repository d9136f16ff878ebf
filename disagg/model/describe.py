"""What a model is, from its config alone: enough to refuse a request before anything heavy starts.

Reads JSON files only. Imports neither torch nor transformers, except for a config that leaves its
sizes to the defaults of its architecture. Never touches the network.
"""

import json
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from disagg.errors import ModelError, UnknownNameError

DEFAULT_MODEL = Path(__file__).parent / "default"
FETCHED_NAMES = ("smollm2",)  # what `disagg fetch` knows
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

# one thing, many names: what config.json files call it
ALIASES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}
SIZES = (*ALIASES, "vocab_size")
WHOLE_ATTENTION = (
    "llama",
    "gpt2",
    "opt",
)  # no windows; KV heads and head dim follow from the rest
SAME_WINDOW = ("mistral", "mixtral", "starcoder2")  # in all layers
CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
STATE_SPACES = ("mamba_", "ssm_", "time_step_")  # how what belongs to them is called
ALIBI = ("bloom", "mpt")  # where no key says so


@dataclass(frozen=True)
class ModelInfo:
    """The sizes of a decoder-only model.

    heads:          KV heads
    dtype:          what it computes in, "float32"
    windows:        per layer, the tokens a query sees, itself included; None: all
    context_length: tokens of prompt and answer
    """

    path: Path
    architecture: str
    num_layers: int
    query_heads: int
    heads: int
    head_dim: int
    dtype: str
    windows: tuple[int | None, ...]
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def locate_model(ref: str | None = None) -> Path:
    """The folder of a model: a path, what `disagg fetch` made, a name in the Hugging Face cache, or
    the packaged one, which is called "default" too."""
    if ref is None:
        return DEFAULT_MODEL
    folder = Path(
        os.path.expanduser(ref)
    )  # Path.expanduser raises where nobody has that name
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(
            f"model {ref!r} is a file; a folder with config.json is wanted"
        )
    if ref == DEFAULT_MODEL.name:
        return DEFAULT_MODEL
    if ref in FETCHED_NAMES:
        fetched = fetched_folder(ref)
        if not fetched.is_dir():
            raise ModelError(
                f"model {ref!r} is not here yet; `disagg fetch {ref}` fetches it"
            )
        return fetched
    cached = _cached_snapshot(ref)
    if cached is None:
        if ref.startswith(("/", ".", "~")):
            raise ModelError(
                f"no model {ref!r}: no such folder; one with config.json is wanted"
            )
        close = get_close_matches(ref.lower(), FETCHED_NAMES, 1)
        way = f"disagg fetch {close[0]}" if close else f"hf download {ref}"
        raise ModelError(
            f"no model {ref!r}: no such folder, and not in the Hugging Face cache; "
            f"`{way}` fetches one by name"
        )
    return cached


def fetched_folder(name: str) -> Path:
    """Where `disagg fetch` puts a model; UnknownNameError for one that it does not know."""
    if name not in FETCHED_NAMES:
        raise UnknownNameError.of("model to fetch", name, FETCHED_NAMES)
    return user_cache() / "models" / name


def user_cache() -> Path:
    """What is ours in the cache of whoever runs this."""
    return (
        Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
        / "disagg"
    )


def describe_model(
    ref: str | None = None, dtype: str = "auto", device: str = "cpu"
) -> ModelInfo:
    """The sizes of a model, by name or path.

    dtype: "auto" (float32 on a CPU, else the checkpoint's), "float32", "bfloat16" or "float16"
    ModelError where there is none, or where its config says that we cannot serve it.
    """
    path = locate_model(ref)
    config = read_config(path)
    try:
        refuse_unsupported(config)
        sizes = _complete(config, path)
        layers, query_heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
        return ModelInfo(
            path=path,
            architecture=(
                config.get("architectures") or [config.get("model_type", "unknown")]
            )[0],
            num_layers=layers,
            query_heads=query_heads,
            heads=sizes.get("num_key_value_heads") or query_heads,
            head_dim=sizes.get("head_dim") or sizes["hidden_size"] // query_heads,
            dtype=_dtype(dtype, device, config),
            windows=_windows(sizes, layers),
            context_length=_context_length(sizes),
            vocab_size=sizes["vocab_size"],
            eos_ids=_eos_ids(path, sizes),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'} makes no sense: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder; ModelError where it is missing or no JSON object."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} has no config.json, so it is no Hugging Face model")
    return read_object(file)


def named_weights(path: Path) -> list[str]:
    """The safetensors of a model folder: one file, or all that its index names; none of others."""
    if (path / SINGLE).is_file():
        return [SINGLE]
    return sorted({*read_object(path / INDEX).get("weight_map", {}).values()})


def check_weights(path: Path) -> None:
    """ModelError for a model folder without weights, or without some files that its index names."""
    found = {
        x.name
        for x in path.iterdir()
        if x.suffix in (".safetensors", ".bin") and x.is_file()
    }
    lacking = [name for name in named_weights(path) if name not in found]
    if lacking or not found:
        told = ", ".join(lacking[:3]) or "*.safetensors, *.bin"
        raise ModelError(f"{path} lacks weights of its model: there is no {told}")


def read_object(file: Path) -> dict[str, Any]:
    """What a JSON file says, nothing where there is none; ModelError where it is no JSON object."""
    try:
        config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}; an object is wanted")
    return config


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ModelError(f"text_config is {text!r}; an object is wanted")
    return text


def refuse_unsupported(config: dict[str, Any]) -> None:
    """Raise ModelError for what a config tells of attention that pages cannot serve."""
    text = _text_config(config)
    kind = config.get("model_type", "unknown")
    names = config.get("architectures") or []
    if names and not any(name.endswith(CAUSAL_HEADS) for name in names):
        raise ModelError(f"{names[0]} is no language model that continues text")
    if config.get("is_encoder_decoder") or text.get("add_cross_attention"):
        raise ModelError(
            f"{kind} is an encoder-decoder model; decoder-only ones can be served"
        )
    if text.get("kv_lora_rank"):
        raise ModelError(
            f"{kind} keeps latents, not K and V (MLA, kv_lora_rank): not supported"
        )
    if text.get("attention_chunk_size"):
        raise ModelError(
            f"{kind} attends in chunks (attention_chunk_size): not supported"
        )
    if text.get("alibi") or kind in ALIBI:
        raise ModelError(f"{kind} adds to scores by distance (ALiBi): not supported")
    if states := [key for key in text if key.startswith(STATE_SPACES)]:
        raise ModelError(f"{kind} has state-space layers ({states[0]}): not supported")
    if text.get("num_kv_shared_layers"):
        raise ModelError(
            f"{kind} shares KV between layers (num_kv_shared_layers): not supported"
        )
    for key in ("global_head_dim", "v_head_dim"):
        if (size := text.get(key)) not in (None, text.get("head_dim", size)):
            raise ModelError(
                f"{kind} has heads of several sizes ({key}): not supported"
            )
    strange = set(text.get("layer_types") or []) - {
        "full_attention",
        "sliding_attention",
    }
    if strange:
        raise ModelError(
            f"{kind} has layers of type {', '.join(sorted(strange))}: not supported"
        )


def _cached_snapshot(name: str) -> Path | None:
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
        # slow, seconds: only transformers knows the defaults of this architecture
        from transformers import AutoConfig

        try:
            full = AutoConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:  # its checks of a config raise whatever they like
            raise ModelError(
                f"transformers cannot read {path / 'config.json'}: {error}"
            ) from error
        text = full.get_text_config()
        sizes = _rename(text.to_dict())
        if not hasattr(type(text), "sliding_window"):
            sizes["sliding_window"] = (
                None  # a key left over: the architecture knows no windows
            )
        refuse_unsupported(sizes)
    sound = {name for name, size in sizes.items() if type(size) is int and size > 0}
    if missing := [name for name in SIZES if name not in sound]:
        raise ModelError(f"{path / 'config.json'} says no usable {', '.join(missing)}")
    return sizes


def _rename(config: dict[str, Any]) -> dict[str, Any]:
    known = [(name, x) for name, aliases in ALIASES.items() for x in reversed(aliases)]
    return {name: config[alias] for name, alias in known if alias in config} | config


def _explicit(sizes: dict[str, Any]) -> bool:
    """Whether nothing depends on defaults that only transformers knows."""
    if any(name not in sizes for name in SIZES):
        return False
    if sizes.get("model_type") in WHOLE_ATTENTION:
        return True
    if "num_key_value_heads" not in sizes or "head_dim" not in sizes:
        return False
    whole = "sliding_window" in sizes and sizes["sliding_window"] is None
    same = "sliding_window" in sizes and sizes.get("model_type") in SAME_WINDOW
    return bool(sizes.get("layer_types")) or whole or same


def _windows(sizes: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window = sizes.get("sliding_window")
    if (
        sizes.get("use_sliding_window") is False
        or sizes.get("model_type") in WHOLE_ATTENTION
    ):
        window = None
    types = sizes.get("layer_types") or ["sliding_attention"] * layers
    return tuple(
        window if kind == "sliding_attention" else None for kind in types[:layers]
    )


def _context_length(sizes: dict[str, Any]) -> int:
    """max_position_embeddings, or the length up to which rotary frequencies do not change.

    For LongRoPE the least that any key says: which one counts differs by architecture.
    """
    ropes = [sizes.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    ropes += [
        inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)
    ]
    switching = [rope for rope in ropes if "long_factor" in rope]
    said = [
        x.get("original_max_position_embeddings")
        for x in (*switching, sizes)
        if switching
    ]
    return min(filter(None, (*said, sizes["max_position_embeddings"])))


def stored_dtype(config: dict[str, Any]) -> str:
    """What a checkpoint holds, by its config."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _dtype(dtype: str, device: str, config: dict[str, Any]) -> str:
    known = ("float32", "bfloat16", "float16")
    if dtype == "auto":
        stored = stored_dtype(config)
        return "float32" if device == "cpu" or stored not in known else stored
    if dtype not in known:
        raise ModelError(f"dtype {dtype!r} is unknown; known: auto, {', '.join(known)}")
    return dtype


def _eos_ids(path: Path, sizes: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer: generation_config.json first, as transformers does."""
    generation = read_object(path / "generation_config.json")
    found = generation.get("eos_token_id", sizes.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(x for x in ids if 0 <= x < sizes["vocab_size"])  # -1 stands for none
