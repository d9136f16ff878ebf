from disagg.bench.latency import LatencyOptions, run, table
from disagg.bench.shape import Shape


def test_every_round_is_a_whole_hand_off():
    (row,) = run(LatencyOptions(tokens=37, rounds=3, shape=Shape(2, 1, 64)))
    assert (row.tokens, row.rounds) == (37, 3)
    assert row.wire_bytes > 2 * 2 * 2 * 1 * 64 * 37
    assert 0 < row.admit_ms <= row.median_ms <= row.p99_ms
    assert "of 3" in table([row])
