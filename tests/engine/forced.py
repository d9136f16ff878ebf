"""Make an engine say given tokens, and keep the logits that it would have chosen from.

Answers of two runs may differ where two tokens are nearly as likely, or where a number lies between
two codes. Logits of the same tokens always compare.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from disagg.engine.messages import Replay
from disagg.model.attention import Batch
from disagg.model.runner import Runner
from tests.engine.serving import MAX_STEPS, make_engine, request
from tests.model.tiny import VOCAB

Logits = dict[str, Tensor]  # by request: [tokens, VOCAB]


class ForcedRunner:
    """A runner whose next token depends on its position alone; `logits` are of the last step."""

    def __init__(self, runner: Runner):
        self.logits = torch.empty(0, VOCAB)
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Batch) -> Tensor:
        self.logits = self._runner.forward(batch)
        positions = torch.tensor([batch.positions[row] for row in batch.outputs])
        return torch.nn.functional.one_hot(positions * 7919 % (VOCAB - 4), VOCAB).float()


def forced_logits(
    runner: Runner,
    prompts: Mapping[str, Sequence[int]],
    codecs: Mapping[str, str],
    max_tokens: int,
    **config: Any,
) -> Logits:
    """Serve prompts that arrive together, each with a codec of its own; the pool ends up empty."""
    forced = ForcedRunner(runner)
    engine = make_engine(cast(Runner, forced), **config)
    for rid, prompt in prompts.items():
        engine.submit(Replay(request(rid, prompt, codecs[rid], max_tokens)))
    found: dict[str, list[Tensor]] = {rid: [] for rid in prompts}
    for _ in range(MAX_STEPS):
        if engine.idle:
            break
        output = engine.step()
        assert not output.failed, output.failed
        rows = forced.logits if output.tokens else ()
        for token, row in zip(output.tokens, rows, strict=True):
            assert token.index == len(found[token.rid])
            found[token.rid].append(row)
    assert engine.idle
    engine.pool.check_integrity()
    assert engine.pool.used_bytes == 0
    return {rid: torch.stack(rows) for rid, rows in found.items()}
