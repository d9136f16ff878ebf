"""Models that keep latents (MLA): chunks, prefixes, little room, recorded steps, hand-offs."""

import pytest
import torch

from disagg.codecs.planning import parse_plan
from disagg.engine.messages import Prefill
from disagg.engine.sequence import handoff_stats
from disagg.eval.quality import Case, EvalOptions, Judge
from disagg.eval.texts import PYTHON
from disagg.llm import LLM, SamplingParams
from disagg.model.capacity import exact_bytes
from disagg.model.runner import Runner
from tests.engine.forced import (
    SampledToken,
    allowed,
    collect,
    forced_logits,
    make_forced,
    recorded_logits,
)
from tests.engine.serving import make_engine, request, serve
from tests.engine.test_error_probe import computed, worst
from tests.model.tiny import random_prompt, save_tiny
from tests.synthetic import relative_error

# latents of 32 channels and rotated keys of 16, in 16 bits
TOKEN_BYTES = 2 * (32 + 16)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
KINDS = ["deepseek_v3", "kimi_linear"]  # the second keeps states too


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> Runner:
    folder = tmp_path_factory.mktemp("latents")
    return Runner.load(str(save_tiny("deepseek_v3", folder, num_hidden_layers=3)))


def prompts_of(*lengths: int) -> dict[str, list[int]]:
    return {str(n): random_prompt(n) for n in lengths}


def logits_of(rid: str, answers: list[SampledToken]) -> torch.Tensor:
    own = [x for x in answers if x.token.rid == rid]
    return torch.stack([x.logits for x in own])


def test_pages_hold_one_latent_for_each_token(latents):
    shape = latents.shape
    plan = parse_plan("raw:dtype=fp16", shape)
    (group,) = plan.groups

    assert (group.heads, group.head_dim, group.latent) == (1, 48, 32)
    assert plan.nbytes(160) == 160 * TOKEN_BYTES * shape.num_layers
    assert handoff_stats(plan, 160, 0).fp16_bytes == plan.nbytes(160)
    exact = exact_bytes(shape, [1] * shape.num_layers)
    assert exact == 2 * TOKEN_BYTES * shape.num_layers  # fp32


def test_a_workspace_keeps_latents_and_no_values(latents):
    workspace = latents.workspace(40)
    k = torch.randn(1, 20, 48)
    workspace.reserve(torch.float32, torch.device("cpu"))

    exact_k, exact_v = workspace.extend(0, k, k[..., :32], 0)

    assert torch.equal(exact_k, k)
    assert torch.equal(exact_v, k[..., :32])
    assert exact_v.data_ptr() == exact_k.data_ptr()


@pytest.mark.parametrize("codec", ["raw", "int8", "kivi:bits=4,residual=64"])
def test_chunks_and_crowds_change_no_logits(codec, latents):
    prompts = prompts_of(5, 90, 150)
    codecs = dict.fromkeys(prompts, codec)
    expected = forced_logits(latents, prompts, codecs, 6)
    engine, forced = make_forced(latents, max_batch_tokens=32)
    for rid, prompt in prompts.items():
        engine.submit(Prefill(request(rid, prompt, codec, 6)))

    answers = collect(engine, forced)

    for rid, logits in expected.items():
        own = logits_of(rid, answers)
        assert relative_error(own, logits) < allowed(codec)


def test_a_known_prefix_is_restored_from_units_of_latents(latents):
    engine = make_engine(latents)
    prompt = random_prompt(70)
    (first,) = serve(engine, [prompt], "raw", 8)

    (second,) = serve(engine, [prompt], "raw", 8)

    assert second == first
    assert engine.counts["cached_tokens"] == 64


def test_a_preempted_sequence_is_computed_again(latents):
    prompts = prompts_of(330, 340, 350, 360, 370)
    codecs = dict.fromkeys(prompts, "raw")
    expected = forced_logits(latents, prompts, codecs, 20)
    tight, forced = make_forced(latents, arena_bytes=1 << 20, watermark=0.0)
    for rid, prompt in prompts.items():
        tight.submit(Prefill(request(rid, prompt, "raw", 20)))

    answers = collect(tight, forced)

    assert tight.counts["preempted"] > 0
    for rid, logits in expected.items():
        own = logits_of(rid, answers)
        assert relative_error(own, logits) < 1e-3


def test_recorded_steps_give_the_logits_of_others(tmp_path):
    runner = Runner.load(str(save_tiny("deepseek_v3", tmp_path)))
    prompts = prompts_of(5, 23, 40)
    codecs = {"5": "raw", "23": "int8", "40": "kivi:bits=4,residual=64"}
    expected = forced_logits(runner, prompts, codecs, 8)

    replayed = recorded_logits(runner, prompts, codecs, 8)

    for rid, logits in expected.items():
        assert relative_error(replayed[rid], logits) < allowed(codecs[rid])


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_after_a_hand_off_is_that_of_one_engine(kind, hybrid):
    runner = hybrid(kind)
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(runner), [prompt], "raw", 12)

    llm = LLM(str(runner.info.path), codec="raw")
    (completion,) = llm.generate([prompt], GREEDY)

    assert list(completion.tokens) == expected
    shape = runner.shape
    latent_bytes = exact_bytes(shape, [70] * shape.num_layers)
    payload = completion.kv.payload_bytes - shape.state_bytes
    assert payload < 1.5 * latent_bytes


def test_errors_of_codecs_are_measured_on_latents(latents):
    """What `auto` chooses by: the outputs of queries that ask latents."""
    codecs = ["raw:dtype=fp16", "int8", "kivi:bits=2,group=16,residual=64"]

    (prefilled,) = computed(latents, codecs, random_prompt(300))

    raw, int8, kivi = (worst(prefilled.errors[codec][0]) for codec in codecs)
    assert raw < 1e-3 < int8 < kivi < 1


def test_the_quality_of_codecs_is_measured_on_those_that_hold_latents(latents):
    model = str(latents.info.path)
    judge = Judge(EvalOptions(model, rows=1, prompt=128, score=16))
    specs = judge.codecs

    row = judge.measure(Case(PYTHON, 0, "int8"))

    assert {"int8", "fp8", "kivi"} <= set(specs)
    assert not {"banded:bits=3", "gear", "h2o"} & set(specs)
    assert 0 < max(row["errors"]) < 0.1
    assert judge.sizes("raw:dtype=fp16")["handoff_pct"] == 100
