"""JSON as a model writes it, read while it arrives. Its text is passed on as it is."""

import json
from collections.abc import Callable
from typing import Any

from disagg.parsers.marks import CODES, FIRST_CODE, LAST_CODE
from disagg.parsers.source import CharacterStops, TextSource, Wait

STRUCTURE = CharacterStops(r'"{}\[\]' + CODES)
IN_STRING = CharacterStops(r'"\\' + CODES)
BEHIND_SCALAR = CharacterStops(r'",}\]\s' + CODES)

Emit = Callable[[str], None]


def container(source: TextSource, emit: Emit) -> Wait[bool]:
    """Read an object or a list, with all that is in it. False: it is cut off."""
    depth = 0
    while True:
        text, mark = yield from source.piece(STRUCTURE)
        emit(text)
        if mark == '"':
            is_closed = yield from string(source, emit)
            if not is_closed:
                return False
        elif mark in ("{", "["):
            depth += 1
            emit(source.take(1))
        elif mark in ("}", "]"):
            depth -= 1
            emit(source.take(1))
            if depth <= 0:
                return True
        elif mark or not text:  # a special token, or the end
            return False


def string(source: TextSource, emit: Emit) -> Wait[bool]:
    """Read a string, with its quotes. False: it is cut off."""
    emit(source.take(1))
    while True:
        text, mark = yield from source.piece(IN_STRING)
        emit(text)
        if mark == '"':
            emit(source.take(1))
            return True
        if mark == "\\":
            emit(source.take(1))
            is_closed = yield from _escaped(source, emit)
            if not is_closed:
                return False
        elif mark or not text:
            return False


def _escaped(source: TextSource, emit: Emit) -> Wait[bool]:
    letter = yield from source.peek()
    if not letter or FIRST_CODE <= letter <= LAST_CODE:
        return False
    emit(source.take(1))
    return True


def value(source: TextSource, emit: Emit) -> Wait[bool]:
    """Read any value. False: it is cut off, or is none."""
    first = yield from source.peek()
    if first in ("{", "["):
        return (yield from container(source, emit))
    if first == '"':
        return (yield from string(source, emit))
    size = 0
    while True:
        text, mark = yield from source.piece(BEHIND_SCALAR)
        emit(text)
        size += len(text)
        if mark or not text:
            return size > 0


def decoded_string(source: TextSource) -> Wait[str | None]:
    """Read a string, which comes next. None: it is none."""
    pieces: list[str] = []
    yield from string(source, pieces.append)
    decoded = parsed("".join(pieces))
    return decoded if isinstance(decoded, str) else None


def parsed(text: str) -> Any:
    """The value of a JSON text, in which line breaks may stand in strings; None if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def quoted_letters(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
