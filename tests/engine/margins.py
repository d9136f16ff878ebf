"""Compare whole answers where two tokens may be as likely: a tie may fall either way.

A matrix product of another shape rounds in another order, by 1e-6 of a logit. Where the two best
logits are closer than `TIE` that can change a token, and with it all that follow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.model.attention import Batch
from disagg.model.runner import Runner
from tests.engine.serving import StandIn, make_engine, serve
from tests.model.reference import Reference

TIE = 1e-3  # logits


class WatchedRunner(StandIn):
    """A runner that notes how far ahead the best token of each row of logits was."""

    def __init__(self, runner: Runner):
        super().__init__(runner)
        self.margins: list[float] = []

    def forward(self, batch: Batch) -> Tensor:
        logits = self._runner.forward(batch)
        best = logits.topk(2).values
        self.margins += (best[:, 0] - best[:, 1]).tolist()
        return logits


def serve_watched(
    runner: Runner, prompt: Sequence[int], codec: str, max_tokens: int
) -> Reference:
    """The greedy continuation that an engine gives a prompt on its own, with its margins."""
    watched = WatchedRunner(runner)
    (tokens,) = serve(make_engine(watched), [prompt], codec, max_tokens)
    return Reference(tuple(tokens), tuple(watched.margins))


def assert_same(tokens: Sequence[int], expected: Reference) -> None:
    """Tokens are the expected ones, up to a tie in the second half of the answer, if any."""
    assert len(tokens) == len(expected.tokens) == len(expected.margins)
    differs = torch.tensor(list(tokens)) != torch.tensor(expected.tokens)
    if differs.any():
        index = int(differs.int().argmax())
        assert expected.margins[index] < TIE, (
            f"token {index} differs by {expected.margins[index]}"
        )
        assert 2 * index >= len(tokens), f"a tie at token {index}: take another prompt"
