"""What compression costs is measured on samples, by the pages that a codec gives."""

from typing import Any
from unittest.mock import Mock

import pytest

from disagg.codecs.planning import parse_plan
from disagg.config import EngineConfig
from disagg.engine import error_probe
from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Prefill, Prefilled
from disagg.eval.paged import EXACT, PagedKV, prefill
from disagg.model.runner import Runner
from tests.engine.serving import Nowhere, request
from tests.model.tiny import random_prompt, save_tiny

CODECS = [
    "raw:dtype=fp16",
    "fp8",
    *(f"kivi:bits={x},group=64,residual=64" for x in (4, 2)),
]
TWO = "0:fp8;1-:kivi:bits=2,group=64,residual=64"


def computed(
    runner: Any, codecs: list[str], prompt: Any, count: int = 1
) -> list[Prefilled]:
    """What an engine says of some prompts, one after another, the same but for their last token."""
    engine = Engine(runner, EngineConfig(arena_bytes=32 << 20), probed=codecs)
    prefilled: list[Prefilled] = []
    for number in range(count):
        tokens = [*prompt[:-1], number]
        engine.submit(Prefill(request(str(number), tokens, "raw", 2), Nowhere()))
        while len(prefilled) == number:
            prefilled += engine.step().prefilled
        engine.submit(Abort(str(number)))
    return prefilled


def test_every_eighth_prompt_says_the_error_of_each_codec(runner):
    found = computed(runner, CODECS, random_prompt(300), 9)
    assert [bool(x.errors) for x in found] == [True] + 7 * [False] + [True]
    for one in (found[0], found[8]):
        raw, fp8, four, two = (one.errors[codec][0] for codec in CODECS)
        assert raw < 1e-3 < fp8 < two
        assert 1e-3 < four < two


def test_each_layer_group_of_a_plan_has_an_error_of_its_own(runner):
    (one,) = computed(runner, [TWO], random_prompt(300))
    ((fp8, two),) = one.errors.values()
    assert 1e-3 < fp8 < two


def test_it_is_the_error_of_the_heads_that_were_looked_at(runner, monkeypatch):
    """As evaluation has it, of all heads of the layers that the first sample takes."""
    looked = Mock(wraps=error_probe._error)
    monkeypatch.setattr(error_probe, "_error", looked)
    codec, prompt = CODECS[3], [*random_prompt(300)[:-1], 0]
    (one,) = computed(runner, [codec], prompt)
    exact = prefill(runner, prompt)
    outputs, wanted = (
        PagedKV(runner, spec, exact).attend(exact) for spec in (codec, EXACT)
    )
    share = outputs[0].shape[1] // parse_plan(codec, runner.shape).groups[0].heads
    off = whole = 0.0
    assert looked.call_args_list
    for _, layer, *_, head in (call.args for call in looked.call_args_list):
        some = slice(head * share, (head + 1) * share)
        off += float((outputs[layer][:, some] - wanted[layer][:, some]).square().sum())
        whole += float(wanted[layer][:, some].square().sum())
    assert one.errors[codec][0] == pytest.approx((off / whole) ** 0.5, rel=0.01)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_models_with_caps_and_sinks_are_measured_as_they_attend(kind, tmp_path):
    runner = Runner.load(str(save_tiny(kind, tmp_path)))
    (one,) = computed(runner, ["raw:dtype=fp32", "kivi:group=32"], random_prompt(300))
    raw, two = (max(errors) for errors in one.errors.values())
    assert raw < 1e-5 < 1e-3 < two


def test_short_prompts_and_those_that_stay_here_are_no_samples(runner, monkeypatch):
    assert not computed(runner, CODECS, random_prompt(255))[0].errors
    monkeypatch.setattr(error_probe, "MOST_TOKENS", 256)
    assert not computed(runner, CODECS, random_prompt(257))[0].errors


def test_what_breaks_a_measurement_breaks_no_request(runner, monkeypatch, caplog):
    monkeypatch.setattr(
        error_probe, "_error", Mock(side_effect=MemoryError("of the probe"))
    )
    (one,) = computed(runner, CODECS[:1], random_prompt(300))
    assert not one.errors
    assert "cannot be measured" in caplog.text
