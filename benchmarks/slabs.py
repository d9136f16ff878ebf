"""How much of an arena its slabs can use: what is promised, what is held, what churn leaves.

    python -m benchmarks.slabs --json --out FILE

A real pool without memory. `rows`: prompts are allocated until one is refused, in an arena whose
slabs suit the codec (`listed`), or the default codec and two others. `kinds`: the same for models
with states, windows or latents, in a large and a small arena. `churn`: sequences of many lengths
come and go; how full the arena is whenever one is refused.
"""

import random
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import log2

from typer import Option

from benchmarks import command
from benchmarks.hybrid_bytes import PUBLISHED, Shape
from benchmarks.hybrid_bytes import shape_of as shape_of_config
from disagg.bench.result import Row, progress, result_of
from disagg.cli.bench import Out, show
from disagg.cli.options import Json
from disagg.codecs.planning import KVShape, makes_plan, parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.errors import CapacityError
from disagg.kv.arena import HostArena
from disagg.kv.page import make_state_layout
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.state import GroupState, allocate_groups
from disagg.model.capacity import slab_bytes_for, tokens_that_fit

MIB = 1 << 20
GIB = 1 << 30
STATE = make_state_layout([("recurrent0", "float32", (32, 128, 128))])


def shape_of(
    layers: int, heads: int, head_dim: int, dtype: str, states: int
) -> KVShape:
    """The KV shape of a model without windows; `states`: layers that keep 2 MiB."""
    shape = KVShape.uniform(layers, heads, head_dim, dtype)
    return replace(shape, states=(STATE,) * states)


MODELS = {
    "Llama 3.1 8B": shape_of(32, 8, 128, "bfloat16", 0),
    "Llama 3.1 70B": shape_of(80, 8, 128, "bfloat16", 0),
    "Qwen2.5 7B": shape_of(28, 4, 128, "bfloat16", 0),
    "SmolLM2 135M": shape_of(30, 3, 64, "float32", 0),
    "a hybrid": shape_of(8, 2, 256, "bfloat16", 24),
}
CODECS = (
    "banded:bits=3",
    "banded:bits=2",
    "kivi:bits=4,residual=64",
    "kivi:bits=2",
    "fp8",
    "int8",
    "raw",
    "gear:bits=2",
    "gear-l:bits=2",
    "ott",
    "kcvt",
    "decoquant",
)
KINDS = {
    "Qwen/Qwen3.5-27B": "states",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "states",
    "nvidia/Gemma-4-31B-IT-NVFP4": "windows",
    "openai/gpt-oss-20b": "windows",
    "deepseek-ai/DeepSeek-V3": "latents",
}
KIND_ARENAS = (40 * GIB, 8 * GIB)
THREE = (DEFAULT_CODEC, "fp8", "raw")
EIGHT = (*CODECS[:1], *CODECS[2:8], "ott")
TOKENS = 8192
CHURN = (
    ("Llama 3.1 8B", 256 * MIB, (64, 4096)),
    ("Llama 3.1 8B", 2 * GIB, (64, 4096)),
    ("SmolLM2 135M", 256 * MIB, (64, 4096)),
)
MIXES = {"banded": CODECS[:1], "four": ("raw", "fp8", *CODECS[:3:2]), "eight": EIGHT}
NOTES = (
    "tokens in prompts of 8,192; held_of_promised: what the pool takes of what models check says; "
    "used: bytes of records in a full arena"
)


