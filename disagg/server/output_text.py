"""From tokens to visible text: whole characters, and nothing after a stop string."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.engine.sequence import Logprobs as Logprobs
from disagg.model.tokenizer import Detokenizer

# a token with its log-probabilities; the first token of a prompt has none
Score = tuple[int, Logprobs | None]


@dataclass(frozen=True)
class TextDelta:
    """New text of a choice. The last delta has the finish reason and the hand-off's figures.

    num_tokens: of the answer up to here
    scores:     tokens with their log-probabilities, if the request asks for them
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()

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


class TextStream:
    """The text of one answer. Text that may begin a stop string is held back until that is clear.

    min_tokens: stop strings that end within this many tokens are ignored, as in vLLM
    hidden:     tokens that have no text
    """

    def __init__(
        self,
        decoder: Detokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: Collection[int] = (),
    ):
        self.stopped = False
        self._decoder = decoder
        self._stops = [stop for stop in stops if stop]
        self._held_back = ""
        self._tokens_to_go = min_tokens
        self._hidden = hidden

    def add(self, token: int) -> str:
        """The text that one more token makes visible; sets `stopped` at a stop string."""
        text = "" if token in self._hidden else self._decoder.add([token])
        visible = self._release(text)
        self._tokens_to_go -= 1
        return visible

    def finish(self) -> str:
        """The text that is still held back; no more tokens follow."""
        if self.stopped:
            return ""
        visible = self._release(self._decoder.finish())
        if not self.stopped:
            visible += self._held_back
            self._held_back = ""
        return visible

    def _release(self, new_text: str) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return new_text
        text = self._held_back + new_text
        if self._tokens_to_go <= 0:
            end = self._stop_position(text)
            if end is not None:
                self.stopped = True
                self._held_back = ""
                return text[:end]
        overlaps = (_overlap(text, stop) for stop in self._stops)
        visible_chars = len(text) - max(overlaps, default=0)
        self._held_back = text[visible_chars:]
        return text[:visible_chars]

    def _stop_position(self, text: str) -> int | None:
        """Where the first stop string begins that ends in the new part of the text."""
        positions = []
        for stop in self._stops:
            first = max(0, len(self._held_back) + 1 - len(stop))
            position = text.find(stop, first)
            if position >= 0:
                positions.append(position)
        return min(positions, default=None)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    for size in range(longest, 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
