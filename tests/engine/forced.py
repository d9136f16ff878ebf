"""Make an engine say given tokens, and keep the logits that it would have chosen from.

Answers of two runs may differ where two tokens are nearly as likely, or where a number lies between
two codes. Logits of the same tokens always compare.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill, Token
from disagg.model.attention import Batch
from disagg.model.runner import Runner
from tests.engine.serving import MAX_STEPS, StandIn, make_engine, request
from tests.model.recorders import EagerRecorder
from tests.model.tiny import VOCAB

Logits = dict[str, Tensor]  # by request: [tokens, VOCAB]


class ForcedRunner(StandIn):
    """A runner whose next token depends on its position alone; `logits` are of the last step."""

    def __init__(self, runner: Runner):
        super().__init__(runner)
        self.logits = torch.empty(0, VOCAB)

    def forward(self, batch: Batch) -> Tensor:
        self.logits = self._runner.forward(batch)
        next_tokens = [token_at(batch.positions[row]) for row in batch.outputs]
        tokens = torch.tensor(next_tokens, dtype=torch.int64)
        return torch.nn.functional.one_hot(tokens, VOCAB).float()


def allowed(codec: str) -> float:
    """Relative, over a whole answer: rounding alone, or with some codes next to what they were.

    Noise also turns the eigenvectors that DecoQuant rotates by, where they are nearly equal.
    """
    return {"raw": 1e-4, "decoquant": 0.1}.get(codec, 0.02)


@dataclass(frozen=True)
class SampledToken:
    """A token of an answer, and the logits that it would have been chosen from.

    logits: [VOCAB] fp32; empty for a token that was known before
    """

    token: Token
    logits: Tensor


def token_at(position: int) -> int:
    """What the model says behind the token at a position."""
    return position * 7919 % (VOCAB - 4)


def make_forced(runner: Runner, **config: Any) -> tuple[Engine, ForcedRunner]:
    """An engine whose model says `token_at`."""
    forced = ForcedRunner(runner)
    return make_engine(forced, **config), forced


def collect(
    engine: Engine, forced: ForcedRunner, preempted: set[str] | None = None
) -> list[SampledToken]:
    """All tokens until nothing is left, in order; the pool must be whole and empty then.

    preempted: gets the requests that waited again when they had said something
    """
    tokens: list[SampledToken] = []
    for _ in range(MAX_STEPS):
        if engine.idle:
            break
        forced.logits = torch.empty(0, VOCAB)
        output = engine.step()
        assert not output.failed, output.failed
        if preempted is not None:
            preempted |= {x.rid for x in engine._scheduler.waiting if x.emitted}
        num_repeated = len(output.tokens) - len(
            forced.logits
        )  # said once more, before the step
        rows = [torch.empty(0)] * num_repeated + list(forced.logits)
        tokens += [
            SampledToken(*pair) for pair in zip(output.tokens, rows, strict=True)
        ]
    assert engine.idle
    engine.pool.check_integrity()
    assert engine.pool.used_bytes == 0
    return tokens


def forced_logits(
    runner: Runner,
    prompts: Mapping[str, Sequence[int]],
    codecs: Mapping[str, str],
    max_tokens: int,
    **config: Any,
) -> Logits:
    """Serve prompts that arrive together, each with a codec of its own; the pool ends up empty."""
    engine, forced = make_forced(runner, **config)
    for rid, prompt in prompts.items():
        engine.submit(Prefill(request(rid, prompt, codecs[rid], max_tokens)))
    logits: dict[str, list[Tensor]] = {rid: [] for rid in prompts}
    for sampled in collect(engine, forced):
        assert sampled.token.index == len(logits[sampled.token.rid])
        logits[sampled.token.rid].append(sampled.logits)
    return {rid: torch.stack(rows) for rid, rows in logits.items()}


def recorded_logits(
    runner: Runner,
    prompts: Mapping[str, Sequence[int]],
    codecs: Mapping[str, str],
    max_tokens: int,
    **config: Any,
) -> Logits:
    """The same where decode steps are recorded, from now on; most of them must be replays."""
    recorder = EagerRecorder()
    runner.record_steps(recorder)
    logits = forced_logits(runner, prompts, codecs, max_tokens, **config)
    assert recorder.replayed > recorder.recorded > 0
    return logits
