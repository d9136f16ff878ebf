"""Recorded decode steps: the bookkeeping, with a recorder that runs eagerly in the same buffers."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor

from disagg.codecs import codec_names
from disagg.engine.lookup import DraftHistory
from disagg.kernels.sealing import NO_PAGE
from disagg.kernels.view import WorkPlan
from disagg.model import static
from disagg.model.attention import Batch
from disagg.model.graphs import CudaRecorder, Recording
from disagg.model.runner import Runner
from tests.engine.forced import allowed, forced_logits
from tests.engine.serving import StandIn, make_engine, serve
from tests.model.recorders import EagerRecorder
from tests.model.tiny import random_prompt
from tests.synthetic import relative_error

MIXED = "0:kivi:bits=4,group=32,residual=32;1-:kivi:bits=2,group=64,residual=16"
LENGTHS = (300, 63, 130)


@pytest.fixture
def runner(tiny: Path) -> Runner:
    return Runner.load(str(tiny))


def logits_of(
    runner: Runner, codecs: dict[str, str], tokens: int = 12
) -> dict[str, Tensor]:
    prompts = {rid: random_prompt(n) for rid, n in zip(codecs, LENGTHS, strict=False)}
    return forced_logits(runner, prompts, codecs, tokens)


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for rid, logits in expected.items():
        assert relative_error(actual[rid], logits) <= allowed("kivi")


@pytest.mark.parametrize("codec", [*codec_names(), MIXED])
def test_a_replayed_step_gives_what_an_eager_one_gives(runner, codec):
    codecs = dict.fromkeys("abc", codec)
    expected = logits_of(runner, codecs)
    recorder = EagerRecorder()
    runner.record_steps(recorder)

    assert_alike(logits_of(runner, codecs), expected)

    assert recorder.replayed > recorder.recorded


@pytest.mark.parametrize("codec", ["raw", "banded", MIXED])
def test_replayed_blocks_give_what_eager_ones_give(runner, codec, guess):
    expected, _ = logits_of_blocks(runner, codec)
    runner.record_steps(recorder := EagerRecorder())

    logits, blocks = logits_of_blocks(runner, codec)

    assert_alike(logits, expected)
    assert recorder.replayed > recorder.recorded
    assert blocks
    assert all(static.parts_of(batch) for batch in blocks)


@pytest.fixture
def guess(monkeypatch):
    """Drafts of one to seven tokens for every sequence, right or wrong."""

    def draft(_history, emitted, size):
        return [7] * min(size, 1 + len(emitted) % 7)

    monkeypatch.setattr(DraftHistory, "draft", draft)


def logits_of_blocks(
    runner: Runner, codec: str
) -> tuple[dict[str, Tensor], list[Batch]]:
    """The logits of each step with drafts, by its number; and those steps without prompts."""
    logits: dict[str, Tensor] = {}
    blocks: list[Batch] = []

    def forward(batch: Batch) -> Tensor:
        step_logits = runner.forward(batch)
        logits[str(len(logits))] = step_logits
        if not batch.chunks and len(batch.outputs) > len(LENGTHS):
            blocks.append(batch)
        return step_logits

    engine = make_engine(StandIn(runner, forward), speculative_tokens=7)
    serve(engine, [random_prompt(n) for n in LENGTHS], codec, 20)
    return logits, blocks


def test_blocks_longer_than_a_draft_run_eagerly(runner, guess, monkeypatch):
    monkeypatch.setattr(static, "BLOCK", 2)

    _, blocks = logits_of_blocks(runner, "kivi")

    assert not all(static.parts_of(batch) for batch in blocks)


def test_each_codec_of_a_batch_is_a_recorded_step(runner):
    codecs = {"a": "kivi", "b": "raw", "c": MIXED}
    expected = logits_of(runner, codecs)
    graphs = runner.record_steps(EagerRecorder())

    assert_alike(logits_of(runner, codecs), expected)

    assert {len(key) - 3 for key in graphs._recorded} == {1, 2}  # layer groups
    assert {key[0] for key in graphs._recorded} == {1}  # rows


def test_plans_that_share_a_layer_group_run_eagerly_in_one_batch(runner):
    codecs = {"a": MIXED, "b": MIXED.replace("32,residual", "16,residual", 1)}
    expected = logits_of(runner, codecs)
    runner.record_steps(recorder := EagerRecorder())

    assert_alike(logits_of(runner, codecs), expected)

    assert not recorder.recorded


def test_padding_writes_where_the_step_writes_and_nowhere_else(runner):
    written = [
        x.view(-1, 128).any(1) for x in eager_and_replayed(runner, LENGTHS, 6, "kivi")
    ]

    assert written[0].any()
    assert torch.equal(*written)


def eager_and_replayed(
    runner: Runner, lengths: Sequence[int], tokens: int, codec: str
) -> Any:
    """Arenas of engines that served three rows, in a bucket of four."""
    recorder, arenas = EagerRecorder(), []
    for step_recorder in (None, recorder):
        if step_recorder is not None:
            runner.record_steps(step_recorder)
        engine = make_engine(runner)
        engine.arena.zero_()
        serve(engine, [random_prompt(n) for n in lengths], codec, tokens)
        arenas.append(engine.arena.clone())
    assert recorder.replayed > recorder.recorded
    return arenas


def test_padding_sees_nothing_and_is_not_written(runner):
    (batch,) = static.parts_of(batches_of(runner, list(LENGTHS), 3, "kivi")[-1])
    buffers = static.StaticStep(batch, static.size_of(batch))
    (padded,) = buffers.batch.decodes
    (original,) = batch.decodes
    sealed, tail = padded.step.tables
    bounds = (sealed.lo, sealed.hi, tail.lo, tail.hi)
    for buffer in (buffers.tokens, buffers.positions, *bounds):
        buffer.fill_(7)  # as a larger batch may have left them

    buffers.fill(batch)

    assert buffers.tokens.tolist() == [[*batch.tokens, 0]]
    assert buffers.positions.tolist() == [[*batch.positions, 0]]
    assert padded.step.rows.tolist() == [0, 1, 2, 3]
    assert padded.step.pages.tolist() == [*original.step.pages.tolist(), NO_PAGE]
    pages = original.step.tables[0].pages
    assert torch.equal(sealed.pages[:3, : pages.shape[1]], pages)
    assert (sealed.pages[3] == pages[0, 0]).all()
    assert sealed.hi[3:].tolist() == tail.hi[3:].tolist() == [[0]]


def batches_of(
    runner: Runner, prompts: list[int], tokens: int, codec: str
) -> list[Batch]:
    batches: list[Batch] = []

    def forward(batch: Batch) -> Tensor:
        batches.append(batch)
        return runner.forward(batch)

    engine = make_engine(StandIn(runner, forward))
    serve(engine, [random_prompt(n) for n in prompts], codec, tokens)
    return batches


@pytest.mark.parametrize(
    ("codec", "by_append"), [("int8", True), ("ott:residual=0", False)]
)
def test_steps_are_recorded_unless_they_prefill_or_flush(runner, codec, by_append):
    batches = batches_of(runner, [120], 30, codec)
    plain = [bool(static.parts_of(batch)) for batch in batches]
    seals = [any(x.step.seals for x in batch.decodes) for batch in batches]

    both = zip(batches, seals, strict=True)

    assert plain == [
        not batch.chunks and (by_append or not seal) for batch, seal in both
    ]
    assert (plain[0], sum(seals)) == (False, 1)


@pytest.mark.parametrize(
    "codec", ["kivi:bits=2,group=64,residual=0", "gear", "alignedkv"]
)
def test_a_replayed_step_seals_what_an_eager_one_seals(runner, codec):
    lengths = (63, 50, 60)  # a page each, in different steps
    eager, replayed = eager_and_replayed(runner, lengths, 20, codec)
    used = (eager | replayed) != 0

    assert (eager == replayed)[used].float().mean() >= 1 - allowed("kivi")


def test_a_recorded_shape_serves_many_steps_of_one_layout(runner):
    def keys_of(prompts: list[int], codec: str) -> list[Any]:
        batches = batches_of(runner, prompts, 40, codec)
        parts = [part for batch in batches for part in static.parts_of(batch)]
        keys = [static.key_of(part, static.size_of(part)) for part in parts]
        # without the arena: every engine has its own
        return [(key[0], *key[2:]) for key in keys]

    two_rows = keys_of([70, 75], "kivi")
    three_rows = keys_of([70, 75, 72], "kivi")
    four_rows = keys_of([70, 75, 72, 71], "kivi")

    assert len(two_rows) > 30
    assert len(set(two_rows)) <= 2  # without pages and with pages
    assert not set(two_rows) & set(keys_of([70, 75], "int8"))
    assert not set(two_rows) & set(three_rows)
    assert set(three_rows) & set(four_rows)  # both in a bucket of four


def test_buckets_fit_closely_and_tables_have_few_sizes():
    counts = (1, 2, 3, 4, 5, 9, 17, 24)

    assert [*map(static.bucket_of, counts)] == [1, 2, 4, 4, 8, 16, 24, 24]
    assert [static.rooms(most)[-1] for most in (0, 1024, 1025, 4097)] == [
        1024,
        1024,
        4096,
        16384,
    ]


@pytest.mark.parametrize(
    ("need", "most", "room"), [(3, 9, 9), (3, 70_000, 1024), (1500, 70_000, 4096)]
)
def test_one_long_row_makes_no_room_for_units_of_each_row(
    runner, monkeypatch, need, most, room
):
    monkeypatch.setattr("disagg.model.static.room_for_units", lambda *_: most)
    (batch,) = static.parts_of(batches_of(runner, [70], 3, "kivi")[-1])
    starts = torch.tensor([0, need], dtype=torch.int32)
    units = WorkPlan(torch.ones(need, 5, dtype=torch.int32), starts)
    decodes = [replace(x, step=replace(x.step, units=units)) for x in batch.decodes]
    part = replace(batch, decodes=tuple(decodes))
    size = static.size_of(part)

    (padded,) = static.StaticStep(part, size).batch.decodes

    assert padded.step.units.table.shape == (room, 5)
    assert padded.step.units.table.sum() == need * 5
    assert room in (most, size[1])
    assert size in static.sizes_of(part, 5000)

    keys = {static.key_of(part, x) for x in static.sizes_of(part, 5000)}

    assert len(keys) == 3 * len(static.rooms(most, size[1]))


def test_a_step_is_recorded_in_no_size_that_is_too_small_for_it(runner, monkeypatch):
    monkeypatch.setattr("disagg.model.static.ROOM", 64)
    (part,) = static.parts_of(batches_of(runner, [200], 3, "int8")[-1])

    sizes = [*static.sizes_of(part, 512)]

    assert [tokens for tokens, _ in sizes] == [1024, 256]
    assert all(static.StaticStep(part, size) for size in sizes)


def test_what_cannot_be_recorded_runs_eagerly_and_is_tried_once(runner):
    codecs = dict.fromkeys("ab", "kivi")
    expected = logits_of(runner, codecs)
    recorder = Mock()
    recorder.record.side_effect = RuntimeError(
        "operation not permitted when stream is capturing"
    )
    graphs = runner.record_steps(recorder)

    assert_alike(logits_of(runner, codecs), expected)

    assert not any(graphs._recorded.values())
    assert 0 < recorder.record.call_count < 5


class StandInCuda:
    """In place of torch.cuda: notes streams, recordings, and whether waiting is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.refuses = MagicMock(), 0
        self.streams, self.waited, self.recorded = list[Any](), list[Any](), list[Any]()
        self.current.wait_stream = self.waited.append
        for name in ("graph_pool_handle", "CUDAGraph", "set_stream"):
            monkeypatch.setattr(f"torch.cuda.{name}", MagicMock())
        monkeypatch.setattr("torch.cuda.current_stream", lambda: self.current)
        monkeypatch.setattr("torch.cuda.Stream", self.make_stream)
        monkeypatch.setattr("torch.cuda.stream", nullcontext)
        monkeypatch.setattr("torch.cuda.graph", self.begin)
        monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: self.refuses)
        monkeypatch.setattr(
            "torch.cuda.set_sync_debug_mode", partial(setattr, self, "refuses")
        )

    def make_stream(self) -> object:
        self.streams.append(MagicMock())
        return self.streams[-1]

    def begin(self, _graph: object, _pool: object, stream: object, mode: str) -> Any:
        assert mode == "thread_local"
        self.recorded.append(stream)
        return nullcontext()

    def wait(self) -> Tensor:
        """What asks the host, as torch does it."""
        if self.refuses:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.empty(0)