class Nowhere(HostArena):
    """An arena without memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(bytearray())
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def zero(self, spans: object) -> None:
        """There are no bytes."""


def measure_slabs(churn_steps: int) -> Row:
    """Rows for every model and codec, and what churn leaves."""
    cases = [(model, 40 * GIB, TOKENS) for model in MODELS]
    rows = [row for case in progress(cases, str) for row in compare(*case)]
    kinds = [row for model in progress(KINDS, str) for row in kind_rows(model)]
    churn = [
        churn_row(*case, mix, churn_steps)
        for case in progress(CHURN, str)
        for mix in MIXES
    ]
    return result_of(rows, NOTES, kinds=kinds, churn=churn)


def compare(model: str, arena_bytes: int, tokens: int) -> Iterator[Row]:
    """Rows of every codec: listed alone, and beside the default and two others."""
    for spec in CODECS:
        yield fill_row(model, arena_bytes, tokens, spec, [spec])
    for spec in THREE:
        yield fill_row(model, arena_bytes, tokens, spec, THREE)


def kind_rows(model: str) -> Iterator[Row]:
    """Rows of every codec that fits a model whose layers differ."""
    specs = [spec for spec in CODECS if makes_plan(spec, shape_named(model))]
    for arena_bytes, spec in product(KIND_ARENAS, specs):
        row = fill_row(model, arena_bytes, TOKENS, spec, [spec])
        yield {"kind": KINDS[model], **row, "asked": spec}


@cache
def shape_named(model: str) -> KVShape:
    """The KV shape of one of `MODELS` or `KINDS`."""
    return MODELS.get(model) or shape_of_config(Shape(model, PUBLISHED))


def fill_row(
    model: str, arena_bytes: int, tokens: int, spec: str, listed: Sequence[str]
) -> Row:
    """What an arena is said to hold under a codec, and what it holds."""
    plan = parse_plan(spec, shape_named(model))
    pool = _pool(model, arena_bytes, tokens, listed)
    promised = tokens_that_fit(plan, pool, tokens)
    held = _fill(pool, plan, tokens)
    record_bytes = [shape.nbytes for shape in plan.records(plan.full(tokens))]
    return {
        "model": model,
        "arena_bytes": arena_bytes,
        "codec": plan.spec,
        "listed": len(listed),
        "slab_bytes": pool.slab_bytes,
        "record_bytes": sorted(record_bytes),
        "promised_tokens": promised,
        "held_tokens": held,
        "held_of_promised": held / promised,
        "used": pool.used_bytes / arena_bytes,
    }


def _pool(model: str, arena_bytes: int, tokens: int, listed: Sequence[str]) -> Pool:
    shape = shape_named(model)
    plans = [parse_plan(each, shape) for each in listed]
    slab_bytes = slab_bytes_for(shape, plans, arena_bytes, tokens)
    return Pool(Nowhere(arena_bytes), slab_bytes)


def _fill(pool: Pool, plan: Plan, tokens: int) -> int:
    """Tokens of prompts until one is refused, and of the longest one that then fits."""
    held = 0
    while _fits(pool, plan, tokens):
        allocate_groups(plan, tokens, pool)
        held += tokens
    rest = bisect_left(range(1, tokens), True, key=lambda x: not _fits(pool, plan, x))
    if rest:
        allocate_groups(plan, rest, pool)
    return held + rest


def _fits(pool: Pool, plan: Plan, tokens: int) -> bool:
    """Whether a prompt is not refused."""
    try:
        states = allocate_groups(plan, tokens, pool)
    except CapacityError:
        return False
    pool.release([page for state in states for page in state.ids()])
    return True


def churn_row(
    model: str, arena_bytes: int, lengths: tuple[int, int], mix: str, steps: int
) -> Row:
    """How full an arena is when a sequence is refused, while others come and go."""
    chance = random.Random(0)
    specs = MIXES[mix]
    plans = [parse_plan(spec, MODELS[model]) for spec in specs]
    pool = _pool(model, arena_bytes, lengths[1], specs)
    least, most = map(log2, lengths)
    sequences: list[tuple[GroupState, ...]] = []
    fills = []
    for _ in range(steps):
        plan = chance.choice(plans)
        tokens = int(2 ** chance.uniform(least, most))
        try:
            sequences.append(allocate_groups(plan, tokens, pool))
        except CapacityError:
            fills.append(pool.used_bytes / arena_bytes)
            num_ends = min(len(sequences), chance.randint(1, 1 + len(sequences) // 4))
            for _ in range(num_ends):
                ended = sequences.pop(chance.randrange(len(sequences)))
                pool.release([page for state in ended for page in state.ids()])
    pool.check_integrity()
    return {
        "model": model,
        "arena_bytes": arena_bytes,
        "codecs": mix,
        "slab_bytes": pool.slab_bytes,
        "refusals": len(fills),
        "full_median": statistics.median(fills),
        "full_least": min(fills),
    }


def slabs(
    churn_steps: int = Option(3000, help="Sequences that arrive at each arena."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How much of an arena its slabs can use."""
    show(measure_slabs(churn_steps), out, as_json)


if __name__ == "__main__":
    command.main(slabs, "slabs")
