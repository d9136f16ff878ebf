"""Sequences of one codec that decode step by step, their contexts made up: what decode.py times."""

import time
from functools import lru_cache

import torch

from disagg.bench.kvgen import Knobs, generate
from disagg.bench.kvgen import Layer as Context
from disagg.bench.shape import slabs_for
from disagg.codecs.layer import write_prompt
from disagg.codecs.planning import codec_of, parse_plan
from disagg.codecs.seals import Growth
from disagg.codecs.tables import plan_step
from disagg.engine.arena import make_pool, slab_bytes_for
from disagg.model.attention import Batch, Decode
from disagg.model.runner import Runner
from disagg.plan import Plan
from disagg.state import GroupState, allocate_group

LAST_QUERIES = 32
SPARE_RECORDS = 10  # of every layout: a page of 128 raw tokens is 8, and what is begun


class Decoding:
    """Sequences of one codec that decode step by step."""

    def __init__(self, runner: Runner, spec: str, count: int, tokens: int, steps: int):
        self.plan = parse_plan(spec, runner.shape)
        self.times: list[tuple[float, float]] = []  # seconds of planning, and of all
        self._runner, self._n = runner, tokens
        slab = slab_bytes_for(*_sizes(runner))
        slabs = slabs_for(self.plan, tokens + steps, slab, count, SPARE_RECORDS)
        self._pool, self._arena = make_pool(slabs * slab, slab, runner.device)
        self._states = [
            [allocate_group(group, tokens, self._pool) for group in self.plan.groups]
            for _ in range(count)
        ]
        self._tokens = list(range(count))
        for states in self._states:
            _write_context(runner, self.plan, states, self._arena, tokens)

    def step(self) -> None:
        """One more token of every sequence."""
        began = time.perf_counter()
        device, freed = self._arena.device, list[int]()
        decodes = []
        for index, group in enumerate(self.plan.groups):
            growths = [Growth(s[index], self._n, 1, row) for row, s in enumerate(self._states)]
            step = plan_step(group, growths, self._pool, device)
            decodes.append(Decode(codec_of(group), step, whole=True))
            freed += step.freed
        count = len(self._tokens)
        batch = Batch(
            self._tokens, [self._n] * count, range(count), self._arena, decodes=tuple(decodes)
        )
        planned = time.perf_counter()
        self._tokens = self._runner.forward(batch).argmax(1).tolist()
        self._pool.release(freed)
        self._n += 1
        self.times.append((planned - began, time.perf_counter() - began))


def _write_context(
    runner: Runner, plan: Plan, states: list[GroupState], arena: torch.Tensor, tokens: int
) -> None:
    """Made-up K and V of a prompt, the same in every layer, encoded into the pages of a state."""
    _, heads, head_dim = _sizes(runner)
    made = make_context(tokens, heads, head_dim)
    k, v, q = (
        x.to(runner.device, getattr(torch, runner.info.dtype)) for x in (made.k, made.v, made.q)
    )
    for group, state in zip(plan.groups, states, strict=True):
        for layer in group.layers:
            write_prompt(codec_of(group), group, state, layer, arena, k, v, 0, tokens, q)


@lru_cache(maxsize=1)
def make_context(tokens: int, heads: int, head_dim: int) -> Context:
    """K and V of one layer, and the last queries."""
    queries = min(LAST_QUERIES, tokens)
    return generate(
        0, Knobs(kv_heads=heads, group=2, n=tokens, head_dim=head_dim, num_queries=queries)
    )


def _sizes(runner: Runner) -> tuple[int, int, int]:
    return runner.shape.num_layers, runner.shape.heads, runner.shape.head_dim
