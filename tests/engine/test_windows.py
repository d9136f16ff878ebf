"""Layers with a window store, send and attend only what it sees; answers stay the same."""

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
from disagg.kv.plan import LayerGroup, LayerShape, Plan
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

# whole pages: a window is less than one page longer
WINDOW = 320
PROMPT = 1472
ANSWER = 40
KIVI = "kivi:bits=4,residual=64"
WINDOWS = tuple(None if i % 6 == 5 else 1024 for i in range(62))
GEMMA_3_27B = KVShape.uniform(62, 16, 128, "bfloat16", WINDOWS)


def needed_bytes(plan: Plan, tokens: int) -> int:
    """The bytes of a plan whose layers with a window get only a window of tokens."""
    nbytes = 0
    for group in plan.groups:
        visible = min(tokens, group.window or tokens)
        without_window = Plan((replace(group, window=None),), ())
        nbytes += without_window.nbytes(visible)
    return nbytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gemma")
    changes = {"sliding_window": WINDOW, "max_position_embeddings": 2048}
    return str(save_tiny("gemma3_text", folder, **changes))


def test_a_cached_prefix_may_be_longer_than_the_room_of_a_layer() -> None:
    workspace = Workspace([LayerShape(2, 4)], 500, rooms=[64])
    k = torch.randn(2, 100, 4)

    stored, _ = workspace.extend(0, k, k, 0)

    assert torch.equal(stored, k[:, -64:])


def test_gemma_3_27b_at_32k_holds_what_its_windows_need() -> None:
    tokens = 32768
    plan = parse_plan("kivi:bits=2,group=64,residual=64", GEMMA_3_27B)
    assert 2 * plan.numbers(tokens) == 2 * 2 * 16 * 128 * (10 * tokens + 52 * 1024)
    assert plan.nbytes(tokens) <= 1.05 * needed_bytes(plan, tokens)
    assert Manifest(plan, tokens).total_bytes <= plan.nbytes(tokens) < 550e6
    without_windows = KVShape.uniform(62, 16, 128, "bfloat16")
    whole = parse_plan(plan.groups[0].codec, without_windows)
    assert whole.nbytes(tokens) > 2600e6


@pytest.mark.parametrize("codec", ["raw", KIVI])
def test_what_is_sent_and_resident_is_what_windows_need(path, codec):
    llm = LLM(path, codec, config=EngineConfig(arena_bytes=32 << 20))
    (answer,) = llm.generate([random_prompt(PROMPT)], SamplingParams(max_tokens=ANSWER))
    plan = llm._decode.plan(codec)
    needed = needed_bytes(plan, PROMPT)
    frame_headers = 8192
    assert answer.kv.resident_bytes <= 1.05 * needed
    assert answer.kv.wire_bytes <= 1.05 * needed + frame_headers
    assert answer.kv.fp16_bytes == 2 * 2 * 2 * 32 * (PROMPT + 2 * WINDOW)
    if codec == "raw":
        expected = ReferenceModel(path).generate(random_prompt(PROMPT), ANSWER)
        assert_same(answer.tokens, expected)


@pytest.mark.parametrize("codec", ["raw", KIVI, "kcvt", "h2o"])
def test_dropping_what_no_query_sees_changes_no_answer(path, codec, monkeypatch):
    runner = Runner.load(path)
    prompts = [random_prompt(n) for n in (300, 700)]

    dropping = serve(make_engine(runner, max_batch_tokens=256), prompts, codec, ANSWER)

    monkeypatch.setattr(LayerGroup, "dropped", lambda self, n: 0)
    engine = make_engine(runner, max_batch_tokens=256)
    assert dropping == serve(engine, prompts, codec, ANSWER)


