"""Sizes of small models of the families that only the page of models tries, not the fast tests.

As in `tiny.py`: changes of the sizes that all small models have, by architecture.
"""

from typing import Any

VOCAB = 260
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ALL_KV_HEADS = {"num_key_value_heads": 4}
SIDES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
# names of sizes that an architecture has in place of the usual ones
OWN_NAMES: dict[str, dict[str, Any]] = {
    "codegen": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
    | {"rotary_dim": 8},
    "ctrl": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "dff": 96},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512}
    | {"attn_config": {"kv_n_heads": 2}}
    | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "gpt-sw3": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_neo": {"hidden_size": 64, "num_layers": 2, "num_heads": 4}
    | {"attention_types": [[["global", "local"], 1]]},
    "rwkv": {"hidden_size": 64, "num_hidden_layers": 2, "context_length": 512},
    "trocr": {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
}
EXTRA: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cwm": ENDS | {"sliding_window": 20},
    "dots3_note_text": ALL_KV_HEADS,
    "emu3": ENDS,
    "gemma4_unified_text": {"num_hidden_layers": 4, "sliding_window": 20}
    | {"global_head_dim": 64, "tie_word_embeddings": False}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "granitemoe_swa": {"sliding_window": 20},
    "hrm_text": ALL_KV_HEADS,
    "hy_v3": EXPERTS,
    "laguna": EXPERTS | {"sliding_window": 20},
    "mellum": EXPERTS | {"sliding_window": 20},
    "modernbert-decoder": ENDS,
    "persimmon": {"head_dim": 16} | ALL_KV_HEADS,
    "sarvam_moe": ROUTED,
}
HEADLESS = ("persimmon", "fuyu", "gpt_neox_japanese")  # no head dim of their own
MROPE: dict[str, Any] = {"head_dim": 16}


def mrope(*sections: int, **changes: Any) -> dict[str, Any]:
    """A text part whose positions have three axes."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return MROPE | {"rope_parameters": rope | {"mrope_section": [*sections]}} | changes


DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 48}
GEMMA_TYPES = ["sliding_attention", "full_attention"]
GEMMA_4 = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 3,
    "layer_types": [*GEMMA_TYPES, *GEMMA_TYPES, "full_attention"],
    "sliding_window": 20,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
}
GEMMA_3N = GEMMA_4 | {
    "activation_sparsity_pattern": None,
    "intermediate_size": [96] * 5,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
}
LLAMA_4 = {"num_hidden_layers": 4, "attention_chunk_size": 20, "num_local_experts": 2}
LLAMA_4 |= {"floor_scale": 8, "attn_scale": 0.5, "intermediate_size_mlp": 96}
CONV = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", *["conv"] * 2],
}
# changes of the text part, and of the vision part
VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aria": (EXTRA["aria_text"], {}),
    "cohere2_vision": ({"sliding_window": 20}, {}),
    "ernie4_5_vl_moe": (
        mrope(3, 3, 2) | {"moe_num_experts": 4, "moe_k": 2},
        {"hidden_size": 64},
    ),
    "exaone4_5": ({"model_type": "exaone4", "sliding_window": 20}, {}),
    "gemma3n": (GEMMA_3N, {}),
    "gemma4": (GEMMA_4 | {"global_head_dim": 64}, {}),
    "gemma4_unified": (EXTRA["gemma4_unified_text"] | {"pad_token_id": 0}, {}),
    "glm46v": (mrope(2, 3, 3), {}),
    "glm4v_moe": (mrope(1, 1, 2) | ROUTED, {}),
    "glm_ocr": (mrope(2, 3, 3), {}),
    "got_ocr2": ({}, {}),
    "granite_docling": ({"model_type": "llama"}, {}),
    "hunyuan_vl": (mrope(2, 2, 2, 2), {}),
    "hyperclovax_vision_v2": ({}, {}),
    "idefics2": ({"model_type": "llama"}, {}),
    "lfm2_vl": (CONV | {"model_type": "lfm2"}, {}),
    "lfm3_vl": (CONV, {}),
    "lighton_ocr": ({}, {}),
    "llama4": (LLAMA_4, {}),
    "llava_next": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "llava_next_video": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "llava_onevision": ({"model_type": "qwen2"}, {}),
    "minicpmv4_6": (DELTA, {}),
    "minimax_m3_vl": ({"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "paddleocr_vl": (mrope(2, 3, 3), {}),
    "paligemma": ({"model_type": "gemma"}, {}),
    "qianfan_ocr": ({}, {}),
    "qwen3_5": (DELTA, {}),
    "qwen3_5_moe": (DELTA | EXPERTS | SHARED_EXPERT, {}),
    "video_llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "vipllava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
}
