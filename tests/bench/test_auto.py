"""The choice of codecs on a link that drops, at a size that says nothing of speed."""

from disagg.bench.auto import PHASES, AutoOptions, draw_auto, measure_auto


def test_every_codec_and_the_choice_among_them_serve_all_prompts():
    codecs = ("fp8", "kivi:bits=4,group=64,residual=64")
    result = measure_auto(AutoOptions(codecs=codecs, requests=2, tokens=300, budget=0.9))
    *fixed, auto = result["rows"]
    assert [(row["codec"], row["phases"]) for row in fixed] == [
        (codec, len(PHASES) * [{codec: 2}]) for codec in codecs
    ]
    assert auto["codec"] == "auto"
    assert [sum(phase.values()) for phase in auto["phases"]] == len(PHASES) * [2]
    assert {codec for phase in auto["phases"] for codec in phase} <= set(codecs)
    for row in result["rows"]:
        assert 0 < row["mean_error"] < 0.9
        assert row["budget_pct"] == 100
        assert 0 <= row["both_pct"] == row["deadline_pct"] <= 100
    assert "2 fp8 | 2 fp8 | 2 fp8" in draw_auto(result)
