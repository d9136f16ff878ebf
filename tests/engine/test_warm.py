"""Warmed up, a worker records nothing for requests; and serves only what it was warmed up for."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor

from disagg.codecs import codec_names
from disagg.config import Config, EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.lookup import DraftHistory
from disagg.engine.messages import Prefill
from disagg.engine.warm import REPLAYED, warm_up
from disagg.errors import ConfigError, UnknownNameError
from disagg.kernels.cpu import library
from disagg.kernels.gpu.plan import AMD_COLUMNS, NVIDIA_COLUMNS
from disagg.model.attention import Batch
from disagg.model.runner import Runner
from disagg.model.static import parts_of, size_of
from disagg.transfer.messages import Role
from disagg.worker.worker import Worker
from tests.engine.serving import StandIn, make_engine, request, run_until_idle
from tests.model.recorders import EagerRecorder
from tests.model.test_graphs import MIXED
from tests.model.tiny import random_prompt

KIVI = "kivi:bits=2,group=64,residual=16"
ROWS = 5
ROOT = Path(__file__).parents[2]


@pytest.fixture
def runner(tiny: Path) -> Runner:
    return Runner.load(str(tiny))


@pytest.mark.parametrize("mixed", [False, True])
def test_after_the_start_all_steps_are_replayed_and_none_is_recorded(
    runner, mixed, monkeypatch
):
    monkeypatch.setattr(
        "disagg.model.static.ROOM", 64
    )  # so that a context of 512 has three sizes
    recorder, steps = EagerRecorder(), list[Batch]()
    runner.record_steps(recorder)

    def forward(batch: Batch) -> Tensor:
        steps.extend(parts_of(batch))
        return runner.forward(batch)

    engine = make_engine(StandIn(runner, forward))
    warm_up(engine, runner, [KIVI, "int8"], ROWS, print)
    recorded = recorder.recorded
    assert recorded > 0
    assert not engine.counts
    assert not engine.pool.referenced_pages
    steps.clear()
    recorder.replayed = 0
    for lengths in ((200, 400, 90, 91, 70), (200,), (90,), (400, 70, 90)):
        for i, tokens in enumerate(lengths):
            codec = "int8" if mixed and i % 2 else KIVI
            engine.submit(Prefill(request(str(i), random_prompt(tokens), codec, 12)))
        run_until_idle(engine)
    assert recorder.recorded == recorded
    assert recorder.replayed == len(steps) > 0
    assert {size_of(part)[0] for part in steps} == {64, 256, 1024}


def test_after_the_start_steps_with_drafts_are_replayed_too(runner, monkeypatch):
    monkeypatch.setattr(DraftHistory, "draft", lambda *_: [1, 2, 3])
    recorder = EagerRecorder()
    runner.record_steps(recorder)
    blocks = list[Batch]()

    def forward(batch: Batch) -> Tensor:
        if not batch.chunks and len(batch.outputs) > 2:
            blocks.append(batch)
        return runner.forward(batch)

    engine = make_engine(StandIn(runner, forward), speculative_tokens=3)
    warm_up(engine, runner, ["int8"], 2, print)
    recorded = recorder.recorded
    blocks.clear()
    recorder.replayed = 0

    for rid in "ab":
        engine.submit(Prefill(request(rid, random_prompt(70), "int8", 9)))
    run_until_idle(engine)

    assert blocks
    assert recorder.recorded == recorded
    assert recorder.replayed >= len(blocks)
    assert all(map(parts_of, blocks))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "codecs",
    [
        ["raw", "kivi"],
        pytest.param([*codec_names(), MIXED], marks=pytest.mark.slow, id="all"),
    ],
)
def test_a_gpu_compiles_records_and_copies_nothing_but_tables_after_the_start(codecs):
    """One copy of tables for each step that runs or is replayed, and none inside a layer."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.pretended", *codecs]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counts = Counter(json.loads(done.stdout.splitlines()[-1]))
    assert counts["start"]["merge_kernel"] == 2  # its forms for few and for many units
    assert not counts["requests"]
    assert not counts["recorded"]
    assert counts["copied"] == counts["eager"] + counts["replayed"]
    assert counts["replayed"] > counts["eager"] > 0


def test_the_start_feeds_more_known_tokens_at_once_than_one_tile_of_queries_has(runner):
    widths = Counter[int]()

    def forward(batch: Batch) -> Tensor:
        widths.update(x.step.queries.shape[1] for x in batch.decodes)
        return runner.forward(batch)

    runner.record_steps(EagerRecorder())
    engine = make_engine(StandIn(runner, forward))
    warm_up(engine, runner, [KIVI], 2, print)
    assert widths.keys() == {1, REPLAYED - 1}
    assert REPLAYED - 1 > AMD_COLUMNS >= NVIDIA_COLUMNS


def test_where_steps_are_recorded_a_request_names_a_listed_codec(runner):
    engine = Engine(runner, EngineConfig(arena_bytes=32 << 20), codecs=[KIVI, "int8"])
    assert engine.plan("kivi:residual=16,bits=2,group=64") == engine.plan(KIVI)
    with pytest.raises(UnknownNameError, match=rf"'raw'; known: int8, {KIVI}"):
        engine.plan("raw")


def test_a_worker_that_records_warms_up_every_listed_codec_before_it_can_be_reached(
    runner,
):
    recorder = EagerRecorder()
    runner.record_steps(recorder)
    config = Config(
        KIVI, ["int8"], engine=EngineConfig(arena_bytes=32 << 20, max_sequences=2)
    )
    worker = Worker(config, Role.BOTH, "w", runner=runner)
    worker.start()
    try:
        assert set(worker.engine.listed.values()) == {KIVI, "int8"}
        assert worker.doing == "compiling and recording steps of int8, 2 of 2 codecs"
        assert recorder.recorded > 0
        assert (
            asyncio.run(worker.service.status()).info["backend"]
            == library.describe_backend()
        )
    finally:
        worker.stop(0.0)
        worker.wait()


def test_a_worker_whose_kernels_are_wrong_refuses_to_start(runner, monkeypatch):
    runner.record_steps(EagerRecorder())
    monkeypatch.setattr("disagg.paged.doctor.GPU_BYTES", 0.0)
    monkeypatch.setattr("disagg.paged.doctor._error", lambda result, expected: 0.5)
    worker = Worker(Config(KIVI), Role.BOTH, "w", runner=runner)
    with pytest.raises(ConfigError, match="encode of kivi"):
        worker.start()


def test_a_listed_codec_that_does_not_fit_is_an_error(runner):
    runner.record_steps(EagerRecorder())
    with pytest.raises(ConfigError, match="no-such-codec"):
        Worker(Config(KIVI, ["no-such-codec"]), Role.BOTH, "w", runner=runner)


def test_a_prompt_that_fails_at_the_start_is_an_error(runner):
    runner.record_steps(EagerRecorder())
    engine = Engine(runner, EngineConfig(arena_bytes=1 << 20))
    with pytest.raises(ConfigError):
        warm_up(engine, runner, ["no-such-codec"], 1, print)
