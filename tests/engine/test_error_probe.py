"""The error of compression is measured on samples, by the pages of a codec."""

from collections.abc import Mapping
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import EngineConfig
from disagg.engine import error_probe
from disagg.engine.engine import Engine
from disagg.engine.error_probe import head_of_sample
from disagg.engine.messages import Abort, Prefill, Prefilled
from disagg.eval.paged import EXACT, PagedKV, prefill
from disagg.model.runner import Runner
from disagg.router.codec_policy import CodecPolicy
from tests.engine.serving import Nowhere, request
from tests.model.tiny import add_outliers, random_prompt, save_tiny

CODECS = [
    "raw:dtype=fp16",
    "fp8",
    "kivi:bits=4,group=64,residual=64",
    "kivi:bits=2,group=64,residual=64",
]
TWO_GROUPS = "0:fp8;1-:kivi:bits=2,group=64,residual=64"


def computed(
    runner: Any, codecs: list[str], prompt: Any, count: int = 1
) -> list[Prefilled]:
    """Prefill `count` prompts one after another, which differ in their last token."""
    engine = Engine(runner, EngineConfig(arena_bytes=32 << 20), probed=codecs)
    prefilled: list[Prefilled] = []
    for number in range(count):
        tokens = [*prompt[:-1], number]
        engine.submit(Prefill(request(str(number), tokens, "raw", 2), Nowhere()))
        while len(prefilled) == number:
            prefilled += engine.step().prefilled
        engine.submit(Abort(str(number)))
    return prefilled


def worst(errors: Mapping[str, float]) -> float:
    """Of all sampled layers of a layer group."""
    return max(errors.values(), default=0.0)


def test_every_eighth_prompt_says_the_error_of_each_codec(runner):
    prefilled = computed(runner, CODECS, random_prompt(300), 9)

    assert [bool(x.errors) for x in prefilled] == [True] + 7 * [False] + [True]
    for one in (prefilled[0], prefilled[8]):
        raw, fp8, four, two = (worst(one.errors[codec][0]) for codec in CODECS)
        assert raw < 1e-3 < fp8 < two
        assert 1e-3 < four < two


def test_each_layer_group_of_a_plan_has_an_error_of_its_own(runner):
    (one,) = computed(runner, [TWO_GROUPS], random_prompt(300))

    ((fp8, two),) = one.errors.values()
    assert ([*fp8], [*two]) == (["0"], ["1", "2"])
    assert 1e-3 < worst(fp8) < worst(two)


@pytest.mark.parametrize(("num_layers", "heads"), [(1, 1), (3, 2), (28, 4), (32, 8)])
def test_samples_go_from_the_outermost_layers_inwards_and_through_all_heads(
    num_layers, heads
):
    shape = KVShape.uniform(num_layers, heads, 64, "float16")
    (group,) = parse_plan("fp8", shape).groups
    per_round = -(-num_layers // 2)

    first_round = [
        [x for x in range(num_layers) if head_of_sample(group, x, sample) is not None]
        for sample in range(per_round)
    ]
    measured = {
        (layer, head_of_sample(group, layer, sample))
        for sample in range(per_round * heads)
        for layer in range(num_layers)
    } - {(layer, None) for layer in range(num_layers)}

    assert first_round[0] == sorted({0, num_layers - 1})
    assert sorted(chain(*first_round)) == list(range(num_layers))
    assert len(measured) == num_layers * heads


def test_it_is_the_error_that_evaluation_measures_for_the_same_heads(
    runner, monkeypatch
):
    spy = Mock(wraps=error_probe._error)
    monkeypatch.setattr(error_probe, "_error", spy)
    codec = CODECS[3]
    prompt = [*random_prompt(300)[:-1], 0]
    kv = prefill(runner, prompt)
    outputs = PagedKV(runner, codec, kv).attend(kv)
    exact_outputs = PagedKV(runner, EXACT, kv).attend(kv)
    (group,) = parse_plan(codec, runner.shape).groups
    query_heads = outputs[0].shape[1] // group.heads  # of one KV head

    (one,) = computed(runner, [codec], prompt)

    assert spy.call_args_list
    for call in spy.call_args_list:
        _, layer, *_, head = call.args
        heads = slice(head * query_heads, (head + 1) * query_heads)
        exact = exact_outputs[layer][:, heads]
        difference = outputs[layer][:, heads] - exact
        expected = float(difference.norm() / exact.norm())
        assert one.errors[codec][0][str(layer)] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_models_with_caps_and_sinks_are_measured_as_they_attend(kind, tmp_path):
    runner = Runner.load(str(save_tiny(kind, tmp_path)))
    (one,) = computed(runner, ["raw:dtype=fp32", "kivi:group=32"], random_prompt(300))
    raw, two = (max(map(worst, errors)) for errors in one.errors.values())
    assert raw < 1e-5 < 1e-3 < two


def test_short_and_long_prompts_are_no_samples(runner, monkeypatch):
    assert not computed(runner, CODECS, random_prompt(255))[0].errors
    monkeypatch.setattr(error_probe, "MOST_TOKENS", 256)
    assert not computed(runner, CODECS, random_prompt(257))[0].errors


def test_an_error_in_a_measurement_fails_no_request(runner, monkeypatch, caplog):
    broken = Mock(side_effect=MemoryError("of the probe"))
    monkeypatch.setattr(error_probe, "_error", broken)

    (one,) = computed(runner, CODECS[:1], random_prompt(300))

    assert not one.errors
    assert "cannot be measured" in caplog.text


def test_auto_takes_no_codec_that_outliers_ruin_in_a_few_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(error_probe, "EVERY", 1)
    num_layers = 24
    folder = save_tiny("llama", tmp_path, num_hidden_layers=num_layers)
    codecs = ["int8", "fp8"]
    chosen = []
    for factor in (1, 256):
        add_outliers(folder, factor, (0, num_layers - 1))
        prompts = computed(
            Runner.load(str(folder)), codecs, random_prompt(300), num_layers // 2
        )
        policy = CodecPolicy()
        for one in prompts:
            policy.learn({"attention_error": one.errors}, ("p", "d"))
        sizes = dict.fromkeys(codecs, 1.0)
        codec, _ = policy.choose(sizes, 0.15, 9, ("p", "d"), 9, 0)
        chosen.append(codec)

    assert chosen == ["int8", "fp8"]
    assert policy.errors["int8"].mean < 0.15, "the mean alone would allow it"


def test_groups_of_states_have_no_error(hybrid):
    """They are sent as they are; only the layer that attends is compressed."""
    codecs = ["raw:dtype=fp16", "fp8"]

    (one,) = computed(hybrid("qwen3_5_text"), codecs, random_prompt(300))

    (raw,), (fp8,) = (one.errors[codec] for codec in codecs)
    assert raw.keys() == fp8.keys() == {"0"}
    assert raw["0"] < 1e-3 < fp8["0"]
