"""Look-up speculation changes how many steps an answer takes, and nothing else."""

import sys
from itertools import pairwise

import pytest
import torch

from disagg.codecs import codec_names
from disagg.engine.lookup import DraftHistory, TokenText
from disagg.engine.messages import Move, Prefill
from tests.engine.serving import (
    Nowhere,
    StandIn,
    answers,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.model.tiny import random_prompt

DRAFTS = 5
ASKS = {
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.9},
    "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "short of an end": {"min_tokens": 30},
    "biased": {"logit_bias": ((7, 2.0), (9, -3.0))},
}


def text_of(*tokens):
    text = TokenText()
    text.add(tokens)
    return text


def with_drafts(runner, **config):
    return make_engine(runner, speculative_tokens=DRAFTS, **config)


class Repeating(StandIn):
    """A runner that likes the tokens of a passage, one after another, and so follows drafts."""

    def __init__(self, runner, passage, bonus=1e3):
        super().__init__(runner)
        self.following = dict(pairwise(passage))
        self.bonus = bonus
        self.steps = []

    def forward(self, batch):
        logits = self._runner.forward(batch).clone()
        self.steps.append(len(batch.tokens))
        for row, output in enumerate(batch.outputs):
            token = self.following.get(batch.tokens[output])
            if token is not None:
                logits[row, token] += self.bonus
        return logits


def test_the_tokens_behind_the_last_match_are_a_continuation():
    text = text_of(1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3)

    assert text.continuation(4) == [6, 7, 8, 1]


def test_a_match_begins_at_a_token_not_within_one():
    # as bytes, the last three of these tokens also lie across the first ones
    text = text_of(0x010000, 0, 0x0100, 5, 1, 0, 0)

    assert text.continuation(2) == []


def test_crafted_text_is_searched_once_for_a_draft():
    # as bytes, three tokens of 0 lie across each four of these, and never at whole ones
    text = text_of(*[0xAA, 0, 0, 0xBB00] * 500, 7, 0, 0, 0)
    searches = []

    def count(_frame, event, function):
        if event == "c_call" and function.__name__ == "rfind":
            searches.append(function)

    sys.setprofile(count)
    draft = text.continuation(4)
    sys.setprofile(None)

    assert draft == []
    assert len(searches) == 1


def test_a_text_that_repeats_itself_goes_on_repeating():
    assert text_of(9, 1, 2, 1, 2, 1, 2).continuation(5) == [1, 2, 1, 2, 1]


def test_a_text_without_a_match_has_no_continuation():
    assert text_of(1, 2, 3, 4, 5).continuation(4) == []
    assert text_of(1, 2).continuation(4) == []


def test_wrong_drafts_make_the_next_one_wait_longer():
    history = DraftHistory(text_of(*[1, 2, 3, 4] * 8), size=4)
    pauses = []
    answer = []
    for _ in range(4):
        drafted_at = len(answer)
        while not history.draft(answer, 4):
            answer.append([1, 2, 3, 4][len(answer) % 4])
        pauses.append(len(answer) - drafted_at)
        history.learn(4, 0, most=7)

    assert pauses == [0, 0, 4, 8]


@pytest.fixture
def guess(monkeypatch):
    """Makes drafts of known answers, in which every seventh token is wrong."""

    def guess(*expected):
        def draft(_history, emitted, size):
            start = len(emitted)
            (answer, *_) = (x for x in expected if x[:start] == [*emitted])
            indices = range(start, min(start + size, len(answer)))
            return [answer[i] if i % 7 else answer[i] ^ 1 for i in indices]

        monkeypatch.setattr(DraftHistory, "draft", draft)

    return guess


@pytest.mark.parametrize("codec", codec_names())
def test_answers_are_those_without_drafts(codec, runner, guess):
    prompts = [random_prompt(n) for n in (1, 90, 150)]
    expected = serve(make_engine(runner), prompts, codec, 80)
    guess(*expected)
    engine = with_drafts(runner)

    tokens = serve(engine, prompts, codec, 80)

    assert tokens == expected
    assert 0 < engine.counts["accepted_tokens"] < engine.counts["draft_tokens"]


@pytest.mark.parametrize("ask", ASKS)
def test_sampling_sees_the_same_logits_and_randomness(ask, runner, guess):
    prompt = random_prompt(70)
    expected = serve(make_engine(runner), [prompt], "raw", 40, **ASKS[ask])
    guess(*expected)
    engine = with_drafts(runner)

    tokens = serve(engine, [prompt], "raw", 40, **ASKS[ask])

    assert tokens == expected
    assert engine.counts["accepted_tokens"]


def test_an_answer_ends_at_a_stop_token_within_a_draft(runner, guess):
    prompt = random_prompt(70)
    (whole,) = serve(make_engine(runner), [prompt], "raw", 40)
    guess(whole)
    stop = whole[10]

    engine = with_drafts(runner)

    (answer,) = serve(engine, [prompt], "raw", 40, stop_token_ids=(stop,))

    assert answer == whole[: whole.index(stop) + 1]
    assert engine.counts["accepted_tokens"]


def test_log_probabilities_are_those_without_drafts(runner, guess):
    ask = request("a", random_prompt(70), "raw", 20, logprobs=2)
    plain, drafting = make_engine(runner), with_drafts(runner)
    plain.submit(Prefill(ask))
    expected = run_until_idle(plain)
    guess(answers(expected)["a"])
    drafting.submit(Prefill(ask))

    output = run_until_idle(drafting)

    scores = [score for token in output.tokens for score, _ in token.logprobs]
    others = [score for token in expected.tokens for score, _ in token.logprobs]
    assert drafting.counts["accepted_tokens"]
    assert scores == pytest.approx(others, abs=1e-4)


