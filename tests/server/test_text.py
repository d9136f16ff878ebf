"""What a client sees: never half a stop string, never what follows one."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from disagg.server.text import TextStream


class Letters:
    """A decoder whose tokens are letters; every third piece waits, as bytes of a character do."""

    def __init__(self) -> None:
        self.waiting = ""
        self.count = 0

    def add(self, ids: Iterable[int]) -> str:
        self.waiting += "".join(map(chr, ids))
        self.count += 1
        if self.count % 3 == 0:
            return ""
        text, self.waiting = self.waiting, ""
        return text

    def finish(self) -> str:
        return self.waiting


def shown(text: str, stops: list[str], min_tokens: int = 0) -> str:
    stream = TextStream(Letters(), stops, min_tokens)
    pieces = []
    for letter in text:
        pieces.append(stream.add(ord(letter)))
        if stream.stopped:
            return "".join(pieces)
    return "".join([*pieces, stream.finish()])


@given(st.text("ab", max_size=20), st.lists(st.text("ab", max_size=4), max_size=3))
def test_the_text_ends_at_the_first_stop_string(text, stops):
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    seen = shown(text, stops)
    if not ends:
        assert seen == text
    else:
        assert text.startswith(seen)
        assert not any(stop in seen for stop in stops if stop)
        assert len(seen) >= min(ends) or seen == text[: min(ends)]


def test_a_begun_stop_string_is_shown_when_it_is_not_completed():
    assert shown("one two\nthr", ["\nthree"]) == "one two\nthr"


def test_a_stop_string_ends_an_answer_only_where_it_ends_behind_min_tokens():
    assert shown("one two", ["e t"], 4) == "on"
    assert shown("one one", ["one"], 4) == "one "
    assert shown("one two", ["two"], 7) == "one two"
    assert shown("ab?", ["ab", "abc"], 2) == "ab?"


def test_without_stop_strings_everything_is_shown_at_once():
    stream = TextStream(Letters())
    assert [stream.add(ord(x)) for x in "abc"] == ["a", "b", ""]
    assert stream.finish() == "c"
