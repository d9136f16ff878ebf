"""`disagg bench transfer`, at sizes that say nothing of speed."""

import json
from itertools import product

import pytest

from disagg.bench import handoff, transfer
from disagg.cli.app import run
from tests.bench.here import Here

SMALL = ["--layers", "2", "--heads", "1", "--head-dim", "64", "--tokens", "70", "--rounds", "1"]
RAW = "raw:dtype=fp16"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "Child", Here)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["bench", "transfer", *SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_transfer_prints_writes_and_draws_a_row_for_every_case(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.json")]
    cases = ["--codec", "fp8", "--gbps", "1", "--gbps", "3.5", "--tokens", "37"]
    printed = json.loads(bench(capsys, *cases, *files, "--json"))
    assert json.loads((tmp_path / "a.json").read_text()) == printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(printed["rows"]) == 2 * 2 * 2 * 2
    assert {(x["codec"], x["tokens"], x["gbps"]) for x in printed["rows"]} == {
        *product((RAW, "fp8"), (37, 70), (1.0, 3.5))
    }


def test_people_get_a_table_and_progress_beside_it(capsys):
    cases = ["--codec", "fp8", "--gbps", "2", "--channel", "direct"]
    assert run(["bench", "transfer", *SMALL, *cases]) == 0
    said = capsys.readouterr()
    header, *lines = said.out.splitlines()
    assert header.split()[:4] == ["codec", "tokens", "gbps", "pages"]
    assert [line.split()[0] for line in lines] == [RAW, RAW, "fp8", "fp8"]
    assert f"1 of 2: 70 tokens, encode {RAW}" in said.err
    assert f"1 of 4: 70 tokens, 2 Gb/s, {RAW}, ready" in said.err


@pytest.mark.parametrize(
    "name", ["overlap", "latency", "load", "kernels", "decode", "transfer", "serve", "capacity"]
)
def test_every_benchmark_is_a_command(name, capsys):
    assert run(["bench", name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_the_plane_is_measured_beside_a_socket(capsys):
    result = json.loads(bench(capsys, "--plane", "--no-netns", "--json"))
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
def test_what_cannot_be_measured_is_refused_before_it_begins(arguments, word, capsys):
    pytest.importorskip("matplotlib")
    assert run(["bench", "transfer", *SMALL, *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert word in said.err
    assert not said.out


@pytest.mark.parametrize("name", ["overlap", "load"])
def test_a_benchmark_of_workers_prints_its_rows(name, capsys, monkeypatch):
    row = {"codec": "raw", "waited_s": 1.5}
    monkeypatch.setattr(
        handoff, f"measure_{name}", lambda *_: {"machine": {"kernels": "avx2"}, "rows": [row]}
    )
    assert run(["bench", name]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["raw", "1.5"]
