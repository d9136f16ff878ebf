"""Pass keys lie where they are said to, and greedy answers are compared token by token."""

import pytest

from disagg.errors import ConfigError
from disagg.eval.paged import EXACT
from disagg.eval.recall import DEPTHS, Recall, same_tokens, summarize_recall
from disagg.model.tokenizer import Tokenizer
from tests.model.tiny import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer())
FILLER = BYTES.encode("." * 1000)


@pytest.fixture
def recall(runner):
    return Recall(runner, BYTES, FILLER, (300, 400), ("kivi",), 2)


def test_every_prompt_has_its_length_and_its_key_at_its_depth(recall):
    for case in recall.cases():
        prompt, answer = recall._passage(case)
        text = BYTES.decode(prompt)
        assert len(prompt) == case.length
        assert f"is{BYTES.decode(answer)}. Remember it" in text
        before, _, after = text.partition("The pass key for the")
        dots = before.count("."), after.rpartition("What is")[0].count(".")
        assert dots[0] / sum(dots) == pytest.approx(case.depth, abs=0.02)


def test_all_codecs_are_asked_the_same_beside_exact_kv(recall):
    cases = recall.cases()
    assert len(cases) == 2 * len(DEPTHS) * 2 * 2
    assert [case.codec for case in cases[:2]] == [EXACT, "kivi"]
    assert recall._passage(cases[0]) == recall._passage(cases[1])
    assert recall._passage(cases[0]) != recall._passage(cases[2])


def test_an_answer_is_right_if_all_of_it_is(recall, monkeypatch):
    case = recall.cases()[1]
    answer = recall._passage(case)[1]
    answers = iter([answer, [*answer[:-1], answer[-1] + 1]])
    monkeypatch.setattr("disagg.eval.recall.greedy", lambda *_: next(answers))
    rows = [recall.measure(case), recall.measure(case)]
    assert [row["right"] for row in rows] == [True, False]
    assert summarize_recall(rows) == [{"codec": "kivi", "300 @ 0.1": 50}]
    assert case not in recall.cases(rows)


def test_lengths_that_neither_text_nor_context_have_are_refused(runner):
    most = runner.info.context_length - 10
    for filler, limit in ((FILLER[:400], 400), (FILLER, most)):
        with pytest.raises(ConfigError, match=f"200 to {limit} are known"):
            Recall(runner, BYTES, filler, (300, limit + 1), ("kivi",), 2)


def test_tokens_are_the_same_until_one_differs():
    assert same_tokens([1, 2, 3, 4], [1, 2, 5, 4]) == 2
    assert same_tokens([1, 2], [1, 2]) == 2
