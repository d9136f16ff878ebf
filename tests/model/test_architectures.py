"""Every architecture that calls our attention answers as transformers does; others are refused."""

from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ModelError
from disagg.model.capacity import check_model
from disagg.model.runner import Runner
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, serve
from tests.model.architectures import KINDS, table
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_config, save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SERVED = ["llama", "mistral", "qwen3", "gpt2", "opt", "gemma2", "gemma3_text", "afmoe"]
SERVED += ["gpt_oss", "vaultgemma"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({}, "state-space layers"),
    "bloom": ({}, "ALiBi"),
    "deepseek_v3": ({"kv_lora_rank": 16}, "MLA"),
    "falcon": ({}, "no attention function"),
    "falcon_h1": ({}, "state-space layers"),
    "jamba": ({}, "state-space layers"),
    "llama4_text": ({}, "in chunks"),
    "qwen3_next": ({}, "linear_attention"),
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
    path = save_config(kind, tmp_path, **changes)
    with pytest.raises(ModelError, match=reason):
        Runner.load(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_alone_says_what_the_page_of_models_says(kind, tmp_path):
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{kind}` |")]
    fit = check_model(str(save_config(kind, tmp_path)))
    assert fit.served or "refused" in row  # a refusal may also come of the probe
    assert fit.reason in row
    assert "\n" not in fit.reason


@pytest.mark.slow
def test_the_page_of_models_is_what_its_command_makes():
    assert PAGE.read_text() == table()
