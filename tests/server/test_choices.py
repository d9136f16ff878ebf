"""From the parts of an answer to the choices of a chat, in chunks and whole."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.model.tokenizer import Tokenizer
from disagg.parsers.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Thought,
)
from disagg.server.choices import ChatChoices, WholeChoice
from disagg.server.output_text import TextDelta, joined
from tests.model.tiny import byte_tokenizer

CALL: list[Part] = [
    CallBegin(0, "get_weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Oslo"}'),
    CallEnd(0),
]
ANSWER: list[Part] = [Thought("Rain"), Thought("?"), Content("I look it up."), *CALL]


def choices(**options: Any) -> ChatChoices:
    numbers = itertools.count(1)
    new_id = lambda: f"call_{next(numbers)}"  # noqa: E731
    return ChatChoices(Tokenizer(byte_tokenizer()), new_id, **options)


def deltas(parts: list[Part], finish_reason: str) -> list[TextDelta]:
    """A delta for each part, and the end."""
    pieces = [TextDelta("", i, parts=(part,)) for i, part in enumerate(parts, 1)]
    return [*pieces, TextDelta("", len(parts), finish_reason)]


def chunks(parts: list[Part], finish: str = "stop", **options: Any) -> list[Any]:
    """The delta and the finish reason of every chunk."""
    writer = choices(**options)
    events: Iterator[Any] = (
        writer.chunk(0, piece)
        for delta in deltas(parts, finish)
        for piece in delta.slices(256)
    )
    return [(x["delta"], x["finish_reason"]) for x in events if x is not None]


def whole(parts: list[Part], finish: str = "stop", **options: Any) -> dict[str, Any]:
    choice = WholeChoice(0, choices(**options))
    for delta in deltas(parts, finish):
        choice.add(delta)
    return json.loads(b"".join(choice.pieces(finish, {})))


def test_a_call_is_streamed_as_openai_does():
    function = {"name": "get_weather", "arguments": ""}
    begin = {"index": 0, "id": "call_1", "type": "function", "function": function}

    assert chunks(CALL) == [
        ({"tool_calls": [begin]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]}, None),
        ({}, "tool_calls"),
    ]


def test_thoughts_are_streamed_by_both_of_their_names():
    assert chunks([Thought("Rain"), Content("No.")]) == [
        ({"reasoning_content": "Rain", "reasoning": "Rain"}, None),
        ({"content": "No."}, None),
        ({}, "stop"),
    ]


def test_a_whole_choice_has_what_its_chunks_have_together():
    choice = whole(ANSWER)

    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look it up.",
        "refusal": None,
        "reasoning_content": "Rain?",
        "reasoning": "Rain?",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_content_is_null_where_there_are_only_calls():
    assert whole(CALL)["message"]["content"] is None
    assert whole([Thought("Rain")])["message"]["content"] == ""


def test_calls_have_indices_and_ids_of_their_own():
    parts = [*CALL, CallBegin(1, "clock"), CallArguments(1, "{}"), CallEnd(1)]

    calls = whole(parts)["message"]["tool_calls"]
    streamed = [x["tool_calls"][0] for x, _ in chunks(parts) if "tool_calls" in x]

    assert [call["function"]["name"] for call in calls] == ["get_weather", "clock"]
    assert [call["id"] for call in calls] == ["call_1", "call_2"]
    assert [call["index"] for call in streamed] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("finish", ["length"])
def test_a_cut_call_is_not_presented_as_a_whole_one(finish):
    cut = CALL[:2]

    choice = whole(cut, finish)

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": '
    assert chunks(cut, finish)[-1] == ({}, "length")


def test_a_call_that_the_client_named_ends_with_stop():
    assert whole(CALL, names_call=True)["finish_reason"] == "stop"
    assert chunks(CALL, names_call=True)[-1] == ({}, "stop")


def test_thoughts_that_a_client_does_not_want_are_left_out():
    assert "reasoning" not in whole(ANSWER, shows_thoughts=False)["message"]
    assert chunks([Thought("Rain")], shows_thoughts=False) == [({}, "stop")]


def test_pieces_of_one_text_are_joined_for_a_slow_client():
    pieces = deltas([*ANSWER, CallBegin(1, "f"), CallArguments(1, "{}")], "length")

    together = joined(pieces)

    assert together.parts == (
        Thought("Rain?"),
        Content("I look it up."),
        CallBegin(0, "get_weather"),
        CallArguments(0, '{"city": "Oslo"}'),
        CallEnd(0),
        CallBegin(1, "f"),
        CallArguments(1, "{}"),
    )
    assert [len(piece.parts) for piece in together.slices(256)] == [1] * 7 + [0]


def test_a_slice_has_one_part_and_its_share_of_the_log_probabilities():
    scores = tuple((token, None) for token in range(3))
    delta = TextDelta("", 3, parts=tuple(CALL[:2]), scores=scores)

    slices = [*delta.slices(2)]

    assert [(piece.parts, len(piece.scores)) for piece in slices] == [
        ((CALL[0],), 2),
        ((CALL[1],), 1),
    ]
