"""A token bucket by numbers."""

from disagg.transfer.pace import Pace


def test_a_burst_passes_at_once_and_the_rest_at_the_rate():
    pace = Pace(1000.0, burst_bytes=500)
    assert pace.delay(500, 0.0) == 0.0
    assert pace.delay(100, 0.0) == 0.1
    assert pace.delay(100, 0.1) == 0.1


def test_idle_time_saves_up_one_burst_and_no_more():
    pace = Pace(1000.0, burst_bytes=500)
    assert pace.delay(500, 0.0) == 0.0
    assert pace.delay(500, 100.0) == 0.0
    assert pace.delay(1, 100.0) > 0.0


def test_over_time_the_rate_is_exact_whatever_the_messages():
    pace, now, sent = Pace(1000.0, burst_bytes=64), 0.0, 0
    for nbytes in (7, 2000, 1, 64, 500, 33) * 20:
        now += pace.delay(nbytes, now)
        sent += nbytes
    assert abs(now - (sent - 64) / 1000.0) < 1e-6
