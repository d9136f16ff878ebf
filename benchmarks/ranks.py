"""What ranks cost: a decode step of two ranks beside one process with all threads.

    python -m benchmarks.ranks --json --out FILE

The model has SmolLM2's shape, but 4 KV heads and 12 query heads, and random weights. The two ranks
have half of the threads each.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer import Option

from benchmarks import command
from disagg.bench.result import Row, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.model.runner import Runner
from disagg.worker.ranks import RankProcesses

NOTES = (
    "milliseconds of a decode step of all sequences by the clock; medians of its steps"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
DTYPE = "float32"
RANKS = 2
STEPS = 24  # that are measured
TIMEOUT_S = 60.0
COLUMNS = ["sequences", "tokens", "one_ms", "ranks_ms", "ratio"]


@dataclass(frozen=True)
class RankOptions:
    """What to decode. tokens: of each prompt; threads: of all ranks together"""

    sequences: int = 16
    tokens: int = 512
    threads: int = os.cpu_count() or 1
    codec: str = "raw"


def measure_ranks(options: RankOptions) -> Row:
    """A step of one process, then of a group."""
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
        one_ms = _step_ms(_one_engine(Path(folder), options), options)
        with _group_engine(Path(folder), options) as engine:
            ranks_ms = _step_ms(engine, options)
    row = {
        "sequences": options.sequences,
        "tokens": options.tokens,
        "threads": options.threads,
        "codec": options.codec,
        "one_ms": one_ms,
        "ranks_ms": ranks_ms,
        "ratio": ranks_ms / one_ms,
    }
    return result_of([row], NOTES)


def _one_engine(folder: Path, options: RankOptions) -> Engine:
    torch.set_num_threads(options.threads)
    return Engine(Runner.load(str(folder), DTYPE), _engine_config(options))


@contextmanager
def _group_engine(folder: Path, options: RankOptions) -> Iterator[Engine]:
    """The engine of rank 0, until the end."""
    torch.set_num_threads(max(1, options.threads // RANKS))
    processes = RankProcesses(RANKS, TIMEOUT_S, str(folder), DTYPE)
    try:
        runner = Runner.load(str(folder), DTYPE, group=processes.group)
        yield Engine(runner, _engine_config(options), orders=processes.orders())
    finally:
        processes.close()


def _engine_config(options: RankOptions) -> EngineConfig:
    return EngineConfig(
        arena_bytes=2 << 30,
        max_sequences=options.sequences,
        speculative_tokens=0,
        prefix_cache=False,
    )


def _step_ms(engine: Engine, options: RankOptions) -> float:
    """The median of the decode steps that have all sequences."""
    params = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True)
    for number in range(options.sequences):
        prompt = torch.arange(options.tokens).mul(7919 + number)
        tokens = prompt.remainder(SHAPE["vocab_size"]).tolist()
        request = Request(str(number), tuple(tokens), params, options.codec)
        engine.submit(Prefill(request))
    times: list[float] = []
    while len(times) < STEPS:
        began = time.perf_counter()
        output = engine.step()
        spent_s = time.perf_counter() - began
        is_decoding = engine.load.running == options.sequences
        if is_decoding and len(output.tokens) == options.sequences:
            times.append(1e3 * spent_s)
    return statistics.median(times[1:])


def draw(result: Row) -> str:
    """The result as a table."""
    return table(result["rows"], COLUMNS)


def ranks(
    sequences: int | None = Option(None, min=1, help="Sequences that decode."),
    tokens: int | None = Option(None, min=1, help="Tokens of each prompt."),
    threads: int | None = Option(None, min=1, help="Threads of all ranks together."),
    codec: str | None = Option(None, help="The codec."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """A decode step of two ranks beside one process with all threads."""
    fields = without_none(
        sequences=sequences, tokens=tokens, threads=threads, codec=codec
    )
    show(measure_ranks(RankOptions(**fields)), out, as_json, draw)


if __name__ == "__main__":
    command.main(ranks, "ranks")
