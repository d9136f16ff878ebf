"""Tiny random models of several architectures, saved as real checkpoints.

    python -m tests.model.tiny qwen3_next FOLDER

writes one with the tokenizer of the packaged model, which `disagg serve --model FOLDER` serves.
"""

import argparse
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from disagg.model.describe import DEFAULT_MODEL, describe_model
from disagg.model.outliers import EVERY_HEAD, PAIRS
from tests.model import families

VOCAB = 260
CONTEXT = 512
READABLE_CONTEXT = 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
}
SIZES |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32, "max_position_embeddings": CONTEXT}
SIZES |= {"initializer_range": 0.2}  # attention matters, and best tokens are well ahead
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
OWN_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "num_hidden_layers": 3,
    }
    | {"num_attention_heads": 4, "max_position_embeddings": CONTEXT, "init_std": 0.2},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    | {"num_attention_heads": 4, "max_position_embeddings": CONTEXT},
    "gptj": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": CONTEXT,
        "rotary_dim": 8,
    },
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
EXTRA: dict[str, dict[str, Any]] = {
    "afmoe": {"sliding_window": 20, "moe_intermediate_size": 48}
    | {"num_experts": 4, "num_experts_per_tok": 2},
    "bitnet": {"head_dim": 16},
    "cohere2": {"sliding_window": 20, "sliding_window_pattern": 2, "logit_scale": 1.0},
    "cohere2_moe": {"sliding_window": 20},
    "dots1": {
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "exaone4": {"sliding_window": 20, "sliding_window_pattern": 2},
    "exaone_moe": {"sliding_window": 20, "moe_intermediate_size": 48, "num_experts": 4}
    | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "granite_swa": {"sliding_window": 20},
    "helium": {"head_dim": 16},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5": {"use_bias": False},
    "glm4_moe": {
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mistral": {"sliding_window": 20},
    "ministral": {"sliding_window": 20},
    "mixtral": {
        "sliding_window": None,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "olmo3": {"sliding_window": 20},
    "olmoe": {"hidden_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 2, "sliding_window": None},
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    | {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "starcoder2": {"sliding_window": 20},
    "qwen3": {"use_sliding_window": False},
    "gemma3_text": {
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 50,
    }
    | {"tie_word_embeddings": False},
    "gemma2": {
        "sliding_window": 20,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": False,
    }
    | {"attn_logit_softcapping": 2.0},  # low enough for small models to feel it
    "vaultgemma": {"sliding_window": 20, "query_pre_attn_scalar": 32}
    | {"attn_logit_softcapping": 2.0},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 20},
}
# a layer of each type has K and V, for three that have none
GEMMA_TYPES = ["sliding_attention", "full_attention"]
EXTRA |= {
    "gemma4_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 3}
    | {"layer_types": [*GEMMA_TYPES, *GEMMA_TYPES, "full_attention"]}
    | {"global_head_dim": 64, "sliding_window": 20, "use_double_wide_mlp": True}
    | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 3}
    | {"layer_types": [*GEMMA_TYPES, *GEMMA_TYPES, "full_attention"]}
    | {"sliding_window": 20, "activation_sparsity_pattern": None}
    | {"intermediate_size": [96] * 5, "laurel_rank": 8, "altup_num_inputs": 2}
    | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
}
EXTRA["llama4_text"] = {"num_hidden_layers": 4, "attention_chunk_size": 20}
EXTRA["llama4_text"] |= {"floor_scale": 8, "attn_scale": 0.5, "num_local_experts": 2}
EXTRA["llama4_text"] |= {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
CONV = ["conv", "full_attention", "conv", "conv"]
SHARED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
DELTA: dict[str, Any] = {
    "layer_types": LINEAR,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
MLA |= {"num_key_value_heads": 4}
# of hybrid models: some layers keep a state
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": {"layer_types": LINEAR, "linear_key_head_dim": 12}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "lara_mini": DELTA,
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 128, "head_dim": 16},
    "granitemoehybrid": MAMBA2
    | {"layer_types": LINEAR, "shared_intermediate_size": 48}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"]
    }
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    | {"chunk_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
    "zamba2": {"layers_block_type": SHARED, "num_key_value_heads": 4}
    | {"mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 16}
    | {"use_shared_attention_adapter": True, "adapter_rank": 8},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 8}
    | {"num_experts": 2, "num_experts_per_tok": 1, "mamba_dt_rank": 4},
    "zamba": {"layers_block_type": SHARED, "num_key_value_heads": 4}
    | {"mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": CONV},
    "lfm2_moe": {"layer_types": CONV, "num_dense_layers": 1}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]}
    | {"sliding_window": 20},
    "zaya": {"head_dim": 16},
    "kimi_linear": MLA
    | {"num_hidden_layers": 2, "layer_types": LINEAR[:2]}
    | {"linear_head_dim": 16, "linear_num_heads": 4}
    | {"v_head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 48},
    "bailing_hybrid": MLA
    | {"num_hidden_layers": 2, "layer_types": LINEAR[:2]}
    | {"v_head_dim": 16, "head_dim": 16}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "qwen4_exp_text": EXPERTS,
    "minimax": {"head_dim": 16},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
}
EXTRA |= {kind: {"num_hidden_layers": 4} | sizes for kind, sizes in HYBRIDS.items()}
# of models that keep latents (MLA): heads of 64 channels in K, and of fewer in V
LATENT = MLA | {
    "num_hidden_layers": 2,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
}
YARN: dict[str, Any] = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    | {"original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7}
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | ROUTED | YARN,
    "deepseek_v3": LATENT | ROUTED | YARN,
    "sarvam_mla": LATENT | ROUTED,
    "glm4_moe_lite": LATENT | ROUTED | {"v_head_dim": 64},
    "mistral4": LATENT | ROUTED | {"v_head_dim": 64},
    "minicpm3": LATENT | {"scale_emb": 1, "dim_model_base": 64},
    "youtu": LATENT,
    "axk1": LATENT | ROUTED,
    "longcat_flash": LATENT
    | {
        "num_layers": 1,
        "head_dim": 16,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
    }
    | {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1},
}
EXTRA |= LATENTS
# sizes that configs compute from others, and do not take
COMPUTED = {
    "nemotron_h": ("num_hidden_layers",),
    "olmo_hybrid": ("head_dim",),
    "bamba": ("head_dim",),
    "granitemoehybrid": ("head_dim",),
    "zamba2": ("head_dim",),
    "zamba": ("head_dim",),
    "jamba": ("head_dim",),
    "lfm2": ("head_dim",),
    "lfm2_moe": ("head_dim",),
    **dict.fromkeys(LATENTS, ("head_dim",)),
    "kimi_linear": ("head_dim",),
    "longcat_flash": ("num_hidden_layers", "intermediate_size"),
    "mamba2": ("intermediate_size", "num_attention_heads", "num_key_value_heads"),
    "mamba": ("intermediate_size", "num_attention_heads", "num_key_value_heads"),
    "falcon_mamba": ("intermediate_size", "num_attention_heads", "num_key_value_heads"),
}
# of models that see images too: changes of the text part, and of the vision part
MROPE: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}
    | {"mrope_section": [2, 3, 3]},
}
VISION_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
VISION_SIZES |= dict.fromkeys(("num_hidden_layers", "depth"), 1)
VISION_SIZES |= dict.fromkeys(("num_attention_heads", "num_heads"), 2)
VISION_SIZES |= {"image_size": 28, "patch_size": 14, "out_hidden_size": 64}
VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aya_vision": (
        {"model_type": "cohere2", "sliding_window": 20, "logit_scale": 1.0},
        {"model_type": "siglip_vision_model"},
    ),
    "gemma3": (EXTRA["gemma3_text"], {}),
    "glm4v": (MROPE, {}),
    "idefics3": ({"model_type": "llama"}, {}),
    "internvl": ({"model_type": "qwen2"}, {}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "kimi_k25": (
        {"model_type": "deepseek_v3", "head_dim": 16} | EXTRA["deepseek_v3"],
        {"pos_emb_height": 4, "pos_emb_width": 4, "num_hidden_layers": 1},
    ),
    "mistral3": ({"sliding_window": None}, {"model_type": "pixtral"}),
    "qwen2_vl": (MROPE, {"hidden_size": 64, "embed_dim": 32}),
    "qwen2_5_vl": (MROPE, {"fullatt_block_indexes": [0]}),
    "qwen3_vl": (MROPE, {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (
        MROPE | EXTRA["qwen3_moe"],
        {"deepstack_visual_indexes": [0]},
    ),
    "smolvlm": ({"model_type": "llama"}, {}),
}
EXTRA |= families.EXTRA
OWN_NAMES |= families.OWN_NAMES
VISION |= families.VISION
COMPUTED |= dict.fromkeys(families.HEADLESS, ("head_dim",))
IMAGE_TOKEN = VOCAB - 2  # in no random prompt
GENERAL = (
    "vocab_size",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def tiny_config(kind: str, **changes: Any) -> transformers.PreTrainedConfig:
    """The config of a small model of an architecture; changes are of its text part."""
    if "text_config" in transformers.CONFIG_MAPPING[kind].sub_configs:
        text, vision = VISION.get(kind, ({}, {}))
        return transformers.CONFIG_MAPPING[kind](
            text_config=SIZES | text | changes,
            vision_config=VISION_SIZES | vision,
            tie_word_embeddings=False,
            image_token_id=IMAGE_TOKEN,
        )
    sizes = SIZES
    if kind in OWN_NAMES:
        sizes = {name: SIZES[name] for name in GENERAL} | OWN_NAMES[kind]
    sizes = sizes | EXTRA.get(kind, {}) | changes
    absent = COMPUTED.get(kind, ())
    named = {name: size for name, size in sizes.items() if name not in absent}
    return transformers.CONFIG_MAPPING[kind](**named)


def auto_class(kind: str) -> Any:
    """The class of transformers that makes models of an architecture."""
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def save_config(kind: str, folder: Path, **changes: Any) -> Path:
    """A folder with the config of a small model, without weights."""
    config = tiny_config(kind, **changes)
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [names[kind]]
    config.save_pretrained(folder)
    return folder


def save_tiny(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Build a random model of an architecture, and a tokenizer of bytes, and save both."""
    torch.manual_seed(seed)
    config = tiny_config(kind, **changes)
    auto_class(kind).from_config(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def save_readable(kind: str, folder: Path, **changes: Any) -> Path:
    """Build a random model that reads and writes the tokens of the packaged one, and save it."""
    sizes = {
        "vocab_size": describe_model(None).vocab_size,
        "max_position_embeddings": READABLE_CONTEXT,
        "head_dim": 64,
    }
    save_tiny(kind, folder, **sizes | changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEFAULT_MODEL / name, folder / name)
    return folder


def add_outliers(folder: Path, factor: float, layers: Iterable[int]) -> None:
    """Give keys outlier channels in the weights of a saved model, and take them from its queries.

    The channels and KV heads are those of `KeyOutliers`.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    head_dim, kv_heads = config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    lower = [pair * head_dim // 16 for pair in PAIRS]
    channels = lower + [channel + head_dim // 2 for channel in lower]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        _, _, rest = name.partition("model.layers.")
        if not rest or int(rest.split(".")[0]) not in layers:
            continue
        if ".k_proj." in name:
            by_head = tensor.unflatten(0, (kv_heads, head_dim))
            by_head[::EVERY_HEAD, channels] *= factor
        elif ".q_proj." in name:
            by_head = tensor.unflatten(0, (kv_heads, group, head_dim))
            by_head[::EVERY_HEAD, :, channels] /= factor
    save_file(tensors, file, metadata={"format": "pt"})


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_prompt(n: int, seed: int = 0) -> list[int]:
    """Token ids that any tiny model knows."""
    generator = torch.Generator().manual_seed(1000 * seed + n)
    return torch.randint(0, VOCAB - 4, (n,), generator=generator).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="model_type of transformers, such as qwen3_next")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    save_readable(arguments.kind, arguments.folder)


if __name__ == "__main__":
    main()
