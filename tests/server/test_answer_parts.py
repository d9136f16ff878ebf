"""One answer, delta by delta, read by a parser that says what a test wants."""

from collections.abc import Sequence
from typing import Any, cast

from disagg.parsers.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
)
from disagg.server.answer_parts import AnswerParts
from disagg.server.output_text import TextDelta

CALL: list[Part] = [CallBegin(0, "f"), CallArguments(0, "{}"), CallEnd(0)]


class Scripted:
    """Takes "f" for a whole call, "(" for half of one, and "~" for what is held back."""

    num_thought_tokens = 0

    def __init__(self) -> None:
        self._held_back = ""

    def add(self, text: str) -> Sequence[Part]:
        return [part for letter in text for part in self._parts(letter)]

    def _parts(self, letter: str) -> Sequence[Part]:
        if letter == "~":
            self._held_back += letter
            return []
        by_letter = {"f": CALL, "(": CALL[:2]}
        return by_letter.get(letter, [Content(letter)])

    def finish(self) -> Sequence[Part]:
        return [Content(self._held_back)] if self._held_back else []


def read(
    text: str, end: str = "stop", parallel: bool = True
) -> tuple[list[Part], TextDelta]:
    """The parts of an answer with a token for each letter, and its last delta."""
    answer = AnswerParts(cast(Any, Scripted()), parallel)
    parts: list[Part] = []
    deltas = [TextDelta(letter, number) for number, letter in enumerate(text, 1)]
    for delta in [*deltas, TextDelta("", len(text), end)]:
        last = answer.read(delta)
        assert last.text == ""
        parts += last.parts
        if last.finish_reason:
            break
    return parts, last


def test_what_a_parser_holds_back_comes_with_the_end():
    parts, last = read("1~")

    assert parts == [Content("1"), Content("~")]
    assert last.finish_reason == "stop"


def test_an_answer_with_whole_calls_ends_as_it_ends():
    assert read("ff", "stop")[1].finish_reason == "stop"
    assert read("f", "length")[1].finish_reason == "length"


def test_an_end_token_inside_a_call_is_a_cut():
    parts, last = read("1(", "stop")

    assert parts == [Content("1"), *CALL[:2]]
    assert last.finish_reason == "length"


def test_nothing_follows_the_only_call():
    parts, last = read("1f2", parallel=False)

    assert parts == [Content("1"), *CALL]
    assert (last.finish_reason, last.num_tokens) == ("stop", 2)


def test_a_token_with_two_calls_ends_behind_the_only_one():
    answer = AnswerParts(cast(Any, Scripted()), parallel=False)

    delta = answer.read(TextDelta("f1~", 1))

    assert delta.parts == tuple(CALL)
    assert delta.finish_reason == "stop"


def test_the_beginning_of_a_forced_call_that_is_cut_off_is_no_content():
    answer = AnswerParts(cast(Any, Scripted()), only_calls=True)

    deltas = [answer.read(TextDelta(letter, 1)) for letter in "f~"]
    last = answer.read(TextDelta("", 2, "length"))

    assert [*deltas[0].parts, *deltas[1].parts, *last.parts] == CALL
    assert last.finish_reason == "length"
