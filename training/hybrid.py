"""A small hybrid model for measurements: the default model, with states in four of its six layers.

    python -m training.hybrid qwen3_5_text --books PATH --out DIR [--minutes N]

Embeddings, MLPs and two attention layers are those of the default model; the projections of the
other attention layers become the keys, values and outputs of a delta rule where they fit. All of it
is trained on: after some hundred rows the states are those of a model that uses them. A stopped
training goes on from OUT/checkpoint.pt. OUT/model is written at the end.
"""

import argparse
import json
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
)

from disagg.model.describe import DEFAULT_MODEL
from training.rows import RowMaker, training_tokens
from training.train import CHECKPOINT, TrainConfig, Training

ROPE = {"rope_theta": 50000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
        "rope_parameters": ROPE | {"mrope_section": [11, 11, 10]},
    },
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
        "attn_layer_indices": [2, 5],
        "rope_parameters": ROPE,
    },
}
LENGTH = 2048  # tokens of a row; one row a step


@torch.no_grad()
def hybrid_model(kind: str) -> Any:
    """A model of a kind with the weights of the default model, as far as they fit."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    source = LlamaForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).model
    model.model.embed_tokens.weight.copy_(source.embed_tokens.weight)
    copy = _copy_to_bamba if kind == "bamba" else _copy_to_qwen
    copy(model.model, source)
    return model


def _copy_to_qwen(model: Any, source: Any) -> None:
    """Its norms hold their weight less 1, and its queries have a gate beside them."""
    model.norm.weight.copy_(source.norm.weight - 1)
    for layer, like in zip(model.layers, source.layers, strict=True):
        attention = like.self_attn
        norm = like.post_attention_layernorm.weight
        layer.input_layernorm.weight.copy_(like.input_layernorm.weight - 1)
        layer.post_attention_layernorm.weight.copy_(norm - 1)
        layer.mlp.load_state_dict(like.mlp.state_dict())
        if hasattr(layer, "linear_attn"):
            _copy_to_delta(layer.linear_attn, attention)
            continue
        own = layer.self_attn
        own.k_proj.weight.copy_(attention.k_proj.weight)
        own.v_proj.weight.copy_(attention.v_proj.weight)
        own.o_proj.weight.copy_(2 * attention.o_proj.weight)  # the gates begin with 0.5
        queries_and_gates = own.q_proj.weight.view(4, 2, 64, 256)
        queries_and_gates[:, 0].copy_(attention.q_proj.weight.view(4, 64, 256))
        queries_and_gates[:, 1].mul_(0.1)
        own.q_norm.weight.fill_(0.5)
        own.k_norm.weight.fill_(0.5)


def _copy_to_delta(delta: Any, attention: Any) -> None:
    """Heads that forget over a few tokens up to hundreds."""
    keys, values = map(_for_each_head, (attention.k_proj, attention.v_proj))
    delta.in_proj_qkv.weight.copy_(torch.cat([attention.q_proj.weight, keys, values]))
    delta.in_proj_b.weight.mul_(0.3)
    delta.out_proj.weight.copy_(attention.o_proj.weight)
    delta.A_log.copy_(torch.tensor([0.004, 0.02, 0.1, 0.5]).log())
    delta.dt_bias.fill_(0.5)
    _pass_on(delta.conv1d)


def _copy_to_bamba(model: Any, source: Any) -> None:
    model.final_layernorm.weight.copy_(source.norm.weight)
    for layer, like in zip(model.layers, source.layers, strict=True):
        layer.input_layernorm.weight.copy_(like.input_layernorm.weight)
        layer.pre_ff_layernorm.weight.copy_(like.post_attention_layernorm.weight)
        layer.feed_forward.load_state_dict(like.mlp.state_dict())
        if hasattr(layer, "self_attn"):
            layer.self_attn.load_state_dict(like.self_attn.state_dict())
            continue
        layer.mamba.A_log.copy_(torch.logspace(0, 1.2, 8).log())
        layer.mamba.dt_bias.copy_(torch.logspace(-3, -0.7, 8).expm1().log())
        _pass_on(layer.mamba.conv1d)


def _for_each_head(projection: nn.Linear) -> Tensor:
    """The rows of two KV heads, for four heads."""
    heads = projection.weight.view(2, 64, 256)
    return heads.repeat_interleave(2, 0).reshape(256, 256)


def _pass_on(convolution: nn.Conv1d) -> None:
    """A convolution that at first lets its last input through."""
    convolution.weight.mul_(0.3)
    convolution.weight[:, :, -1] += 1


def main() -> None:
    """Train until the minutes are over or SIGTERM comes."""
    parser = argparse.ArgumentParser(
        prog="python -m training.hybrid", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=55.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    rows = RowMaker(training_tokens(args.books, tokenizer, args.out), tokenizer, LENGTH)
    config = TrainConfig(
        minutes=args.minutes,
        num_rows=1,
        length=LENGTH,
        peak_lr=1.5e-3,
        end_lr_share=0.05,
        warmup_steps=10,
        bf16=True,
    )
    training = Training(hybrid_model(args.kind), rows, config)
    checkpoint = args.out / CHECKPOINT
    if checkpoint.exists():
        training.load(checkpoint)
    _train(training, checkpoint)
    training.model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    print(json.dumps(training.done()))


def _train(training: Training, checkpoint: Path) -> None:
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stopping.append(signum))
    saved = training.ticked
    while training.progress() < 1 and not stopping:
        loss = training.train_step()
        print(f"step {training.step} loss {loss:.3f}", flush=True)
        if training.ticked - saved > training.config.checkpoint_s:
            training.save(checkpoint)
            saved = training.ticked
    training.save(checkpoint)


if __name__ == "__main__":
    main()
