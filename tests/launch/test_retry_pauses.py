"""Places of workers that fail stay empty for growing pauses."""

import pytest

from disagg.launch.retry_pauses import FREE_ENDS, STEADY_S, RetryPauses


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> RetryPauses:
    return RetryPauses(clock)


def test_pauses_double_up_to_five_minutes(pauses):
    lengths = [pauses.failed("decode-0") for _ in range(7)]

    assert lengths == [10, 20, 40, 80, 160, 300, 300]


def test_a_pause_is_over_after_its_length(pauses, clock):
    pauses.failed("decode-0")

    clock.now_s = 9.9
    assert not pauses.is_over("decode-0")
    clock.now_s = 10.0
    assert pauses.is_over("decode-0")


def test_other_places_do_not_pause(pauses):
    pauses.failed("decode-0")

    assert pauses.is_over("decode-1")


def test_only_early_ends_in_a_row_pause(pauses):
    lengths = []

    for _ in range(FREE_ENDS + 2):
        pauses.served("decode-0")
        lengths.append(pauses.ended("decode-0"))

    assert lengths == [0] * FREE_ENDS + [10, 20]


def test_a_steady_worker_clears_its_place(pauses, clock):
    pauses.failed("decode-0")
    pauses.served("decode-0")
    clock.now_s = STEADY_S

    assert pauses.ended("decode-0") == 0
    assert pauses.failed("decode-0") == 10
