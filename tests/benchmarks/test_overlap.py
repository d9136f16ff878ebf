"""Overlap of compute and wire, at sizes that say nothing of speed."""

import pytest

from benchmarks import overlap
from disagg.bench.serving import RequestTimes
from disagg.bench.workers import Answer, prompt_of


def runs(first_ms: float, decoded_ms: float, wire_bytes: int) -> list[Answer]:
    """Three answers; the medians are those given."""
    answers = []
    for extra_ms in (-1, 0, 1):
        gap_s = (decoded_ms + extra_ms - first_ms) / 1e3
        times = RequestTimes(0, ttft_s=first_ms / 1e3, gaps_s=[gap_s])
        answers.append((times, {"wire_bytes": wire_bytes}))
    return answers


@pytest.mark.slow
def test_prompts_go_through_a_router_and_are_decoded_elsewhere(monkeypatch):
    monkeypatch.setattr(overlap, "CODECS", ("raw", "int8"))
    monkeypatch.setattr(overlap, "PROMPT_TOKENS", 140)

    answers = overlap.measure_side(True, runs=1)

    for ((times, figures),) in answers.values():
        assert 0 < times.ttft_s < times.decoded_s
        assert figures["wire_bytes"] > 0 == figures["cached_tokens"]


def test_the_bound_of_a_slow_link_is_sending():
    nbytes = int(overlap.LINK_MBPS * 1e6 / 8)  # one second of the link

    row = overlap.summarise(
        "raw", early=runs(300, 1100, nbytes), late=runs(300, 1400, nbytes)
    )

    assert (row["wire_ms"], row["bound_ms"]) == (1000, 1000)
    assert row["overlapped_ratio"] == pytest.approx(1.1)
    assert row["after_ratio"] == pytest.approx(1.4)


def test_the_bound_of_a_slow_model_is_computing():
    nbytes = int(overlap.LINK_MBPS * 1e6 / 8) // 10

    row = overlap.summarise(
        "kivi", early=runs(300, 330, nbytes), late=runs(300, 450, nbytes)
    )

    assert row["bound_ms"] == pytest.approx(300)
    assert row["overlapped_ratio"] == pytest.approx(1.1)


def test_prompts_have_the_length_they_say_and_share_no_beginning():
    first, second = (prompt_of(overlap.PROMPT_TOKENS, number) for number in (1, 2))

    assert len(first) == len(second) == overlap.PROMPT_TOKENS
    assert first[0] != second[0]
