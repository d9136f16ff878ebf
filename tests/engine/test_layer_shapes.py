"""Models whose layers differ: in heads, in K and V of their own, in windows that do not slide."""

import pytest

from disagg.config import EngineConfig
from disagg.engine.messages import Move, Prefill
from disagg.kv.plan import LayerGroup, LayerShape
from disagg.llm import LLM, SamplingParams
from disagg.model.capacity import check_model
from disagg.model.runner import Runner
from disagg.transfer.records import Manifest
from tests.engine.forced import forced_logits, recorded_logits
from tests.engine.margins import assert_same
from tests.engine.serving import (
    Nowhere,
    answers,
    joined,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny
from tests.synthetic import relative_error

KINDS = {
    # in layers that see all: wider heads, and one KV head for K and V alike
    "gemma4_text": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "llama4_text": {},
}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
NOISE = 1e-3


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    return {
        kind: str(save_tiny(kind, folder, **KINDS[kind]))
        for kind, folder in folders.items()
    }


@pytest.fixture(scope="module")
def runners(paths: dict[str, str]) -> dict[str, Runner]:
    return {kind: Runner.load(path) for kind, path in paths.items()}


def test_layers_have_the_heads_and_windows_of_their_type(runners):
    narrow = LayerShape(heads=2, head_dim=32, window=20)
    wide = LayerShape(heads=1, head_dim=64)

    gemma = runners["gemma4_text"].info

    assert gemma.layers == (narrow, wide)
    assert gemma.sources == (0, 1, 0, 1, 1)


def test_layers_that_attend_to_others_hold_and_send_nothing(runners):
    runner = runners["gemma4_text"]
    plan = make_engine(runner).plan("raw")

    assert [group.layers for group in plan.groups] == [(0,), (1,)]
    assert plan.numbers(100) == 2 * (20 * 2 * 32 + 100 * 64)


def test_a_model_check_names_all_sizes_of_heads(paths):
    fit = check_model(paths["gemma4_text"])

    assert fit.served
    assert fit.head_sizes == {"2x32": 1, "1x64": 1}
    assert fit.exact_bytes_per_token == 4 * 2 * (2 * 32 + 64)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_after_a_hand_off_is_that_of_transformers(kind, paths):
    prompt = random_prompt(70)
    expected = ReferenceModel(paths[kind]).generate(prompt, 24)

    llm = LLM(paths[kind], codec="raw", config=EngineConfig(max_batch_tokens=33))
    (completion,) = llm.generate([prompt], GREEDY)

    assert_same(completion.tokens, expected)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("gemma4_text", "banded:bits=3|kivi:bits=4"), ("llama4_text", "int8")],
)
def test_dropping_what_no_query_sees_changes_no_answer(
    kind, codec, runners, monkeypatch
):
    prompts = [random_prompt(n) for n in (30, 150)]
    dropping = serve(
        make_engine(runners[kind], max_batch_tokens=64), prompts, codec, 30
    )

    monkeypatch.setattr(LayerGroup, "dropped", lambda self, n: 0)
    engine = make_engine(runners[kind], max_batch_tokens=64)

    assert dropping == serve(engine, prompts, codec, 30)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_lost_its_pages_computes_them_again(kind, runners):
    prompts = [random_prompt(n) for n in (15, 70)]
    expected = serve(make_engine(runners[kind]), prompts, "raw", 20)
    engine = make_engine(runners[kind], max_batch_tokens=16, prefix_cache=False)
    for rid, prompt in enumerate(prompts):
        engine.submit(Prefill(request(str(rid), prompt, "raw", 20)))
    early = joined([engine.step() for _ in range(15)])

    victim = engine._scheduler.preempt()
    engine._on_preempted(victim)
    late = run_until_idle(engine)

    tokens = answers(joined([early, late]))
    assert victim.emitted[:-1]
    assert [tokens[rid] for rid in "01"] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_gives_what_an_eager_one_gives(kind, paths):
    runner = Runner.load(paths[kind])
    prompts = {str(n): random_prompt(n) for n in (15, 37, 70)}
    codecs = dict.fromkeys(prompts, "raw")
    expected = forced_logits(runner, prompts, codecs, 12)

    replayed = recorded_logits(runner, prompts, codecs, 12)

    for rid, logits in expected.items():
        assert relative_error(replayed[rid], logits) < NOISE


@pytest.mark.parametrize("count", [79, 80, 81])
def test_a_sequence_can_stop_anywhere_and_have_what_its_chunk_needs(runners, count):
    engine, handoff = make_engine(runners["llama4_text"]), Nowhere()
    engine.submit(Prefill(request("a", random_prompt(70), "raw", 100)))
    engine.step()
    engine.submit(Move("a", count, handoff))

    while not any((output := engine.step()).moved):
        assert not output.failed

    Manifest(engine.plan("raw"), count).match(handoff.groups)
