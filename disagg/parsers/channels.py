"""Reader of messages in channels: harmony, the format of gpt-oss.

    analysis                       a thought
    final, commentary              content
    commentary to=functions.NAME   a call of NAME; the recipient may stand before the channel too

A header that is cut off is dropped.
"""

import re

from disagg.parsers.calls import write_call
from disagg.parsers.formats import Channels
from disagg.parsers.marks import Marks
from disagg.parsers.parts_writer import PartsWriter
from disagg.parsers.source import Stops, TextSource, Wait

RECIPIENT = "to="
FUNCTION = re.compile(r"\bto=functions\.([\w.:/-]+)")
THOUGHT_CHANNEL = "analysis"
FINAL_CHANNEL = "final"  # for users
MAX_HEADER = 512  # characters


class ChannelsReader:
    """Reads a whole answer.

    tools, thoughts: whether calls and thoughts are separated from content
    """

    def __init__(
        self,
        syntax: Channels,
        source: TextSource,
        writer: PartsWriter,
        marks: Marks,
        *,
        tools: bool,
        thoughts: bool,
    ):
        self._syntax = syntax
        self._source = source
        self._writer = writer
        self._marks = marks
        self._tools = tools
        self._thoughts = thoughts
        self._was_thought: bool | None = None  # the text before; None: there is none
        self._header_end = Stops([syntax.message, *syntax.ends])
        self._text_end = Stops([*syntax.ends, syntax.start, syntax.channel])

    def read(self) -> Wait[None]:
        while not (self._source.ended and not (yield from self._source.peek())):
            yield from self._message()

    def _message(self) -> Wait[None]:
        syntax = self._syntax
        self._source.record()
        yield from self._source.space()
        opening = yield from self._source.match(
            syntax.start, syntax.channel, syntax.message, RECIPIENT
        )
        header = opening
        if opening not in ("", syntax.message):
            header += yield from self._source.word(self._header_end, MAX_HEADER)
            message = yield from self._source.match(syntax.message)
            if not message:
                yield from self._broken_header(header)
                return
        elif not opening:
            self._writer.content(self._source.recorded())
        yield from self._body(header)
        yield from self._source.match(*syntax.ends)

    def _broken_header(self, header: str) -> Wait[None]:
        if len(header) > MAX_HEADER:
            self._writer.content(self._marks.spelled(header))
        yield from self._source.match(*self._syntax.ends)

    def _body(self, header: str) -> Wait[None]:
        function = FUNCTION.search(header)
        if function and self._tools:
            is_call = yield from self._call(function[1])
            if is_call:
                self._was_thought = None
        _, _, channel = header.partition(self._syntax.channel)
        is_thought = self._thoughts and channel.lstrip().startswith(THOUGHT_CHANNEL)
        yield from self._text(is_thought)

    def _call(self, name: str) -> Wait[bool]:
        first = yield from self._source.space()
        if first == "{":
            yield from write_call(self._source, self._writer, name)
            self._writer.border()
            return True
        is_empty = yield from self._source.match(*self._syntax.ends)
        if is_empty:
            self._writer.begin_call(name)
            self._writer.arguments("{}")
            self._writer.end_call(is_whole=True)
        return bool(is_empty)

    def _text(self, is_thought: bool) -> Wait[None]:
        write = self._writer.thought if is_thought else self._writer.content
        if is_thought == self._was_thought:
            write("\n")  # between two messages
        elif self._was_thought is not None:
            self._writer.border()
        self._was_thought = is_thought
        self._writer.in_thought = is_thought
        while True:
            text, mark = yield from self._source.piece(self._text_end)
            write(self._marks.spelled(text))
            if mark or not text:
                break
        self._writer.in_thought = False