def test_drafts_take_no_room_from_others(runner, guess):
    prompts = [random_prompt(n) for n in (60, 61, 62)]
    sizes = {"arena_bytes": 1 << 20, "max_sequences": 3}
    plain = make_engine(runner, **sizes)
    expected = serve(plain, prompts, "raw", 150)
    guess(*expected)
    engine = with_drafts(runner, **sizes)

    assert serve(engine, prompts, "raw", 150) == expected
    assert engine.counts["preempted"] <= plain.counts["preempted"]
    assert engine.counts["accepted_tokens"]


def test_a_draft_whose_logits_are_broken_ends_before_them(runner, guess):
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(runner), [prompt], "raw", 20)
    guess(expected)

    def forward(batch):
        logits = runner.forward(batch).clone()
        if len(batch.outputs) > 2:
            logits[2] = torch.nan
        return logits

    engine = with_drafts(StandIn(runner, forward))

    (answer,) = serve(engine, [prompt], "raw", 20)

    assert answer == expected
    assert 0 < engine.counts["accepted_tokens"] < engine.counts["draft_tokens"]


def test_a_sequence_that_moves_stops_where_it_should(runner, guess):
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(runner), [prompt], "raw", 40)
    guess(expected)
    engine = with_drafts(runner)
    engine.submit(Prefill(request("a", prompt, "raw", 40)))
    tokens = []
    while len(tokens) < 5:
        tokens += engine.step().tokens
    hold_at = len(prompt) + len(tokens) + 6
    engine.submit(Move("a", hold_at, Nowhere()))

    while not (moved := engine.step().moved):
        pass

    assert [*moved[0].emitted] == expected[: hold_at - len(prompt) + 1]
    assert engine.counts["accepted_tokens"]


def test_answers_end_at_the_context(runner, guess):
    context = runner.info.context_length
    prompt = random_prompt(context - 12)
    (expected,) = serve(make_engine(runner), [prompt], "raw", 40)
    guess([*expected, 1, 2, 3, 4, 5])

    engine = with_drafts(runner)

    assert serve(engine, [prompt], "raw", 40) == [expected]
    assert engine.counts["accepted_tokens"]


def test_large_steps_have_no_drafts(runner, guess):
    prompts = [random_prompt(20 + n) for n in range(15)]
    expected = serve(make_engine(runner), prompts, "raw", 8)
    guess(*expected)
    engine = with_drafts(runner)

    assert serve(engine, prompts, "raw", 8) == expected
    assert not engine.counts["drafts"]


def test_right_drafts_take_fewer_steps(runner):
    passage = [*range(40)]
    prompt = [*passage, *random_prompt(50), *passage[:4]]
    alone = Repeating(runner, passage)
    expected = serve(make_engine(alone), [prompt], "raw", 30)
    drafting = Repeating(runner, passage)
    engine = with_drafts(drafting)

    tokens = serve(engine, [prompt], "raw", 30)

    assert tokens == expected
    assert len(drafting.steps) < len(alone.steps) / 2
    assert engine.counts["accepted_tokens"] > 15


def with_a_change(answer, at):
    """An answer in which one token is another."""
    return [*answer[:at], answer[at] ^ 1, *answer[at + 1 :]]


def test_a_prediction_with_one_change_takes_fewer_steps(runner):
    prompt = random_prompt(70)
    alone = StandIn(runner)
    (expected,) = serve(make_engine(alone), [prompt], "raw", 40)
    engine = with_drafts(runner)
    prediction = with_a_change(expected, 20)

    (answer,) = serve(engine, [prompt], "raw", 40, prediction=prediction)

    assert answer == expected
    assert engine.counts["accepted_tokens"] > 25


def test_a_prediction_that_is_wrong_changes_no_token(runner):
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(runner), [prompt], "raw", 40)
    prediction = [token ^ 1 for token in expected]

    (answer,) = serve(with_drafts(runner), [prompt], "raw", 40, prediction=prediction)

    assert answer == expected


def test_an_answer_is_followed_in_its_prediction_before_it_is_looked_up():
    ask = request("a", [1, 2, 3, 9, 1, 2, 3], "raw", 20, prediction=[1, 2, 3, 4, 5])
    history = DraftHistory.of(ask)

    assert history.draft([1, 2, 3], 2) == [4, 5]


def test_a_passage_of_a_prediction_is_found_out_of_its_order():
    ask = request("a", [50, 51], "raw", 20, prediction=[1, 2, 3, 4, 5, 6, 7])
    history = DraftHistory.of(ask)

    assert history.draft([4, 5, 6, 7, 1, 2, 3], 2) == [4, 5]


def test_a_predicted_token_outside_the_vocabulary_is_refused(runner):
    engine = with_drafts(runner)
    engine.submit(Prefill(request("a", [1, 2], "raw", 4, prediction=[1 << 20])))

    (failed,) = engine.step().failed

    assert "token 1048576 is outside the vocabulary" in str(failed.error)


def test_a_prediction_that_is_found_again_does_not_wait():
    ask = request("a", [50, 51], "raw", 20, prediction=[*range(20)])
    history = DraftHistory.of(ask)
    history.draft([30, 31], 4)
    for _ in range(4):
        history.learn(4, 0, most=7)

    assert history.draft([30, 31, 5, 6, 7], 2) == [8, 9]
