"""Retry-After follows the queue, and differs between clients."""

import pytest

from disagg.server.retry import MAX_RETRY_S, MIN_RETRY_S, RetryEstimate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def estimate(clock: Clock) -> RetryEstimate:
    """After ten answers, one every two seconds."""
    estimate = RetryEstimate(clock)
    for second in range(0, 20, 2):
        clock.now = second
        estimate.ended()
    clock.now = 20.0
    return estimate


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [(0, MIN_RETRY_S), (5, 10.0), (1000, MAX_RETRY_S)],
)
def test_the_queue_is_divided_by_the_rate_of_answers(waiting, expected, estimate):
    assert estimate.wait_s(waiting) == expected


def test_without_answers_the_shortest_time_is_told(clock):
    assert RetryEstimate(clock).wait_s(1000) == MIN_RETRY_S


def test_when_answers_stop_the_time_grows(clock, estimate):
    clock.now = 60.0

    assert estimate.wait_s(5) == 30.0


def test_clients_are_told_different_times(estimate):
    times = {estimate.retry_after_s(5) for _ in range(100)}

    assert times <= {*range(10, 16)}
    assert len(times) > 1
