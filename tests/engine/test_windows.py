"""Layers with a window keep, send and attend only what their window sees, and answers stay."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from disagg.codecs.planning import KVShape, codec_of, parse_plan
from disagg.codecs.registry import get_codec
from disagg.config import EngineConfig
from disagg.engine.exact_prefixes import MODEL
from disagg.engine.messages import Move, Prefill
from disagg.errors import PromptTooLongError
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.prefix_keys import content_keys
from disagg.kv.state import GroupState
from disagg.llm import LLM, SamplingParams
from disagg.model.cache import Workspace
from disagg.model.capacity import exact_bytes, rooms_of
from disagg.model.runner import Runner
from disagg.paged.append import SequenceGrowth, append_tokens, seal_tails, take_records
from disagg.paged.compressed_kv import CompressedKV, GrowingArena
from disagg.paged.layer import StepLayers
from disagg.transfer.records import Manifest
from tests.engine.margins import assert_same
from tests.engine.serving import Nowhere, make_engine, request, run_until_idle, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny
from tests.synthetic import exact_attention, relative_error
from tests.transfer.prompts import make_pool

WINDOW, PROMPT, ANSWER = (
    320,
    1472,
    40,
)  # whole pages: a window is less than one page longer
KIVI = "kivi:bits=4,residual=64"
WINDOWS = tuple(None if i % 6 == 5 else 1024 for i in range(62))
GEMMA_3_27B = KVShape(62, 16, 128, "bfloat16", WINDOWS)


def needed_bytes(plan: Plan, tokens: int) -> int:
    """What layers with a window hold if they are told no more than a window of tokens."""
    parts = (
        (Plan((replace(x, window=None),), ()), x.window or tokens) for x in plan.groups
    )
    return sum(part.nbytes(min(tokens, window)) for part, window in parts)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gemma")
    changes = {"sliding_window": WINDOW, "max_position_embeddings": 2048}
    return str(save_tiny("gemma3_text", folder, **changes))


def test_what_is_known_of_a_prompt_may_be_more_than_a_layer_has_room_for() -> None:
    workspace, k = Workspace(1, 2, 500, 4, rooms=[64]), torch.randn(2, 100, 4)
    kept, _ = workspace.extend(0, k, k, 0)
    assert torch.equal(kept, k[:, -64:])


def test_gemma_3_27b_at_32k_holds_what_its_windows_need() -> None:
    tokens = 32768
    plan = parse_plan("kivi:bits=2,group=64,residual=64", GEMMA_3_27B)
    assert 2 * plan.numbers(tokens) == 2 * 2 * 16 * 128 * (10 * tokens + 52 * 1024)
    assert plan.nbytes(tokens) <= 1.05 * needed_bytes(plan, tokens)
    assert Manifest(plan, tokens).total_bytes <= plan.nbytes(tokens) < 550e6
    whole = parse_plan(plan.groups[0].codec, replace(GEMMA_3_27B, windows=(None,) * 62))
    assert whole.nbytes(tokens) > 2600e6


@pytest.mark.parametrize("codec", ["raw", KIVI])
def test_what_is_sent_and_resident_is_what_windows_need(path, codec):
    llm = LLM(path, codec, config=EngineConfig(arena_bytes=32 << 20))
    (answer,) = llm.generate([random_prompt(PROMPT)], SamplingParams(max_tokens=ANSWER))
    plan = llm._decode.plan(codec)
    assert answer.kv.resident_bytes <= 1.05 * needed_bytes(plan, PROMPT)
    assert (
        answer.kv.wire_bytes <= 1.05 * needed_bytes(plan, PROMPT) + 8192
    )  # headers of frames
    assert answer.kv.fp16_bytes == 2 * 2 * 2 * 32 * (PROMPT + 2 * WINDOW)
    if codec == "raw":
        assert_same(
            answer.tokens, ReferenceModel(path).generate(random_prompt(PROMPT), ANSWER)
        )


@pytest.mark.parametrize("codec", ["raw", KIVI, "kcvt", "h2o"])
def test_dropping_what_no_query_sees_changes_no_answer(path, codec, monkeypatch):
    runner = Runner.load(path)
    prompts = [random_prompt(n) for n in (300, 700)]
    dropping = serve(make_engine(runner, max_batch_tokens=256), prompts, codec, ANSWER)
    monkeypatch.setattr(LayerGroup, "dropped", lambda self, n: 0)
    assert dropping == serve(
        make_engine(runner, max_batch_tokens=256), prompts, codec, ANSWER
    )


def test_pages_sealed_behind_a_window_join_the_segment_that_the_first_one_began():
    group = get_codec("banded", 64).layer_group((2,), 2, 64, "float16", 128)
    pool, state, begun = make_pool(1 << 20), GroupState(), 0
    for n in range(1500):
        pool.release(state.drop(group.dropped(n) // group.page.tokens))
        growths = [SequenceGrowth(state, n, 1, 0)]
        fresh = take_records(group, growths, pool)
        append_tokens(group, growths, fresh)
        for seal in seal_tails(group, growths, fresh):
            begun += seal.fresh
            pool.release(seal.places.tail.tolist())
    assert state.dropped > 0
    assert begun == 1


def test_pages_behind_the_window_are_freed_while_decoding(path):
    engine = make_engine(Runner.load(path))
    plan = engine.plan(KIVI)
    engine.submit(Prefill(request("a", random_prompt(300), KIVI, 200)))
    engine.step()
    while not engine.idle:
        engine.step()
        for sequence in engine._scheduler.active:
            spare = sum(group.record(group.page).nbytes for group in plan.groups)
            assert engine.pool.used_bytes <= plan.nbytes(sequence.n) + spare
    run_until_idle(engine)


def test_answers_of_kivi_are_attention_on_the_reconstruction_within_the_window(
    path, monkeypatch
):
    engine = make_engine(Runner.load(path), max_batch_tokens=256)
    plan, run, errors = engine.plan(KIVI), StepLayers.run, list[float]()
    arena = cast(GrowingArena, SimpleNamespace(bytes=engine.arena))

    def checked(self: StepLayers, layer: int, q: Tensor, *rest: Any) -> Tensor:
        out, index = run(self, layer, q, *rest), plan.group_of[layer]
        group, (sequence,) = plan.groups[index], engine._scheduler.active
        if layer == group.layers[0]:
            cache = CompressedKV(
                codec_of(group),
                group,
                sequence.groups[index],
                arena,
                num_tokens=sequence.n + 1,
            )
            seen = slice(-min(cache.num_tokens, group.window or cache.num_tokens), None)
            k, v = (x[:, seen] for x in cache.reconstruct())
            errors.append(
                relative_error(out[0], exact_attention(q[:, 0], k, v, rest[-1].scale))
            )
        return out

    monkeypatch.setattr(StepLayers, "run", checked)
    serve(engine, [random_prompt(700)], KIVI, 100)
    assert len(errors) == 99 * len(plan.groups)
    assert max(errors) <= codec_of(plan.groups[0]).attend_error


def test_layers_with_windows_prefill_in_the_room_that_they_need(path):
    runner, chunk = Runner.load(path), 256
    rooms = rooms_of(parse_plan("raw", runner.shape), PROMPT, chunk)
    assert rooms == [
        WINDOW + 16 + chunk,
        PROMPT,
        WINDOW + 16 + chunk,
    ]  # 16: a page of raw
    room = exact_bytes(runner.shape, sum(rooms)) // 3
    for workspace_bytes in (room, room - 1):
        engine = make_engine(
            runner, max_batch_tokens=chunk, workspace_bytes=workspace_bytes
        )
        engine.submit(Prefill(request("a", random_prompt(PROMPT), "raw", ANSWER)))
        outputs, held = [], [0]
        while not engine.idle:
            outputs.append(engine.step())
            begun = [
                x.workspace for x in engine._scheduler.active if x.workspace is not None
            ]
            held += [sum(x.nbytes for x in y._layers if x is not None) for y in begun]
        if workspace_bytes == room:
            answer = [token.token for output in outputs for token in output.tokens]
            assert_same(
                answer, ReferenceModel(path).generate(random_prompt(PROMPT), ANSWER)
            )
            assert max(held) == room
        else:
            (failed,) = outputs[0].failed
            assert isinstance(failed.error, PromptTooLongError)
            assert f"needs {room} bytes of exact KV" in str(failed.error)


@pytest.mark.parametrize("codec", ["raw", KIVI])
def test_a_longer_prompt_shares_what_it_sees_of_a_shorter_one(path, codec):
    config, params = EngineConfig(arena_bytes=32 << 20), SamplingParams(max_tokens=30)
    longer = random_prompt(1128)
    llm = LLM(path, codec, config=config)
    llm.generate([longer[:1000]], params)
    (answer,) = llm.generate([longer], params)
    assert answer.kv.cached_bytes > 0
    assert (
        answer.tokens
        == LLM(path, codec, config=config).generate([longer], params)[0].tokens
    )


@pytest.mark.parametrize("count", range(396, 404))
def test_a_sequence_can_stop_anywhere_and_have_what_its_windows_need(path, count):
    engine, handoff = make_engine(Runner.load(path)), Nowhere()
    engine.submit(Prefill(request("a", random_prompt(380), "raw", 100)))
    engine.step()
    engine.submit(Move("a", count, handoff))
    while not any((output := engine.step()).moved):
        assert not output.failed
    Manifest(engine.plan("raw"), count).match(handoff.groups)


def test_a_prefix_is_known_where_its_last_window_is(path):
    engine, prompt = (
        make_engine(Runner.load(path), max_batch_tokens=256),
        random_prompt(1000),
    )
    expected = serve(engine, [prompt], "raw", 8)
    of_windows, of_all = content_keys(MODEL, engine._prefixes._plan, prompt)
    known = []
    for lost in (of_windows[:20], of_windows[50:51], of_windows[40:41], of_all[10:11]):
        for key in lost:
            engine.pool.drop(key)
        before = engine.counts["cached_tokens"]
        assert serve(engine, [prompt], "raw", 8) == expected
        known.append((engine.counts["cached_tokens"] - before) // 16)
    assert known == [62, 50, 62, 0]
