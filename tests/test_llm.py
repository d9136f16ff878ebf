"""The whole path in one process."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from disagg.codecs import codec_names
from disagg.codecs.planning import parse_plan
from disagg.config import EngineConfig
from disagg.errors import (
    ConfigError,
    PromptTooLongError,
    RequestError,
    UnknownNameError,
)
from disagg.grammar import choice
from disagg.llm import LLM, SamplingParams
from disagg.model.runner import Runner
from disagg.parsers.parts import CallArguments, CallBegin, CallEnd, Content
from disagg.transfer.records import Manifest
from tests.engine.margins import assert_same, serve_watched
from tests.model.recorders import EagerRecorder
from tests.model.reference import ReferenceModel
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
    """No engine has work or records left, and no hand-off is open."""
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


def test_the_text_ends_before_a_stop_token(llm):
    (answer,) = llm.generate("Call me Ishmael.", SamplingParams(max_tokens=9))
    stop = answer.tokens[4]
    end = answer.tokens.index(stop) + 1

    params = SamplingParams(max_tokens=9, stop_token_ids=[stop])
    (stopped,) = llm.generate("Call me Ishmael.", params)

    assert (stopped.tokens, stopped.finish_reason) == (answer.tokens[:end], "stop")
    assert stopped.text == llm._tokenizer.decode(answer.tokens[: end - 1])


def test_the_authors_sampling_applies_where_none_is_given(tiny, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.8, "top_k": 9, "max_new_tokens": 12}')
    llm = LLM(
        str(tiny),
        KIVI,
        config=EngineConfig(arena_bytes=16 << 20),
        generation_config=str(file),
    )
    explicit = SamplingParams(max_tokens=12, temperature=0.8, top_k=9)
    assert llm.default_params == explicit
    explicit = llm.default_params = replace(explicit, seed=5)

    (unsaid,) = llm.generate([random_prompt(40)])
    (said,) = llm.generate([random_prompt(40)], explicit)
    (greedy,) = llm.generate([random_prompt(40)], SamplingParams(max_tokens=12))

    assert unsaid.tokens == said.tokens != greedy.tokens


def test_minus_one_is_as_many_tokens_as_fit_into_the_context(tiny):
    llm = LLM(str(tiny), KIVI, config=EngineConfig(arena_bytes=16 << 20), context=70)
    (answer,) = llm.generate([random_prompt(60)], SamplingParams(max_tokens=-1))

    assert (len(answer.tokens), answer.finish_reason) == (10, "length")
    with pytest.raises(PromptTooLongError, match="context of 70"):
        llm.generate([random_prompt(70)])


def test_n_answers_have_consecutive_seeds(llm):
    prompts = [random_prompt(40), random_prompt(50)]
    params = [
        SamplingParams(max_tokens=9, temperature=1.0, seed=seed) for seed in (7, 8)
    ]
    one_by_one = [
        llm.generate([prompt], each)[0].tokens for prompt in prompts for each in params
    ]

    answers = llm.generate(prompts, params[0], n=2)

    assert [answer.tokens for answer in answers] == one_by_one
    assert len(set(one_by_one)) == 4


def test_behind_the_largest_seed_comes_0(llm):
    prompts = [random_prompt(40)]
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=2**63 - 1)
    (expected,) = llm.generate(prompts, replace(params, seed=0))

    (_, last) = llm.generate(prompts, params, n=2)

    assert last.tokens == expected.tokens


def test_without_a_seed_equal_prompts_get_answers_of_their_own(llm):
    params = SamplingParams(max_tokens=12, temperature=1.0)

    answers = llm.generate(2 * [random_prompt(40)], params, n=2)
    answers += llm.generate([random_prompt(40)], params)

    assert len({answer.tokens for answer in answers}) == 5


def test_an_answer_ends_before_a_stop_string(llm):
    prompts = ["Call me Ishmael.", "Some years ago"]
    params = SamplingParams(max_tokens=30)
    whole = [answer.text for answer in llm.generate(prompts, params)]
    stop = whole[0][7:9]

    answers = llm.generate(prompts, params, stop=[stop])

    assert answers[0].text == whole[0][: whole[0].index(stop)]
    assert answers[0].finish_reason == "stop"
    assert len(answers[0].tokens) < 30
    assert answers[1].text == whole[1].partition(stop)[0]
    assert_empty(llm)


@pytest.mark.parametrize("prompt", ["Call me Ishmael.", "Some years ago", "x"])
def test_the_first_character_may_end_an_answer(prompt, llm):
    (whole,) = llm.generate(prompt, SamplingParams(max_tokens=30))

    params = SamplingParams(max_tokens=30)
    (answer,) = llm.generate(prompt, params, stop=[whole.text[0]])

    assert (answer.text, answer.finish_reason) == ("", "stop")
    assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert_empty(llm)


def test_stop_is_a_list_of_texts(llm):
    with pytest.raises(RequestError, match="stop is 'a'; expected a list of texts"):
        llm.generate("Call me Ishmael.", stop="a")


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def test_conversations_are_answered_as_their_template_writes_them(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    llm = LLM(str(folder), KIVI, config=EngineConfig(arena_bytes=16 << 20))
    messages = [{"role": "user", "content": "Hello"}]
    tokens = llm._tokenizer.encode("<user>Hello<assistant>", special=False)
    (expected,) = llm.generate([tokens])

    (one,) = llm.chat(messages)
    several = llm.chat([messages, messages])

    assert [x.tokens for x in (one, *several)] == 3 * [expected.tokens]


CALLS = (
    "{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}" + TEMPLATE
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def caller(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Its chat template shows tools."""
    folder = tmp_path_factory.mktemp("caller") / "model"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(CALLS)
    return LLM(str(folder), KIVI, config=EngineConfig(arena_bytes=16 << 20))


