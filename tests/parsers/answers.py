"""Reads texts with a parser, cut in any way, and joins the pieces of the parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.parsers.answer import AnswerParser
from disagg.parsers.formats import AnswerFormats
from disagg.parsers.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Thought,
)

Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Reading:
    """How an answer is read. specials: which marks are special tokens."""

    tool: str = "none"
    reasoning: str = "none"
    tools: Tools | None = field(default_factory=dict)
    prompt: str = ""
    specials: Sequence[str] = ()

    def parser(self) -> AnswerParser:
        ids = {name: number for number, name in enumerate(self.specials)}
        formats = AnswerFormats.choose("", self.tool, self.reasoning)
        return AnswerParser(formats, self.tools, self.prompt, ids)

    def whole(self, text: str) -> list[Part]:
        return self.pieces([text])

    def pieces(self, pieces: Sequence[str]) -> list[Part]:
        parser = self.parser()
        parts = [part for piece in pieces for part in parser.add(piece)]
        return joined([*parts, *parser.finish()])

    def shown(self, text: str) -> str:
        """A text as it reaches the parser if its marks are special tokens."""
        characters = self.parser().marks
        for number, name in enumerate(self.specials):
            text = text.replace(name, characters.get(number, ""))
        return text


def joined(parts: Sequence[Part]) -> list[Part]:
    """Parts whose pieces of one text are one."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        longer = _continued(last, part)
        if longer is None:
            whole.append(part)
        else:
            whole[-1] = longer
    return whole


def _continued(last: Part | None, part: Part) -> Part | None:
    match last, part:
        case Thought(text), Thought(more):
            return Thought(text + more)
        case Content(text), Content(more):
            return Content(text + more)
        case CallArguments(index, text), CallArguments(other, more) if index == other:
            return replace(part, text=text + more)
    return None


def call(index: int, name: str, arguments: str, *, is_whole: bool = True) -> list[Part]:
    """The parts of one call."""
    parts: list[Part] = [CallBegin(index, name)]
    if arguments:
        parts.append(CallArguments(index, arguments))
    return [*parts, CallEnd(index)] if is_whole else parts


def content_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def calls_of(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The names and arguments of the calls that are complete."""
    names = {part.index: part.name for part in parts if isinstance(part, CallBegin)}
    arguments = dict.fromkeys(names, "")
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    ends = [part.index for part in parts if isinstance(part, CallEnd)]
    return [(names[number], arguments[number]) for number in ends]
