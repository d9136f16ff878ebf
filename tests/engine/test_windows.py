"""Layers with a window keep, send and attend only what their window sees, and answers stay."""

from dataclasses import replace

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import EngineConfig
from disagg.engine.messages import Replay
from disagg.llm import LLM, SamplingParams
from disagg.model.runner import Runner
from disagg.plan import LayerGroup, Plan
from disagg.transfer.records import Checklist
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, request, run_until_idle, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny

WINDOW, PROMPT, ANSWER = 320, 1472, 40  # whole pages: a window is less than one page longer
KIVI = "kivi:bits=4,residual=64"
WINDOWS = tuple(None if i % 6 == 5 else 1024 for i in range(62))
GEMMA_3_27B = KVShape(62, 16, 128, "bfloat16", WINDOWS)


def needed_bytes(plan: Plan, tokens: int) -> int:
    """What layers with a window hold if they are told no more than a window of tokens."""
    return sum(
        Plan((replace(group, window=None),), ()).nbytes(min(tokens, group.window or tokens))
        for group in plan.groups
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gemma")
    changes = {"sliding_window": WINDOW, "max_position_embeddings": 2048}
    return str(save_tiny("gemma3_text", folder, **changes))


def test_gemma_3_27b_at_32k_holds_what_its_windows_need() -> None:
    tokens = 32768
    plan = parse_plan("kivi:bits=2,group=64,residual=64", GEMMA_3_27B)
    assert 2 * plan.numbers(tokens) == 2 * 2 * 16 * 128 * (10 * tokens + 52 * 1024)
    assert plan.nbytes(tokens) <= 1.05 * needed_bytes(plan, tokens)
    assert Checklist(plan, tokens).total_bytes <= plan.nbytes(tokens) < 550e6
    whole = parse_plan(plan.groups[0].codec, replace(GEMMA_3_27B, windows=(None,) * 62))
    assert whole.nbytes(tokens) > 2600e6


@pytest.mark.parametrize("codec", ["raw", KIVI])
def test_what_is_sent_and_resident_is_what_windows_need(path, codec):
    llm = LLM(path, codec, config=EngineConfig(arena_bytes=32 << 20))
    (answer,) = llm.generate([random_prompt(PROMPT)], SamplingParams(max_tokens=ANSWER))
    plan = llm._decode.plan(codec)
    assert answer.kv.resident_bytes <= 1.05 * needed_bytes(plan, PROMPT)
    assert answer.kv.wire_bytes <= 1.05 * needed_bytes(plan, PROMPT) + 8192  # headers of frames
    assert answer.kv.fp16_bytes == 2 * 2 * 2 * 32 * (PROMPT + 2 * WINDOW)
    if codec == "raw":
        assert_same(answer.tokens, ReferenceModel(path).generate(random_prompt(PROMPT), ANSWER))


@pytest.mark.parametrize("codec", ["raw", KIVI, "kcvt", "h2o"])
def test_dropping_what_no_query_sees_changes_no_answer(path, codec, monkeypatch):
    runner = Runner.load(path)
    prompts = [random_prompt(n) for n in (300, 700)]
    dropping = serve(make_engine(runner, max_batch_tokens=256), prompts, codec, ANSWER)
    monkeypatch.setattr(LayerGroup, "dropped", lambda self, n: 0)
    assert dropping == serve(make_engine(runner, max_batch_tokens=256), prompts, codec, ANSWER)


def test_pages_behind_the_window_are_freed_while_decoding(path):
    engine = make_engine(Runner.load(path))
    plan = engine.plan(KIVI)
    engine.submit(Replay(request("a", random_prompt(300), KIVI, 200)))
    engine.step()
    while not engine.idle:
        engine.step()
        for sequence in engine._scheduler.active:
            spare = sum(group.record(group.page).nbytes for group in plan.groups)
            assert engine.pool.used_bytes <= plan.nbytes(sequence.n) + spare
    run_until_idle(engine)
