"""The order of prompts under load: engines whose model computes nothing, on a made-up clock.

Prompt i repeats the token i, so a batch shows how many tokens of each prompt it computes.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from disagg.codecs.planning import KVShape
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill, StepOutput
from disagg.engine.sequence import AGEING_S, Request, SamplingParams, urgency
from disagg.model.attention import Batch
from disagg.model.cache import Workspace

STEP_S = 0.05
BUDGET = 512
VOCAB = 4096
SHAPE = KVShape.uniform(1, 1, 64, "float32")


class Unwritten(Workspace):
    """Of a model that computes nothing: no number in it means anything."""

    def largest(self) -> list[float]:
        return []


@dataclass
class Load:
    """An engine over a model that answers token 0, and the tokens computed in every step.

    steps: per step, its start, and tokens by prompt
    """

    arena_bytes: int = 64 << 20
    now: float = 0.0
    steps: list[tuple[float, Counter[int]]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    born: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        info = SimpleNamespace(eos_ids=(), context_length=1 << 20, vocab_size=VOCAB)
        info.media_ids = ()
        info.dtype, device = "float32", torch.device("cpu")
        runner: Any = SimpleNamespace(
            has_pieces=False,
            shape=SHAPE,
            info=info,
            device=device,
            forward=self.forward,
        )
        runner.workspace = lambda total, rooms: Unwritten(SHAPE.layers, total, rooms)
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
        self.lengths[name] = length
        self.born[name] = self.now
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(str(name), (name,) * length, params, "raw")
        self.engine.submit(Prefill(request, waited_s=waited_s))

    def keys(self, backlog: dict[int, int], now: float) -> dict[int, tuple]:
        """The order of prompts with tokens left, the most urgent least."""
        return {
            name: (urgency(tokens, now - self.born[name]), name)
            for name, tokens in backlog.items()
        }

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

    def backlogs(self) -> Iterator[tuple[float, dict[int, int], Counter[int]]]:
        """Per step: its time, the tokens left of each prompt that had come, those computed."""
        remaining = dict(self.lengths)
        for now, done in self.steps:
            backlog = {
                name: tokens
                for name, tokens in remaining.items()
                if tokens and self.born[name] <= now
            }
            yield now, backlog, done
            for name, count in done.items():
                remaining[name] -= count


def serve_long_and_mixed() -> Load:
    """8 long prompts, and 40 of 4 to 1,500 tokens that come while those are computed."""
    pick = random.Random(1)
    load = Load()
    long = [(0.1 * i, 1500) for i in range(8)]
    mixed = [(pick.uniform(0, 3), pick.randint(4, 1500)) for _ in range(40)]
    load.serve(long + mixed)
    return load


def test_a_prompt_waits_only_for_more_urgent_ones():
    load = serve_long_and_mixed()
    assert len(load.lengths) == 48
    for now, backlog, done in load.backlogs():
        keys = load.keys(backlog, now)
        for name in backlog:
            is_waiting = done[name] < backlog[name]
            if is_waiting:
                assert all(keys[x] <= keys[name] for x in done)
                assert done.total() == BUDGET


def test_a_prompt_takes_no_more_steps_than_the_work_ahead_of_it():
    """Work that was more urgent when they met, and its own."""
    load = serve_long_and_mixed()
    work_ahead: Counter[int] = Counter()
    met: set[tuple[int, int]] = set()
    steps: Counter[int] = Counter()
    for now, backlog, _ in load.backlogs():
        keys = load.keys(backlog, now)
        steps.update(backlog.keys())
        for name, other in product(backlog, backlog):
            if (name, other) not in met and keys[other] <= keys[name]:
                work_ahead[name] += backlog[other]
            met.add((name, other))
    for name in load.lengths:
        # the chunk being computed when it came is not counted: it was submitted after that
        assert steps[name] <= math.ceil(work_ahead[name] / BUDGET)


def test_a_prompt_that_waited_for_its_worker_is_as_old_there():
    load = Load()
    load.submit(1, 1000)
    load.submit(2, 1500, waited_s=AGEING_S)
    load.step()
    assert load.steps[0][1] == {2: BUDGET}


def test_endless_short_prompts_hold_a_long_one_back_for_a_bounded_time():
    load = Load()
    name = 1
    load.submit(1, 1500)
    while not any(token.rid == "1" for token in load.step().tokens):
        for _ in range(6):  # more than a step can compute
            name += 1
            load.submit(name, 100)
    passing_s = AGEING_S * math.log2(1500 / 100)
    backlog = (6 * 100 - BUDGET) * passing_s / STEP_S  # of prompts before that time
    work_s = (1500 + backlog) / BUDGET * STEP_S
    assert passing_s < load.now <= passing_s + work_s + 2 * STEP_S


def test_small_prompts_pass_a_large_one_without_room_but_not_for_ever():
    load = Load(arena_bytes=2 << 20)  # 4,096 tokens
    name = 12
    large = 2600
    for early in (11, 12):
        load.submit(early, 1200, max_tokens=20)
    load.step()
    load.submit(1, large)
    num_refusals = 0
    while not any(done[1] for _, done in load.steps):
        name += 1
        load.submit(name, 400, max_tokens=20)
        load.step()
        if not load.engine.may_reserve():
            num_refusals += 1
    passed = {x for _, done in load.steps for x in done if x > 12}
    last = load.born[1] + AGEING_S * math.log2(large / 400)
    assert num_refusals
    assert len(passed) > 10
    assert all(load.born[x] <= last for x in passed)


def test_a_running_step_says_for_how_long_it_has_stalled():
    class Slow(Load):
        stalls: ClassVar[list[float]] = []

        def forward(self, batch: Batch) -> Tensor:
            logits = super().forward(batch)
            self.stalls.append(self.engine.progress.stalled_s)
            return logits

    load = Slow()
    load.submit(1, length=5)

    load.step()

    assert load.stalls == [STEP_S]
    assert load.engine.progress.stalled_s == 0
    assert load.engine.progress.num_steps == 1


def test_a_step_that_breaks_is_no_stalled_step():
    class Broken(Load):
        def forward(self, batch: Batch) -> Tensor:
            raise ValueError("no")

    load = Broken()
    load.submit(1, length=5)

    load.engine.step()
    load.now += 100

    assert load.engine.progress.stalled_s == 0
