"""The text of an answer, read from its front while it still arrives.

Readers are generators: they yield where they need more text. So a reader says in one line after
another what it expects, and the text may be cut anywhere.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

ValueT = TypeVar("ValueT")
Wait = Generator[None, None, ValueT]

SPACE = " \t\r\n"
NO_SPACE = re.compile(f"[^{SPACE}]")


class Stops:
    """The marks at which a reader stops."""

    def __init__(self, marks: Iterable[str]):
        self._marks = tuple({mark for mark in marks if mark})
        self._firsts = {mark[0] for mark in self._marks}
        self._longest = max(map(len, self._marks), default=1)
        longest_first = sorted(self._marks, key=len, reverse=True)
        letters = "|".join(map(re.escape, longest_first))
        self.pattern = re.compile(letters or "(?!)")

    def clear_end(self, text: str, begin: int) -> int:
        """Up to where a text without marks can have no beginning of one. begin: where it begins."""
        first = max(begin, len(text) - self._longest + 1)
        for place in range(first, len(text)):
            if text[place] in self._firsts and self._may_begin(text[place:]):
                return place
        return len(text)

    def _may_begin(self, text: str) -> bool:
        return any(mark.startswith(text) for mark in self._marks)


class CharacterStops(Stops):
    """The characters at which a reader stops: a set of a regular expression."""

    def __init__(self, characters: str):
        super().__init__(())
        self.pattern = re.compile(f"[{characters}]")


class TextSource:
    """Text that arrives at one end and is taken from the other."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._log: list[str] = []
        self.ended = False

    def add(self, text: str) -> None:
        """The next piece of the text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text follows."""
        self.ended = True

    @property
    def num_waiting(self) -> int:
        """Characters that have arrived and are not taken."""
        return len(self._text) - self._at

    def take(self, size: int) -> str:
        """The next characters, which must have arrived."""
        text = self._text[self._at : self._at + size]
        self._at += size
        self._log.append(text)
        return text

    def record(self) -> None:
        """From here on, `recorded` says what was taken."""
        self._log.clear()

    def recorded(self) -> str:
        """What was taken since `record`."""
        return "".join(self._log)

    def peek(self) -> Wait[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def piece(self, stops: Stops) -> Wait[tuple[str, str]]:
        """Take text up to a mark, which stays: the text, and the mark behind it.

        Without a mark, more text may follow; both are empty at the end.
        """
        while True:
            match = stops.pattern.search(self._text, self._at)
            if match:
                return self.take(match.start() - self._at), match[0]
            end = len(self._text) if self.ended else self._clear_end(stops)
            if end > self._at or self.ended:
                return self.take(end - self._at), ""
            yield

    def _clear_end(self, stops: Stops) -> int:
        return stops.clear_end(self._text, self._at)

    def match(self, *marks: str) -> Wait[str]:
        """Take the mark that comes next; empty if it is none of these."""
        while True:
            for mark in marks:
                if mark and self._text.startswith(mark, self._at):
                    return self.take(len(mark))
            if self.ended or not self._may_begin(marks):
                return ""
            yield

    def _may_begin(self, marks: Iterable[str]) -> bool:
        longer = [mark for mark in marks if self._at + len(mark) > len(self._text)]
        return any(mark.startswith(self._text[self._at :]) for mark in longer)

    def space(self) -> Wait[str]:
        """Take spaces and line breaks. Returns the character behind them; empty at the end."""
        while True:
            match = NO_SPACE.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            self.take(end - self._at)
            if match or self.ended:
                return match[0] if match else ""
            yield

    def word(self, stops: Stops, most: int) -> Wait[str]:
        """Take text up to a mark, or a little more than `most` characters of it."""
        pieces: list[str] = []
        size = 0
        while size <= most:
            text, mark = yield from self.piece(stops)
            pieces.append(text)
            size += len(text)
            if mark or not text:
                break
        return "".join(pieces)
