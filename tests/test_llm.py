"""The whole path in one process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.codecs import codec_names
from disagg.codecs.planning import parse_plan
from disagg.config import EngineConfig
from disagg.errors import ConfigError, PromptTooLongError, RequestError
from disagg.llm import LLM, SamplingParams
from disagg.model.runner import Runner
from disagg.transfer.records import Manifest
from tests.engine.margins import assert_same, serve_watched
from tests.model.reference import ReferenceModel
from tests.model.test_graphs import EagerRecorder
from tests.model.tiny import CONTEXT, random_prompt

KIVI = "kivi:bits=2,group=64,residual=64"
LENGTHS = (1, 64, 130, 300)
PLAN = "0:ott:skip_layers=0;1-:gear:bits=2,backbone=kivi"


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny), KIVI, config=EngineConfig(arena_bytes=16 << 20))
    yield llm
    assert_empty(llm)


def assert_empty(llm: LLM) -> None:
    for engine in (llm._prefill, llm._decode):
        engine.pool.check_integrity()
        assert engine.idle
        assert not engine.pool.referenced_pages
    assert not any(llm._receiver.reservations.gauges().values())


def test_exact_kv_gives_the_tokens_that_transformers_gives(llm, tiny):
    prompts = [random_prompt(n) for n in LENGTHS]
    reference = ReferenceModel(str(tiny))
    expected = [reference.generate(prompt, 20).tokens for prompt in prompts]
    answers = llm.generate(prompts, SamplingParams(max_tokens=20), codec="raw")
    assert [answer.tokens for answer in answers] == expected
    assert [answer.prompt_tokens for answer in answers] == list(LENGTHS)
    assert_empty(llm)


def test_text_goes_in_and_comes_out(llm):
    (answer,) = llm.generate("Call me Ishmael.", SamplingParams(max_tokens=9))
    assert answer.prompt_tokens == len("Call me Ishmael.")
    assert answer.text == llm._tokenizer.decode(answer.tokens)
    assert (len(answer.tokens), answer.finish_reason) == (9, "length")
    params = SamplingParams(max_tokens=9, stop_token_ids=answer.tokens[4:5])
    (stopped,) = llm.generate("Call me Ishmael.", params)
    end = answer.tokens.index(answer.tokens[4]) + 1
    assert (stopped.tokens, stopped.finish_reason) == (answer.tokens[:end], "stop")
    assert stopped.text == llm._tokenizer.decode(answer.tokens[: end - 1])


def test_the_answers_to_a_prompt_are_of_seeds_that_follow_each_other(llm):
    prompts = [random_prompt(40), random_prompt(50)]
    params = [
        SamplingParams(max_tokens=9, temperature=1.0, seed=seed) for seed in (7, 8)
    ]
    apart = [
        llm.generate([prompt], each)[0].tokens for prompt in prompts for each in params
    ]
    assert [answer.tokens for answer in llm.generate(prompts, params[0], n=2)] == apart
    assert len(set(apart)) == 4
    with pytest.raises(RequestError, match="n is 0; an integer from 1"):
        llm.generate(prompts, n=0)
    (_, last) = llm.generate(prompts[:1], replace(params[0], seed=2**63 - 1), n=2)
    assert (
        last.tokens == llm.generate(prompts[:1], replace(params[0], seed=0))[0].tokens
    )


def test_calls_of_several_threads_are_answered_as_one_after_another(llm):
    prompts = [random_prompt(40 + i, seed=i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = [*pool.map(lambda prompt: llm.generate([prompt])[0].tokens, prompts)]
    assert together == [x.tokens for x in llm.generate(prompts)]


def test_an_answer_says_what_its_handoff_took(llm):
    n, plan = 300, llm._decode.plan(KIVI)
    (answer,) = llm.generate([random_prompt(n)], SamplingParams(max_tokens=2))
    kv = answer.kv
    numbers = n * 3 * 2 * 2 * 64  # layers, K and V, heads, head dim
    assert (kv.codec, kv.tokens) == (KIVI, n)
    assert (kv.fp16_bytes, kv.fp8_bytes) == (2 * numbers, numbers)
    assert kv.resident_bytes == plan.nbytes(n)
    assert (
        kv.payload_bytes + kv.cached_bytes
        == Manifest(plan, n).total_bytes
        <= kv.resident_bytes
    )
    assert kv.payload_bytes < kv.wire_bytes < 1.05 * kv.payload_bytes
    assert min(kv.encode_ms, kv.wire_ms, kv.exposed_ms, kv.admit_ms) > 0
    assert kv.exposed_ms <= kv.wire_ms


def test_a_single_token_is_answered_without_a_commit(llm):
    params = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2))
    one, two = (llm.generate([random_prompt(40)], each)[0] for each in params)
    assert (one.tokens, one.finish_reason) == (two.tokens[:1], "length")
    assert_empty(llm)


def test_answers_do_not_depend_on_who_else_asks_or_on_how_little_room_there_is(tiny):
    prompts = [random_prompt(n) for n in (100, 120, 90, 110, 130)]
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=5)
    roomy = LLM(str(tiny), "raw", config=EngineConfig(arena_bytes=16 << 20))
    expected = [roomy.generate([prompt], params)[0].tokens for prompt in prompts]
    config = EngineConfig(arena_bytes=2 << 20, watermark=0.0, max_batch_tokens=64)
    tight = LLM(str(tiny), "raw", config=config)
    assert [answer.tokens for answer in tight.generate(prompts, params)] == expected
    assert_empty(tight)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (None, None),
        ([5], None),
        ([None], None),
        ([["a"]], None),
        ("x", {"seed": 5}),
        ("x", []),
    ],
)
def test_what_is_no_prompt_or_no_params_is_refused_with_what_is_wanted(
    prompts, params, llm
):
    with pytest.raises(
        RequestError, match=r"(prompts|params) are .*(texts|SamplingParams)"
    ):
        llm.generate(prompts, params)
    with pytest.raises(ConfigError, match="codec is 5; the name of one"):
        llm.generate("x", codec=5)
    with pytest.raises(ConfigError, match="codec is 5; the name of one"):
        LLM(codec=5)


def test_a_prompt_that_cannot_be_answered_leaves_nothing_behind(llm):
    good, long = random_prompt(30), random_prompt(CONTEXT)
    with pytest.raises(PromptTooLongError):
        llm.generate([good, long])
    with pytest.raises(RequestError):
        llm.generate([good, []])
    with pytest.raises(ConfigError):
        llm.generate([good], codec="kivi:bits=3")
    assert_empty(llm)
    assert len(llm.generate([good], SamplingParams(max_tokens=3))[0].tokens) == 3


def test_a_codec_whose_kernels_a_gpu_refuses_is_an_error_before_it_serves(
    tiny, monkeypatch
):
    runner, wrong = Runner.load(str(tiny)), 0.0
    runner.record_steps(EagerRecorder())  # as on a GPU
    monkeypatch.setattr("disagg.llm.Runner.load", lambda *_: runner)
    monkeypatch.setattr("disagg.paged.doctor._error", lambda result, expected: wrong)
    small = EngineConfig(arena_bytes=16 << 20)
    llm, wrong = LLM(str(tiny), KIVI, config=small), 0.5
    with pytest.raises(ConfigError, match=r"encode of gear.* is not sound"):
        LLM(str(tiny), "gear", config=small)
    with pytest.raises(ConfigError, match=r"encode of gear.* is not sound"):
        llm.generate([random_prompt(40)], codec="gear")
    assert_empty(llm)
    assert llm.generate([random_prompt(40)], SamplingParams(max_tokens=2))[0].tokens


@pytest.mark.parametrize("codec", [*codec_names(), PLAN])
def test_a_hand_off_of_any_codec_changes_no_token(llm, runner, codec):
    prompt = random_prompt(250)
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12), codec=codec)
    assert_same(answer.tokens, serve_watched(runner, prompt, codec, 12))
    said, meant = (parse_plan(spec, runner.shape) for spec in (answer.kv.codec, codec))
    assert said.fingerprint == meant.fingerprint
    kv = answer.kv
    assert kv.wire_bytes > kv.payload_bytes + kv.cached_bytes > 0.9 * kv.resident_bytes
    assert_empty(llm)
