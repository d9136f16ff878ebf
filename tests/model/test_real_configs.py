"""58 config.json files of 2025 and 2026: each is served as it is meant, or refused for its reason.

configs.jsonl has their facts, without keys that no loader reads. The tables were written by hand,
from what is published on each architecture; a KV size is 2 (K and V) x 2 bytes x layers x KV heads
x head dim. Of latents V is not stored: 2 bytes x layers x (512 + 64).
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from disagg.model.capacity import check_model

CONFIGS = Path(__file__).parent / "configs.jsonl"


@dataclass(frozen=True)
class Served:
    """What a model is like that is served, in bfloat16.

    shape:   layers, KV heads, head dim
    ends:    end tokens that the config alone names
    windows: layers by the tokens that they see; None: all layers see all
    wide:    the same of layers with other heads; `shape` counts them too
    states:  layers that keep a state, and their MiB of one sequence
    sides:   2, K and V; 1 of latents
    """

    shape: tuple[int, int, int]
    kv_bytes: int
    context: int
    ends: tuple[int, ...]
    windows: dict[int | None, int] | None = None
    states: tuple[int, float] = (0, 0.0)
    sides: int = 2
    wide: tuple[int, int, int] = (0, 0, 0)


QWEN_END = (151645,)  # <|im_end|>
LLAMA_END = (128001,)  # <|end_of_text|>
LLAMA_CHAT_ENDS = (128001, 128008, 128009)
# a class default: the real one stands in generation_config.json
CLASS_DEFAULT = (2,)
QWEN_TEXT_END = (248044,)  # <|endoftext|>


def qwen_hybrid(
    shape: tuple[int, int, int], kv_bytes: int, states: tuple[int, float]
) -> Served:
    """Gated DeltaNet in 3 layers of 4."""
    return Served(shape, kv_bytes, 262_144, QWEN_TEXT_END, states=states)


def nemotron(layers: int, states: tuple[int, float], context: int = 262_144) -> Served:
    """Mamba 2 and experts, and 2 KV heads of 128 in some layers."""
    kv_bytes = layers * 1024
    return Served((layers, 2, 128), kv_bytes, context, CLASS_DEFAULT, states=states)


def deepseek_latents(context: int, end: int) -> Served:
    """MLA in 61 layers: latents of 512 channels and rotated keys of 64."""
    return Served((61, 1, 576), 70_272, context, (end,), sides=1)


SERVED = {
    # full attention in every layer, in spite of the linear attention of MiniMax-01
    "MiniMaxAI/MiniMax-M2.5": Served((62, 8, 128), 253_952, 196_608, ()),
    "MiniMaxAI/MiniMax-M2.7": Served((62, 8, 128), 253_952, 204_800, ()),
    "nvidia/MiniMax-M2.5-NVFP4": Served((62, 8, 128), 253_952, 196_608, CLASS_DEFAULT),
    "nvidia/MiniMax-M2.7-NVFP4": Served((62, 8, 128), 253_952, 196_608, CLASS_DEFAULT),
    # 32,768 tokens and room for an answer; YaRN has to be added by the user
    "Qwen/Qwen3-0.6B": Served((28, 8, 128), 114_688, 40_960, QWEN_END),
    "Qwen/Qwen3-1.7B": Served((28, 8, 128), 114_688, 40_960, QWEN_END),
    "Qwen/Qwen3-8B": Served((36, 8, 128), 147_456, 40_960, QWEN_END),
    "Qwen/Qwen3-32B": Served((64, 8, 128), 262_144, 40_960, QWEN_END),
    "Qwen/Qwen3-32B-FP8": Served((64, 8, 128), 262_144, 40_960, QWEN_END),
    "Qwen/Qwen3-30B-A3B": Served((48, 4, 128), 98_304, 40_960, QWEN_END),
    "Qwen/Qwen3-235B-A22B-FP8": Served((94, 4, 128), 192_512, 40_960, QWEN_END),
    "nvidia/Qwen3-235B-A22B-NVFP4": Served((94, 4, 128), 192_512, 40_960, QWEN_END),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": Served(
        (62, 8, 128), 253_952, 262_144, QWEN_END
    ),
    # Qwen3 with positions of three axes, which are one for text; images are refused
    "Qwen/Qwen3-VL-2B-Instruct": Served((28, 8, 128), 114_688, 262_144, QWEN_END),
    "Qwen/Qwen3-VL-4B-Instruct": Served((36, 8, 128), 147_456, 262_144, QWEN_END),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Served((48, 4, 128), 98_304, 262_144, QWEN_END),
    "Qwen/Qwen3-VL-32B-Thinking": Served((64, 8, 128), 262_144, 262_144, QWEN_END),
    # llama3 scaling by 8 of 8,192 would be less than what the config says
    "meta-llama/Meta-Llama-3.1-8B": Served((32, 8, 128), 131_072, 131_072, LLAMA_END),
    "meta-llama/Meta-Llama-3.1-70B": Served((80, 8, 128), 327_680, 131_072, LLAMA_END),
    "nvidia/Llama-3.1-70B-Instruct-FP8": Served(
        (80, 8, 128), 327_680, 131_072, LLAMA_CHAT_ENDS
    ),
    # the window of Mistral 7B is off: null
    "mistralai/Mixtral-8x7B-v0.1": Served((32, 8, 128), 131_072, 32_768, (2,)),
    # every second layer sees 128 tokens; YaRN by 32 of 4,096; <|return|>
    "openai/gpt-oss-20b": Served(
        (24, 8, 64), 49_152, 131_072, (200002,), {128: 12, None: 12}
    ),
    # YaRN by 40 of 4,096; Kimi K2 has half of the heads, by 32 and by 64 of 4,096
    "deepseek-ai/DeepSeek-R1": deepseek_latents(163_840, 1),
    "deepseek-ai/DeepSeek-V3": deepseek_latents(163_840, 1),
    "nvidia/DeepSeek-V3.1-NVFP4": deepseek_latents(163_840, 1),
    "moonshotai/Kimi-K2-Instruct": deepseek_latents(131_072, 163_585),
    "nvidia/Kimi-K2.5-NVFP4": deepseek_latents(262_144, 163_585),
    "nvidia/Kimi-K2.7-Code-NVFP4": deepseek_latents(262_144, 163_586),
    # three layers of four attend in chunks of 8,192 tokens; the config names no end
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": Served(
        (48, 8, 128), 196_608, 1_048_576, (), {8192: 36, None: 12}
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Served(
        (48, 8, 128), 196_608, 10_485_760, (), {8192: 36, None: 12}
    ),
    # 16 KV heads of 256 in layers with a window, 4 of 512 in every sixth
    "nvidia/Gemma-4-31B-IT-NVFP4": Served(
        (60, 16, 256),
        901_120,
        262_144,
        (1, 106),
        {1024: 50, None: 10},
        wide=(10, 4, 512),
    ),
    # hybrids: the bytes of their states follow from the sizes of heads alone
    "Qwen/Qwen3.5-27B": qwen_hybrid((16, 4, 256), 65_536, (48, 147.75)),
    "Qwen/Qwen3.5-122B-A10B": qwen_hybrid((12, 2, 256), 24_576, (36, 147.375)),
    "Qwen/Qwen3.5-397B-A17B": qwen_hybrid((15, 2, 256), 30_720, (45, 184.21875)),
    "nvidia/Qwen3.5-122B-A10B-NVFP4": qwen_hybrid((12, 2, 256), 24_576, (36, 147.375)),
    "nvidia/Qwen3.6-27B-NVFP4": qwen_hybrid((16, 4, 256), 65_536, (48, 147.75)),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": qwen_hybrid((10, 2, 256), 20_480, (30, 61.875)),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": nemotron(6, (23, 47.08)),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": nemotron(6, (23, 47.08)),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": nemotron(8, (40, 163.12)),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": nemotron(12, (48, 390.75)),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": nemotron(12, (48, 390.75)),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": nemotron(
        6, (23, 47.08), context=1_048_576
    ),
}

INDEXED = "attends only to tokens that an indexer picks"

REFUSED = {
    # Qwen2 with a head for multi-token prediction, in code of its repository
    "XiaomiMiMo/MiMo-7B-Base": "no model type 'mimo'",
    # Kimi Delta Attention and latents, in code of its repository
    "moonshotai/Kimi-K3": "no model type 'kimi_k3'",
    # latents with sparse attention (DSA) on top
    "zai-org/GLM-5-FP8": INDEXED,
    "zai-org/GLM-5.1": INDEXED,
    "zai-org/GLM-5.2": INDEXED,
    "zai-org/GLM-5.2-FP8": INDEXED,
    "nvidia/GLM-5.1-NVFP4": INDEXED,
    "nvidia/GLM-5.2-NVFP4": INDEXED,
    # and compresses them, by 4 or by 128 tokens, layer by layer
    "deepseek-ai/DeepSeek-V4-Flash": INDEXED,
    "deepseek-ai/DeepSeek-V4-Pro": INDEXED,
    "nvidia/DeepSeek-V4-Flash-NVFP4": INDEXED,
    "nvidia/DeepSeek-V4-Pro-NVFP4": INDEXED,
    "sgl-project/DeepSeek-V4-Flash-FP8": INDEXED,
    # the class in transformers wants a text_config, and would take its defaults
    "stepfun-ai/Step-3.7-Flash": "vocab_size 128896, but transformers takes 128815",
    "stepfun-ai/Step-3.7-Flash-FP8": "vocab_size 128896, but transformers takes 128815",
}


@cache
def configs() -> dict[str, dict[str, Any]]:
    rows = map(json.loads, CONFIGS.read_text().splitlines())
    return {row["name"]: row["config"] for row in rows}


def folder_of(name: str, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(configs()[name]))
    return str(folder)


@pytest.fixture(autouse=True)
def nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a repository must be refused, never asked about."""

    def refuse(*prompt: object) -> str:
        raise AssertionError(f"a question: {prompt}")

    monkeypatch.setattr("builtins.input", refuse)


