"""Serving by codec and by link, at sizes that say nothing of speed."""

import asyncio
import json
from itertools import product
from pathlib import Path

import pytest

from disagg.bench import compare
from disagg.bench.compare import CompareOptions, Speed
from disagg.bench.result import Row
from disagg.bench.serving import RequestTimes
from disagg.errors import ConfigError, PeerLostError
from disagg.report.transfer import draw

CODECS = ("raw:dtype=fp16", "kivi:bits=4,residual=64")


@pytest.mark.parametrize("cached", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_codec_crosses_every_link_beside_colocated_workers(cached, tmp_path):
    options = CompareOptions(
        codecs=CODECS,
        rates=(1.0, 8.0),
        prompts=2,
        tokens=200,
        cached=cached,
        answer=3,
    )

    result = compare.measure_compare(options)

    colocated, *disaggregated = result["rows"]
    assert colocated["serving"] == "co-located"
    assert colocated["wire_bytes"] == 0
    assert colocated["ratio"] == 1
    cells = [(row["link_times"], row["codec"]) for row in disaggregated]
    assert cells == [*product(options.rates, CODECS)]
    for raw, kivi in zip(disaggregated[::2], disaggregated[1::2], strict=True):
        assert raw["wire_bytes"] > kivi["wire_bytes"] > 0
    for row in result["rows"]:
        assert 0 < row["mean_ttft_ms"] / 1e3 < row["first_decode_s"] < row["request_s"]
        assert row["longest_pause_s"] > 0
    check_drawings(result, tmp_path)


def check_drawings(result: Row, folder: Path) -> None:
    """The text ends with the verdict; the picture is there."""
    text = compare.draw_compare(json.loads(json.dumps(result)))
    assert "isaggregation loses" in text.splitlines()[-1]
    draw(result, folder / "picture.svg")
    assert (folder / "picture.svg").stat().st_size > 0


def row(codec: str, times: float, ratio: float) -> Row:
    return {"codec": codec, "link_times": times, "ratio": ratio, "request_s": 2.0}


def test_one_line_says_where_disaggregation_loses():
    rows = [
        row("raw", 0, 1.0),
        row("raw", 0.125, 3.0),
        row("raw", 0.5, 1.1),
        row("fp8", 0.5, 0.9),
    ]

    assert compare.verdict({"rows": rows}) == (
        "Disaggregation loses, a request takes longer than the 2.00 s of co-located workers: "
        "with raw at 0.125, 0.5 times the KV rate of prefill."
    )
    assert "loses on no measured link" in compare.verdict({"rows": rows[:1] + rows[3:]})


def measure_cell(monkeypatch: pytest.MonkeyPatch, figures: list[Row]) -> Row:
    """A cell of two prompts; `figures` are those of their hand-offs."""

    async def visit(*arguments):
        times = RequestTimes(8, ttft_s=1.0, e2el_s=2.0, gaps_s=[0.5, 0.5], tokens=3)
        return times, figures.pop()

    monkeypatch.setattr(compare, "visit", visit)
    options = CompareOptions(prompts=2, tokens=8, answer=3)
    return asyncio.run(compare._measure_cell(options, (), Speed(0.0, 1), "raw"))


def test_figures_that_do_not_come_in_time_are_left_out(monkeypatch):
    assert measure_cell(monkeypatch, [{}, {"wire_bytes": 7}])["wire_bytes"] == 7


def test_a_cell_without_any_figures_is_an_error(monkeypatch):
    with pytest.raises(PeerLostError, match="did not report the times"):
        measure_cell(monkeypatch, [{}, {}])


def test_no_prompt_begins_as_another():
    prompts = compare.texts_of(None, tokens=64, count=40)

    assert {len(prompt) for prompt in prompts} == {64}
    assert len({prompt[:32] for prompt in prompts}) == 40
    with pytest.raises(ConfigError, match=r"the text has \d+ tokens"):
        compare.texts_of(None, tokens=512, count=400)