def test_pages_sealed_behind_a_window_join_the_segment_that_the_first_one_began():
    group = get_codec("banded", 64).layer_group((2,), 2, 64, "float16", 128)
    pool, state, begun = make_pool(1 << 20), GroupState(), 0
    for n in range(1500):
        pool.release(state.drop(group.dropped(n) // group.page.tokens))
        growths = [SequenceGrowth(state, n, 1, 0)]
        fresh = take_records(group, growths, pool)
        append_tokens(group, growths, fresh)
        for seal in seal_tails(group, growths, fresh):
            begun += seal.begins_segment
            pool.release(seal.records.tail.tolist())
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
    plan = engine.plan(KIVI)
    run = StepLayers.run
    errors: list[float] = []
    arena = cast(GrowingArena, SimpleNamespace(bytes=engine.arena))

    def checked(self: StepLayers, layer: int, q: Tensor, *rest: Any) -> Tensor:
        out = run(self, layer, q, *rest)
        index = plan.group_of[layer]
        group = plan.groups[index]
        (sequence,) = engine._scheduler.active
        if layer == group.layers[0]:
            cache = CompressedKV(
                codec_of(group),
                group,
                sequence.groups[index],
                arena,
                num_tokens=sequence.n + 1,
            )
            visible = min(cache.num_tokens, group.window or cache.num_tokens)
            k, v = cache.reconstruct()
            expected = exact_attention(
                q[:, 0], k[:, -visible:], v[:, -visible:], rest[2].scale
            )
            errors.append(relative_error(out[0], expected))
        return out

    monkeypatch.setattr(StepLayers, "run", checked)
    serve(engine, [random_prompt(700)], KIVI, 100)
    assert len(errors) == 99 * len(plan.groups)
    assert max(errors) <= codec_of(plan.groups[0]).attend_error


def prefill_room(runner: Runner, chunk: int) -> int:
    """Bytes of exact KV that the layers need for a prompt of PROMPT tokens."""
    rooms = rooms_of(parse_plan("raw", runner.shape), PROMPT, chunk)
    with_window = WINDOW + 16 + chunk  # 16: a page of raw
    assert rooms == [with_window, PROMPT, with_window]
    return exact_bytes(runner.shape, rooms)


def test_layers_with_windows_prefill_in_the_room_that_they_need(path):
    runner = Runner.load(path)
    room = prefill_room(runner, 256)
    engine = make_engine(runner, max_batch_tokens=256, workspace_bytes=room)
    engine.submit(Prefill(request("a", random_prompt(PROMPT), "raw", ANSWER)))

    answer = []
    workspace_bytes = [0]
    while not engine.idle:
        answer += [token.token for token in engine.step().tokens]
        for sequence in engine._scheduler.active:
            if sequence.workspace is not None:
                layers = [x for x in sequence.workspace._layers if x is not None]
                workspace_bytes.append(sum(x.nbytes for x in layers))

    expected = ReferenceModel(path).generate(random_prompt(PROMPT), ANSWER)
    assert_same(answer, expected)
    assert max(workspace_bytes) == room


def test_a_prompt_with_a_byte_too_little_room_is_refused(path):
    runner = Runner.load(path)
    room = prefill_room(runner, 256)
    engine = make_engine(runner, max_batch_tokens=256, workspace_bytes=room - 1)
    engine.submit(Prefill(request("a", random_prompt(PROMPT), "raw", ANSWER)))

    (failed,) = engine.step().failed

    assert isinstance(failed.error, PromptTooLongError)
    assert f"needs {room} bytes of exact KV" in str(failed.error)
    run_until_idle(engine)


@pytest.mark.parametrize("codec", ["raw", KIVI])
def test_a_longer_prompt_shares_what_it_sees_of_a_shorter_one(path, codec):
    config, params = EngineConfig(arena_bytes=32 << 20), SamplingParams(max_tokens=30)
    longer = random_prompt(1128)
    llm = LLM(path, codec, config=config)
    llm.generate([longer[:1000]], params)
    (answer,) = llm.generate([longer], params)

    assert answer.kv.cached_bytes > 0
    (expected,) = LLM(path, codec, config=config).generate([longer], params)
    assert answer.tokens == expected.tokens


@pytest.mark.parametrize("count", range(396, 404))
def test_a_sequence_can_stop_anywhere_and_have_what_its_windows_need(path, count):
    engine, handoff = make_engine(Runner.load(path)), Nowhere()
    engine.submit(Prefill(request("a", random_prompt(380), "raw", 100)))
    engine.step()
    engine.submit(Move("a", count, handoff))
    while not any((output := engine.step()).moved):
        assert not output.failed
    Manifest(engine.plan("raw"), count).match(handoff.groups)


def test_a_prefix_is_cached_as_long_as_its_last_window_is(path):
    engine = make_engine(Runner.load(path), max_batch_tokens=256)
    prompt = random_prompt(1000)
    expected = serve(engine, [prompt], "raw", 8)
    of_windows, of_all = content_keys(MODEL, engine._prompts.prefixes._plan, prompt)

    for dropped_keys, cached_units in (
        (of_windows[:20], 62),
        (of_windows[50:51], 50),
        (of_windows[40:41], 62),
        (of_all[10:11], 0),
    ):
        for key in dropped_keys:
            engine.pool.drop(key)
        before = engine.counts["cached_tokens"]
        assert serve(engine, [prompt], "raw", 8) == expected
        assert (engine.counts["cached_tokens"] - before) // 16 == cached_units
