"""Step 5: decode steps of an 8B model with random weights, under CUDA graphs, by codec.

A step is plan, forward pass and greedy choice, for all streams. Beside every codec
stand raw pages, and transformers' static cache with `torch.compile`. Weights are fp16,
as K and V are, so that the kernels are those that the other steps compiled.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from benchmarks.gpu import cases
from benchmarks.gpu.compiling import Compiles
from benchmarks.gpu.setting import Setting
from disagg.bench.decode import (
    MODELS,
    RAW,
    SPARE_RECORDS,
    WARM_UP,
    Decoding,
    random_model,
)
from disagg.bench.inputs import slabs_for
from disagg.bench.result import Row
from disagg.codecs.planning import parse_plan
from disagg.kv.plan import Plan
from disagg.model.capacity import slab_bytes_for
from disagg.model.runner import Runner

CODECS = cases.DECODED
SIZES = (
    *((8, 8192), (32, 2048), (1, 32768), (32, 8192), (0, 8192), (1, 2048)),
    *((8, 32768), (0, 2048), (0, 32768), (1, 8192), (8, 2048), (32, 32768)),
)  # streams x tokens; 0: as many as fit
TINY_CODECS, TINY_SIZES = (RAW, cases.KIVI), ((2, 48),)
STATIC_SIZES = ((8, 8192), (8, 2048))
STEPS, TINY_STEPS = 12, 2
MOST_STREAMS = 256
FREE_SHARE = 0.85  # of free memory, for pages; the rest is for graphs and activations
ROW_S = 6.0  # that a row takes, about
STATIC_S = 45.0  # kept for the last rows: compiling takes most of it


@dataclass(frozen=True)
class Size:
    """A number of streams and their tokens."""

    streams: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.streams}x{self.tokens}"


def rows(setting: Setting) -> Iterator[Row]:
    """A row for every size and codec, then those of the static cache.

    step_ms, plan_ms: medians; plan: of it on the host · ratio: to raw pages of the same
    size
    resident_bytes: pages and tails of all streams · most: whether these are all that
    fit
    """
    model = "small" if setting.rehearsal else "8b"
    with torch.inference_mode():
        yield from _paged(setting, model)
    gc.collect()
    if not setting.rehearsal:
        torch.cuda.empty_cache()
    yield from static_rows(setting, model)


def _paged(setting: Setting, model: str) -> Iterator[Row]:
    device = setting.device.type
    runner = random_model(model, device, "float32" if setting.rehearsal else "float16")
    spare = 0.0 if setting.rehearsal else STATIC_S
    codecs, sizes = (TINY_CODECS, TINY_SIZES) if setting.rehearsal else (CODECS, SIZES)
    for streams, tokens in sizes:
        raw_ms: dict[str, float] = {}
        for spec in codecs:
            if setting.seconds_left < spare + ROW_S:
                return
            row = _row(
                runner,
                spec,
                streams,
                tokens,
                TINY_STEPS if setting.rehearsal else STEPS,
            )
            if spec == RAW and "step_ms" in row:
                raw_ms[row["size"]] = row["step_ms"]
            if row.get("size") in raw_ms:
                row["ratio"] = raw_ms[row["size"]] / row["step_ms"]
            yield row


def _row(runner: Runner, spec: str, streams: int, tokens: int, steps: int) -> Row:
    """One size and codec; streams 0: as many as fit."""
    plan = parse_plan(spec, runner.shape)
    fitting = _fitting(runner, _arena_bytes(runner, plan, tokens + WARM_UP + steps))
    size = Size(streams or min(fitting, MOST_STREAMS), tokens)
    row: Row = {"codec": spec, "size": size.name, "most": not streams}
    if size.streams > fitting:
        return row | {"reason": f"{fitting} streams fit"}
    began, compiles = time.monotonic(), Compiles()
    try:
        with compiles.counting():
            times = _time(runner, spec, size, steps)
    except Exception as error:
        result = row | {"failure": f"{type(error).__name__}: {error}"[:300]}
    else:
        result = row | times | {"resident_bytes": size.streams * plan.nbytes(tokens)}
    _forget(runner)
    return result | {"compiled": compiles.count, "took_s": time.monotonic() - began}


def _time(runner: Runner, spec: str, size: Size, steps: int) -> Row:
    decoding = Decoding(runner, spec, size.streams, size.tokens, WARM_UP + steps)
    for _ in range(steps):
        decoding.step()
    plan_ms, step_ms = decoding.median_ms()
    graphs = [] if runner.graphs is None else list(runner.graphs._recorded.values())
    return {
        "step_ms": step_ms,
        "plan_ms": plan_ms,
        "tokens_per_s": 1e3 * size.streams / step_ms,
        "recorded": sum(x is not None for x in graphs),
        "unrecorded": graphs.count(None),
    }


def _arena_bytes(runner: Runner, plan: Plan, tokens: int) -> int:
    """What a stream takes of an arena, room to grow included."""
    streams = 8
    slab = slab_bytes_for(runner.shape, [plan], streams * plan.nbytes(tokens), tokens)
    return slab * slabs_for(plan, tokens, slab, streams, SPARE_RECORDS) // streams


def _fitting(runner: Runner, nbytes: int) -> int:
    """How many streams of this many bytes fit next to the model."""
    if runner.device.type != "cuda":
        return MOST_STREAMS
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    free -= torch.cuda.memory_allocated()
    return int(FREE_SHARE * free / nbytes)


def _forget(runner: Runner) -> None:
    """Let go of arenas, which recorded steps hold."""
    if runner.graphs is not None:
        runner.graphs.clear()
    gc.collect()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()


# -- transformers alone


def static_rows(setting: Setting, model: str) -> Iterator[Row]:
    """The same model on a static cache, compiled; sizes that there is time for."""
    device = setting.device
    sizes = TINY_SIZES if setting.rehearsal else STATIC_SIZES
    compiled: Row = (
        {"disable": True} if setting.rehearsal else {"mode": "reduce-overhead"}
    )
    try:
        plain = _plain_model(model, device)
    except Exception as error:
        yield {
            "codec": "static cache",
            "reason": f"{type(error).__name__}: {error}"[:300],
        }
        return
    for streams, tokens in sizes:
        size = Size(streams, tokens)
        row: Row = {"codec": "static cache", "size": size.name}
        if setting.seconds_left < ROW_S:
            return
        try:
            step_ms = _static_ms(
                plain, size, compiled, TINY_STEPS if setting.rehearsal else STEPS
            )
        except Exception as error:  # a baseline that does not run is no failure of ours
            yield row | {"reason": f"{type(error).__name__}: {error}"[:300]}
            continue
        yield row | {"step_ms": step_ms, "tokens_per_s": 1e3 * streams / step_ms}


def _plain_model(model: str, device: torch.device) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return module.eval().requires_grad_(False)


@torch.inference_mode()
def _static_ms(model: torch.nn.Module, size: Size, compiled: Row, steps: int) -> float:
    """Median milliseconds of a step; the cache is as full as it says, of no numbers."""
    device = next(model.parameters()).device
    most = size.tokens + WARM_UP + steps
    cache = StaticCache(config=model.config, max_cache_len=most)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, **compiled)
    tokens = torch.zeros(size.streams, 1, dtype=torch.int64, device=device)
    times: list[float] = []
    for index in range(WARM_UP + steps):
        began = time.perf_counter()
        position = torch.tensor([size.tokens + index], device=device)
        tokens = _static_step(forward, tokens, cache, position)
        tokens[0, 0].item()
        times.append(time.perf_counter() - began)
    return 1e3 * median(times[WARM_UP:])


def _static_step(
    forward: Callable, tokens: Tensor, cache: StaticCache, position: Tensor
) -> Tensor:
    if hasattr(torch.compiler, "cudagraph_mark_step_begin"):
        torch.compiler.cudagraph_mark_step_begin()
    positions = position.expand(len(tokens), 1)
    logits = forward(
        input_ids=tokens,
        position_ids=positions,
        cache_position=position,
        past_key_values=cache,
        use_cache=True,
    ).logits
    return logits[:, -1:].argmax(2).clone()


def headline(rows: list[Row]) -> list[str]:
    """Tokens a second by size: raw pages, the best codec, the static cache."""
    timed = [row for row in rows if "step_ms" in row]
    lines = []
    for size in dict.fromkeys(row["size"] for row in timed):
        rows_of_size = [row for row in timed if row["size"] == size]
        speeds = [f"{row['codec']} {row['tokens_per_s']:,.0f}" for row in rows_of_size]
        lines.append(f"{size}, tokens/s: {', '.join(speeds)}")
    return lines[:14]
