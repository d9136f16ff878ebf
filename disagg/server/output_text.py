"""From tokens to the text a client sees: whole characters, and nothing behind a stop string."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.model.tokenizer import Detokenizer

# a token, its log-probability, and the likeliest tokens in its place with theirs; None for the
# first token of a prompt, of which nobody says how likely it is
Score = tuple[int, tuple[float, Sequence[tuple[int, float]]] | None]


@dataclass(frozen=True)
class TextDelta:
    """Some more text; the last piece says why it ended and what the hand-off cost.

    num_tokens: of the answer so far
    scores:     tokens with their log-probabilities, where those are wanted
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()

    def before(self, more: "TextDelta") -> "TextDelta":
        """Both as one."""
        return replace(
            more, text=self.text + more.text, scores=self.scores + more.scores
        )


class TextStream:
    """One answer. Text that may be the begin of a stop string is held back until that is clear.

    min_tokens: stop strings that end in the text of so many tokens end nothing, as in vLLM
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
        self._held = ""
        self._early = min_tokens
        self._hidden = hidden

    def add(self, token: int) -> str:
        """The text to show after one more token; `stopped` tells that a stop string was found."""
        text = "" if token in self._hidden else self._decoder.add([token])
        shown = self._show(text)
        self._early -= 1
        return shown

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        if self.stopped:
            return ""
        shown = self._show(self._decoder.finish())
        rest, self._held = "" if self.stopped else self._held, ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        known, text = len(self._held), self._held + text
        new = [(stop, max(0, known + 1 - len(stop))) for stop in self._stops]
        ends = [at for stop, start in new if (at := text.find(stop, start)) >= 0]
        if ends and self._early <= 0:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the begin of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
