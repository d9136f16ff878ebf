"""The smallest hand-off, at sizes that say nothing of speed."""

import pytest

from benchmarks.latency import LatencyOptions, draw_latency, measure_latency
from disagg.bench.result import Row

# layers, K and V, heads, channels and bytes of the packaged model, for 37 tokens
EXACT_TAIL_BYTES = 2 * 2 * 6 * 2 * 64 * 37


@pytest.mark.slow
def test_every_round_is_a_hand_off_and_an_answer_decodes_along():
    options = LatencyOptions(tokens=37, rounds=3, answer=100, arriving=130, seconds=1.0)

    result = measure_latency(options)

    (row,) = result["rows"]
    assert row["tokens"] == 37
    assert row["rounds"] == 3
    assert row["wire_bytes"] > EXACT_TAIL_BYTES
    assert 0 < row["running_ms"] <= row["running_p99_ms"]
    assert 0 < row["admit_ms"] <= row["acknowledged_ms"] <= row["acknowledged_p99_ms"]
    check_decoding(row["decoding"], options)
    assert "running" in draw_latency(result)


def check_decoding(rows: list[Row], options: LatencyOptions) -> None:
    """Of an answer alone, and while prompts arrive."""
    alone, unpaced, paced = rows
    assert alone["received_gbps"] == 0
    assert alone["tokens"] == options.answer - 1
    for row in (unpaced, paced):
        assert row["received_gbps"] > 0
        assert row["tokens"] > 0
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
