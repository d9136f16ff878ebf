"""`disagg eval` on the packaged model, at lengths that say nothing of quality."""

import json

import pytest

from disagg.eval.quality import Judge, Runner

SHORT = "eval --rows 1 --prompt 150 --score 20"
TWO = ["--codec", "fp8", "--codec", "kivi:bits=2"]


def test_one_run_prints_a_table_writes_a_file_and_draws(disagg, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.json"
    plot = tmp_path / "a.png"

    table = disagg(SHORT, *TWO, "--out", out, "--plot", plot).out

    assert [line.split()[0] for line in table.splitlines()[3:5]] == [
        "fp8",
        "kivi:bits=2",
    ]
    assert "exact perplexity: python" in table
    result = json.loads(out.read_text())
    assert [line["codec"] for line in result["summary"]] == ["fp8", "kivi:bits=2"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_on_a_hybrid_says_which_layers_codecs_apply_to(disagg, hybrid):
    model = hybrid("qwen3_5_text").info.path

    table = disagg(SHORT, "--model", model, "--codec", "fp8").out

    state_bytes = hybrid("qwen3_5_text").shape.state_bytes
    assert table.splitlines()[-1] == (
        "layers with K and V, which codecs apply to: 1; "
        f"layers with states, exact under every codec: 3, {state_bytes:,} bytes a sequence"
    )


def test_a_run_resumes_where_it_broke_off(disagg, tmp_path, monkeypatch):
    out = tmp_path / "a.json"
    disagg(SHORT, "--codec", "fp8", "--out", out)
    earlier = json.loads(out.read_text())["rows"]
    measured = []
    measure = Judge.measure
    monkeypatch.setattr(
        Judge, "measure", lambda *x: measured.append(x[1]) or measure(*x)
    )

    result = json.loads(disagg(SHORT, *TWO, "--out", out, "--resume", "--json").out)

    assert [case.codec for case in measured] == ["kivi:bits=2"]
    assert result["rows"][0] == earlier[0]
    assert json.loads(out.read_text()) == result


def test_a_stress_test_shows_codecs_by_factor_and_exact_kv_unchanged(disagg, tmp_path):
    out = tmp_path / "a.json"

    table = disagg(SHORT, *TWO, "--stress", "outliers", "--out", out).out

    header, *lines = table.splitlines()[2:]
    assert header.split() == ["codec", "x", "1", "x", "8", "x", "64", "x", "256"]
    assert [line.split()[0] for line in lines[:2]] == ["fp8", "kivi:bits=2"]
    result = json.loads(out.read_text())
    assert [row["factor"] for row in result["rows"][::2]] == [1, 8, 64, 256]
    (of_plain, *others) = result["perplexity_by_factor"].values()
    assert others == 3 * [of_plain]


def test_a_file_of_another_run_is_not_resumed(disagg, tmp_path):
    out = tmp_path / "a.json"
    disagg(SHORT, "--codec", "fp8", "--out", out)
    other_run = ["--codec", "fp8", "--out", out, "--resume", "--streaming"]

    output = disagg(SHORT, *other_run, code=2)

    assert "another model" in output.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--codec", "zip"], 2, "zip"),
        (["--prompt", "3000"], 2, "do not fit"),
        (["--free", "3000"], 2, "150 + 3000 tokens do not fit"),
        (["--threads", "99999999999"], 2, "--threads"),
        (["--keys", "3"], 2, "--passkey"),
        (["--stress", "heat"], 2, "outliers"),
        (["--stress", "outliers", "--save-costs"], 2, "--save-costs"),
        (["--text", "a.txt", "--text", "./a.txt"], 2, "the same name"),
        (["--plot", "a.gif"], 2, ".png"),
        (["--resume"], 2, "--out"),
        (["--resume", "--out", "other.json"], 2, "other.json is not one"),
        (["--resume", "--out", "text.json"], 2, "text.json is not one"),
        (["--out", "/dev/null/a.json"], 2, "cannot write /dev/null/a.json"),
        (["--model", "smollm2"], 3, "disagg fetch smollm2"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_loaded(
    arguments, code, message, disagg, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"model": "packaged", "rows": []}')
    for name in ("text.json", "a.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr(
        Runner, "load", lambda *_: pytest.fail("a model was loaded for nothing")
    )

    output = disagg(SHORT, *arguments, code=code)

    assert message in output.err
