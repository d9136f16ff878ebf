"""What a client sees: never half a stop string, never what follows one."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.model.text_stream import TextStream
from disagg.model.tokenizer import Tokenizer
from tests.model.tiny import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer())
WORDS = Tokenizer.load()  # "ab" is a token, and a snowman is several


def shown(
    text: str, stops: list[str], min_tokens: int = 0, tokenizer: Tokenizer = BYTES
) -> str:
    stream = TextStream(tokenizer.detokenizer(), stops, min_tokens)
    pieces = []
    for token in tokenizer.encode(text, special=False):
        pieces.append(stream.add(token))
        if stream.stopped:
            return "".join(pieces)
    return "".join([*pieces, stream.finish()])


@given(st.text("ab☃", max_size=20), st.lists(st.text("ab☃", max_size=4), max_size=3))
def test_the_text_ends_at_the_first_stop_string(text, stops):
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    visible = shown(text, stops, tokenizer=WORDS)
    if not ends:
        assert visible == text
    else:
        assert text.startswith(visible)
        assert not any(stop in visible for stop in stops if stop)
        assert len(visible) >= min(ends) or visible == text[: min(ends)]


def test_a_begun_stop_string_is_shown_when_it_is_not_completed():
    assert shown("one two\nthr", ["\nthree"]) == "one two\nthr"


def test_a_stop_string_ends_an_answer_only_where_it_ends_behind_min_tokens():
    assert shown("one two", ["e t"], 4) == "on"
    assert shown("one one", ["one"], 4) == "one "
    assert shown("one two", ["two"], 7) == "one two"
    assert shown("ab?", ["ab", "abc"], 2) == "ab?"


def test_without_stop_strings_everything_is_shown_at_once():
    """But for bytes of a character that is not whole."""
    stream = TextStream(BYTES.detokenizer())
    assert [stream.add(x) for x in BYTES.encode("aéé")[:-1]] == ["a", "", "é", ""]
    assert stream.finish() == "\ufffd"


SNOWMAN = BYTES.encode("☃", special=False)
MARK = 1 << 20  # an id that the tokenizer does not have: marks are not decoded


def marked(tokens: list[int], stops: list[str], hidden: set[int] | None = None) -> str:
    stream = TextStream(
        BYTES.detokenizer(), stops, hidden=hidden or set(), marks={MARK: "\ud800"}
    )
    pieces = [stream.add(token) for token in tokens]
    return "".join([*pieces, stream.finish()])


def test_a_mark_is_shown_where_it_stands():
    """Also if it is an end token, which is hidden otherwise."""
    one, two = BYTES.encode("one"), BYTES.encode("two")

    assert marked([*one, MARK, *two, MARK], ["net"], {MARK}) == "one\ud800two\ud800"


def test_no_stop_string_reaches_over_a_mark():
    one, two = BYTES.encode("one"), BYTES.encode("two")

    assert marked([*one, MARK, *two, *two], ["onetwo", "twot"]) == "one\ud800"
    assert marked([*one, MARK], ["one"]) == ""


def test_half_a_character_before_a_mark_is_not_completed_behind_it():
    tokens = [SNOWMAN[0], MARK, *SNOWMAN[1:], *SNOWMAN]

    assert marked(tokens, []) == "\ufffd\ud800\ufffd\ufffd☃"
