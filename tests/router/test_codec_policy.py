"""The codec of who leaves it to the service: the rule, and the rule on a link that drops."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.router.codec_policy import Candidate, CodecPolicy, choose

PAIR = ("p", "d")
NBYTES = {
    "raw": 1.0,
    "fp8": 0.5,
    "kivi": 0.32,
    "banded": 0.28,
}  # of what a prompt has in fp16
ERRORS = {"raw": 0.0005, "fp8": 0.062, "kivi": 0.063, "banded": 0.105}
LISTED = [Candidate(codec, NBYTES[codec], error) for codec, error in ERRORS.items()]


CHOSEN = [
    (0.2, 9, 9, ("raw", "accurate")),
    (0.2, 9, 0.6, ("fp8", "deadline")),
    (0.2, 9, 0.3, ("banded", "deadline")),
    (0.2, 9, 0.2, ("banded", "late")),
    (0.1, 9, 0.3, ("kivi", "late")),
    (0.2, 0.4, 9, ("kivi", "room")),
    (0.2, 0.1, 9, ("banded", "room")),
    (0.0001, 9, 0.3, ("raw", "budget")),
]


@pytest.mark.parametrize(("budget", "room", "timely", "expected"), CHOSEN)
def test_it_is_the_most_accurate_in_the_budget_with_room_and_in_time(
    budget, room, timely, expected
):
    best, reason = choose(LISTED, budget, room, timely)
    assert (best.codec, reason) == expected


def test_the_first_that_is_listed_is_taken_while_no_error_is_known():
    candidates = [Candidate("kivi", 0.3), Candidate("raw", 1.0)]
    assert choose(candidates, 0.1, 9, 9) == (candidates[0], "unmeasured")


numbers = st.floats(0, 1)
candidate = st.builds(
    Candidate, st.just("c"), numbers, st.one_of(numbers, st.just(math.inf))
)


@given(st.lists(candidate, min_size=1, max_size=5), numbers, numbers, numbers)
def test_nothing_above_the_budget_or_late_while_there_is_better(
    candidates, budget, room, timely
):
    best, _ = choose(candidates, budget, room, timely)
    assert best in candidates
    fitting = [
        x for x in candidates if x.error <= budget and x.nbytes <= min(room, timely)
    ]
    if fitting:
        assert best in fitting
        assert best.error == min(x.error for x in fitting)
    elif any(x.error <= budget for x in candidates):
        assert best.error <= budget


def sampled(**errors: float) -> dict[str, object]:
    """Figures of a hand-off: errors of codecs in the only layer of a model."""
    return {"attention_error": {codec: [{"0": e}] for codec, e in errors.items()}}


def test_of_errors_the_mean_is_kept_and_of_layer_groups_the_worst():
    choices = CodecPolicy()
    for worst in (0.2, float("nan"), 0.4):
        errors = [{"0": 0.1, "2": 0.1}, {"1": worst}]
        choices.learn({"attention_error": {"kivi": errors}}, PAIR)

    assert choices.errors["kivi"].value == pytest.approx(0.3)


def test_a_mean_over_many_layers_does_not_hide_a_ruined_one():
    choices = CodecPolicy()
    layers = range(28)
    for number in range(200):
        ends = (number % 14, 27 - number % 14)
        int8 = {str(layer): 1.0 if layer in (0, 27) else 0.01 for layer in ends}
        fp8 = dict.fromkeys(map(str, ends), 0.06)
        choices.learn({"attention_error": {"int8": [int8], "fp8": [fp8]}}, PAIR)
        codec, _ = choices.choose({"int8": 0.5, "fp8": 0.5}, 0.15, 9, PAIR, 9, 0)
        assert codec == "fp8", number

    assert choices.errors["int8"].mean == pytest.approx((2 + 26 * 0.01) / len(layers))
    assert choices.errors["int8"].worst == 1.0


def test_a_layer_that_recovers_is_forgiven():
    choices = CodecPolicy()
    for error in (1.0, *(12 * [0.01])):
        choices.learn(sampled(int8=error), PAIR)

    assert choices.errors["int8"].value < 0.15


def test_without_a_link_nothing_is_late():
    choices = CodecPolicy()
    choices.learn({"link_bytes_per_s": 1e-9, **sampled(raw=0.0)}, ("b", "b"))
    assert choices.choose({"raw": 9.0}, 0.1, 99, ("b", "b"), 1.0, 0.0) == (
        "raw",
        "accurate",
    )


def test_what_is_on_the_link_already_comes_first():
    choices = CodecPolicy()
    choices.learn(sampled(**ERRORS), PAIR)
    choices.learn({"link_bytes_per_s": 1.0}, PAIR)
    chosen = [
        choices.choose(NBYTES, 0.2, 9, PAIR, 2.0, ahead)[0] for ahead in (0.5, 0.8, 1.2)
    ]
    assert chosen == ["raw", "fp8", "kivi"]
    assert sum(choices.chosen.values()) == 3


def play(
    fixed: str = "", requests: int = 300
) -> tuple[list[str], list[bool], list[float]]:
    """Prompts one after another, each 1 s of prefill, over a link of 4, 1/8 and 4 times what that
    makes: the codecs, whether deadline and budget were met, and the errors."""
    choices, noise = CodecPolicy(), random.Random(1)
    codecs, met, errors = list[str](), list[bool](), list[float]()
    for number in range(requests):
        rate = (4.0, 1 / 8, 4.0)[3 * number // requests]
        codec = fixed or choices.choose(NBYTES, 0.15, 99, PAIR, 3.0, 0.0)[0]
        seconds = max(1.0, NBYTES[codec] / rate)
        factor = noise.uniform(0.7, 1.3)
        errors_now = {x: factor * error for x, error in ERRORS.items()}
        choices.learn(sampled(**({} if number % 8 else errors_now)), PAIR)
        choices.learn({"link_bytes_per_s": rate}, PAIR)
        codecs.append(codec)
        errors.append(factor * ERRORS[codec])
        met.append(seconds <= 3.0 and errors[-1] <= 0.15)
    return codecs, met, errors


def test_on_a_link_that_drops_and_returns_it_moves_to_fewer_bits_and_back():
    codecs, met, errors = play()
    assert codecs[0] == codecs[1] == "raw"
    assert codecs[99::100] == ["raw", "banded", "raw"]
    assert sum(a != b for a, b in pairwise(codecs)) == 2
    fixed = [play(codec) for codec in NBYTES]
    _, best_met, best_errors = max(fixed, key=lambda one: (sum(one[1]), -sum(one[2])))
    assert sum(met) >= sum(best_met) - 0.02 * len(met)
    assert sum(errors) < sum(best_errors)
