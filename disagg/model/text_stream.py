"""From tokens to visible text: whole characters, and nothing after a stop string."""

from collections.abc import Collection, Mapping, Sequence

from disagg.model.tokenizer import Detokenizer


class TextStream:
    """The text of one answer. Text that may begin a stop string is held back until that is clear.

    min_tokens: stop strings that end within this many tokens are ignored, as in vLLM
    hidden:     tokens that have no text
    marks:      special tokens that are shown as characters which no text has, also hidden ones
                (`AnswerParser.marks`); no stop string contains them
    """

    def __init__(
        self,
        decoder: Detokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: Collection[int] = (),
        marks: Mapping[int, str] | None = None,
    ):
        self.stopped = False
        self._decoder = decoder
        self._stops = [stop for stop in stops if stop]
        self._held_back = ""
        self._tokens_to_go = min_tokens
        self._hidden = hidden
        self._marks = marks or {}

    def add(self, token: int) -> str:
        """The text that one more token makes visible; sets `stopped` at a stop string."""
        if token in self._marks:
            visible = self._release_all(self._decoder.cut(), self._marks[token])
        elif token in self._hidden:
            visible = self._release("")
        else:
            visible = self._release(self._decoder.add([token]))
        self._tokens_to_go -= 1
        return visible

    def finish(self) -> str:
        """The text that is still held back; no more tokens follow."""
        return self._release_all(self._decoder.finish(), "")

    def _release_all(self, new_text: str, mark: str) -> str:
        """What is held back too, since a mark or the end follows."""
        if self.stopped:
            return ""
        visible = self._release(new_text)
        if not self.stopped:
            visible += self._held_back + mark
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
