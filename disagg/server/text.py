"""From tokens to the text a client sees: whole characters, and nothing behind a stop string."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class TextDecoder(Protocol):
    """Turns tokens into text piece by piece; `disagg.model.tokenizer.Detokenizer` is one."""

    def add(self, ids: Iterable[int]) -> str:
        """The text that is now certain."""

    def finish(self) -> str:
        """The rest."""


class TextTokenizer(Protocol):
    """Text to tokens and back; `disagg.model.tokenizer.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Called on threads of its own."""

    def detokenizer(self) -> TextDecoder:
        """A new decoder for one stream of tokens."""


@dataclass(frozen=True)
class Piece:
    """Some more text; the last piece says why it ended and what the hand-off cost."""

    text: str
    num_tokens: int
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)


class TextStream:
    """One answer. Text that may be the begin of a stop string is held back until that is clear."""

    def __init__(self, decoder: TextDecoder, stops: Sequence[str] = ()):
        self.stopped = False
        self._decoder = decoder
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def add(self, token: int) -> str:
        """The text to show after one more token; `stopped` tells that a stop string was found."""
        return self._show(self._decoder.add([token]))

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
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the begin of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
