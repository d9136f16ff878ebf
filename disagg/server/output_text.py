"""The new text of an answer, with its log-probabilities and figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.engine.sequence import Logprobs as Logprobs

# a token with its log-probabilities; the first token of a prompt has none
Score = tuple[int, Logprobs | None]


@dataclass(frozen=True)
class TextDelta:
    """New text of a choice. The last delta has the finish reason and the hand-off's figures.

    num_tokens: of the answer up to here
    num_predicted: tokens of the request's prediction that the answer has up to here
    scores:     tokens with their log-probabilities, if the request asks for them
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()
    num_predicted: int = 0

    def parts(self, max_scores: int) -> Iterator["TextDelta"]:
        """This delta in parts with at most so many log-probabilities, the text in the first one."""
        if len(self.scores) <= max_scores:
            yield self
            return
        text = self.text
        for begin in range(0, len(self.scores), max_scores):
            end = begin + max_scores
            is_last = end >= len(self.scores)
            yield replace(
                self,
                text=text,
                scores=self.scores[begin:end],
                finish_reason=self.finish_reason if is_last else None,
            )
            text = ""


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Consecutive deltas of a choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        scores=tuple(score for delta in deltas for score in delta.scores),
    )
