"""How long texts may be, in old and new forms of rope scaling; and that they are computed right."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.engine.messages import Move, Prefill
from disagg.errors import ConfigError, TransferError
from disagg.llm import LLM, SamplingParams
from disagg.model.describe import describe_model
from disagg.model.rotary import Reach, rotary_reach
from disagg.model.runner import Runner
from tests.engine.forced import forced_logits, recorded_logits
from tests.engine.margins import assert_same
from tests.engine.serving import Nowhere, make_engine, request, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny
from tests.synthetic import relative_error

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
    ],
    ids=str,
)
def test_a_text_is_as_long_as_its_scaling_reaches(length, keys, default, most):
    sizes = {"max_position_embeddings": length, **keys}

    assert rotary_reach(sizes) == Reach(default, most)


@pytest.mark.parametrize(
    ("keys", "switch"),
    [
        ({"rope_scaling": LONG, ORIGINAL: 4096}, 4096),
        ({"rope_scaling": LONG | {ORIGINAL: 8192}}, 8192),
    ],
)
def test_longrope_reaches_as_far_as_its_long_factors(keys, switch):
    sizes = {"max_position_embeddings": 131072, **keys}

    assert rotary_reach(sizes) == Reach(131072, 131072, switch)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_texts_stay_short_where_only_some_layers_have_longrope(kind):
    plain = {"rope_type": "default"}
    by_type = {"full_attention": plain, "sliding_attention": plain}
    by_type |= {kind: LONG | {ORIGINAL: 4096}}
    sizes = {"max_position_embeddings": 131072, "rope_parameters": by_type}

    assert rotary_reach(sizes) == Reach(4096, 4096)


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
    sizes = {"head_dim": 16} if kind == "phi3" else {}  # it has no head dim of its own
    save_tiny(kind, folder, max_position_embeddings=128, **sizes)
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


LONG_FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    ORIGINAL: 128,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
}


def saved_longrope(folder: Path) -> str:
    """A small Phi 3 that switches behind 128 tokens, of 512."""
    changes = {"max_position_embeddings": 512, ORIGINAL: 128}
    return saved(folder, "phi3", rope_parameters=LONG_FACTORS, **changes)


@pytest.mark.parametrize("budget", [70, 512])
def test_longrope_switches_where_a_text_grows_long(budget, tmp_path):
    """Short, about to grow long, and long from the start; in one crowd."""
    path = saved_longrope(tmp_path)
    prompts = [random_prompt(n) for n in (60, 118, 128, 129, 200)]
    expected = [ReferenceModel(path).generate(prompt, 24) for prompt in prompts]

    runner = Runner.load(path)
    engine = make_engine(runner, max_batch_tokens=budget)
    answers = serve(engine, prompts, "raw", 24)

    assert runner.info.context_length == 512
    for answer, right in zip(answers, expected, strict=True):
        assert_same(answer, right)


def test_a_text_may_grow_long_after_a_hand_off(tmp_path):
    path = saved_longrope(tmp_path)
    prompts = [random_prompt(n) for n in (118, 128)]
    expected = [ReferenceModel(path).generate(prompt, 24) for prompt in prompts]

    llm = LLM(path, codec="raw")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    completions = llm.generate(prompts, params)

    for completion, right in zip(completions, expected, strict=True):
        assert_same(completion.tokens, right)


def test_no_sequence_grows_long_while_it_moves(tmp_path):
    engine = make_engine(Runner.load(saved_longrope(tmp_path)))
    engine.submit(Prefill(request("a", random_prompt(120), "raw", 40)))
    engine.step()
    engine.submit(Move("a", 130, Nowhere()))

    (failed,) = engine.step().failed

    assert type(failed.error) is TransferError
    assert "computes all its 130 tokens again" in str(failed.error)


def test_no_prefix_of_a_short_text_serves_a_long_one(tmp_path):
    path = saved_longrope(tmp_path)
    short, long = random_prompt(100), random_prompt(100) + random_prompt(60, seed=1)
    expected = ReferenceModel(path).generate(long, 16)
    llm = LLM(path, codec="raw")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    llm.generate([short], params)

    (first,) = llm.generate([long], params)
    (second,) = llm.generate([long], params)

    assert_same(first.tokens, expected)
    assert_same(second.tokens, expected)
    assert not first.kv.cached_bytes
    assert second.kv.cached_bytes > 0


def test_recorded_steps_hold_texts_of_both_lengths(tmp_path):
    runner = Runner.load(saved_longrope(tmp_path))
    prompts = {str(n): random_prompt(n) for n in (60, 118, 200)}
    codecs = dict.fromkeys(prompts, "raw")
    expected = forced_logits(runner, prompts, codecs, 24)

    replayed = recorded_logits(runner, prompts, codecs, 24)

    for rid, logits in expected.items():
        assert relative_error(replayed[rid], logits) < 1e-3


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
