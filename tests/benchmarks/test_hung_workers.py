"""Workers of a real service that hang, and what is said of it."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from benchmarks.hung_workers import (
    HungWorkersOptions,
    TimedAnswer,
    cpu_s_of,
    held_up,
    is_alive,
    longest_pause_s,
    measure_hung_workers,
    went_on_at,
)

# shorter than the defaults, in the same order
SETTINGS = {
    "router.silence_s": 4.0,
    "router.stuck_s": 5.0,
    "engine.stuck_s": 12.0,
    "cluster.replace_s": 20.0,
}
BAR_S = 15.0  # in which all answers go on
REPLACED_S = 90.0


def answers(*times: list[float]) -> list[TimedAnswer]:
    """Answers that came at these times."""
    return [TimedAnswer(number, at) for number, at in enumerate(times)]


def test_an_answer_that_stood_still_after_a_fault_is_held_up():
    both = answers([0.0, 9.0, 21.0, 21.1], [8.0, 11.0, 12.5])

    assert held_up(both, hit_at=10.0) == [(9.0, 21.0)]
    assert went_on_at(both, hit_at=10.0) == 21.0


def test_an_answer_that_begins_soon_after_a_fault_may_be_held_up():
    both = answers([12.0, 20.5], [20.5, 29.0])

    assert held_up(both, hit_at=10.0) == [(12.0, 20.5)]


def test_without_an_answer_that_stood_still_all_go_on_at_once():
    assert went_on_at(answers([0.0, 1.0, 12.0]), hit_at=10.0) == 10.0


def test_the_longest_pause_counts_from_the_question():
    assert longest_pause_s(answers([0.0, 4.0, 5.0], [1.0, 2.0])) == 4.0
    assert longest_pause_s([]) == 0.0


def test_this_process_is_alive_and_has_used_a_processor():
    assert is_alive(os.getpid())
    assert not is_alive(1 << 23)
    assert cpu_s_of(os.getpid()) > 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_service_gets_over_workers_that_hang():
    options = HungWorkersOptions(settings=SETTINGS)

    # Ray reads its environment when it is imported, which other tests of this process do
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        result = alone.submit(measure_hung_workers, options).result()

    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert row["exact"] == row["answers"], row["errors"]
        if row["worker"].startswith("decode"):  # it has sequences at any moment
            assert row["held_up"] > 0
        assert row["elsewhere_s"] < BAR_S
        assert row["later"] > 0
        assert row["replaced_s"] < REPLACED_S
        assert row["gauges"] == {}
        expected = {"hang": "wrote before it ended", "stop": "was silent for"}
        assert any(expected[row["fault"]] in line for line in row["log"])
