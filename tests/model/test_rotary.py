"""How long texts may be, in old and new forms of rope scaling; and that they are computed right."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.errors import ConfigError
from disagg.model.describe import describe_model
from disagg.model.rotary import Reach, rotary_reach
from disagg.model.runner import Runner
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny

ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}
BY_LAYER = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("length", "keys", "default", "most"),
    [
        (32768, {}, 32768, 32768),
        (32768, {"rope_scaling": None}, 32768, 32768),
        (32768, {"rope_scaling": {}}, 32768, 32768),
        (32768, {"rope_scaling": {"factor": 4.0}}, 32768, 32768),
        (32768, {"rope_scaling": {"mrope_section": [24, 20, 20]}}, 32768, 32768),
        (32768, {"rope_scaling": YARN}, 131072, 131072),
        (32768, {"rope_scaling": {"type": "yarn", "factor": 4}}, 131072, 131072),
        (40960, {"rope_parameters": YARN}, 131072, 131072),
        (163840, {"rope_scaling": YARN}, 163840, 163840),
        (32768, {"rope_parameters": BY_LAYER}, 131072, 131072),
        (131072, {"rope_scaling": LLAMA3}, 131072, 131072),
        (8192, {"rope_scaling": LLAMA3}, 8192, 65536),
        (4096, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 4096, 16384),
        (4096, {"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 4096, 10240),
        (
            32768,
            {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope"}},
            32768,
            32768,
        ),
        (131072, {"rope_scaling": LONG, ORIGINAL: 4096}, 4096, 131072),
        (131072, {"rope_scaling": LONG | {ORIGINAL: 8192}}, 8192, 131072),
    ],
    ids=str,
)
def test_a_text_is_as_long_as_its_scaling_reaches(length, keys, default, most):
    sizes = {"max_position_embeddings": length, **keys}

    assert rotary_reach(sizes) == Reach(default, most)


def test_a_length_that_is_stretched_already_is_not_stretched_again():
    linear = {"rope_type": "linear", "factor": 8.0}
    sizes = {"max_position_embeddings": 131072, "model_type": "gemma3_text"}

    reach = rotary_reach({**sizes, "rope_scaling": linear})

    assert reach == Reach(131072, 131072)


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "foo", "factor": 4.0}, "'foo' is unknown; known: default"),
        ({"type": "mrope"}, "'mrope' is unknown"),
        ({"type": "linear"}, "'linear' lacks factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks low_freq_factor, high_freq"),
        ({"rope_type": "yarn", "factor": "4"}, "factor of rope scaling is '4'"),
        ({"rope_type": "yarn", "factor": math.inf}, "factor of rope scaling is inf"),
        ({"rope_type": "linear", "factor": -4}, "factor of rope scaling is -4"),
    ],
    ids=str,
)
def test_a_scaling_that_nothing_computes_is_refused_by_its_config(rope, reason):
    with pytest.raises(ValueError, match=reason):
        rotary_reach({"max_position_embeddings": 4096, "rope_scaling": rope})


def saved(folder: Path, kind: str = "llama", **rope: Any) -> str:
    """A tiny model with 128 positions, whose config.json has these keys and no others on rope."""
    save_tiny(kind, folder, max_position_embeddings=128)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters", None)
    changes = {"rope_theta": 1e4, **rope}
    file.write_text(json.dumps(config | changes))
    return str(folder)


FORMS = {
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 128}},
    "yarn-type": {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 128}},
    "yarn-new": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            ORIGINAL: 128,
        }
    },
    "yarn-both": {
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 4.0,
            ORIGINAL: 128,
        }
    },
    "yarn-no-original": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
}


BY_LAYER_FORMS = {
    "olmo3-old": {"rope_theta": 5e5, **FORMS["yarn"]},
    "olmo3-nested": {
        "rope_parameters": {
            "full_attention": FORMS["yarn-new"]["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
}


@pytest.mark.parametrize("form", BY_LAYER_FORMS, ids=BY_LAYER_FORMS)
def test_scaling_by_type_of_layer_has_the_tokens_of_transformers(form, tmp_path):
    path = saved(tmp_path, "olmo3", **BY_LAYER_FORMS[form])
    prompt = random_prompt(300)
    expected = ReferenceModel(path).generate(prompt, 16)

    runner = Runner.load(path)
    (answer,) = serve(make_engine(runner), [prompt], "raw", 16)

    assert runner.info.context_length == 512
    assert_same(answer, expected)


@pytest.mark.parametrize("form", FORMS, ids=FORMS)
def test_long_texts_of_yarn_have_the_tokens_of_transformers(form, tmp_path):
    path = saved(tmp_path, **FORMS[form])
    prompts = [random_prompt(n) for n in (60, 300)]
    expected = [ReferenceModel(path).generate(prompt, 16) for prompt in prompts]

    runner = Runner.load(path)
    answers = serve(make_engine(runner, max_batch_tokens=70), prompts, "raw", 16)

    assert runner.info.context_length == 512
    for answer, right in zip(answers, expected, strict=True):
        assert_same(answer, right)


SHORT_FORMS = {
    "none": {"rope_scaling": None},
    "empty": {"rope_scaling": {}},
    "no-type": {"rope_scaling": {"factor": 2.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 32,
        }
    },
}


@pytest.mark.parametrize("form", SHORT_FORMS, ids=SHORT_FORMS)
def test_every_form_of_rope_scaling_has_the_tokens_of_transformers(form, tmp_path):
    path = saved(tmp_path, **SHORT_FORMS[form])
    prompt = random_prompt(100)
    expected = ReferenceModel(path).generate(prompt, 16)

    runner = Runner.load(path)
    (answer,) = serve(make_engine(runner), [prompt], "raw", 16)

    assert runner.info.context_length == 128
    assert_same(answer, expected)


def test_a_context_beyond_the_switch_of_longrope_has_long_factors(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, ORIGINAL: 128, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [3.0] * 16}
    path = saved(tmp_path, max_position_embeddings=512, rope_parameters=rope)
    prompt = random_prompt(200)
    expected = ReferenceModel(path).generate(prompt, 16)

    runner = Runner.load(path, context=512)
    (answer,) = serve(make_engine(runner), [prompt], "raw", 16)

    assert_same(answer, expected)
    assert runner.fingerprint != Runner.load(path).fingerprint


def test_a_dynamic_context_has_the_frequencies_of_a_text_that_fills_it(tmp_path):
    scaling = {"type": "dynamic", "factor": 4.0}
    path = saved(tmp_path, rope_scaling=scaling)
    prompt = random_prompt(60)

    runner = Runner.load(path, context=256)
    (answer,) = serve(make_engine(runner), [prompt], "raw", 196)

    # transformers, shown the whole text at once, takes the frequencies of its length
    text = prompt + answer
    assert len(text) == 256
    best = ReferenceModel(path).logprobs(text)[59:-1].topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-3
    differs = best.indices[:, 0] != torch.tensor(answer)
    assert not (differs & clear).any()


def test_less_context_is_taken_and_more_than_the_reach_refused(tmp_path):
    path = saved(tmp_path, **FORMS["yarn"])

    assert describe_model(path, context=100).context_length == 100
    assert describe_model(path, context=512).context_length == 512
    with pytest.raises(ConfigError, match=r"model\.context is 513; at most 512"):
        describe_model(path, context=513)
