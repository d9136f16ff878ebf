"""Whose turn it is under load: engines whose model computes nothing, on a clock of their own.

Prompt i is made of the token i alone, so a batch says how much of whom it computes.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from disagg.codecs.planning import KVShape
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill, StepOutput
from disagg.engine.sequence import AGEING_S, Request, SamplingParams, urgency
from disagg.model.attention import Batch
from disagg.model.cache import Workspace

STEP_S, BUDGET, VOCAB = 0.05, 512, 4096
SHAPE = KVShape(num_layers=1, heads=1, head_dim=64, dtype="float32", windows=(None,))


@dataclass
class Load:
    """An engine over a model that says token 0, and what it computed in every step.

    steps: per step, when it began, and tokens by prompt
    """

    arena_bytes: int = 64 << 20
    now: float = 0.0
    steps: list[tuple[float, Counter[int]]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    born: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        info = SimpleNamespace(eos_ids=(), context_length=1 << 20, vocab_size=VOCAB)
        info.dtype, device = "float32", torch.device("cpu")
        runner: Any = SimpleNamespace(
            shape=SHAPE, info=info, device=device, forward=self.forward
        )
        runner.workspace = lambda total, rooms: Workspace(1, 1, total, 64, rooms)
        config = EngineConfig(
            BUDGET, max_sequences=64, arena_bytes=self.arena_bytes, watermark=0
        )
        self.engine = Engine(runner, config, clock=lambda: self.now)

    def forward(self, batch: Batch) -> Tensor:
        self.steps.append((self.now, Counter(batch.tokens)))
        self.now += STEP_S
        return torch.zeros(len(batch.outputs), VOCAB)

    def submit(
        self, name: int, length: int, max_tokens: int = 1, waited_s: float = 0.0
    ) -> None:
        self.lengths[name], self.born[name] = length, self.now
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(str(name), (name,) * length, params, "raw")
        self.engine.submit(Prefill(request, waited_s=waited_s))

    def step(self) -> StepOutput:
        output = self.engine.step()
        assert not output.failed
        return output

    def serve(self, arrivals: list[tuple[float, int]]) -> None:
        """Submit prompts of given lengths when their time has come; until all are computed."""
        pending = sorted(arrivals)
        while pending or not self.engine.idle:
            while pending and pending[0][0] <= self.now:
                self.submit(len(self.lengths) + 1, pending.pop(0)[1])
            self.step()
            if self.engine.idle and pending:
                self.now = max(self.now, pending[0][0])

    def lefts(self) -> Iterator[tuple[float, dict[int, int], Counter[int]]]:
        """Per step: when, what was left of every prompt that was there, and what was computed."""
        left = dict(self.lengths)
        for now, done in self.steps:
            there = {x: left[x] for x in left if left[x] and self.born[x] <= now}
            yield now, there, done
            for name, count in done.items():
                left[name] -= count


def test_a_prompt_waits_only_for_those_with_less_work_left_and_one_chunk_of_a_longer_one():
    """8 long prompts, and 40 of 4 to 1,500 tokens that come while those are computed."""
    pick, load = random.Random(1), Load()
    long = [(0.1 * i, 1500) for i in range(8)]
    load.serve(long + [(pick.uniform(0, 3), pick.randint(4, 1500)) for _ in range(40)])
    assert len(load.lengths) == 48
    ahead = dict.fromkeys(load.lengths, 0)  # work that was more urgent when they met
    met: set[tuple[int, int]] = set()
    steps: Counter[int] = Counter()
    for now, left, done in load.lefts():
        keys = {x: (urgency(left[x], now - load.born[x]), x) for x in left}
        for one in left:
            steps[one] += 1
            for other in left:
                if (one, other) not in met:
                    met.add((one, other))
                    ahead[one] += left[other] if keys[other] <= keys[one] else 0
            if done[one] < left[one]:  # it waits, and for nobody with more to do
                assert all(keys[x] <= keys[one] for x in done)
                assert done.total() == BUDGET
    for (
        name
    ) in load.lengths:  # its submission waited for the chunk that was being computed
        assert steps[name] <= math.ceil(ahead[name] / BUDGET)


def test_a_prompt_that_waited_for_its_worker_is_as_old_there():
    load = Load()
    load.submit(1, 1000)
    load.submit(2, 1500, waited_s=AGEING_S)
    load.step()
    assert load.steps[0][1] == {2: BUDGET}


def test_short_prompts_without_end_hold_a_long_one_back_for_so_long_and_no_longer():
    load, name = Load(), 1
    load.submit(1, 1500)
    while not any(token.rid == "1" for token in load.step().tokens):
        for _ in range(6):  # more than a step can compute
            name += 1
            load.submit(name, 100)
    passing_s = AGEING_S * math.log2(1500 / 100)
    backlog = (6 * 100 - BUDGET) * passing_s / STEP_S  # of those who came before that
    assert (
        passing_s
        < load.now
        <= passing_s + (1500 + backlog) / BUDGET * STEP_S + 2 * STEP_S
    )


def test_small_prompts_pass_a_large_one_that_finds_no_room_but_not_for_ever():
    load, name, large = Load(arena_bytes=2 << 20), 12, 2600  # of 4,096 tokens
    for early in (11, 12):
        load.submit(early, 1200, max_tokens=20)
    load.step()
    load.submit(1, large)
    crowded = 0
    while not any(done[1] for _, done in load.steps):
        name += 1
        load.submit(name, 400, max_tokens=20)
        load.step()
        crowded += not load.engine.may_reserve()
    passed = {x for _, done in load.steps for x in done if x > 12}
    last = load.born[1] + AGEING_S * math.log2(large / 400)
    assert crowded
    assert len(passed) > 10
    assert all(load.born[x] <= last for x in passed)
