"""`codecs` and `page`: what they print adds up."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from disagg.codecs import describe

COLUMNS = {
    "name",
    "spec",
    "bits_per_element",
    "page_tokens",
    "page_bytes",
    "segment_bytes",
}


def json_of(disagg: Callable[..., Any], *arguments: str) -> Any:
    return json.loads(disagg(*arguments, "--json").out)


def test_codecs_lists_every_codec_with_its_size(disagg):
    size = ["--heads", "8", "--head-dim", "128", "--tokens", "2048"]

    rows = json_of(disagg, "codecs", *size)
    printed = disagg("codecs", *size).out

    assert all(row.keys() >= COLUMNS | {"fp16_pct"} for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["raw"]["page_tokens"] == 16
    assert by_name["kivi"]["fp16_pct"] < 30
    assert all(row["spec"] in printed for row in rows)


def test_codecs_lists_those_that_hold_the_head_dim(disagg):
    rows = json_of(disagg, "codecs", "--head-dim", "96")

    assert {row["spec"] for row in rows} >= {
        "kivi:bits=2,group=32,residual=128",
        "raw:dtype=model",
    }
    assert "banded" not in {row["name"] for row in rows}
    assert "for a head dim of 96: banded" in disagg("codecs --head-dim 96").out
    assert "banded" not in disagg("codecs kivi --head-dim 96").out


def test_no_cell_is_cut_on_any_terminal(disagg, monkeypatch):
    for name, value in {"TERM": "dumb", "FORCE_COLOR": "1", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    spec = "ott:bits=2,group=64,residual=32,outliers=3,aux=32,skip_layers=2,rank=0"

    cells = disagg("codecs", spec).out.split()

    assert {spec, "82,048"} <= set(cells)


def test_codecs_shows_the_measured_costs(disagg, monkeypatch):
    spec = "kivi:bits=2,group=64,residual=128"
    costs = {"model": "smollm2", "codecs": {spec: {"ppl_pct": 25.3, "kl": 0.2506}}}
    monkeypatch.setattr(describe, "measured_costs", lambda: costs)

    rows = json_of(disagg, "codecs", "kivi", "kivi:group=32", "--tokens", "8192")
    printed = disagg("codecs kivi").out

    assert [round(row["fp16_pct"], 1) for row in rows] == [16.9, 20.0]
    assert [(row["ppl_pct"], row["kl"]) for row in rows] == [
        (25.3, 0.2506),
        (None, None),
    ]
    assert "measured on smollm2" in printed
    assert {"+25.30", "0.2506"} <= set(printed.split())


def test_the_planes_of_a_page_lie_one_behind_the_other(disagg):
    names = ["k_codes", "v_codes", "k_scale", "k_zero", "v_scale", "v_zero"]

    plan = json_of(disagg, "page", "kivi:bits=2,group=64,residual=64")

    (group,) = plan["groups"]
    page, raw = group["layouts"]
    assert [plane["name"] for plane in page["planes"]] == names
    ends = [plane["offset"] + plane["bytes"] for plane in page["planes"]]
    assert [plane["offset"] for plane in page["planes"]] == [0, *ends[:-1]]
    assert page["block_bytes"] == ends[-1]
    assert (page["kind"], raw["kind"], raw["tokens"]) == ("page", "raw", 16)


def test_a_page_is_drawn_for_every_layer_group(disagg):
    drawn = disagg("page 0-1:kivi:bits=4;2-:raw").out

    assert "layers 0, 1 ·" in drawn
    assert "layers 2, 3, 4, 5 ·" in drawn
    assert "k_codes" in drawn


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["page", "zip"], 2),
        (["page", "kivi:group=48"], 2),
        (["page", "raw", "--model", "/no"], 3),
    ],
    ids=["codec", "option", "model"],
)
def test_a_page_that_cannot_be_drawn_is_an_error(arguments, code, disagg):
    assert disagg(*arguments, code=code).err.startswith("error: ")
