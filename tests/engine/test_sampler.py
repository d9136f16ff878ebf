import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagg.engine import sampler
from disagg.engine.sampler import Sampled, logprobs_of, sample, uniform
from disagg.engine.sequence import Request, SamplingParams
from disagg.errors import RequestError

LOGITS = torch.log(torch.tensor([[0.5, 0.05, 0.3, 0.15]]))
EOS = 3


def ask(prompt: Sequence[int] = (1,), **params: Any) -> Request:
    return Request("r", tuple(prompt), SamplingParams(**params), "raw")


def answers_of_lengths(count: int) -> list[list[int]]:
    """Answers of 0, 1, 2, ... tokens, so that each row has a random number of its own."""
    return [[0] * length for length in range(count)]


def test_uniform_numbers_are_fixed_for_ever():
    assert uniform(0, 0) == 0.8336885269740499
    assert uniform(0, 1) == 0.9459165357046844
    assert uniform(1, 0) == 0.3214364412611488


@pytest.mark.parametrize("vocab", [50, 500, 5000])
def test_of_equal_tokens_the_first_survive(vocab):
    for params in (
        {"top_k": 3},
        {"top_p": 2.5 / vocab},
        {"top_k": 30, "top_p": 2.5 / 30},
    ):
        requests = [ask(temperature=1.0, **params)] * 99
        sampled = sample(torch.zeros(99, vocab), requests, answers_of_lengths(99))
        assert {x.token for x in sampled} == {0, 1, 2}


@pytest.mark.parametrize("params", [{"top_k": 700}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_survivors_do_not_depend_on_the_first_widths(params, monkeypatch):
    spread = torch.arange(1, 10.0)[:, None]
    logits = spread * torch.randn(9, 5000, generator=torch.Generator().manual_seed(1))
    requests = [ask(temperature=1.0, **params)] * 9
    emitted = answers_of_lengths(9)

    sampled = sample(logits, requests, emitted)

    monkeypatch.setattr(sampler, "TRUNCATION_WIDTHS", ())
    assert sample(logits, requests, emitted) == sampled


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_likeliest_token_survives_any_temperature(cut):
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    requests = [ask(temperature=1e8, seed=row, **cut) for row in range(8)]

    sampled = sample(logits, requests, [[]] * 8)

    assert [x.token for x in sampled] == logits.argmax(-1).tolist()


def test_log_probabilities_are_the_models_before_any_edit():
    request = ask(logprobs=2, temperature=2.0, logit_bias=[(1, 100.0)])

    (sampled,) = sample(LOGITS, [request], [[]])

    assert sampled.token == 1
    own, likeliest = sampled.logprobs
    assert own == pytest.approx(math.log(0.05))
    assert [token for token, _ in likeliest] == [0, 2]
    assert [x for _, x in likeliest] == pytest.approx([math.log(0.5), math.log(0.3)])


def test_each_row_gets_the_log_probabilities_that_it_asks_for():
    rows = LOGITS.expand(4, -1)
    requests = [ask(logprobs=count) for count in (None, 0, 3, 99)]

    sampled = sample(rows, requests, [[]] * 4)

    assert sampled[0] == Sampled(0)
    assert [len(x.logprobs[1]) for x in sampled[1:] if x.logprobs] == [0, 3, 4]


def test_tokens_that_the_model_excludes_have_log_probabilities_that_json_has():
    """Such as those of a padded vocabulary."""
    logits = torch.tensor([[2.0, -torch.inf, 1.0, -torch.inf]])

    (sampled,) = sample(logits, [ask(logprobs=4)], [[]])
    ((own, _),) = logprobs_of(logits, torch.tensor([3]), [0])

    assert sampled.token == 0
    assert [x for _, x in sampled.logprobs[1]][2:] == [-9999.0, -9999.0]
    assert own == -9999.0
    json.dumps(sampled.logprobs, allow_nan=False)


def test_no_rows_have_no_log_probabilities():
    no_tokens = torch.tensor([], dtype=torch.int64)
    assert logprobs_of(LOGITS[:0], no_tokens, []) == []


VOCAB = 8  # few tokens, so that every edit of logits can change the best one
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-300, 0.3, 1.0, 5.0]),
        "top_k": st.integers(0, 9),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "seed": st.integers(0, 2**63 - 1),
        "logit_bias": st.lists(st.tuples(TOKENS, st.floats(-9, 9)), max_size=3),
        "stop_token_ids": st.lists(TOKENS, max_size=3),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 5),
        "logprobs": st.integers(0, 5),
    },
)
WORDS = st.lists(TOKENS, max_size=8)


