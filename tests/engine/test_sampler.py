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


def test_uniform_numbers_are_fixed_for_ever():
    seen = [uniform(0, 0), uniform(0, 1), uniform(1, 0)]
    assert seen == [0.8336885269740499, 0.9459165357046844, 0.3214364412611488]


@pytest.mark.parametrize("vocab", [50, 500, 5000])
def test_of_equal_tokens_the_first_are_kept(vocab):
    said = [[0] * index for index in range(99)]
    for params in (
        {"top_k": 3},
        {"top_p": 2.5 / vocab},
        {"top_k": 30, "top_p": 2.5 / 30},
    ):
        requests = [ask(temperature=1.0, **params)] * 99
        assert {x.token for x in sample(torch.zeros(99, vocab), requests, said)} == {
            0,
            1,
            2,
        }


@pytest.mark.parametrize("params", [{"top_k": 700}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_what_is_left_does_not_depend_on_how_many_are_looked_at_first(
    params, monkeypatch
):
    spread = torch.arange(1, 10.0)[:, None]
    logits = spread * torch.randn(9, 5000, generator=torch.Generator().manual_seed(1))
    requests, said = (
        [ask(temperature=1.0, **params)] * 9,
        [[0] * index for index in range(9)],
    )
    found = sample(logits, requests, said)
    monkeypatch.setattr(sampler, "TRUNCATION_WIDTHS", ())
    assert sample(logits, requests, said) == found


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_likeliest_token_is_left_however_high_the_temperature(cut):
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    requests = [ask(temperature=1e8, seed=row, **cut) for row in range(8)]
    found = [sampled.token for sampled in sample(logits, requests, [[]] * 8)]
    assert found == logits.argmax(-1).tolist()


def test_log_probabilities_are_the_models_whatever_sampling_does():
    params: dict[str, Any] = {
        "logprobs": 2,
        "temperature": 2.0,
        "logit_bias": [(1, 100.0)],
    }
    (sampled,) = sample(LOGITS, [ask(**params)], [[]])
    assert sampled.token == 1
    own, likeliest = sampled.logprobs
    assert own == pytest.approx(math.log(0.05))
    assert [token for token, _ in likeliest] == [0, 2]
    assert [x for _, x in likeliest] == pytest.approx([math.log(0.5), math.log(0.3)])


def test_rows_get_as_many_of_the_likeliest_as_they_want_and_others_none():
    rows = LOGITS.expand(4, -1)
    wanted = (None, 0, 3, 99)
    found = sample(rows, [ask(logprobs=count) for count in wanted], [[]] * 4)
    assert found[0] == Sampled(0)
    assert [len(x.logprobs[1]) for x in found[1:] if x.logprobs] == [0, 3, 4]
    assert logprobs_of(rows[:0], torch.tensor([], dtype=torch.int64), []) == []


VOCAB = 8  # few: whatever edits the logits changes who is best
TOKENS = st.integers(0, VOCAB - 1)
OPTIONAL = {"temperature": st.sampled_from([0.0, 1e-300, 0.3, 1.0, 5.0])}
OPTIONAL |= {
    "top_k": st.integers(0, 9),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
}
OPTIONAL |= dict.fromkeys(("presence_penalty", "frequency_penalty"), st.floats(-2, 2))
OPTIONAL |= {"repetition_penalty": st.floats(0.5, 2), "seed": st.integers(0, 2**63 - 1)}
OPTIONAL |= {"logit_bias": st.lists(st.tuples(TOKENS, st.floats(-9, 9)), max_size=3)}
OPTIONAL |= {
    "stop_token_ids": st.lists(TOKENS, max_size=3),
    "ignore_eos": st.booleans(),
}
OPTIONAL |= dict.fromkeys(("min_tokens", "logprobs"), st.integers(0, 5))
PARAMS = st.fixed_dictionaries({}, optional=OPTIONAL)
WORDS = st.lists(TOKENS, max_size=8)


def plainly(logits: Tensor, request: Request, emitted: Sequence[int]) -> int:
    """One row by the book, token by token."""
    params, scores = request.params, logits.double().tolist()
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*request.tokens, *emitted}:
        factor = params.repetition_penalty
        scores[token] *= factor if scores[token] <= 0 else 1 / factor
    for token in {*emitted}:
        said = params.frequency_penalty * list(emitted).count(token)
        scores[token] -= said + params.presence_penalty
    if len(emitted) < params.min_tokens:
        for token in (*params.stop_token_ids, *([] if params.ignore_eos else [EOS])):
            scores[token] = -math.inf
    ranked = sorted(range(VOCAB), key=lambda token: (-scores[token], token))
    if not params.temperature:
        return ranked[0]
    top = scores[ranked[0]]
    weights = {x: math.exp((scores[x] - top) / params.temperature) for x in ranked}
    weights = {x: weights[x] for x in ranked[: params.top_k or VOCAB]}
    mass, kept, before = sum(weights.values()), {}, 0.0
    for token, weight in weights.items():
        if before < params.top_p * mass and weight >= params.min_p:
            kept[token] = weight
        before += weight
    target, sums = uniform(params.seed, len(emitted)) * sum(kept.values()), 0.0
    for token in sorted(kept):
        sums += kept[token]
        if sums > target:
            return token
    return max(kept)


@given(
    st.lists(st.tuples(PARAMS, WORDS, WORDS), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_a_batch_of_anything_gives_each_row_what_it_gets_alone_and_by_the_book(
    rows, seed
):
    logits = torch.randn(
        len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)
    )
    requests = [ask([*prompt, 1], **params) for params, prompt, _ in rows]
    emitted = [said for *_, said in rows]
    before = logits.clone()
    together = sample(logits, requests, emitted, [EOS])
    for i, sampled in enumerate(together):
        row, request, said = logits[i : i + 1], requests[i : i + 1], emitted[i : i + 1]
        assert sample(row, request, said, [EOS]) == [sampled]
        assert sampled.token == plainly(logits[i], requests[i], emitted[i])
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
    ("name", "value"), [(x, y) for x, some in WRONG.items() for y in some]
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
