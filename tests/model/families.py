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
    "ctrl": {"initializer_range": 1.0},
    "dots3_note_text": ALL_KV_HEADS,
    "gemma4_unified_text": {"num_hidden_layers": 4, "sliding_window": 20}
    | {"global_head_dim": 64, "tie_word_embeddings": False}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "granitemoe_swa": {"sliding_window": 20},
    "hrm_text": ALL_KV_HEADS,
    "hy_v3": EXPERTS,
    "laguna": EXPERTS | {"sliding_window": 20},
    "mellum": EXPERTS | {"sliding_window": 20},
    "mimo_v2_flash": {"v_head_dim": 16} | ROUTED,
    "modernbert-decoder": ENDS | ALL_KV_HEADS,
    "persimmon": ALL_KV_HEADS,
    "sarvam_moe": ROUTED,
}
HEADLESS = (
    "persimmon",
    "modernbert-decoder",
    "gpt_neox_japanese",
)  # no head dim of their own
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
LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 20,
    "num_local_experts": 2,
}
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
    "emu3": (ENDS, {}),
    "exaone4_5": ({"model_type": "exaone4", "sliding_window": 20}, {}),
    "fuyu": (ALL_KV_HEADS | {"head_dim": 16}, {}),
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
    "minicpm_ocr": (DELTA, {}),
    "minicpmv4_6": (DELTA, {}),
    "minicpmv4_7": (DELTA, {}),
    "minimax_m3_vl": ({"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "paddleocr_vl": (mrope(2, 3, 3), {}),
    "mllama": (ENDS | {"cross_attention_layers": [1]}, {}),
    "paligemma": ({"model_type": "gemma"}, {}),
    "qianfan_ocr": ({}, {}),
    "qwen2_5_omni_thinker": (mrope(2, 3, 3), {}),
    "qwen3_5": (DELTA, {}),
    "qwen4_exp": (EXPERTS | {"num_hidden_layers": 4}, {}),
    "qwen3_5_moe": (DELTA | EXPERTS | SHARED_EXPERT, {}),
    "video_llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "vipllava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
}
# of the page of models: by family
SERVED = {
    "Apertus 1.5": "apertus1p5_text",
    "Aria": "aria_text",
    "Beam": "beam",
    "CodeGen": "codegen",
    "CTRL": "ctrl",
    "CWM": "cwm",
    "EXAONE 3": "exaone",
    "Flint": "flint",
    "Gemma 4 Unified": "gemma4_unified_text",
    "GPT-SW3": "gpt-sw3",
    "Granite MoE": "granitemoe_swa granitemoeshared",
    "HRM": "hrm_text",
    "Hunyuan 3": "hy_v3",
    "HyperCLOVA X": "hyperclovax",
    "IQuest Coder": "iquestcoder",
    "Kolibri": "kolibri1",
    "Laguna": "laguna",
    "Mellum": "mellum",
    "Persimmon": "persimmon",
    "Sarvam MoE": "sarvam_moe",
}
SEEING = {
    "Aria": "aria",
    "Cohere 2 Vision": "cohere2_vision",
    "Cosmos 3 Omni": "cosmos3_omni",
    "EXAONE 4.5": "exaone4_5",
    "Fuyu": "fuyu",
    "Gemma 4": "gemma4 gemma4_unified",
    "GLM 4.5V, 4.6V, OCR": "glm4v_moe glm46v glm_ocr",
    "GOT OCR 2": "got_ocr2",
    "Granite Docling": "granite_docling",
    "Hunyuan VL": "hunyuan_vl",
    "HyperCLOVA X Vision": "hyperclovax_vision_v2",
    "Idefics 2": "idefics2",
    "LFM 2 and 3 VL": "lfm2_vl lfm3_vl",
    "LightOn OCR": "lighton_ocr",
    "Llama 4": "llama4",
    "LLaVA-NeXT, OneVision": "llava_next llava_next_video llava_onevision",
    "MiniCPM-V 4.6, 4.7, OCR": "minicpmv4_6 minicpmv4_7 minicpm_ocr",
    "PaddleOCR VL": "paddleocr_vl",
    "PaliGemma": "paligemma",
    "Qianfan OCR": "qianfan_ocr",
    "Qwen3.5, Qwen3.6": "qwen3_5 qwen3_5_moe",
    "VideoLLaMA 3": "video_llama_3",
    "Video-LLaVA, ViP-LLaVA": "video_llava vipllava",
}
REFUSED = """
    blip cpmant deepseek_vl diffllama doge evolla git gpt_neo
    gpt_neox_japanese idefics janus jetmoe mimo_v2_flash minimax_m3_vl
    minimax_m3_vl_text mllama modernbert-decoder moshi openai-gpt qwen4_exp
    recurrent_gemma rwkv trocr unlimited_ocr xglm xlstm
"""
# encoders, encoders with a decoder, heads that draft for other models, diffusion
NO_DECODERS = """
    bart bert bert-generation big_bird bigbird_pegasus blenderbot
    blenderbot-small camembert data2vec-text diffusion_gemma electra ernie
    florence2 gemma4_assistant gemma4_unified_assistant marian mbart
    megatron-bert musicgen musicgen_melody mvp pegasus pi0 pix2struct plbart
    pp_formulanet prophetnet reformer rembert roberta roberta-prelayernorm
    roc_bert roformer t5gemma2 udop vision-encoder-decoder whisper xlm
    xlm-roberta xlm-roberta-xl xlnet xmod
"""
# no small model of these could be made, or it could not be asked without images
UNTRIED = """
    apertus1p5 blip-2 blt chameleon cohere_compass cohere_compass_text
    cosmos3_edge dbrx deepseek_ocr2 deepseek_vl_hybrid dory dots3_note
    dots3_note_text emu3 ernie4_5_vl_moe fast_vlm gemma3n glm5_next glmga
    granite4_vision hy_v4_vl inkling2 inkling2_loop inkling2_loop_text
    inkling2_text inkling_mm_model inkling_text instructblip
    instructblipvideo kosmos-2 kosmos-2.5 mistral_large4 molmo2
    moss_transcribe_diarize muse_glimmer muse_spark nemotron_h_omni ovis2
    perception_lm phi4_multimodal pp_chart2table qwen2_5_omni_thinker
    qwen3_omni_moe_thinker shieldgemma2 step3p7
"""
