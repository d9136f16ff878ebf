"""The new text of an answer, with its log-probabilities and figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from disagg.engine.sequence import Logprobs as Logprobs
from disagg.parsers.parts import Part, joined_parts

# a token with its log-probabilities; the first token of a prompt has none
Score = tuple[int, Logprobs | None]


@dataclass(frozen=True)
class TextDelta:
    """New text of a choice. The last delta has the finish reason and the hand-off's figures.

    parts:      of an answer that a parser reads: what the new text adds to its thoughts, content
                and calls. `text` is empty then
    num_tokens: of the answer up to here
    num_predicted: tokens of the request's prediction that the answer has up to here
    num_thought: tokens of the answer's thoughts up to here
    finish_reason: "stop" or "length", which is also that of an answer with a call that is cut off
    scores:     tokens with their log-probabilities, if the request asks for them
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()
    num_predicted: int = 0
    parts: tuple[Part, ...] = ()
    num_thought: int = 0

    def slices(self, max_scores: int) -> Iterator["TextDelta"]:
        """This delta in slices of one chunk each.

        A slice has one part or a text, and at most so many log-probabilities. The finish reason
        has a slice of its own: some clients ignore a text beside it.
        """
        if self.finish_reason is None and self._fits(max_scores):
            yield self
            return
        end = replace(self, text="", parts=(), scores=())
        empty = replace(end, finish_reason=None)
        contents = [replace(empty, text=self.text)] if self.text else []
        contents += [replace(empty, parts=(part,)) for part in self.parts]
        scores = [
            self.scores[begin : begin + max_scores]
            for begin in range(0, len(self.scores), max_scores)
        ]
        for content, batch in zip_longest(contents, scores):
            yield replace(content or empty, scores=batch or ())
        if self.finish_reason is not None:
            yield end

    def _fits(self, max_scores: int) -> bool:
        return len(self.parts) <= 1 and len(self.scores) <= max_scores


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Consecutive deltas of a choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        parts=joined_parts([part for delta in deltas for part in delta.parts]),
        scores=tuple(score for delta in deltas for score in delta.scores),
    )
