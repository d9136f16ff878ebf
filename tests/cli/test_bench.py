"""`disagg bench transfer`, at sizes that say nothing of speed."""

import json
from itertools import product

import pytest

from disagg.bench import child, handoff, transfer
from disagg.engine.guard import LEAST_TOKENS
from disagg.model.runner import Runner
from tests.bench.here import Here

SMALL = "bench transfer --layers 2 --heads 1 --head-dim 64 --tokens 70 --rounds 1"
RAW = "raw:dtype=fp16"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "Child", Here)


def test_transfer_prints_writes_and_draws_a_row_for_every_case(disagg, tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--plot", tmp_path / "a.png", "--out", tmp_path / "a.json"]
    cases = ["--codec", "fp8", "--gbps", "1", "--gbps", "3.5", "--tokens", "37"]
    printed = json.loads(disagg(SMALL, *cases, *files, "--json").out)
    assert json.loads((tmp_path / "a.json").read_text()) == printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(printed["rows"]) == 2 * 2 * 2 * 2
    assert {(x["codec"], x["tokens"], x["gbps"]) for x in printed["rows"]} == {
        *product((RAW, "fp8"), (37, 70), (1.0, 3.5))
    }


def test_a_picture_that_fails_loses_no_result(disagg, tmp_path, monkeypatch):
    pictures = pytest.importorskip("disagg.report.transfer")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures, "draw", fail)
    files = ["--plot", tmp_path / "a.png", "--out", tmp_path / "a.json"]
    assert "No space left" in disagg(SMALL, "--gbps", "2", *files, code=2).err
    assert json.loads((tmp_path / "a.json").read_text())["rows"]


def test_people_get_a_table_and_progress_beside_it(disagg):
    cases = ["--codec", "fp8", "--gbps", "2", "--channel", "direct"]
    said = disagg(SMALL, *cases)
    header, *lines = said.out.splitlines()
    assert header.split()[:4] == ["codec", "tokens", "gbps", "pages"]
    assert [line.split()[0] for line in lines] == [RAW, RAW, "fp8", "fp8"]
    assert f"1 of 2: 70 tokens, encode {RAW}" in said.err
    assert f"1 of 4: 70 tokens, 2 Gb/s, {RAW}, ready" in said.err


@pytest.mark.parametrize(
    "name", ["overlap", "latency", "load", "kernels", "decode", "transfer", "serve", "capacity"]
)
def test_every_benchmark_is_a_command(name, disagg):
    assert "--json" in disagg("bench", name, "--help").out


def test_the_plane_is_measured_beside_a_socket(disagg):
    result = json.loads(disagg(SMALL, "--plane", "--no-netns", "--json").out)
    assert {row["link"] for row in result["rows"]} == {"loopback"}
    assert result["machine"]["cores"] > 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--plane", "--plot", "a.png"], "draws nothing"),
        (["--plane", "--codec", "raw", "--codec", "fp8"], "one codec"),
        (["--plot", "a.gif"], ".png"),
        (["--plot", "/nowhere/a.png"], "/nowhere"),
        (["--codec", "zip"], "zip"),
        (["--out", "/"], "/ cannot be written"),
    ],
    ids=["drawn", "two", "name", "folder", "codec", "out"],
)
def test_what_cannot_be_measured_is_refused_before_it_begins(arguments, word, disagg):
    pytest.importorskip("matplotlib")
    said = disagg(SMALL, *arguments, code=2)
    assert said.err.startswith("error: ")
    assert word in said.err
    assert not said.out


@pytest.mark.parametrize("plane", [[], ["--plane", "--no-netns"]], ids=["codecs", "plane"])
def test_prompts_that_no_memory_holds_are_refused_before_it_begins(plane, disagg, monkeypatch):
    monkeypatch.setattr(transfer, "Child", lambda *_: pytest.fail("started for nothing"))
    monkeypatch.setattr(transfer.os, "sysconf", lambda _: 1 << 10)
    assert "this host has 1,048,576" in disagg(SMALL, *plane, code=7).err


@pytest.mark.parametrize(
    "name", ["auto", "capacity", "chaos", "compare", "decode", "latency", "transfer"]
)
def test_an_unknown_codec_is_refused_before_anything_starts(name, disagg, monkeypatch):
    for started in ((child.Child, "__init__"), (Runner, "random")):
        monkeypatch.setattr(*started, lambda *_: pytest.fail("started for nothing"))
    assert "unknown codec 'zip'" in disagg("bench", name, "--codec", "zip", code=2).err


def test_a_folder_that_cannot_be_is_refused_before_a_server_is_asked(disagg):
    where = ["--save-result", "--result-dir", "/dev/null/a"]
    assert "/dev/null/a/openai cannot be written" in disagg("bench serve", *where, code=2).err


def test_codecs_are_not_chosen_on_prompts_too_short_to_be_samples(disagg):
    assert f"or equal to {LEAST_TOKENS}" in disagg("bench auto --tokens 255", code=2).err


@pytest.mark.parametrize("name", ["overlap", "load"])
def test_a_benchmark_of_workers_prints_its_rows(name, disagg, monkeypatch):
    row = {"codec": "raw", "waited_s": 1.5}
    monkeypatch.setattr(
        handoff, f"measure_{name}", lambda *_: {"machine": {"kernels": "avx2"}, "rows": [row]}
    )
    assert disagg("bench", name).out.splitlines()[1].split() == ["raw", "1.5"]
