"""What the benchmarks of hand-offs between workers say, at sizes that say nothing of speed."""

import pytest

from disagg.bench import handoff
from disagg.bench.serving import RequestTimes


def runs(first_ms: float, decoded_ms: float, wire_bytes: int) -> list[handoff.Answer]:
    gaps_s = [(decoded_ms + i - first_ms) / 1e3 for i in (-1, 0, 1)]
    figures = {"wire_bytes": wire_bytes}
    return [
        (RequestTimes(0, ttft_s=first_ms / 1e3, gaps_s=[gap]), figures)
        for gap in gaps_s
    ]


def test_every_round_is_a_whole_hand_off_and_an_answer_is_decoded_beside():
    options = handoff.LatencyOptions(
        tokens=37, rounds=3, answer=100, arriving=130, seconds=1.0
    )
    result = handoff.measure_latency(options)
    (row,) = result["rows"]
    assert (row["tokens"], row["rounds"]) == (37, 3)
    assert row["wire_bytes"] > 2 * 2 * 6 * 2 * 64 * 37  # the tail is exact
    assert 0 < row["running_ms"] <= row["running_p99_ms"]
    assert 0 < row["admit_ms"] <= row["acknowledged_ms"] <= row["acknowledged_p99_ms"]
    alone, unpaced, paced = row["decoding"]
    assert (
        alone["received_gbps"]
        == 0
        < min(paced["received_gbps"], unpaced["received_gbps"])
    )
    assert alone["tokens"] == options.answer - 1
    assert min(paced["tokens"], unpaced["tokens"]) > 0
    assert all(0 < x["p50_ms"] <= x["p99_ms"] for x in row["decoding"])
    assert "running" in handoff.draw_latency(result)


def test_prompts_go_through_a_router_and_are_decoded_elsewhere(monkeypatch):
    monkeypatch.setattr(handoff, "CODECS", ("raw", "int8"))
    monkeypatch.setattr(handoff, "PROMPT_TOKENS", 140)
    found = handoff.measure_side(True, runs=1)
    for ((seen, figures),) in found.values():
        assert 0 < seen.ttft_s < seen.decoded_s
        assert figures["wire_bytes"] > 0 == figures["cached_tokens"]


def test_the_bound_is_the_slower_of_computing_and_sending():
    nbytes = int(handoff.LINK_MBPS * 1e6 / 8)  # one second of the link
    slow_link = handoff.summarise(
        "raw", runs(300, 1100, nbytes), runs(300, 1400, nbytes)
    )
    assert (slow_link["wire_ms"], slow_link["bound_ms"]) == (1000, 1000)
    assert slow_link["overlapped_ratio"] == pytest.approx(1.1)
    assert slow_link["after_ratio"] == pytest.approx(1.4)
    both = (runs(300, decoded_ms, nbytes // 10) for decoded_ms in (330, 450))
    slow_model = handoff.summarise("kivi", *both)
    assert (slow_model["bound_ms"], slow_model["overlapped_ratio"]) == pytest.approx(
        (300, 1.1)
    )


def test_prompts_have_the_length_they_say_and_share_no_begin():
    first, second = (
        handoff.prompt_of(handoff.PROMPT_TOKENS, number) for number in (1, 2)
    )
    assert len(first) == len(second) == handoff.PROMPT_TOKENS
    assert first[0] != second[0]


def test_a_prompt_that_waits_for_longer_ones_is_passed_over():
    long, short, last = (1,) * 400, (2,) * 100, (3,) * 300
    came = {long: 0.0, short: 0.5, last: 0.6}
    turns = [(0.0, 1.0, {long: 100}), (1.0, 2.0, {short: 100}), (2.0, 3.0, {long: 300})]
    passed = handoff.passed_over(came, [*turns, (3.0, 4.0, {last: 300})])
    assert passed == [0, 100, 100]  # one step of it
    late = [
        (0.0, 1.0, {long: 100}),
        (1.0, 2.0, {long: 300}),
        (2.0, 3.0, {last: 300, short: 100}),
    ]
    assert handoff.passed_over(came, late) == [0, 400, 100]


def test_every_prompt_of_a_load_says_what_it_waited_for(monkeypatch):
    monkeypatch.setattr(handoff, "PROMPT_TOKENS", 30)
    result = handoff.measure_load(1, 2)
    assert [
        row["waited_s"] > 0 <= row["passed_over"] for row in result["rows"]
    ] == 3 * [True]
    assert result["longest_wait_s"] >= result["mean_wait_s"] > 0
    assert 0 < result["busy"] < 1