def test_whoever_goes_on_waits_for_a_warm_up_that_broke(monkeypatch):
    cuda = StandInCuda(monkeypatch)

    with pytest.raises(torch.OutOfMemoryError):
        CudaRecorder().record(MagicMock(side_effect=torch.OutOfMemoryError))
    assert cuda.waited == cuda.streams
    assert not cuda.refuses


def test_all_steps_warm_up_and_record_in_one_stream(monkeypatch):
    cuda = StandInCuda(monkeypatch)
    recorder = CudaRecorder()
    for _ in range(3):
        recorder.record(torch.Tensor)
    (stream,) = cuda.streams

    assert cuda.recorded == [stream] * 3


def test_no_recording_begins_of_what_asks_the_host(monkeypatch):
    cuda = StandInCuda(monkeypatch)

    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaRecorder().record(cuda.wait)
    assert not cuda.recorded
    assert not cuda.refuses


def test_steps_of_as_many_rows_share_the_room_for_their_logits(runner):
    class Recorder(EagerRecorder):
        def record(self, call: Callable[[], Tensor]) -> Recording:
            return Recording(call, call())

    graphs = runner.record_steps(Recorder())
    graphs.record_sizes(5000)
    logits_of(runner, {"a": "kivi"})
    outputs = [recorded[1].output for recorded in graphs._recorded.values() if recorded]
    assert len(outputs) > len({x.data_ptr() for x in outputs}) == 1
    graphs.clear()
    assert not graphs._recorded


def test_a_cpu_records_nothing(runner):
    assert runner.graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["raw", "kivi", "kivi:bits=2", "int8", "alignedkv"])
def test_a_graph_gives_what_eager_kernels_give(tiny, codec):
    runner = Runner.load(str(tiny), device="cuda")
    codecs = dict.fromkeys("abc", codec)

    replayed = logits_of(runner, codecs)

    assert runner.graphs is not None
    assert runner.graphs._recorded
    assert all(runner.graphs._recorded.values())

    runner.graphs = None
    assert_alike(replayed, logits_of(runner, codecs))
