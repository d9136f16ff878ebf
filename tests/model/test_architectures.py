"""Every architecture that calls our attention answers as transformers does; others are refused."""

from typing import Any

import pytest

from disagg.errors import ModelError
from disagg.model.runner import Runner
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny

SERVED = ["llama", "mistral", "qwen3", "gpt2", "opt", "gemma3_text", "afmoe"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({}, "BambaForCausalLM does not run on pages"),
    "falcon": ({}, "no attention function"),
    "falcon_h1": ({}, "FalconH1ForCausalLM does not run on pages"),
    "gemma2": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "gpt_oss": ({}, "sinks"),
    "jamba": ({}, "JambaForCausalLM does not run on pages"),
}


@pytest.mark.parametrize("kind", SERVED)
def test_raw_pages_give_the_tokens_that_transformers_gives(kind, tmp_path):
    path = str(save_tiny(kind, tmp_path))
    prompts = [random_prompt(n) for n in (5, 37, 70)]
    reference = ReferenceModel(path)
    expected = [reference.generate(prompt, 24) for prompt in prompts]
    assert len({token for answer in expected for token in answer.tokens}) > 5
    engine = make_engine(Runner.load(path), max_batch_tokens=29)
    for answer, right in zip(serve(engine, prompts, "raw", 24), expected, strict=True):
        assert_same(answer, right)


@pytest.mark.parametrize("kind", REFUSED)
def test_attention_that_pages_cannot_serve_is_refused_at_load(kind, tmp_path):
    changes, reason = REFUSED[kind]
    path = save_tiny(kind, tmp_path, **changes)
    with pytest.raises(ModelError, match=reason):
        Runner.load(str(path))


def test_a_gemma2_without_caps_is_served(tmp_path):
    path = str(save_tiny("gemma2", tmp_path, attn_logit_softcapping=None))
    prompt = random_prompt(50)
    (answer,) = serve(make_engine(Runner.load(path)), [prompt], "raw", 12)
    assert_same(answer, ReferenceModel(path).generate(prompt, 12))
