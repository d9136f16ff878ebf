"""Readers of tool calls, one for each syntax that puts marks around calls.

A call is reported as soon as its name is certain and arguments begin. Until then, text that breaks
the syntax makes it content, up to where it breaks. From then on, such text leaves the call without
an end.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from disagg.parsers.formats import JsonCalls, NamedCalls, ParameterCalls
from disagg.parsers.json_text import (
    container,
    decoded_string,
    parsed,
    quoted_letters,
    value,
)
from disagg.parsers.marks import Marks
from disagg.parsers.parts_writer import PartsWriter
from disagg.parsers.schema_types import is_string, json_text, parameter_types
from disagg.parsers.source import CharacterStops, Stops, TextSource, Wait

NAME_KEYS = {"name", "function", "tool_name"}
ARGUMENTS_KEYS = {"arguments", "parameters"}
OTHER_KEYS = {"id", "type", "tool_call_id"}
BEHIND_NAME = CharacterStops(r"^\w.:/\-")
MAX_NAME = 256  # characters


class CallReader(Protocol):
    """Reads calls that follow each other.

    begins:  the marks before them
    is_bare: an answer may begin with them, without a mark
    """

    begins: tuple[str, ...]
    is_bare: bool

    def accepts(self, first: str) -> bool:
        """Whether calls may go on with this character, behind the mark."""

    def read(self, mark: str) -> Wait[bool]:
        """Read on behind one of `begins`. False: what the source has recorded is content."""


class JsonCallsReader:
    def __init__(self, syntax: JsonCalls, source: TextSource, writer: PartsWriter):
        self.begins: tuple[str, ...] = (syntax.begin,)
        self.is_bare = syntax.bare
        self._syntax = syntax
        self._source = source
        self._writer = writer

    def accepts(self, first: str) -> bool:
        return first in ("{", "[")

    def read(self, mark: str) -> Wait[bool]:
        first = yield from self._source.space()
        is_list = first == "["
        if is_list:
            self._source.take(1)
            yield from self._source.space()
        while True:
            call = _JsonCall(self._source, self._writer, needs_arguments=not mark)
            is_call = yield from call.read()
            if not is_call:
                return False
            self._source.record()
            has_next = yield from self._reach_next()
            if not has_next:
                break
            mark = mark or self._syntax.begin
        if is_list:
            yield from self._source.match("]")
            yield from self._source.space()
        yield from self._source.match(self._syntax.end)
        self._writer.border()
        return True

    def _reach_next(self) -> Wait[bool]:
        """Take what separates two objects. Whether another one follows."""
        yield from self._source.space()
        separator = yield from self._source.match(self._syntax.between)
        first = yield from self._source.space()
        if separator and first not in ("{", "]", ""):
            self._writer.content(separator)
        if first == "{":
            self._source.record()
        return first == "{"


class _JsonCall:
    """One object with a name and arguments, in any order."""

    def __init__(
        self, source: TextSource, writer: PartsWriter, *, needs_arguments: bool
    ):
        self._source = source
        self._writer = writer
        self._needs_arguments = needs_arguments
        self._name = ""
        self._early_arguments = ""  # they came before the name
        self._is_written = False

    def read(self) -> Wait[bool]:
        first = yield from self._source.peek()
        if first != "{":
            return False
        self._source.take(1)
        while True:
            first = yield from self._source.space()
            if first == "}":
                self._source.take(1)
                return self._close()
            if first == ",":
                self._source.take(1)
                continue
            is_member = yield from self._member(first)
            if not is_member:
                return self._is_written

    def _close(self) -> bool:
        """The object has ended: whether it was a call."""
        if self._is_written:
            return True
        if not self._name or (self._needs_arguments and not self._early_arguments):
            return False
        self._write(self._early_arguments or "{}")
        return True

    def _member(self, first: str) -> Wait[bool]:
        """Read a key and its value. False: this is no part of a call."""
        if first != '"':
            return False
        key = yield from decoded_string(self._source)
        first = yield from self._source.space()
        if first != ":":
            return False
        self._source.take(1)
        first = yield from self._source.space()
        if self._is_written or key in OTHER_KEYS:
            return (yield from value(self._source, _drop))
        if key in NAME_KEYS and first == '"':
            self._name = (yield from decoded_string(self._source)) or ""
            return bool(self._name)
        if key in ARGUMENTS_KEYS:
            return (yield from self._arguments(first))
        return False

    def _arguments(self, first: str) -> Wait[bool]:
        if first == "{" and self._name:
            self._is_written = True
            return (yield from write_call(self._source, self._writer, self._name))
        pieces: list[str] = []
        is_value = yield from value(self._source, pieces.append)
        arguments = _object_text("".join(pieces)) if is_value else ""
        if arguments and self._name:
            self._write(arguments)
        self._early_arguments = arguments
        return bool(arguments)

    def _write(self, arguments: str) -> None:
        self._is_written = True
        self._writer.begin_call(self._name)
        self._writer.arguments(arguments)
        self._writer.end_call(is_whole=True)


def write_call(source: TextSource, writer: PartsWriter, name: str) -> Wait[bool]:
    """Pass on a call whose arguments, an object, come next. Whether it is complete."""
    writer.begin_call(name)
    is_whole = yield from container(source, writer.arguments)
    writer.end_call(is_whole=is_whole)
    return is_whole


def _drop(_text: str) -> None:
    pass


def _object_text(text: str) -> str:
    """The text of an object: null is an empty one, and a string may contain one; empty: it is none.

    Models of some families quote their arguments as clients do.
    """
    if text == "null":
        return "{}"
    content = parsed(text)
    if isinstance(content, str):
        text = content or "{}"
        content = parsed(text)
    return text if isinstance(content, dict) else ""


class NamedCallsReader:
    def __init__(self, syntax: NamedCalls, source: TextSource, writer: PartsWriter):
        self.begins: tuple[str, ...] = _begins(syntax)
        self.is_bare = False
        self._syntax = syntax
        self._source = source
        self._writer = writer

    def accepts(self, first: str) -> bool:
        return first not in ("{", "[")

    def read(self, mark: str) -> Wait[bool]:
        return (
            yield from _read_section(
                self._syntax, mark, self._source, self._writer, self._call
            )
        )

    def _call(self) -> Wait[bool]:
        source = self._source
        yield from source.space()
        written = yield from source.word(BEHIND_NAME, MAX_NAME)
        name = re.fullmatch(self._syntax.name, written)
        if not name or len(written) > MAX_NAME:
            return False
        yield from source.space()
        before_id = yield from source.match(self._syntax.before_id)
        if before_id:
            yield from source.word(BEHIND_NAME, MAX_NAME)
        yield from _skip(source, self._syntax.before_arguments)
        first = yield from source.space()
        if first != "{":
            return False
        yield from write_call(source, self._writer, name[1])
        yield from _skip(source, self._syntax.behind)
        return True


class ParameterCallsReader:
    """tools: JSON schemas of parameters by the function's name."""

    def __init__(
        self,
        syntax: ParameterCalls,
        source: TextSource,
        writer: PartsWriter,
        marks: Marks,
        tools: Mapping[str, Mapping[str, Any]],
    ):
        self.begins: tuple[str, ...] = _begins(syntax)
        self.is_bare = False
        self._syntax = syntax
        self._source = source
        self._writer = writer
        self._marks = marks
        self._tools = tools
        self._behind_key = Stops([syntax.behind_key])
        self._behind_value = Stops([syntax.behind_value])

    def accepts(self, first: str) -> bool:
        return True

    def read(self, mark: str) -> Wait[bool]:
        return (
            yield from _read_section(
                self._syntax, mark, self._source, self._writer, self._call
            )
        )

    def _call(self) -> Wait[bool]:
        source, syntax = self._source, self._syntax
        yield from source.space()
        name = yield from source.word(BEHIND_NAME, MAX_NAME)
        if not name or len(name) > MAX_NAME:
            return False
        yield from source.space()
        if syntax.behind_name:
            behind_name = yield from source.match(syntax.behind_name)
            if not behind_name:
                return False
            yield from source.space()
        mark = yield from source.match(syntax.before_key, syntax.end)
        if not mark:
            return False
        self._writer.begin_call(name)
        is_whole = yield from self._parameters(mark, self._tools.get(name, {}))
        self._writer.end_call(is_whole=is_whole)
        return True

    def _parameters(self, mark: str, schema: Mapping[str, Any]) -> Wait[bool]:
        """Read parameters up to the end of the call. mark: what was read before them."""
        before = "{"
        while mark == self._syntax.before_key:
            is_read = yield from self._parameter(before, schema)
            if not is_read:
                return False
            before = ", "
            yield from self._source.space()
            mark = yield from self._source.match(
                self._syntax.before_key, self._syntax.end, self._syntax.close
            )
        if not mark:
            return False
        self._writer.arguments("{}" if before == "{" else "}")
        return True

    def _parameter(self, before: str, schema: Mapping[str, Any]) -> Wait[bool]:
        written = yield from self._text(self._behind_key)
        is_complete = yield from self._source.match(self._syntax.behind_key)
        if not is_complete:
            return False
        key, flag = written, ""
        if self._syntax.string_flag:
            key, _, flag = written.partition(self._syntax.string_flag)
        key = self._marks.spelled(key.strip())
        if self._syntax.before_value:
            yield from self._source.space()
            yield from self._source.match(self._syntax.before_value)
        self._writer.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        types = set() if flag == "false" else parameter_types(schema, key)
        if flag == "true" or is_string(types):
            return (yield from self._string_value())
        return (yield from self._other_value(types))

    def _text(self, stops: Stops) -> Wait[str]:
        """All text up to a mark, or to the end."""
        pieces: list[str] = []
        while True:
            text, mark = yield from self._source.piece(stops)
            pieces.append(text)
            if mark or not text:
                return "".join(pieces)

    def _string_value(self) -> Wait[bool]:
        margin = self._syntax.margin
        yield from self._source.match(margin)
        self._writer.arguments('"')
        held_back = ""
        while True:
            piece, mark = yield from self._source.piece(self._behind_value)
            text = held_back + piece
            body = text.removesuffix(margin)
            held_back = text[len(body) :]
            self._writer.arguments(quoted_letters(self._marks.spelled(body)))
            if mark:
                self._source.take(len(mark))
                self._writer.arguments('"')
                return True
            if not piece:
                return False

    def _other_value(self, types: set[str]) -> Wait[bool]:
        written = yield from self._text(self._behind_value)
        mark = yield from self._source.match(self._syntax.behind_value)
        if not mark:
            return False
        text = self._marks.spelled(written).removeprefix(self._syntax.margin)
        text = text.removesuffix(self._syntax.margin)
        self._writer.arguments(json_text(text, types))
        return True


def _begins(syntax: NamedCalls | ParameterCalls) -> tuple[str, ...]:
    return (syntax.open, syntax.begin) if syntax.open else (syntax.begin,)


def _skip(source: TextSource, marks: tuple[str, ...]) -> Wait[None]:
    for mark in marks:
        yield from source.space()
        yield from source.match(mark)


def _read_section(
    syntax: NamedCalls | ParameterCalls,
    mark: str,
    source: TextSource,
    writer: PartsWriter,
    read_call: Callable[[], Wait[bool]],
) -> Wait[bool]:
    """Read calls up to the mark that closes them, or to other text."""
    if mark == syntax.open:
        yield from source.space()
        mark = yield from source.match(syntax.begin)
    while mark == syntax.begin:
        is_call = yield from read_call()
        if not is_call:
            return False
        writer.border()
        source.record()
        yield from source.space()
        mark = yield from source.match(syntax.begin, syntax.close)
        if mark != syntax.begin:
            return True
    return False
