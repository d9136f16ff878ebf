"""Every architecture that calls our attention answers as transformers does; others are refused."""

import json
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING_TOO,
)

from disagg.engine.messages import Prefill
from disagg.errors import ModelError, RequestError
from disagg.model.capacity import check_model
from disagg.model.runner import Runner
from tests.engine.serving import make_engine, request, serve
from tests.model.architectures import KINDS, OTHERS, SERVED, table, try_out
from tests.model.tiny import IMAGE_TOKEN, random_prompt, save_config, save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MADE_WITH = Version(PAGE.read_text().partition("with transformers ")[2].split(":")[0])
TRIED = ["llama", "mistral", "qwen3", "gpt2", "opt", "gemma2", "gemma3_text", "afmoe"]
TRIED += ["gpt_oss", "vaultgemma"]
# gated delta rule, Mamba 2 and 1, convolution, shared attention, state in attention
TRIED_HYBRIDS = ["qwen3_next", "granitemoehybrid", "jamba", "lfm3", "zamba2", "zaya"]
# YaRN; two attentions a layer; states beside latents
TRIED_LATENTS = [
    "deepseek_v2",
    "deepseek_v3",
    "sarvam_mla",
    "glm4_moe_lite",
    "mistral4",
]
TRIED_LATENTS += ["minicpm3", "youtu", "axk1", "longcat_flash", "kimi_linear"]
TRIED_LATENTS += ["bailing_hybrid", "kimi_k25"]
SEEING = ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"]  # the others with the page


def row_of(kind: str) -> str:
    """The line of docs/models.md that names an architecture."""
    lines = PAGE.read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("|") and f"`{kind}`" in line]
    return row


@pytest.mark.parametrize("kind", [*TRIED, *TRIED_LATENTS, *TRIED_HYBRIDS, *SEEING])
def test_raw_pages_give_the_tokens_that_transformers_gives(kind, tmp_path):
    assert try_out(kind, tmp_path) == SERVED


@pytest.mark.parametrize("kind", SEEING)
def test_tokens_that_stand_for_images_are_refused_by_name(kind, tmp_path):
    runner = Runner.load(str(save_tiny(kind, tmp_path)))
    engine = make_engine(runner)
    prompt = [*random_prompt(20), IMAGE_TOKEN]
    engine.submit(Prefill(request("a", prompt, "raw", 4)))

    (failed,) = engine.step().failed

    assert type(failed.error) is RequestError
    assert f"token {IMAGE_TOKEN} of the prompt is the image_token_i" in str(
        failed.error
    )
    assert (IMAGE_TOKEN, "image_token") in [
        (x, y[:11]) for x, y in runner.info.media_ids
    ]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_config_as_the_authors_wrote_it_gives_the_same_answers(kind, tmp_path):
    """Without text_config, and with rope_scaling."""
    folder = save_tiny(kind, tmp_path)
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(Runner.load(str(folder))), [prompt], "raw", 16)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    sections = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": sections}
    file.write_text(json.dumps({**text, **config, "vocab_size": text["vocab_size"]}))

    (answer,) = serve(make_engine(Runner.load(str(folder))), [prompt], "raw", 16)

    assert answer == expected


@pytest.mark.parametrize("kind", OTHERS.split())
def test_attention_that_pages_cannot_serve_is_refused_at_load(kind, tmp_path):
    with pytest.raises(ModelError) as refusal:
        Runner.load(str(save_config(kind, tmp_path)))

    reason = " ".join(str(refusal.value).split())
    assert row_of(kind) == f"| `{kind}` | {reason} |"


@pytest.mark.skipif(
    Version(transformers.__version__) < MADE_WITH, reason="serves fewer"
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_config_alone_says_what_the_page_of_models_says(kind, tmp_path):
    fit = check_model(str(save_config(kind, tmp_path)))

    is_refused = row_of(kind).startswith(f"| `{kind}` |")
    assert fit.served or is_refused  # a refusal may also come of the probe
    assert fit.reason in row_of(kind)
    assert "\n" not in fit.reason


@pytest.mark.slow
def test_the_page_of_models_is_what_its_command_makes():
    assert PAGE.read_text() == table()


@pytest.mark.skipif(
    Version(transformers.__version__) != MADE_WITH, reason="other architectures"
)
def test_the_page_of_models_names_every_architecture_that_generates_text():
    page = PAGE.read_text()

    missing = [kind for kind in (*CAUSAL, *SEEING_TOO) if f"`{kind}`" not in page]

    assert not missing