def test_an_answer_of_a_chat_has_its_calls(caller):
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    params = SamplingParams(max_tokens=100, grammar=choice([call]))

    (answer,) = caller.chat(HELLO, params, tools=[WEATHER])

    assert answer.text == call
    assert answer.parts == (
        CallBegin(0, "weather"),
        CallArguments(0, "{}"),
        CallEnd(0),
    )
    with pytest.raises(RequestError, match="tools are"):
        caller.chat(HELLO, tools=["weather"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"name": "f", "parameters": "city"}, "the parameters of 'f' are 'city'"),
        ({"name": "f", "parameters": [1]}, "the parameters of 'f' are"),
        ({"name": 3}, "the name of a function is 3"),
    ],
)
def test_a_wrong_function_is_refused_before_its_chat_begins(caller, function, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        caller.chat(HELLO, tools=[{"type": "function", "function": function}])


def test_parts_have_the_whole_text_of_an_answer(caller):
    params = SamplingParams(max_tokens=9, min_tokens=4, grammar=choice(["ab-ab"]))

    (answer,) = caller.chat(HELLO, params, stop=["ab"])

    assert answer.text == "ab-"
    assert answer.parts == (Content("ab-"),)


def test_a_template_that_shows_no_tools_takes_none(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    llm = LLM(str(folder), KIVI, config=EngineConfig(arena_bytes=16 << 20))

    with pytest.raises(RequestError, match="does not show tools"):
        llm.chat([{"role": "user", "content": "Hello"}], tools=[WEATHER])


def test_a_model_without_a_template_has_no_chat(llm):
    with pytest.raises(RequestError, match="no chat template; use generate"):
        llm.chat([{"role": "user", "content": "Hello"}])


def test_n_of_0_is_refused(llm):
    with pytest.raises(RequestError, match="n is 0; expected an integer from 1"):
        llm.generate([random_prompt(40)], n=0)


def test_calls_of_several_threads_are_answered_one_after_another(llm):
    prompts = [random_prompt(40 + i, seed=i) for i in range(6)]

    with ThreadPoolExecutor(6) as pool:
        answers = [*pool.map(lambda prompt: llm.generate([prompt])[0].tokens, prompts)]

    assert answers == [x.tokens for x in llm.generate(prompts)]


def test_an_answer_reports_bytes_and_times_of_its_handoff(llm):
    n = 300
    plan = llm._decode.plan(KIVI)
    numbers = n * 3 * 2 * 2 * 64  # layers, K and V, heads, head dim

    (answer,) = llm.generate([random_prompt(n)], SamplingParams(max_tokens=2))

    kv = answer.kv
    assert (kv.codec, kv.tokens) == (KIVI, n)
    assert (kv.fp16_bytes, kv.fp8_bytes) == (2 * numbers, numbers)
    assert kv.resident_bytes == plan.nbytes(n)
    total_bytes = Manifest(plan, n).total_bytes
    assert kv.payload_bytes + kv.cached_bytes == total_bytes <= kv.resident_bytes
    assert kv.payload_bytes < kv.wire_bytes < 1.05 * kv.payload_bytes
    assert min(kv.encode_ms, kv.wire_ms, kv.exposed_ms, kv.admit_ms) > 0
    assert kv.exposed_ms <= kv.wire_ms


def test_a_single_token_is_answered_without_a_commit(llm):
    prompts = [random_prompt(40)]

    (one,) = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    (two,) = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))

    assert (one.tokens, one.finish_reason) == (two.tokens[:1], "length")
    assert_empty(llm)


