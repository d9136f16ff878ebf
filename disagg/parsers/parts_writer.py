"""Collects the parts of an answer, and trims the space between them."""

from disagg.parsers.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Thought,
    joined_parts,
)
from disagg.parsers.source import SPACE


class PartsWriter:
    """The parts of an answer in order.

    Space around thoughts and between calls separates them and belongs to no part. So space at the
    end of a text waits for what follows it.

    has_calls:  calls may follow content
    in_thought: whether the text that comes now is a thought
    """

    def __init__(self, *, has_calls: bool) -> None:
        self.in_thought = False
        self._has_calls = has_calls
        self._parts: list[Part] = []
        self._space: list[str] = []
        self._skips_space = False
        self._num_calls = 0

    def take(self) -> tuple[Part, ...]:
        """The parts since the last `take`."""
        parts = joined_parts(self._parts)
        self._parts.clear()
        return parts

    def content(self, text: str) -> None:
        text = self._trimmed(text)
        if not self._has_calls:
            text += self._waiting_space()
        if text:
            self._parts.append(Content(text))

    def thought(self, text: str) -> None:
        text = self._trimmed(text)
        if text:
            self._parts.append(Thought(text))

    def border(self) -> None:
        """A mark between two parts: space before and behind it is dropped."""
        self._space.clear()
        self._skips_space = True

    def finish_content(self) -> None:
        """The answer ends in content, whose space is part of it."""
        space = self._waiting_space()
        if space:
            self._parts.append(Content(space))

    def begin_call(self, name: str) -> None:
        self.border()
        self._parts.append(CallBegin(self._num_calls, name))

    def arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self._num_calls, text))

    def end_call(self, *, is_whole: bool) -> None:
        """Nothing more follows of a call."""
        if is_whole:
            self._parts.append(CallEnd(self._num_calls))
        self._num_calls += 1

    def _trimmed(self, text: str) -> str:
        """The text that is certain: with the space before it, without that at its end."""
        if self._skips_space:
            text = text.lstrip(SPACE)
        if not text:
            return ""
        self._skips_space = False
        body = text.rstrip(SPACE)
        before = self._waiting_space() if body else ""
        self._space.append(text[len(body) :])
        return before + body

    def _waiting_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space
