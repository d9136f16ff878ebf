"""Serving by codec and by link, at sizes that say nothing of speed."""

import asyncio
import json
from itertools import product

import pytest

from disagg.bench import compare
from disagg.bench.result import Row
from disagg.bench.serving import RequestTimes
from disagg.errors import ConfigError, PeerLostError
from disagg.report.transfer import draw

CODECS = ("raw:dtype=fp16", "kivi:bits=4,residual=64")


@pytest.mark.parametrize("cached", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_codec_crosses_every_link_beside_workers_that_do_both(cached, tmp_path):
    options = compare.CompareOptions(None, CODECS, (1.0, 8.0), 2, 200, cached, answer=3)
    result = compare.measure_compare(options)
    together, *apart = result["rows"]
    assert (together["serving"], together["wire_bytes"], together["ratio"]) == (
        "co-located",
        0,
        1,
    )
    cells = [*product(options.rates, CODECS)]
    assert [(row["link_times"], row["codec"]) for row in apart] == cells
    for raw, kivi in zip(apart[::2], apart[1::2], strict=True):
        assert raw["wire_bytes"] > kivi["wire_bytes"] > 0
    for row in result["rows"]:
        assert 0 < row["mean_ttft_ms"] / 1e3 < row["first_decode_s"] < row["request_s"]
        assert row["longest_pause_s"] > 0
    said = compare.draw_compare(json.loads(json.dumps(result)))
    assert "isaggregation loses" in said.splitlines()[-1]
    draw(result, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 0


def row(codec: str, times: float, ratio: float) -> Row:
    return {"codec": codec, "link_times": times, "ratio": ratio, "request_s": 2.0}


def test_one_line_says_where_disaggregation_loses():
    rows = [
        row("raw", 0, 1.0),
        row("raw", 0.125, 3.0),
        row("raw", 0.5, 1.1),
        row("fp8", 0.5, 0.9),
    ]
    told = "Disaggregation loses, a request takes longer than the 2.00 s of co-located workers: "
    told += "with raw at 0.125, 0.5 times the KV that prefill makes a second."
    assert compare.verdict({"rows": rows}) == told
    assert "loses nowhere here" in compare.verdict({"rows": rows[:1] + rows[3:]})


@pytest.mark.parametrize("told", [[{}, {"wire_bytes": 7}], [{}, {}]])
def test_figures_that_do_not_come_are_left_out_or_missed_in_words(told, monkeypatch):
    async def visit(*asked):
        return RequestTimes(
            8, ttft_s=1.0, e2el_s=2.0, gaps_s=[0.5, 0.5], tokens=3
        ), told.pop()

    monkeypatch.setattr(compare, "visit", visit)
    options = compare.CompareOptions(prompts=2, tokens=8, answer=3)
    cell = compare._cell(options, (), compare.Speed(0.0, 1), "raw")
    if any(told):
        assert asyncio.run(cell)["wire_bytes"] == 7
    else:
        with pytest.raises(PeerLostError, match="did not tell in time"):
            asyncio.run(cell)


def test_no_prompt_begins_as_another():
    prompts = compare.texts_of(None, 64, 40)
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({prompt[:32] for prompt in prompts}) == 40
    with pytest.raises(ConfigError, match=r"the text has \d+ tokens"):
        compare.texts_of(None, 512, 400)


def test_every_codec_and_the_choice_among_them_serve_all_prompts():
    codecs = ("fp8", "kivi:bits=4,group=64,residual=64")
    options = compare.AutoOptions(codecs=codecs, requests=2, tokens=300, budget=0.9)
    result = compare.measure_auto(options)
    *fixed, auto = result["rows"]
    wanted = [(codec, len(compare.PHASES) * [{codec: 2}]) for codec in codecs]
    assert [(row["codec"], row["phases"]) for row in fixed] == wanted
    assert auto["codec"] == "auto"
    assert [sum(phase.values()) for phase in auto["phases"]] == len(compare.PHASES) * [
        2
    ]
    assert {codec for phase in auto["phases"] for codec in phase} <= set(codecs)
    for row in result["rows"]:
        assert 0 < row["mean_error"] < 0.9
        assert row["budget_pct"] == 100
        assert 0 <= row["both_pct"] == row["deadline_pct"] <= 100
    assert "2 fp8 | 2 fp8 | 2 fp8" in compare.draw_auto(result)
