"""The smallest hand-off, at sizes that say nothing of speed."""

from benchmarks.latency import LatencyOptions, draw_latency, measure_latency


def test_every_round_is_a_whole_hand_off_and_an_answer_is_decoded_beside():
    options = LatencyOptions(tokens=37, rounds=3, answer=100, arriving=130, seconds=1.0)

    result = measure_latency(options)

    (row,) = result["rows"]
    assert (row["tokens"], row["rounds"]) == (37, 3)
    assert row["wire_bytes"] > 2 * 2 * 6 * 2 * 64 * 37  # the tail is exact
    assert 0 < row["running_ms"] <= row["running_p99_ms"]
    assert 0 < row["admit_ms"] <= row["acknowledged_ms"] <= row["acknowledged_p99_ms"]
    alone, unpaced, paced = row["decoding"]
    assert alone["received_gbps"] == 0
    assert min(paced["received_gbps"], unpaced["received_gbps"]) > 0
    assert alone["tokens"] == options.answer - 1
    assert min(paced["tokens"], unpaced["tokens"]) > 0
    assert all(0 < x["p50_ms"] <= x["p99_ms"] for x in row["decoding"])
    assert "running" in draw_latency(result)
