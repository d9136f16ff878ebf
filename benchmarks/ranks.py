"""What ranks cost: a decode step of two ranks beside one process with all threads.

    python -m benchmarks.ranks [--sequences 16] [--tokens 512] [--threads 2]

The model has SmolLM2's shape with 4 KV heads and 12 query heads, and random weights.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.model.runner import Runner
from disagg.worker.ranks import RankProcesses

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
RANKS = 2
STEPS = 24
TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--codec", default="raw")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        model.save_pretrained(folder)
        del model
        one = measure_one(folder, arguments)
        several = measure_ranks(folder, arguments)
    result = {"one_ms": one, "ranks_ms": several, "ratio": several / one}
    print(json.dumps({**vars(arguments), **result}))


def measure_one(folder: str, arguments: argparse.Namespace) -> float:
    """Milliseconds of a decode step in one process with all threads."""
    torch.set_num_threads(arguments.threads)
    runner = Runner.load(folder, "float32")
    return step_ms(Engine(runner, engine_config(arguments)), arguments)


def measure_ranks(folder: str, arguments: argparse.Namespace) -> float:
    """The same of two ranks with half the threads each."""
    torch.set_num_threads(max(1, arguments.threads // RANKS))
    processes = RankProcesses(RANKS, TIMEOUT_S, folder, "float32")
    try:
        runner = Runner.load(folder, "float32", group=processes.group)
        orders = processes.orders()
        engine = Engine(runner, engine_config(arguments), orders=orders)
        return step_ms(engine, arguments)
    finally:
        processes.close()


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        arena_bytes=2 << 30,
        max_sequences=arguments.sequences,
        speculative_tokens=0,
        prefix_cache=False,
    )


def step_ms(engine: Engine, arguments: argparse.Namespace) -> float:
    """The median of the decode steps that have all sequences."""
    params = SamplingParams(max_tokens=STEPS * 4, ignore_eos=True)
    for index in range(arguments.sequences):
        tokens = torch.arange(arguments.tokens).mul(7919 + index).remainder(49152)
        request = Request(str(index), tuple(tokens.tolist()), params, arguments.codec)
        engine.submit(Prefill(request))
    times: list[float] = []
    while len(times) < STEPS:
        began = time.perf_counter()
        output = engine.step()
        took = time.perf_counter() - began
        is_decoding = engine.load.running == arguments.sequences
        if len(output.tokens) == arguments.sequences and is_decoding:
            times.append(1e3 * took)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
