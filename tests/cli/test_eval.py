"""`disagg eval` on the packaged model, at lengths that say nothing of quality."""

import json

import pytest

from disagg.cli.app import run
from disagg.eval.quality import Judge

SHORT = ["eval", "--rows", "1", "--prompt", "150", "--score", "20"]
TWO = ["--codec", "fp8", "--codec", "kivi:bits=2"]


def evaluate(capsys, *arguments: str, code: int = 0) -> str:
    assert run([*SHORT, *arguments]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_one_run_prints_a_table_writes_a_file_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "a.json", tmp_path / "a.png"
    table = evaluate(capsys, *TWO, "--out", str(out), "--plot", str(plot))
    assert [line.split()[0] for line in table.splitlines()[4:6]] == ["fp8", "kivi:bits=2"]
    assert "exact perplexity: python" in table
    result = json.loads(out.read_text())
    assert [line["codec"] for line in result["summary"]] == ["fp8", "kivi:bits=2"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_broke_off_goes_on_where_it_was(capsys, tmp_path, monkeypatch):
    out = tmp_path / "a.json"
    evaluate(capsys, "--codec", "fp8", "--out", str(out))
    earlier = json.loads(out.read_text())["rows"]
    measured = []
    measure = Judge.measure
    monkeypatch.setattr(Judge, "measure", lambda *x: measured.append(x[1]) or measure(*x))
    result = json.loads(evaluate(capsys, *TWO, "--out", str(out), "--resume", "--json"))
    assert [case.codec for case in measured] == ["kivi:bits=2"]
    assert result["rows"][0] == earlier[0]
    assert json.loads(out.read_text()) == result


def test_a_file_of_another_run_is_not_gone_on_with(capsys, tmp_path):
    out = tmp_path / "a.json"
    evaluate(capsys, "--codec", "fp8", "--out", str(out))
    again = ["--codec", "fp8", "--out", str(out), "--resume", "--streaming"]
    assert "another model" in evaluate(capsys, *again, code=2)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--codec", "zip"], 2, "zip"),
        (["--plot", "a.gif"], 2, ".png"),
        (["--resume"], 2, "--out"),
        (["--out", "/dev/null/a.json"], 2, "/dev/null/a.json cannot be written"),
        (["--model", "smollm2"], 3, "disagg fetch smollm2"),
    ],
    ids=["codec", "picture", "resume", "out", "model"],
)
def test_what_cannot_be_judged_says_why(arguments, code, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert said in evaluate(capsys, *arguments, code=code)