def test_answers_do_not_depend_on_the_batch_or_on_room(tiny):
    prompts = [random_prompt(n) for n in (100, 120, 90, 110, 130)]
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=5)
    roomy = LLM(str(tiny), "raw", config=EngineConfig(arena_bytes=16 << 20))
    expected = [roomy.generate([prompt], params)[0].tokens for prompt in prompts]
    config = EngineConfig(arena_bytes=2 << 20, watermark=0.0, max_batch_tokens=64)
    tight = LLM(str(tiny), "raw", config=config)

    answers = tight.generate(prompts, params)

    assert [answer.tokens for answer in answers] == expected
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
def test_other_types_than_prompts_and_params_are_refused(prompts, params, llm):
    with pytest.raises(
        RequestError, match=r"(prompts|params) are .*(texts|SamplingParams)"
    ):
        llm.generate(prompts, params)


def test_a_codec_that_is_no_name_is_refused(llm):
    with pytest.raises(ConfigError, match="codec is 5; expected the name of one"):
        llm.generate("x", codec=5)
    with pytest.raises(ConfigError, match="codec is 5; expected the name of one"):
        LLM(codec=5)


def test_an_unknown_form_of_states_is_refused(tiny):
    with pytest.raises(UnknownNameError, match="unknown state 'int4'; known: auto"):
        LLM(str(tiny), state="int4")


def test_a_prompt_that_cannot_be_answered_leaves_nothing_behind(llm):
    good = random_prompt(30)

    with pytest.raises(PromptTooLongError):
        llm.generate([good, random_prompt(CONTEXT)])
    with pytest.raises(RequestError):
        llm.generate([good, []])
    with pytest.raises(ConfigError):
        llm.generate([good], codec="kivi:bits=3")

    assert_empty(llm)
    (answer,) = llm.generate([good], SamplingParams(max_tokens=3))
    assert len(answer.tokens) == 3


def test_malloc_is_tuned_before_the_model_is_loaded(monkeypatch):
    calls = []
    monkeypatch.setattr("disagg.llm.tune_malloc", lambda: calls.append("tune"))
    monkeypatch.setattr("disagg.llm.Runner.load", Mock(side_effect=ConfigError("stop")))

    with pytest.raises(ConfigError, match="stop"):
        LLM()

    assert calls == ["tune"]


def test_a_codec_that_a_gpu_computes_wrong_is_refused_at_once(tiny, monkeypatch):
    runner = Runner.load(str(tiny))
    runner.record_steps(EagerRecorder())  # as on a GPU
    monkeypatch.setattr("disagg.llm.Runner.load", lambda *_, **__: runner)
    error = 0.0
    monkeypatch.setattr("disagg.paged.doctor._error", lambda actual, expected: error)
    config = EngineConfig(arena_bytes=16 << 20)
    llm = LLM(str(tiny), KIVI, config=config)

    error = 0.5
    with pytest.raises(ConfigError, match=r"encode of gear.* is not sound"):
        LLM(str(tiny), "gear", config=config)
    with pytest.raises(ConfigError, match=r"encode of gear.* is not sound"):
        llm.generate([random_prompt(40)], codec="gear")

    assert_empty(llm)
    assert llm.generate([random_prompt(40)], SamplingParams(max_tokens=2))[0].tokens


@pytest.mark.parametrize("codec", [*codec_names(), PLAN])
def test_a_hand_off_of_any_codec_changes_no_token(llm, runner, codec):
    prompt = random_prompt(250)

    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12), codec=codec)

    assert_same(answer.tokens, serve_watched(runner, prompt, codec, 12))
    kv = answer.kv
    reported = parse_plan(kv.codec, runner.shape)
    assert reported.fingerprint == parse_plan(codec, runner.shape).fingerprint
    assert kv.wire_bytes > kv.payload_bytes + kv.cached_bytes > 0.9 * kv.resident_bytes
    assert_empty(llm)


def test_an_answer_follows_a_grammar(llm):
    params = SamplingParams(max_tokens=9, grammar=choice(["yes", "no"]))

    answers = llm.generate(["a", "b"], params)

    assert {answer.text for answer in answers} <= {"yes", "no"}
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert_empty(llm)


def test_a_grammar_that_cannot_be_followed_admits_nothing(llm):
    params = SamplingParams(grammar="start: <[9999]>")

    with pytest.raises(RequestError, match="grammar is not supported"):
        llm.generate("a", params)

    assert_empty(llm)
