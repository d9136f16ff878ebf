"""A worker of two ranks: the same answers as one process gives, and the end of the group."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.codecs.registry import codec_names
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.orders import StepOrder
from disagg.errors import ConfigError, ModelError, RanksLostError
from disagg.llm import LLM, SamplingParams
from disagg.model.capacity import check_model, check_ranks_of
from disagg.model.runner import Runner
from disagg.worker.ranks import RankProcesses
from tests.engine.serving import answers, make_engine, request, run_until_idle
from tests.model.tiny import random_prompt, save_tiny
from tests.processes import lives, wait_for
from tests.synthetic import relative_error

LENGTHS = (1, 63, 130, 130)  # the last one has the prefix of the one before it
CHUNK = 48
TOKENS = 20
TIMEOUT_S = 60.0
FAMILIES = [
    "gemma2",
    "gemma3_text",
    "granite",
    "mistral",
    "olmo",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
]


class TwoRanks:
    """A group of two processes with a tiny model, and the same model in this process alone."""

    def __init__(self, path: Path):
        self.processes = RankProcesses(2, TIMEOUT_S, str(path))
        self.runner = Runner.load(str(path), group=self.processes.group)

    def engine(self, **config: Any) -> Engine:
        config = {"arena_bytes": 32 << 20, "speculative_tokens": 0, **config}
        orders = self.processes.orders()
        return Engine(self.runner, EngineConfig(**config), orders=orders)


@pytest.fixture(scope="module")
def group(tiny: Path) -> Iterator[TwoRanks]:
    ranks = TwoRanks(tiny)
    yield ranks
    ranks.processes.close()


def serve(engine: Engine, codec: str, **sampling: Any) -> dict[str, list[int]]:
    for index, length in enumerate(LENGTHS):
        prompt = random_prompt(length)
        asked = request(f"r{index}", prompt, codec, TOKENS, **sampling)
        engine.submit(Prefill(asked))
    return answers(run_until_idle(engine))


class Watched:
    """A runner that keeps the logits of each step."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self._runner.forward(batch)
        self.logits.append(logits.clone())
        return logits


@pytest.mark.parametrize(
    "codec", ["raw", "kivi:bits=2,group=64,residual=64", "h2o", "gear"]
)
def test_two_ranks_answer_as_one_does(group, runner, codec):
    together = group.engine(max_batch_tokens=CHUNK)
    alone = make_engine(runner, max_batch_tokens=CHUNK)

    answered = serve(together, codec)

    assert answered == serve(alone, codec)


def test_two_ranks_sample_as_one_does(group, runner):
    sampling = {"temperature": 1.0, "seed": 5}

    answered = serve(group.engine(), "raw", **sampling)

    assert answered == serve(make_engine(runner), "raw", **sampling)


def test_a_cached_prefix_is_read_by_all_ranks(group, runner):
    engine = group.engine(max_batch_tokens=CHUNK)
    first = serve(engine, "raw")

    again = serve(engine, "raw")

    assert again == first == serve(make_engine(runner), "raw")
    assert engine.counts["cached_tokens"] > sum(LENGTHS) - len(LENGTHS) * CHUNK


def test_raw_logits_of_two_ranks_are_those_of_one(group, runner):
    together, alone = Watched(group.runner), Watched(runner)
    engine = group.engine(max_batch_tokens=CHUNK)
    engine._runner = together

    serve(engine, "raw")
    serve(make_engine(alone, max_batch_tokens=CHUNK, speculative_tokens=0), "raw")

    for logits, expected in zip(together.logits, alone.logits, strict=True):
        assert relative_error(logits, expected) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("codec", codec_names())
