"""`disagg bench`: what people see of a measurement, and what is refused before one begins."""

import json
from importlib import import_module
from unittest.mock import Mock

import pytest

from disagg.bench import child, handoff, result
from disagg.engine.error_probe import LEAST_TOKENS
from disagg.model.runner import Runner
from tests.model.tiny import save_tiny

SMALL = "bench transfer --layers 2 --heads 1 --head-dim 64 --tokens 70 --rounds 1"
WITH_CODECS = ("auto", "capacity", "chaos", "compare", "decode", "latency", "transfer")
RAW = "raw:dtype=fp16"
CASES = ["--codec", "fp8", "--gbps", "2", "--channel", "direct"]


def test_people_see_rows_and_progress(disagg, monkeypatch):
    monkeypatch.setattr(result, "INTERVAL_S", 0.0)

    output = disagg(SMALL, *CASES)

    header, *lines = output.out.splitlines()
    assert header.split()[:4] == ["codec", "tokens", "gbps", "pages"]
    assert [line.split()[0] for line in lines] == [RAW, RAW, "fp8", "fp8"]
    assert "this takes about" in output.err
    assert f"1 of 6: 70 tokens, encode {RAW}" in output.err
    assert f"3 of 6: 70 tokens, 2 Gb/s, {RAW}, ready" in output.err


def test_a_picture_that_cannot_be_drawn_loses_no_row(disagg, tmp_path, monkeypatch):
    pictures = pytest.importorskip("disagg.report.transfer")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(pictures, "draw", Mock(side_effect=full))
    out = tmp_path / "new" / "a.json"
    files = ["--plot", tmp_path / "a.png", "--out", out]

    output = disagg(SMALL, *CASES, *files, code=2)

    assert "No space left" in output.err
    assert len(json.loads(out.read_text())["rows"]) == 4


@pytest.mark.parametrize("name", ["overlap", "load"])
def test_a_benchmark_of_workers_prints_its_rows(name, disagg, monkeypatch):
    result = {
        "machine": {"kernels": "avx2"},
        "rows": [{"codec": "raw", "waited_s": 1.5}],
    }
    module = import_module(f"benchmarks.{name}")

    monkeypatch.setattr(module, f"measure_{name}", lambda *_: result)

    assert disagg("bench", name).out.splitlines()[1].split() == ["raw", "1.5"]
    assert json.loads(disagg("bench", name, "--json").out) == result


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (f"{SMALL} --plane --plot a.png", "draws nothing"),
        (f"{SMALL} --plane --codec raw --codec fp8", "one codec"),
        (f"{SMALL} --plot a.gif", ".png"),
        (f"{SMALL} --plot /nowhere/a.png", "/nowhere"),
        (f"{SMALL} --out /", "cannot write /"),
        (
            "bench serve --save-result --result-dir /dev/null/a",
            "cannot write /dev/null/a/openai",
        ),
        (f"{SMALL} --gbps inf", "'--gbps'"),
        (f"{SMALL} --threads 99999999999", "'--threads'"),
        ("bench capacity --memory-mb inf", "'--memory-mb'"),
        ("bench serve --seed -1", "'--seed'"),
        ("bench auto --tokens 255", f"or equal to {LEAST_TOKENS}"),
        ("bench decode --size 2y4", "'2y4' is none; expected sequences x tokens"),
        ("bench decode --size 0x8", "'0x8' is none; expected sequences x tokens"),
        ("bench streams --part speed", "'speed'; known: batch, mixed"),
        *((f"bench {name} --codec zip", "unknown codec 'zip'") for name in WITH_CODECS),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    command, word, disagg, monkeypatch
):
    pytest.importorskip("matplotlib")
    for started in ((child.Child, "__init__"), (Runner, "random")):
        monkeypatch.setattr(*started, lambda *_: pytest.fail("started for nothing"))

    output = disagg(command, code=2)

    assert word in output.err
    assert not output.out


@pytest.mark.parametrize(
    ("part", "tokens"), [("batch", 320), ("beside", 1501), ("known", 1502)]
)
def test_streams_longer_than_the_context_never_begin(
    part, tokens, disagg, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        child.Child, "__init__", lambda *_: pytest.fail("started for nothing")
    )
    model = save_tiny("llama", tmp_path, max_position_embeddings=tokens - 1)

    error = disagg("bench streams --part", part, "--model", model, code=4).err

    assert f"{tokens:,} tokens of a prompt and its answer" in error
    assert f"at most {tokens - 1:,}" in error


@pytest.mark.parametrize(
    "plane", [[], ["--plane", "--no-netns"]], ids=["codecs", "plane"]
)
def test_prompts_that_do_not_fit_in_memory_are_refused(plane, disagg, monkeypatch):
    monkeypatch.setattr(handoff, "Child", lambda *_: pytest.fail("started for nothing"))
    monkeypatch.setattr(handoff.os, "sysconf", lambda _: 1 << 10)

    output = disagg(SMALL, *plane, code=7)

    assert "this host has 1,048,576" in output.err
