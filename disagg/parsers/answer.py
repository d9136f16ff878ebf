"""From the text of an answer to its parts, piece by piece."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from disagg.parsers.calls import (
    CallReader,
    JsonCallsReader,
    NamedCallsReader,
    ParameterCallsReader,
)
from disagg.parsers.channels import ChannelsReader
from disagg.parsers.formats import (
    AnswerFormats,
    CallSyntax,
    Channels,
    JsonCalls,
    NamedCalls,
    ParameterCalls,
    ReasoningFormat,
)
from disagg.parsers.marked import MarkedReader
from disagg.parsers.marks import Marks
from disagg.parsers.parts import Part
from disagg.parsers.parts_writer import PartsWriter
from disagg.parsers.source import TextSource, Wait


class AnswerParser:
    """Reads one answer: pieces of its text in, parts out.

        formats = AnswerFormats.choose(template.source)              # once for a model
        parser = AnswerParser(formats, tools, prompt, tokenizer.special_tokens)
        stream = TextStream(decoder, ..., marks=parser.marks)
        for token in tokens:
            parts = parser.add(stream.add(token))
        parts = parser.add(stream.finish()) + parser.finish()

    However the text is cut, the parts say the same, once pieces of one text are joined. Text that
    may begin a mark is held back until that is clear.

    A mark that is a special token of the tokenizer is read as this token alone, not as the same
    letters in other tokens. `TextStream` shows such a token as one character that no text has.

    formats: with neither, all text is content
    tools:   the JSON schemas of the functions' parameters by name: types of bare values. None: the
             answer has no calls. Other names are called too: clients report them to the model
    prompt:  its end tells whether the answer begins in a thought
    """

    def __init__(
        self,
        formats: AnswerFormats,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        prompt: str = "",
        special_tokens: Mapping[str, int] | None = None,
    ):
        syntaxes = formats.tool.syntaxes if formats.tool and tools is not None else ()
        self._marks = Marks(
            _marks_of(syntaxes, formats.reasoning), special_tokens or {}
        )
        self._source = TextSource()
        self._writer = PartsWriter(has_calls=bool(syntaxes))
        self._num_thought_tokens = 0
        self._held_back: deque[int] = deque()  # sizes of tokens that may be of a mark
        self._reading = self._reader(formats, syntaxes, tools or {}, prompt)
        next(self._reading)  # up to where it needs text

    def _reader(
        self,
        formats: AnswerFormats,
        syntaxes: Sequence[CallSyntax],
        tools: Mapping[str, Mapping[str, Any]],
        prompt: str,
    ) -> Wait[None]:
        coded = [_coded(syntax, self._marks) for syntax in syntaxes]
        channels = [each for each in coded if isinstance(each, Channels)]
        reasoning = formats.reasoning
        if reasoning and reasoning.channels:
            channels.append(_coded(reasoning.channels, self._marks))
        if channels:
            return ChannelsReader(
                channels[0],
                self._source,
                self._writer,
                self._marks,
                tools=bool(syntaxes),
                thoughts=reasoning is not None,
            ).read()
        thought = None
        if reasoning:
            thought = _coded(reasoning, self._marks)
        return MarkedReader(
            self._source,
            self._writer,
            self._marks,
            [reader for each in coded for reader in self._call_readers(each, tools)],
            thought,
        ).read(in_thought=reasoning is not None and reasoning.is_open(prompt))

    def _call_readers(
        self, syntax: CallSyntax, tools: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[CallReader]:
        if isinstance(syntax, JsonCalls):
            yield JsonCallsReader(syntax, self._source, self._writer)
        elif isinstance(syntax, NamedCalls):
            yield NamedCallsReader(syntax, self._source, self._writer)
        elif isinstance(syntax, ParameterCalls):
            yield ParameterCallsReader(
                syntax, self._source, self._writer, self._marks, tools
            )

    @property
    def marks(self) -> Mapping[int, str]:
        """How the special tokens that the parser reads are shown to it, by id."""
        return self._marks.by_token

    @property
    def num_thought_tokens(self) -> int:
        """Tokens of thoughts so far, without those of their marks."""
        return self._num_thought_tokens

    def add(self, text: str) -> tuple[Part, ...]:
        """The parts that the text of one more token makes certain; it may be empty."""
        was_thought = self._writer.in_thought
        self._source.add(text)
        next(self._reading, None)
        if was_thought:
            self._count_thought(len(text))
        return self._writer.take()

    def finish(self) -> tuple[Part, ...]:
        """The rest: what was held back is content. A call that is not complete has no end."""
        if self._writer.in_thought:
            self._num_thought_tokens += len(self._held_back)
        self._source.end()
        next(self._reading, None)
        return self._writer.take()

    def _count_thought(self, size: int) -> None:
        """Count the tokens that are certain to be of a thought. size: of the last token's text."""
        if not self._writer.in_thought:
            self._held_back.clear()  # they were the mark
            return
        self._held_back.append(size)
        num_waiting = self._source.num_waiting
        while self._held_back and (
            not num_waiting or sum(self._held_back) > num_waiting
        ):
            self._held_back.popleft()
            self._num_thought_tokens += 1


def _marks_of(
    syntaxes: Sequence[CallSyntax], reasoning: ReasoningFormat | None
) -> list[str]:
    """All texts of a parser's formats: special tokens are looked for in them."""
    holders: list[Any] = [*syntaxes]
    if reasoning:
        holders += [reasoning, reasoning.channels or ()]
    return [text for holder in holders for text in _texts(holder)]


def _texts(holder: Any) -> Iterator[str]:
    for field in fields(holder) if holder else ():
        value = getattr(holder, field.name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from value


SyntaxT = TypeVar("SyntaxT", bound=CallSyntax | ReasoningFormat)


def _coded(syntax: SyntaxT, marks: Marks) -> SyntaxT:
    """A syntax whose marks are as they stand in a text of this tokenizer."""
    coded: dict[str, Any] = {}
    for field in fields(syntax):
        value = getattr(syntax, field.name)
        if isinstance(value, str):
            coded[field.name] = marks.coded(value)
        elif isinstance(value, tuple):
            coded[field.name] = tuple(map(marks.coded, value))
    return replace(syntax, **coded)
