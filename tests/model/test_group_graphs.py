"""Recorded steps of a group: the same collectives on every rank, and a graph on all or on none."""

import os
from dataclasses import replace
from socket import create_server
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from disagg.engine.messages import Prefill
from disagg.engine.warm import warm_up
from disagg.errors import RanksLostError
from disagg.model import static
from disagg.model.attention import PartSizes
from disagg.model.rank_group import NCCL_SETTINGS, RankGroup, open_store
from disagg.model.runner import Runner
from tests.engine.serving import answers, make_engine, request, run_until_idle
from tests.model.rank_threads import RankThreads
from tests.model.recorders import EagerRecorder
from tests.model.tiny import random_prompt

LENGTHS = (20, 70)
TOKENS = 6
AGREE = ("max", (1,))


@pytest.fixture(scope="module")
def ranks(tiny) -> RankThreads:
    return RankThreads(str(tiny))


def serve(engine: Any, codec: str = "raw") -> dict[str, list[int]]:
    for length in LENGTHS:
        asked = request(str(length), random_prompt(length), codec, TOKENS)
        engine.submit(Prefill(asked))
    return answers(run_until_idle(engine))


def serve_on(ranks: RankThreads, codec: str = "raw") -> dict[str, list[int]]:
    tokens = serve(ranks.engine(), codec)
    ranks.wait()
    return tokens


def test_a_recorded_step_has_two_sums_a_layer_and_one_gather(ranks):
    recorders = [rank.record() for rank in ranks.ranks]

    serve_on(ranks)

    (first, *_), others = recorders[0].captures, recorders[1].captures
    layers = len(ranks.ranks[0].runner.info.layers)
    assert [name for name, _ in first] == ["sum", "sum"] * layers + ["gather"]
    assert recorders[0].captures == others


def test_all_ranks_replay_the_collectives_that_they_recorded(ranks, runner):
    recorders = [rank.record() for rank in ranks.ranks]

    tokens = serve_on(ranks, "kivi")

    assert recorders[0].replays == recorders[1].replays
    assert len(recorders[0].replays) > len(recorders[0].captures)
    for number, run in recorders[0].replays:
        assert run == recorders[0].captures[number]
    assert tokens == serve(make_engine(runner), "kivi")


def test_ranks_connect_before_a_recording_and_agree_around_it(ranks):
    recorders = [rank.record() for rank in ranks.ranks]
    serve_on(ranks)
    (step, *_) = recorders[0].captures

    for rank in ranks.ranks:
        begin = rank.collectives.run.index(AGREE)
        expected = [AGREE, AGREE, *step, AGREE, *step]  # buffers, rehearsal, recording
        assert rank.collectives.run[begin : begin + len(expected)] == expected


@pytest.mark.parametrize(
    ("broken_rank", "method"), [(0, "capture"), (1, "capture"), (1, "warm_up")]
)
def test_what_one_rank_cannot_record_runs_on_all_without(
    ranks, runner, broken_rank, method
):
    recorders = [
        rank.record(method if number == broken_rank else "")
        for number, rank in enumerate(ranks.ranks)
    ]

    tokens = serve_on(ranks)

    assert not any(recorder.replays for recorder in recorders)
    for rank in ranks.ranks:
        assert not any(rank.runner.graphs._recorded.values())
    assert ranks.ranks[0].collectives.run == ranks.ranks[1].collectives.run
    assert tokens == serve(make_engine(runner))


def test_after_the_start_no_rank_records(ranks):
    recorders = [rank.record() for rank in ranks.ranks]
    engine = ranks.engine()
    warm_up(engine, ranks.ranks[0].runner, ["raw"], 2, print)
    recorded = [len(recorder.captures) for recorder in recorders]

    serve(engine)
    ranks.wait()

    assert [len(recorder.captures) for recorder in recorders] == recorded
    assert recorded[0] == recorded[1] > 0


def test_a_rank_without_the_step_that_is_replayed_ends(tiny):
    runner, batches = Runner.load(str(tiny)), list[Any]()
    forward = runner.forward
    engine = make_engine(runner)
    engine._runner.forward = lambda batch: (batches.append(batch), forward(batch))[1]
    serve(engine)
    runner.record_steps(EagerRecorder())
    batch = runner.prepare(batches[-1])
    (part,) = static.parts_of(batch)

    with pytest.raises(RanksLostError, match="a step of 2 rows and 1024 tokens"):
        forward(replace(batch, recordings=(PartSizes(static.size_of(part)),)))


@pytest.fixture
def nccl(monkeypatch) -> Mock:
    """Stands for NCCL, which no CPU has."""
    library = Mock()
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", library, raising=False)
    for name in NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return library


def gpu_group() -> RankGroup:
    store = open_store(create_server(("127.0.0.1", 0)))
    group = RankGroup(store, 0, 1, 0.0, "cuda")
    group.begin_serving()
    return group


def test_collectives_of_gpus_run_in_the_stream_that_is_recorded(nccl):
    group = gpu_group()
    group._group.allreduce.return_value = None
    group._group._allgather_base.return_value = None

    group.sum(torch.zeros(2))
    group.gather_columns(torch.zeros(2, 3), [3])

    _, reducing = group._group.allreduce.call_args.args
    *_, gathering = group._group._allgather_base.call_args.args
    assert not reducing.asyncOp
    assert not gathering.asyncOp


def test_nccl_connects_ranks_before_recordings(nccl, monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")

    gpu_group()

    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_step_whose_other_rank_hangs_ends_the_group(nccl, monkeypatch, has_ended):
    """torch watches no collective that is replayed."""
    monkeypatch.setattr("torch.cuda.Event", lambda: Mock(query=lambda: False))
    group = gpu_group()
    if has_ended:
        group.abandon()

    with pytest.raises(RanksLostError, match="ended" if has_ended else "timed out"):
        group.finish(torch.device("cuda"))


def test_recorded_steps_end_before_the_group(nccl, runner, monkeypatch):
    ends: list[str] = []
    graphs = Mock(clear=lambda: ends.append("graphs"))
    group = gpu_group()
    group._group.abort = lambda: ends.append("group")
    monkeypatch.setattr(runner, "group", group)
    monkeypatch.setattr(runner, "graphs", graphs)

    runner.leave_group()

    assert ends == ["graphs", "group"]
