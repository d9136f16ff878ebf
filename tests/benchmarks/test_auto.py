"""Codecs that the service chooses, at sizes that say nothing of speed."""

from collections.abc import Sequence

from benchmarks.auto import PHASES, AutoOptions, draw_auto, measure_auto
from disagg.bench.result import Row


def test_every_codec_and_the_choice_among_them_serve_all_prompts():
    codecs = ("fp8", "kivi:bits=4,group=64,residual=64")
    options = AutoOptions(codecs=codecs, requests=2, tokens=300, budget=0.9)

    result = measure_auto(options)

    *fixed, auto = result["rows"]
    expected = [(codec, len(PHASES) * [{codec: 2}]) for codec in codecs]
    assert [(row["codec"], row["phases"]) for row in fixed] == expected
    check_choice(auto, codecs)
    for row in result["rows"]:
        assert 0 < row["mean_error"] < 0.9
        assert row["budget_pct"] == 100
        assert 0 <= row["both_pct"] == row["deadline_pct"] <= 100
    assert "2 fp8 | 2 fp8 | 2 fp8" in draw_auto(result)


def check_choice(auto: Row, codecs: Sequence[str]) -> None:
    """Every request of each phase has one of the codecs."""
    assert auto["codec"] == "auto"
    assert len(auto["phases"]) == len(PHASES)
    for phase in auto["phases"]:
        assert sum(phase.values()) == 2
        assert set(phase) <= set(codecs)