def plain_scores(
    logits: Tensor, request: Request, emitted: Sequence[int]
) -> list[float]:
    """The edited logits of one row, token by token."""
    params = request.params
    scores = logits.double().tolist()
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*request.tokens, *emitted}:
        factor = params.repetition_penalty
        scores[token] *= factor if scores[token] <= 0 else 1 / factor
    for token in {*emitted}:
        count = list(emitted).count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(emitted) < params.min_tokens:
        ends = list(params.stop_token_ids)
        if not params.ignore_eos:
            ends.append(EOS)
        for token in ends:
            scores[token] = -math.inf
    return scores


@pytest.mark.parametrize("top_k", [0, 4])
def test_top_p_is_a_share_of_what_min_p_leaves(top_k):
    """As in vLLM: of .5 and .3, which min_p leaves, the first is more than 0.6."""
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.05, 0.05]]).log()
    tokens = set()

    for seed in range(100):
        params = SamplingParams(
            temperature=1.0, min_p=0.3, top_p=0.6, top_k=top_k, seed=seed
        )
        (sampled,) = sample(logits, [Request("r", (0,), params, "raw")], [[]], [])
        tokens.add(sampled.token)

    assert tokens == {0}


def plain_sample(logits: Tensor, request: Request, emitted: Sequence[int]) -> int:
    """One row by the book, token by token."""
    params = request.params
    scores = plain_scores(logits, request, emitted)
    ranked = sorted(range(VOCAB), key=lambda token: (-scores[token], token))
    if not params.temperature:
        return ranked[0]
    best = scores[ranked[0]]
    weights = {
        token: math.exp((scores[token] - best) / params.temperature)
        for token in ranked[: params.top_k or VOCAB]
    }
    weights = {token: x for token, x in weights.items() if x >= params.min_p}
    total = sum(weights.values())
    survivors = {}
    before = 0.0
    for token, weight in weights.items():
        if before < params.top_p * total:
            survivors[token] = weight
        before += weight
    target = uniform(params.seed or 0, len(emitted)) * sum(survivors.values())
    end = 0.0
    for token in sorted(survivors):
        end += survivors[token]
        if end > target:
            return token
    return max(survivors)


@given(
    st.lists(st.tuples(PARAMS, WORDS, WORDS), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_a_row_of_any_batch_gets_the_token_it_gets_alone_and_by_the_book(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=generator)
    before = logits.clone()
    requests = [ask([*prompt, 1], **params) for params, prompt, _ in rows]
    emitted = [answer for _, _, answer in rows]

    batch = sample(logits, requests, emitted, [EOS])

    for i, sampled in enumerate(batch):
        row = slice(i, i + 1)
        assert sample(logits[row], requests[row], emitted[row], [EOS]) == [sampled]
        assert sampled.token == plain_sample(logits[i], requests[i], emitted[i])
    assert torch.equal(logits, before)


WRONG = {
    "max_tokens": [0, 2**63, 1.5],
    "temperature": [-0.1, math.nan, 10**400, "warm"],
    "top_p": [0.0, 1.5],
    "top_k": [-1, 2**64],
    "seed": [-1, 2**63],
    "min_p": [1.5],
    "min_tokens": [-1, 17],
    "presence_penalty": [math.nan],
    "frequency_penalty": [1e5],
    "repetition_penalty": [0.0],
    "logprobs": [-1, True],
    "logit_bias": [{1: 5}, [(1.5, 0)], [(1, "x")]],
    "stop_token_ids": [5, ["a"], [-1]],
    "prompt_logprobs": [True],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
)
def test_parameters_that_make_no_sense_are_refused(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}]
)
@pytest.mark.parametrize(
    ("logit", "penalty"), [(2.0, 1e-40), (math.nan, 1.0), (math.inf, 1.0)]
)
def test_a_row_of_no_numbers_is_refused(params, logit, penalty):
    """Not a token behind the vocabulary, which would break all that decode beside it."""
    requests = [ask(**params, repetition_penalty=penalty)]
    with pytest.raises(RequestError, match="no token can be drawn"):
        sample(torch.tensor([[0.5, logit, 1.0]]), requests, [[]])
