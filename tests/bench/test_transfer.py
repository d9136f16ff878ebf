import json
from dataclasses import replace
from itertools import product
from multiprocessing import active_children

import pytest

from disagg.bench import transfer
from disagg.bench.inputs import shape_of
from disagg.bench.transfer import (
    PLANE,
    RAW,
    TransferOptions,
    draw,
    draw_plane,
    measure,
    measure_plane,
)
from disagg.codecs.planning import parse_plan
from disagg.errors import UnknownNameError
from disagg.transfer.records import Checklist
from tests.bench.here import Here

KIVI = "kivi:bits=2,group=64,residual=64"
SHAPE = shape_of(3, 2, 64)
OPTIONS = TransferOptions(
    codecs=(KIVI, "fp8"), tokens=(333, 70), gbps=(0.5, 3.0), rounds=1, shape=SHAPE
)


@pytest.fixture(scope="module")
def rows():
    found = measure(OPTIONS)["rows"]
    assert not active_children()
    return found


def test_there_is_a_row_for_every_case_and_raw_is_among_the_codecs(rows):
    seen = [(row["tokens"], row["gbps"], row["codec"], row["pages"]) for row in rows]
    assert len(set(seen)) == len(seen)
    specs, pages = (RAW, KIVI, "fp8"), ("ready", "inline")
    assert set(seen) == {*product(OPTIONS.tokens, OPTIONS.gbps, specs, pages)}


def test_bytes_are_those_of_the_layouts_to_the_last(rows):
    for row in rows:
        plan, raw = (parse_plan(spec, OPTIONS.shape) for spec in (row["codec"], RAW))
        assert row["payload_bytes"] == Checklist(plan, row["tokens"]).total_bytes
        assert row["fp16_bytes"] == Checklist(raw, row["tokens"]).total_bytes
        assert row["byte_ratio"] == row["fp16_bytes"] / row["payload_bytes"]
        assert row["fp16_bytes"] == 2 * 2 * 3 * 2 * 64 * row["tokens"]
        assert row["payload_bytes"] < row["wire_bytes"] < 1.1 * row["payload_bytes"] + 4096
        assert row["link_s"] == 8e-9 * row["wire_bytes"] / row["gbps"]


def test_only_inline_rows_have_an_encode_and_the_link_rate_that_it_keeps_up_with(rows):
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
    raw = {(x["tokens"], x["gbps"], x["pages"]): x for x in rows if x["codec"] == RAW}
    for row in rows:
        assert (
            row["time_ratio"]
            == raw[row["tokens"], row["gbps"], row["pages"]]["seconds"] / row["seconds"]
        )
    assert all(row["time_ratio"] == 1 for row in raw.values())


def test_rows_are_plain_values_and_the_table_has_a_line_for_each(rows):
    assert json.loads(json.dumps(rows))[0]["codec"] == RAW
    header, *lines = draw({"rows": rows}).splitlines()
    assert header.startswith("codec")
    assert [line.split()[0] for line in lines] == [row["codec"] for row in rows]


def test_every_channel_and_the_socket_bring_the_records_of_one_prompt(monkeypatch):
    monkeypatch.setattr(transfer, "Child", Here)
    options = replace(PLANE, tokens=(333,), rounds=2, shape=SHAPE)
    result = measure_plane(options)
    rows = result["rows"]
    ways = [(channel, tls) for tls in (False, True) for channel in ("grpc", "direct")]
    assert [(row["channel"], row["tls"]) for row in rows] == ways
    nbytes = Checklist(parse_plan(options.codecs[0], SHAPE), 333).total_bytes
    for row in rows:
        assert (row["link"], row["rounds"], row["nbytes"]) == ("loopback", 2, nbytes)
        assert min(row["plane_gbps"], row["tcp_gbps"], row["ratio"]) > 0
        assert min(*row["plane_cpu"].values(), *row["tcp_cpu"].values()) > 0
    table = draw_plane(result)
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["loopback"] * 4


def test_an_unknown_codec_ends_all_processes():
    with pytest.raises(UnknownNameError):
        measure(TransferOptions(codecs=("zip",), tokens=(70,), shape=OPTIONS.shape))
    assert not active_children()
