"""What prompts of hybrid models compute, with snapshots of their states and without.

    python -m benchmarks.prefixes --json --out FILE

One engine computes prompts one after another, with random weights of a hybrid's kind: a chat whose
turns grow, questions behind one system prompt, and prompts that share nothing. Tokens are random
too. Processor time is of the whole process, with one thread, in one run.
"""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from typer import Option

from benchmarks import command
from disagg.bench.result import Row, progress, result_of
from disagg.cli.bench import Out, show
from disagg.cli.options import Json
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.model.runner import Runner

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "delta": SIZES
    | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    | {"layer_types": LAYERS, "head_dim": 64, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 64}
    | {"linear_value_head_dim": 64},
    "mamba2": SIZES
    | {"model_type": "granitemoehybrid"}
    | {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": LAYERS}
    | {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64}
    | {"num_local_experts": 0, "shared_intermediate_size": 512},
}
TURNS = 8
FIRST_TURN, NEXT_TURN = 400, 150  # tokens; an answer and a question are a turn
QUESTIONS = 16
UNRELATED = 4
SYSTEM, QUESTION = 1024, 100  # tokens
NOTES = "computed tokens of all prompts; processor seconds; time to a first token in ms"

Prompt = tuple[int, ...]


def workloads() -> dict[str, list[Prompt]]:
    """Prompts in the order of their arrival."""
    source = random.Random(0)

    def text(tokens: int) -> Prompt:
        return tuple(source.choices(range(4000), k=tokens))

    lengths = accumulate([NEXT_TURN] * (TURNS - 1), initial=FIRST_TURN)
    chat = text(FIRST_TURN + NEXT_TURN * TURNS)
    system = text(SYSTEM)
    return {
        "a chat of 8 turns": [chat[:length] for length in lengths],
        "16 prompts behind a system prompt": [
            system + text(QUESTION) for _ in range(QUESTIONS)
        ],
        "4 prompts that share nothing": [
            text(SYSTEM + QUESTION) for _ in range(UNRELATED)
        ],
    }


def random_hybrid(model: str) -> Runner:
    """A model of a kind with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        return Runner.random(folder, "float32", "cpu")


def measure(runner: Runner, prompts: Sequence[Prompt], share: float) -> Row:
    """Compute prompts with an engine of their own."""
    engine = Engine(runner, EngineConfig(snapshot_share=share))
    one_token = SamplingParams(max_tokens=1)
    ttft_ms = []
    began_s = time.process_time()
    for number, prompt in enumerate(prompts):
        request = Request(str(number), prompt, one_token, "raw")
        arrived_s = time.perf_counter()
        engine.submit(Prefill(request))
        while not engine.idle:
            engine.step()
        ttft_ms.append(1e3 * (time.perf_counter() - arrived_s))
    return {
        "snapshot_share": share,
        "prompt_tokens": sum(map(len, prompts)),
        "computed_tokens": engine.counts["computed_tokens"],
        "cpu_s": round(time.process_time() - began_s, 3),
        "median_ttft_ms": round(median(ttft_ms), 1),
        "last_ttft_ms": round(ttft_ms[-1], 1),
        "cached_bytes": engine.pool.cached_bytes,
    }


def measure_all(models: Sequence[str]) -> Row:
    """Every workload with every model, without snapshots and with them."""
    torch.set_num_threads(1)
    rows = []
    for model in progress(models, str):
        runner = random_hybrid(model)
        measure(runner, [tuple(range(100))], share=0)  # warms up
        for name, prompts in workloads().items():
            for share in (0, EngineConfig.snapshot_share):
                row = {
                    "model": model,
                    "workload": name,
                    "state_bytes": runner.shape.state_bytes,
                }
                rows.append(row | measure(runner, prompts, share))
    return result_of(rows, NOTES)


def prefixes(
    model: list[str] | None = Option(
        None, help=f"{', '.join(MODELS)}; may be repeated; default: all."
    ),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tokens and processor time of prompts with and without snapshots of states."""
    show(measure_all(model or [*MODELS]), out, as_json)


if __name__ == "__main__":
    command.main(prefixes, "prefixes")
