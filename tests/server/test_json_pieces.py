"""Long JSON is parsed in pieces, and comes out as if it were parsed whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import RequestError
from disagg.server import json_pieces
from disagg.server.json_pieces import Omitted, parse

PIECE = 8
KEPT = {"a", "prompt"}
SCALARS = st.none() | st.booleans() | st.integers(-999, 999) | st.text('ab"\\,[]{}:é')
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text('ab"\\,:'), inner),
    max_leaves=40,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is parsed at once; pieces are small, so that short bodies have many."""
    sizes = []
    from_json = json_pieces.from_json

    def parse_and_note(text: bytes) -> Any:
        sizes.append(len(text))
        return from_json(text)

    monkeypatch.setattr(json_pieces, "PIECE", PIECE)
    monkeypatch.setattr(json_pieces, "from_json", parse_and_note)
    return sizes


def test_every_value_is_parsed_as_json_parses_it():
    @given(VALUES, st.sampled_from([None, 1]))
    def compare(value: Any, indent: int | None) -> None:
        text = json.dumps({"a": value}, indent=indent)
        assert parse(text.encode(), KEPT) == json.loads(text)

    compare()


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [[1, 2, 3, 4, 5],]}',
        b'{"a": [[1, 2, 3, 4, 5] [1, 2, 3, 4, 5]]}',
        b'{"a": [7 [1, 2, 3, 4, 5]]}',
        b'{"a": [1, 2, 3,, 4, 5, 6]}',
        b'{"a": [1, 2, 3, 4, 5, 6}}',
        b'{"a" [1, 2, 3, 4, 5, 6]}',
        b'{"a"; [1, 2, 3, 4, 5, 6]}',
        b'{"a": [1, 2, 3, 4, 5, 6}',
        b'{"a": [1, 2, 3, 4, "5, 6]}',
        b'{"a": [1, 2, 3, 4, 5, 6]',
        b'{"a": [1, 2, 3, 4, 5, 6]]}',
        b'{"x": [1, 2, 3, nonsense]}',
        b'{"x": [[[[[1, 2, 3, nonsense]]]]]}',
    ],
)
def test_what_is_no_json_is_refused_in_used_and_unused_fields(body):
    with pytest.raises(json.JSONDecodeError):
        json.loads(body)

    with pytest.raises(ValueError, match=r"\S"):
        parse(body, KEPT)


def test_a_long_list_is_parsed_in_pieces(small_pieces):
    numbers = list(range(10, 90))
    body = json.dumps({"prompt": [numbers, numbers]}).encode()

    assert parse(body, KEPT) == {"prompt": [numbers, numbers]}
    assert max(small_pieces) <= 3 * PIECE


def test_a_large_value_of_an_unused_field_is_not_kept():
    body = json.dumps({"a": 1, "x": [[]] * 100, "y": [2]}).encode()

    values = parse(body, KEPT)

    assert values == {"a": 1, "x": Omitted(400), "y": [2]}
    assert repr(values["x"]) == "400 bytes"


@pytest.mark.parametrize("field", ["a", "x"])
def test_too_many_lists_are_refused(field, monkeypatch):
    monkeypatch.setattr(json_pieces, "MAX_CONTAINERS", 50)
    body = json.dumps({field: [[]] * 50}).encode()

    with pytest.raises(RequestError, match="too many lists and objects"):
        parse(body, KEPT)
    assert parse(json.dumps({field: [[]] * 49}).encode(), KEPT)
