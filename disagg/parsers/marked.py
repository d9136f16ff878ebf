"""Reader of answers whose thoughts and calls stand between marks, with content around them.

A thought that letters alone mark is one at the beginning of an answer only, since content may write
about such marks. Special tokens mark thoughts and calls anywhere.
"""

from collections.abc import Sequence

from disagg.parsers.calls import CallReader
from disagg.parsers.formats import ReasoningFormat
from disagg.parsers.marks import Marks
from disagg.parsers.parts_writer import PartsWriter
from disagg.parsers.source import Stops, TextSource, Wait


class MarkedReader:
    """Reads a whole answer."""

    def __init__(
        self,
        source: TextSource,
        writer: PartsWriter,
        marks: Marks,
        call_readers: Sequence[CallReader],
        thought: ReasoningFormat | None,
    ):
        self._source = source
        self._writer = writer
        self._marks = marks
        self._call_readers = call_readers
        self._thought_begin = thought.begin if thought else ""
        self._thought_end = thought.end if thought else ""
        begins = [mark for reader in call_readers for mark in reader.begins]
        tokens = [
            mark for mark in (*begins, self._thought_begin) if marks.has_token(mark)
        ]
        self._bare_readers = [reader for reader in call_readers if reader.is_bare]
        self._content_stops = Stops([*begins, *tokens])
        self._thought_stops = Stops(
            [
                self._thought_end,
                *(mark for mark in tokens if mark != self._thought_begin),
            ]
        )

    def read(self, *, in_thought: bool) -> Wait[None]:
        """in_thought: the prompt ends in a thought."""
        self._writer.in_thought = in_thought
        yield from self._opening(in_thought=in_thought)
        while True:
            self._source.record()
            text, mark = yield from self._source.piece(self._content_stops)
            self._content(text)
            if mark == self._thought_begin != "":
                self._source.take(len(mark))
                yield from self._thought()
            elif mark:
                yield from self._calls(mark)
            elif not text:
                self._writer.finish_content()
                return

    def _opening(self, *, in_thought: bool) -> Wait[None]:
        """Read a thought at the beginning, and calls without a mark."""
        if self._thought_begin:
            self._source.record()
            yield from self._source.space()
            mark = yield from self._source.match(self._thought_begin)
            if mark or in_thought:
                yield from self._thought()
            else:
                self._content(self._source.recorded())
        if self._bare_readers:
            self._source.record()
            first = yield from self._source.space()
            self._content(self._source.recorded())
            if first == "{":
                yield from self._read_with(self._bare_readers[0], "")

    def _thought(self) -> Wait[None]:
        self._writer.border()
        self._writer.in_thought = True
        while True:
            text, mark = yield from self._source.piece(self._thought_stops)
            self._writer.thought(self._marks.spelled(text))
            if mark or not text:
                break
        self._writer.in_thought = False
        yield from self._source.match(self._thought_end)
        self._writer.border()

    def _calls(self, mark: str) -> Wait[None]:
        self._source.record()
        self._source.take(len(mark))
        first = yield from self._source.space()
        for reader in self._call_readers:
            if mark in reader.begins and reader.accepts(first):
                yield from self._read_with(reader, mark)
                return
        self._content(self._source.recorded())

    def _read_with(self, reader: CallReader, mark: str) -> Wait[None]:
        is_call = yield from reader.read(mark)
        if not is_call:
            self._content(self._source.recorded())

    def _content(self, text: str) -> None:
        self._writer.content(self._marks.spelled(text))
