"""Sequences that move, at sizes that say nothing of speed."""

import pytest

from benchmarks import moves


@pytest.mark.slow
def test_every_answer_moves_with_the_same_bytes(monkeypatch):
    monkeypatch.setattr(moves, "LENGTHS", (300,))

    for row in moves.measure_moves(rounds=2)["rows"]:
        assert row["moves"] == row["equal"] == 2
        assert 0 < row["moved_bytes"] < 1.1 * row["prefill_bytes"]
        times_ms = [
            row["gap_ms"],
            row["itl_ms"],
            row["stopped_ms"],
            row["prefill_ms"],
        ]
        assert min(times_ms) > 0
