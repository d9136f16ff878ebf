"""`disagg bench transfer`, at sizes that say nothing of speed: what its rows say."""

import json
from itertools import product
from multiprocessing import active_children
from typing import Any

import pytest

from disagg.bench.inputs import shape_of
from disagg.bench.transfer import (
    RAW,
    TransferOptions,
    expected_seconds,
    make_steps,
)
from disagg.cli.app import run
from disagg.codecs.planning import parse_plan
from disagg.transfer.records import Manifest

CODECS = ("kivi:bits=2,group=64,residual=64", "fp8")
TOKENS = (333, 70)
GBPS = (0.5, 3.0)
SHAPE = shape_of(3, 2, 64)


def transfer(*cases: tuple[str, object], **more: object) -> list[str]:
    """The command, at SHAPE."""
    options = [("layers", 3), ("heads", 2), ("head-dim", 64), *cases, *more.items()]
    return ["transfer", *(f"--{name}={value}" for name, value in options)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of real processes; the file has what is printed, and a picture is drawn."""
    pytest.importorskip("matplotlib")
    out, plot = (tmp_path_factory.mktemp("out") / name for name in ("a.json", "a.png"))
    cases = [
        *product(["codec"], CODECS),
        *product(["tokens"], TOKENS),
        *product(["gbps"], GBPS),
    ]

    status = run(
        ["bench", *transfer(*cases, rounds=1), f"--out={out}", f"--plot={plot}"]
    )

    assert status == 0
    assert not active_children()
    assert plot.read_bytes().startswith(b"\x89PNG")
    return json.loads(out.read_text())["rows"]


def test_every_case_has_a_row_and_raw_is_always_measured(rows):
    cases = [(row["tokens"], row["gbps"], row["codec"], row["pages"]) for row in rows]

    expected = {*product(TOKENS, GBPS, (RAW, *CODECS), ("ready", "inline"))}
    assert len(cases) == len(expected)
    assert set(cases) == expected


def test_bytes_are_those_of_the_layouts_to_the_last(rows):
    for row in rows:
        plan, raw = (parse_plan(spec, SHAPE) for spec in (row["codec"], RAW))
        assert row["payload_bytes"] == Manifest(plan, row["tokens"]).total_bytes
        assert row["fp16_bytes"] == Manifest(raw, row["tokens"]).total_bytes
        assert row["byte_ratio"] == row["fp16_bytes"] / row["payload_bytes"]
        assert row["fp16_bytes"] == 2 * 2 * 3 * 2 * 64 * row["tokens"]
        assert (
            row["payload_bytes"] < row["wire_bytes"] < 1.1 * row["payload_bytes"] + 4096
        )
        assert row["link_s"] == 8e-9 * row["wire_bytes"] / row["gbps"]


def test_only_inline_rows_have_encode_times_and_a_crossover(rows):
    for row in rows:
        if row["pages"] == "ready":
            assert (row["encode_s"], row["crossover_gbps"]) == (0.0, None)
            assert row["bottleneck"] != "encode"
        else:
            assert 0 < row["encode_s"] <= row["seconds"]
            assert row["crossover_gbps"] == 8e-9 * row["wire_bytes"] / row["encode_s"]
        if row["bottleneck"] == "encode":
            assert row["gbps"] > row["crossover_gbps"]


def test_times_are_compared_with_raw_on_the_same_link(rows):
    def cell(row: dict[str, Any]) -> tuple[int, float, str]:
        return row["tokens"], row["gbps"], row["pages"]

    raw_seconds = {cell(row): row["seconds"] for row in rows if row["codec"] == RAW}

    for row in rows:
        assert row["time_ratio"] == raw_seconds[cell(row)] / row["seconds"]


def test_the_defaults_take_about_a_minute():
    options = TransferOptions()
    plans = {spec: parse_plan(spec, options.shape) for spec in options.codecs}

    steps = make_steps(options, plans)

    assert sum(expected_seconds(step, plans) for step in steps) < 60
