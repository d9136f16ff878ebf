"""Rows of tokens come from evenly spread places of a text, and are all of one length."""

import json

import pytest

from disagg.errors import ConfigError
from disagg.eval.texts import PYTHON, cut_rows, read_text
from disagg.model.tokenizer import Tokenizer
from tests.model.tiny import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer())


def test_rows_begin_at_evenly_spread_places():
    text = "".join(chr(97 + i // 100) for i in range(1000))
    rows = cut_rows(text, BYTES, 30, 5)

    assert [BYTES.decode(row) for row in rows] == [letter * 30 for letter in "acegi"]


def test_a_text_that_is_too_short_is_refused_with_what_it_has():
    with pytest.raises(
        ConfigError, match=r"40 tokens after character 60; row 4 of 5 takes 41"
    ):
        cut_rows("x" * 100, BYTES, 41, 5)


def test_every_machine_has_a_text():
    name, text = read_text(PYTHON)

    assert name == PYTHON
    assert len(cut_rows(text, BYTES, 4000, 8)) == 8


def test_a_file_of_json_lines_is_the_text_in_it(tmp_path):
    file = tmp_path / "sums.jsonl"
    rows = [
        {"question": "1 + 1?", "answer": "2", "n": 3},
        {"question": "2 + 2?", "answer": "4"},
    ]

    file.write_text("\n".join(map(json.dumps, rows)))

    assert read_text(str(file)) == ("sums", "1 + 1?\n2\n\n2 + 2?\n4")

    file.write_text('{"text": "one\u2028two"}\n')  # a line for Python, not for JSON

    assert read_text(str(file)) == ("sums", "one\u2028two")


@pytest.mark.parametrize("line", ["a sentence", "[1]"])
def test_lines_that_are_no_json_objects_are_named(line, tmp_path):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl: expected a JSON object in each line"
    ):
        read_text(str(tmp_path / "a.jsonl"))
