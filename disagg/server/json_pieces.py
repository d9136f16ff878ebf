"""JSON of a client, parsed in pieces, so that other threads run in between.

`from_json` holds Python's lock until it returns: for 0.3 s where 8 MB are empty lists. Here each
call of it gets a piece: elements of a list or an object, of about PIECE bytes together. An element
that is larger is cut in turn, a few levels deep.

    {"n": 2, "prompt": [[1, 2, ... , 10, 11, ... ], [3, ... ]], "user": "me"}
     └piece┘            └─ piece ─┘ └── piece ──┘   └ piece ┘   └── piece ──┘
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from disagg.errors import RequestError

PIECE = 64 << 10  # bytes; takes a few milliseconds at most
MAX_LEVELS = 4  # that are cut: body, messages, message, content
MAX_CONTAINERS = 1 << 17  # lists and objects in a body; long conversations have fewer
# of what a container holds: anything but containers, and strings without escapes
PLAIN = rb'[^\[\]{}"]*+(?:"[^"\\]*+"[^\[\]{}"]*+)*+'
# a container without others in it, or what begins or ends one, or begins a string
STRUCTURE = re.compile(rb'\[%b\]|\{%b\}|[\[\]{}"]' % (PLAIN, PLAIN))
QUOTE = ord('"')
BACKSLASH = ord("\\")
LIST = ord("[")
ENDS = {LIST: ord("]"), ord("{"): ord("}")}

Body = bytes | bytearray
Span = tuple[int, int]  # begin and end in a body


@dataclass(frozen=True)
class Omitted:
    """In place of a large value that is not used."""

    nbytes: int

    def __repr__(self) -> str:
        return f"{self.nbytes:,} bytes"


@dataclass(frozen=True)
class Piece:
    """Elements of a list or an object; `large`: the value, where it is a single large one."""

    begin: int
    end: int
    large: Span | None = None


def parse(body: Body, used_fields: Collection[str]) -> Any:
    """The value of a body; ValueError unless it is JSON, RequestError for too many parts.

    used_fields: of an object; large values of other fields are checked, but not kept
    """
    text = body.strip()
    return _value(text, (0, len(text)), MAX_LEVELS, keep=True, fields=used_fields)


def _value(
    body: Body,
    span: Span,
    levels: int,
    keep: bool,
    fields: Collection[str] | None = None,
) -> Any:
    begin, end = span
    is_cut = end - begin > PIECE and levels > 0 and body[begin] in ENDS
    if not is_cut:
        return from_json(body[begin:end])
    if body[end - 1] != ENDS[body[begin]]:
        raise ValueError("a list or an object does not end as it begins")
    inside = (begin + 1, end - 1)
    if body[begin] == LIST:
        return _list(body, inside, levels - 1, keep)
    return _object(body, inside, levels - 1, keep, fields)


def _list(body: Body, inside: Span, levels: int, keep: bool) -> list[Any]:
    values: list[Any] = []
    for piece in _pieces(body, inside):
        if piece.large is None:
            part = from_json(b"[" + body[piece.begin : piece.end] + b"]")
        else:
            first, _ = piece.large
            _expect(body[piece.begin : first].strip(), b"")
            part = [_value(body, piece.large, levels, keep)]
        if keep:
            values += part
    return values


def _object(
    body: Body, inside: Span, levels: int, keep: bool, fields: Collection[str] | None
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for piece in _pieces(body, inside):
        if piece.large is None:
            part = from_json(b"{" + body[piece.begin : piece.end] + b"}")
        else:
            first, last = piece.large
            name, colon = _name(body[piece.begin : first])
            _expect(colon, b":")
            is_used = fields is None or name in fields
            value = _value(body, piece.large, levels, keep and is_used)
            part = {name: value if is_used else Omitted(last - first)}
        if keep:
            values |= part
    return values


def _name(head: Body) -> tuple[Any, Body]:
    """The name of a field, and what stands between it and its value."""
    text = head.strip()
    return from_json(text[:-1]), text[-1:]


def _expect(text: Body, expected: bytes) -> None:
    if text != expected:
        raise ValueError(f"expected {expected!r} before a list or an object")


def _pieces(body: Body, inside: Span) -> Iterator[Piece]:
    """Cut the inside of a list or an object at commas between its elements."""
    begin, end = inside
    comma = -1  # the latest one between elements
    comma_from = begin
    for first, last in _tokens(body, inside):
        comma = max(comma, body.rfind(b",", comma_from, first))
        is_large = last - first > PIECE and body[first] in ENDS
        if comma >= begin and (is_large or first - begin > PIECE):
            yield Piece(begin, comma)
            begin = comma + 1
        comma_from = last
        if is_large:
            next_comma = body.find(b",", last, end)
            stop = end if next_comma < 0 else next_comma
            _expect(body[last:stop].strip(), b"")
            yield Piece(begin, stop, large=(first, last))
            if next_comma < 0:
                return
            begin = comma_from = next_comma + 1
    if begin > inside[0] and not body[begin:end].strip():
        raise ValueError("a comma precedes no element")
    yield Piece(begin, end)


def _tokens(body: Body, inside: Span) -> Iterator[Span]:
    """Strings and containers inside of a container, without what is in them.

    Where none comes for a while, an empty token.
    """
    position, end = inside
    depth = 0
    outermost = position
    containers = 0
    while position < end:
        limit = min(end, position + PIECE)
        match = STRUCTURE.search(body, position, limit)
        if match is None:
            position = limit
            if depth == 0:
                yield limit, limit
            continue
        first, position = match.span()
        outermost = first if depth == 0 else outermost
        is_end = False
        if body[first] == QUOTE:
            position = _string_end(body, first)
        elif body[first] in ENDS:
            depth += 1
            containers += 1
            _check_count(containers)
            is_end = position > first + 1
        else:
            is_end = True
        depth -= is_end
        if depth == 0:
            yield outermost, position
    if depth != 0:
        raise ValueError("a list or an object does not end")


def _check_count(containers: int) -> None:
    if containers > MAX_CONTAINERS:
        raise RequestError(
            f"the body has too many lists and objects; expected at most {MAX_CONTAINERS:,}"
        )


def _string_end(body: Body, begin: int) -> int:
    """Where a string ends that begins with a quote at `begin`."""
    quote = body.find(b'"', begin + 1)
    while quote >= 0:
        escape = quote
        while body[escape - 1] == BACKSLASH:
            escape -= 1
        if (quote - escape) % 2 == 0:
            return quote + 1
        quote = body.find(b'"', quote + 1)
    raise ValueError("a string does not end")