def test_every_config_is_in_one_of_the_tables():
    assert sorted([*SERVED, *REFUSED]) == sorted(configs())
    assert len(configs()) == 58


@pytest.mark.parametrize("name", SERVED)
def test_a_real_model_is_served_as_it_is_meant(name, tmp_path):
    expected = SERVED[name]
    layers, heads, head_dim = expected.shape
    wide_layers, wide_heads, wide_dim = expected.wide
    numbers = (layers - wide_layers) * heads * head_dim
    numbers += wide_layers * wide_heads * wide_dim

    fit = check_model(folder_of(name, tmp_path))

    assert fit.served, fit.reason
    assert (fit.num_layers, fit.heads, fit.head_dim) == expected.shape
    assert (
        fit.exact_bytes_per_token == expected.kv_bytes == 2 * expected.sides * numbers
    )
    assert fit.dtype == "bfloat16"
    assert fit.context_length == fit.max_context == expected.context
    assert fit.windows == (expected.windows or {None: layers})
    assert fit.eos_ids == expected.ends
    num_states, mebibytes = expected.states
    assert fit.num_states == num_states
    assert fit.state_bytes / 2**20 == pytest.approx(mebibytes, abs=0.01)


@pytest.mark.parametrize("name", REFUSED)
def test_a_real_model_is_refused_for_its_reason(name, tmp_path):
    fit = check_model(folder_of(name, tmp_path))

    assert not fit.served
    assert REFUSED[name] in fit.reason
    assert "\n" not in fit.reason
