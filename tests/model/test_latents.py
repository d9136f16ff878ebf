"""Latents of MLA: both ways to attend agree, the probe says so, composites and refusals."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from disagg.errors import ModelError
from disagg.kernels.view import Softmax
from disagg.model import latents
from disagg.model.attention import attend_exact
from disagg.model.capacity import check_model
from disagg.model.describe import describe_model
from disagg.model.latents import LatentHeads, heads_of, own_expansion
from disagg.model.linear import PackedLinear
from disagg.model.probe import attend_latents
from disagg.model.runner import Runner
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import LATENTS, random_prompt, save_config, save_tiny, tiny_config
from tests.synthetic import relative_error

RANK, ROTATED, PLAIN, VALUES = 32, 16, 48, 32  # channels
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
SIZES |= {"vocab_size": 260, "max_position_embeddings": 512}


class Attention(nn.Module):
    """What the attention modules of transformers have, as far as latents go."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_lora_rank = RANK
        self.qk_nope_head_dim = PLAIN
        self.v_head_dim = VALUES
        self.kv_b_proj = nn.Linear(RANK, 4 * (PLAIN + VALUES), bias=False)

    def expand_kv(self, latent, rotated):
        both = self.kv_b_proj(latent).unflatten(3, (4, -1))[:, 0].transpose(1, 2)
        k, v = both.split([PLAIN, VALUES], 3)
        return torch.cat([k, rotated.expand(-1, 4, -1, -1)], 3), v


class OwnLinear(nn.Linear):
    """A layer that keeps its weights in a form of its own: here the negative ones."""

    def forward(self, x):
        return nn.functional.linear(x, -self.weight)


def attention_inputs(tokens=9):
    torch.manual_seed(0)
    q = torch.randn(4, tokens, PLAIN + ROTATED)
    k = torch.randn(1, tokens, RANK + ROTATED)
    return q, k, k[..., :RANK]


def test_asking_latents_is_attention_to_what_they_expand_to():
    heads = LatentHeads(Attention().requires_grad_(False), torch.float32)
    q, k, v = attention_inputs()
    expanded = attend_exact(q, *heads.expand(k, v), Softmax(0.1), None)

    attended = attend_latents(heads, q, k, v, Softmax(0.1))

    assert attended.shape == (4, 9, VALUES)
    assert relative_error(attended, expanded[..., :VALUES]) < 1e-5


@torch.no_grad()
def test_weights_of_another_kind_of_layer_are_read_by_calling_it():
    attention = Attention()
    weight = attention.kv_b_proj.weight
    attention.kv_b_proj = OwnLinear(RANK, 4 * (PLAIN + VALUES), bias=False)
    attention.kv_b_proj.weight.copy_(-weight)

    read = latents._weights_of(attention.kv_b_proj, RANK, torch.float32)

    torch.testing.assert_close(read, weight)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Runner:
    return Runner.load(
        str(save_tiny("deepseek_v3", tmp_path_factory.mktemp("latents")))
    )


def test_the_weights_that_queries_ask_with_stay_readable(loaded):
    attention = loaded._forward.model.model.layers[0].self_attn

    assert type(attention.kv_b_proj) is nn.Linear
    assert type(attention.o_proj) is PackedLinear


def test_a_model_can_expand_by_itself_for_a_while(loaded):
    attention = loaded._forward.model.model.layers[0].self_attn
    heads = heads_of(attention)

    with own_expansion(loaded._forward.model):
        assert heads_of(attention) is latents.PLAIN

    assert heads_of(attention) is heads
    assert isinstance(heads, LatentHeads)


def test_the_probe_notices_wrong_weights_of_queries(tmp_path, monkeypatch):
    folder = str(save_tiny("deepseek_v3", tmp_path))
    ask = LatentHeads.ask
    monkeypatch.setattr(LatentHeads, "ask", lambda self, q: 1.1 * ask(self, q))

    with pytest.raises(ModelError, match="gives other logits"):
        Runner.load(folder)


def test_the_probe_notices_wrong_weights_of_answers(tmp_path, monkeypatch):
    folder = str(save_tiny("deepseek_v3", tmp_path))
    answer = LatentHeads.answer
    monkeypatch.setattr(LatentHeads, "answer", lambda self, o: 1.1 * answer(self, o))

    with pytest.raises(ModelError, match="gives other logits"):
        Runner.load(folder)


def test_a_model_without_the_method_is_refused(tmp_path, monkeypatch):
    folder = str(save_tiny("deepseek_v3", tmp_path))
    monkeypatch.setattr(latents, "EXPANSION", "a_method_of_later_versions")

    with pytest.raises(ModelError, match="latents need transformers"):
        Runner.load(folder)


# -- configs


def test_a_token_of_latents_is_shown_with_its_bytes(tmp_path, disagg):
    path = save_config("deepseek_v3", tmp_path, dtype="bfloat16")

    fit = check_model(str(path))
    lines = disagg("models check", path).out

    assert (fit.heads, fit.head_dim, fit.latent) == (1, RANK + ROTATED, RANK)
    assert fit.exact_bytes_per_token == 2 * 2 * (RANK + ROTATED)
    assert "latents of 32 channels, rotated keys of 16" in lines
    assert "exact latents 192 bytes a token" in lines


def test_two_attentions_of_a_layer_have_latents_each(tmp_path):
    info = describe_model(str(save_config("longcat_flash", tmp_path)))
    assert len(info.layers) == 2  # of one


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    folder = save_tiny("deepseek_v3", tmp_path)
    prompt = random_prompt(40)
    (expected,) = serve(make_engine(Runner.load(str(folder))), [prompt], "raw", 8)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.XConfig"}}
    (folder / "config.json").write_text(json.dumps(config))

    (answer,) = serve(make_engine(Runner.load(str(folder))), [prompt], "raw", 8)

    assert answer == expected


def test_the_language_model_of_mistral_small_4_is_served(tmp_path):
    """Its config is of type mistral3, with a text part of type mistral4."""
    sizes = LATENTS["mistral4"] | {"model_type": "mistral4", "head_dim": 64}
    folder = str(save_tiny("mistral3", tmp_path, **sizes))
    prompt = random_prompt(40)
    expected = ReferenceModel(folder).generate(prompt, 8)

    (answer,) = serve(make_engine(Runner.load(folder)), [prompt], "raw", 8)

    assert_same(answer, expected)


def test_bfloat16_passes_the_probe(tmp_path):
    folder = save_tiny("glm4_moe_lite", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)

    runner = Runner.load(str(folder), dtype="bfloat16")

    assert runner.info.dtype == "bfloat16"


@pytest.mark.parametrize("kind", ["glm5_next", "mistral_large4", "dots3_note"])
def test_indexers_of_composite_models_are_refused_by_name(kind, tmp_path):
    text = SIZES | {"model_type": f"{kind}_text", "index_topk": 64, "kv_lora_rank": 32}
    config = {"model_type": kind, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=f"^{kind} attends only to tokens that an ind"):
        describe_model(str(tmp_path))


def test_yarn_scales_the_scores_of_tiny_models():
    """Else equal tokens would say nothing of it."""
    config = tiny_config("deepseek_v3")
    model = AutoModelForCausalLM.from_config(config)
    scale = model.model.layers[0].self_attn.scaling

    assert scale > 1.1 * config.qk_head_dim**-0.5
