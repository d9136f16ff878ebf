"""Pass keys are at their stated depth, and greedy answers are compared token by token."""

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
    return Recall(
        runner,
        BYTES,
        filler=FILLER,
        lengths=(300, 400),
        codecs=("kivi",),
        keys=2,
    )


def test_every_prompt_has_its_length_and_its_key_at_its_depth(recall):
    for case in recall.cases():
        prompt, answer = recall._passage(case)
        text = BYTES.decode(prompt)

        assert len(prompt) == case.length
        assert f"is{BYTES.decode(answer)}. Remember it" in text
        before, _, rest = text.partition("The pass key for the")
        after, _, _ = rest.rpartition("What is")
        dots_before = before.count(".")
        dots = dots_before + after.count(".")
        assert dots_before / dots == pytest.approx(case.depth, abs=0.02)


def test_all_codecs_and_exact_kv_get_the_same_prompts(recall):
    cases = recall.cases()
    assert len(cases) == 2 * len(DEPTHS) * 2 * 2
    assert [case.codec for case in cases[:2]] == [EXACT, "kivi"]

    first, second, third = [recall._passage(case) for case in cases[:3]]

    assert first == second
    assert first != third


def test_an_answer_is_right_if_all_of_it_is(recall, monkeypatch):
    case = recall.cases()[1]
    _, answer = recall._passage(case)
    wrong = [*answer[:-1], answer[-1] + 1]
    answers = iter([answer, wrong])
    monkeypatch.setattr("disagg.eval.recall.greedy", lambda *_: next(answers))

    rows = [recall.measure(case), recall.measure(case)]

    assert [row["right"] for row in rows] == [True, False]
    assert summarize_recall(rows) == [{"codec": "kivi", "300 @ 0.1": 50}]
    assert case not in recall.cases(rows)


@pytest.mark.parametrize("limited_by", ["text", "context"])
def test_lengths_beyond_text_or_context_are_refused(runner, limited_by):
    if limited_by == "text":
        limit = 400
        filler = FILLER[:limit]
    else:
        limit = runner.info.context_length - 10
        filler = FILLER

    with pytest.raises(ConfigError, match=f"200 to {limit} are known"):
        Recall(runner, BYTES, filler, (300, limit + 1), ("kivi",), 2)


def test_tokens_are_the_same_until_one_differs():
    assert same_tokens([1, 2, 3, 4], [1, 2, 5, 4]) == 2
    assert same_tokens([1, 2], [1, 2]) == 2
