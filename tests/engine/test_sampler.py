import pytest
import torch

from disagg.engine.sampler import sample, uniform
from disagg.engine.sequence import SamplingParams
from disagg.errors import RequestError

LOGITS = torch.log(torch.tensor([[0.5, 0.05, 0.3, 0.15]]))


def draws(params: SamplingParams, count: int = 2000) -> list[float]:
    """How often each of the four tokens comes."""
    tokens = [sample(LOGITS, [params], [index])[0] for index in range(count)]
    return [tokens.count(token) / count for token in range(4)]


def test_temperature_zero_takes_the_best_token():
    assert sample(LOGITS, [SamplingParams()], [0]) == [0]


def test_frequencies_follow_the_probabilities():
    assert draws(SamplingParams(temperature=1.0)) == pytest.approx([0.5, 0.05, 0.3, 0.15], abs=0.04)


def test_low_temperatures_sharpen():
    expected = torch.tensor([0.5, 0.05, 0.3, 0.15]).pow(2)
    expected /= expected.sum()
    assert draws(SamplingParams(temperature=0.5)) == pytest.approx(expected.tolist(), abs=0.04)


def test_top_k_keeps_the_most_likely_tokens():
    expected = [0.625, 0, 0.375, 0]
    assert draws(SamplingParams(temperature=1.0, top_k=2)) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.4, [1, 0, 0, 0]), (0.79, [0.625, 0, 0.375, 0]), (0.81, [0.526, 0, 0.316, 0.158])],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, expected):
    assert draws(SamplingParams(temperature=1.0, top_p=top_p)) == pytest.approx(expected, abs=0.04)


def test_a_token_depends_on_seed_and_index_and_not_on_its_batch():
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 1, 2, 3, 4)]
    indices = [7, 8, 7, 0, 123]
    together = sample(logits, params, indices)
    alone = [sample(logits[i : i + 1], params[i : i + 1], indices[i : i + 1])[0] for i in range(5)]
    assert together == alone
    same_row = logits[:1].expand(40, -1)
    by_index = sample(same_row, [params[0]] * 40, range(40))
    by_seed = sample(
        same_row, [SamplingParams(temperature=1.0, seed=x) for x in range(40)], [0] * 40
    )
    assert len(set(by_index)) > 10
    assert len(set(by_seed)) > 10


def test_uniform_numbers_are_fixed_for_ever():
    seen = [uniform(0, 0), uniform(0, 1), uniform(1, 0)]
    assert seen == [0.8336885269740499, 0.9459165357046844, 0.3214364412611488]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"max_tokens": 2**63},
        {"top_k": 2**64},
        {"seed": 2**63},
        {"temperature": 10**400},
        {"max_tokens": 1.5},
        {"temperature": "warm"},
    ],
)
def test_parameters_that_make_no_sense_are_refused(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
