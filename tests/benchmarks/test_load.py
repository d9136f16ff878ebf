"""Prompts that wait for each other, at sizes that say nothing of speed."""

import pytest

from benchmarks import load

LONG, SHORT, LAST = (1,) * 400, (2,) * 100, (3,) * 300
CAME = {LONG: 0.0, SHORT: 0.5, LAST: 0.6}


def test_a_prompt_is_passed_over_by_one_step_of_a_longer_one():
    steps = [
        (0.0, 1.0, {LONG: 100}),
        (1.0, 2.0, {SHORT: 100}),
        (2.0, 3.0, {LONG: 300}),
        (3.0, 4.0, {LAST: 300}),
    ]

    assert load.passed_over(CAME, steps) == [0, 100, 100]


def test_a_prompt_that_waits_for_longer_ones_is_passed_over():
    steps = [
        (0.0, 1.0, {LONG: 100}),
        (1.0, 2.0, {LONG: 300}),
        (2.0, 3.0, {LAST: 300, SHORT: 100}),
    ]

    assert load.passed_over(CAME, steps) == [0, 400, 100]


@pytest.mark.slow
def test_every_prompt_of_a_load_says_what_it_waited_for(monkeypatch):
    monkeypatch.setattr(load, "LONG_TOKENS", 30)

    result = load.measure_load(long=1, others=2)

    assert len(result["rows"]) == 3
    for row in result["rows"]:
        assert row["waited_s"] > 0 <= row["passed_over"]
    assert result["longest_wait_s"] >= result["mean_wait_s"] > 0
    assert 0 < result["busy"] < 1
