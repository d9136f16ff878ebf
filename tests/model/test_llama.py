"""Our forward pass of Llama-like models computes what the modules of transformers compute."""

import pytest
import torch
from torch import nn

from disagg.model import linear
from disagg.model.describe import describe_model
from disagg.model.forward import ModuleForward, forward_of
from disagg.model.linear import PackedLinear
from disagg.model.llama import LLAMA_LIKE, LlamaForward, attend_to_all, llama_forward
from disagg.model.weights import load_model
from tests.model.tiny import save_tiny

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3])
POSITIONS = torch.arange(200, 200 + len(TOKENS))  # others than those of the probe


@pytest.fixture
def load(tmp_path):
    """Loads a tiny random model of an architecture."""

    def load(kind, dtype="float32", **changes):
        folder = save_tiny(kind, tmp_path, **changes)
        model = load_model(describe_model(str(folder), dtype), "cpu")
        return model.eval().requires_grad_(False)

    with torch.inference_mode():
        yield load


def logits_of(model):
    """The logits of a prompt by a module of transformers."""
    return ModuleForward(model)(TOKENS, POSITIONS, attend_to_all, None)


@pytest.mark.parametrize("kind", sorted(LLAMA_LIKE))
def test_logits_are_those_of_the_module(kind, load):
    model = load(kind)
    expected = logits_of(model)

    forward = forward_of(model)

    assert isinstance(forward, LlamaForward)
    logits = forward(TOKENS, POSITIONS, attend_to_all)
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_only_the_selected_rows_have_logits(load):
    forward = forward_of(load("llama"))
    logits = forward(TOKENS, POSITIONS, attend_to_all)

    selected = forward(TOKENS, POSITIONS, attend_to_all, rows=torch.tensor([7, 2]))

    torch.testing.assert_close(selected, logits[[7, 2]], rtol=1e-5, atol=1e-5)


def test_no_weight_is_in_memory_twice(load):
    model = load("qwen3")
    forward = forward_of(model)

    assert not len(model.model.layers)
    linears = [x for x in forward.modules() if isinstance(x, nn.Linear | PackedLinear)]

    assert {type(x) for x in linears} == {PackedLinear}
    assert len(linears) == 4 * len(forward.layers) + 1


def test_fused_weights_serve_the_module_too(load):
    model = load("qwen2")
    expected = logits_of(model)

    LlamaForward(model)

    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)


def test_a_model_that_computes_something_else_stays_a_module(load):
    model = load("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x).relu())

    assert llama_forward(model) is None


def test_copies_that_cannot_be_packed_need_room_too(load, monkeypatch):
    model = load("llama", "float16")
    monkeypatch.setattr(linear, "available_memory", lambda: 1 << 10)

    assert type(forward_of(model)) is ModuleForward


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "glm4"])
def test_models_of_another_form_stay_modules(kind, load):
    model = load(kind)
    expected = logits_of(model)

    forward = forward_of(model)

    assert type(forward) is ModuleForward
    torch.testing.assert_close(
        forward(TOKENS, POSITIONS, attend_to_all, None), expected, rtol=1e-5, atol=1e-4
    )


def test_clipped_projections_stay_a_module(load):
    assert llama_forward(load("olmoe", clip_qkv=0.5)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["olmo", "olmo2", "qwen3"])
def test_a_model_in_16_bits_is_close_to_its_module(kind, dtype, load):
    """Rotations of Olmo are in float32."""
    model = load(kind, dtype)
    expected = logits_of(model)

    logits = forward_of(model)(TOKENS, POSITIONS, attend_to_all)

    assert logits.dtype == getattr(torch, dtype)
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < 0.05