def test_every_codec_answers_on_two_ranks_as_on_one(group, runner, codec):
    assert serve(group.engine(), codec) == serve(make_engine(runner), codec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_give_the_logits_of_one_process(kind, tmp_path):
    folder = save_tiny(kind, tmp_path)
    ranks, alone = TwoRanks(folder), Watched(Runner.load(str(folder)))
    together = Watched(ranks.runner)
    engine = ranks.engine()
    engine._runner = together

    serve(engine, "raw")
    ranks.processes.close()
    serve(make_engine(alone), "raw")

    for logits, expected in zip(together.logits, alone.logits, strict=True):
        assert relative_error(logits, expected) < 5e-6


@pytest.mark.slow
def test_llm_of_two_ranks_answers_as_one_process(tiny):
    prompts = [random_prompt(n) for n in LENGTHS]
    params = SamplingParams(max_tokens=TOKENS)
    alone = LLM(str(tiny), codec="kivi").generate(prompts, params)
    threads = torch.get_num_threads()
    llm = LLM(str(tiny), codec="kivi", ranks=2)

    together = llm.generate(prompts, params)
    llm.close()

    assert torch.get_num_threads() == threads
    assert [x.tokens for x in together] == [x.tokens for x in alone]


@pytest.mark.slow
def test_a_killed_rank_ends_its_group(tiny):
    ranks = TwoRanks(tiny)
    engine = ranks.engine()
    (pid,) = ranks.processes.pids
    engine.submit(Prefill(request("a", random_prompt(20), "raw", 400)))
    engine.step()

    os.kill(pid, signal.SIGKILL)

    with pytest.raises(RanksLostError, match="rank"):
        run_until_idle(engine)
    assert "exit code -9" in ranks.processes.cause()
    ranks.processes.close()


@pytest.mark.slow
def test_a_frozen_rank_ends_its_group_after_the_timeout(tiny, monkeypatch):
    monkeypatch.setattr("tests.worker.test_ranks.TIMEOUT_S", 4.0)
    ranks = TwoRanks(tiny)
    engine = ranks.engine()
    (pid,) = ranks.processes.pids
    engine.submit(Prefill(request("a", random_prompt(20), "raw", 400)))
    engine.step()

    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(RanksLostError, match="imed out"):
        run_until_idle(engine)
    ranks.processes.close()
    assert ranks.processes.cause()


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why():
    """Such as on a host without the model. Rank 0 sees a closed socket."""
    processes = RankProcesses(2, TIMEOUT_S, "/no/such/model")

    with (
        pytest.raises(RanksLostError, match=r"rank 1: ModelError: .*/no/such/model"),
        processes.loading(),
    ):
        processes.group.sum(torch.ones(1))

    assert not any(map(lives, processes.pids))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_a_frozen_rank_ends_with_the_process_of_rank_0(tiny):
    code = (
        "import sys, time; from disagg.worker.ranks import RankProcesses;"
        "ranks = RankProcesses(2, 60.0, sys.argv[1]);"
        "print(*ranks.pids, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tiny)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        pid = int(rank_0.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        assert lives(pid)

        rank_0.kill()

    wait_for(lambda: not lives(pid), 30)


@pytest.mark.slow
def test_a_rank_outlives_the_thread_that_started_it(tiny):
    """The system would end it with the thread that is its parent."""
    with ThreadPoolExecutor() as pool:
        processes = pool.submit(RankProcesses, 2, TIMEOUT_S, str(tiny)).result()
    runner = Runner.load(str(tiny), group=processes.group)
    engine = Engine(
        runner, EngineConfig(arena_bytes=32 << 20), orders=processes.orders()
    )

    assert serve(engine, "raw")
    processes.close()


@pytest.mark.slow
def test_an_order_that_a_frozen_rank_does_not_read_ends_its_group(tiny, monkeypatch):
    """A socket holds 200 KB of orders; steps of long texts have more."""
    monkeypatch.setattr("tests.worker.test_ranks.TIMEOUT_S", 3.0)
    processes = TwoRanks(tiny).processes
    (pid,) = processes.pids
    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(RanksLostError, match="has read no order for too long"):
        processes.send(0, StepOrder(tokens=list(range(10**6))))
    processes.close()


def test_heads_that_ranks_cannot_share_are_refused(tmp_path):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    folder = save_tiny("llama", tmp_path, **heads)

    with pytest.raises(ModelError, match="has 3 KV heads, which 2 ranks cannot share"):
        check_ranks_of(str(folder), 2)


def test_fewer_kv_heads_than_ranks_are_refused(tiny):
    with pytest.raises(ModelError, match="has 2 KV heads, which 4 ranks"):
        check_ranks_of(str(tiny), 4)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("olmo2", "colwise_gather_output"),
        ("mixtral", "moe_tp_experts"),
        ("gpt2", "has no plan for tensor parallelism"),
        ("deepseek_v3", "has latent attention"),
        ("qwen3_next", "has layers with a state"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(kind, reason, tmp_path):
    folder = save_tiny(kind, tmp_path)

    with pytest.raises(ModelError, match=reason):
        check_ranks_of(str(folder), 2)


def test_tokens_that_fit_are_those_of_each_rank(tiny):
    alone = check_model(str(tiny), memory=1 << 30).codecs[0]
    together = check_model(str(tiny), memory=1 << 30, ranks=2).codecs[0]

    assert together.bytes_per_token < 0.6 * alone.bytes_per_token
    assert together.tokens > 1.8 * alone.tokens


def test_ranks_below_one_are_refused(tiny):
    with pytest.raises(ConfigError, match="ranks are 0"):
        LLM(str(tiny), ranks=0)
