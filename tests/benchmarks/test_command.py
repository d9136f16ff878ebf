"""The command line of benchmarks: `python -m benchmarks.NAME`, and their old names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.bench.child import Child
from disagg.cli import bench

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    "command", ["bench auto --tokens 4095", "bench latency --tokens 4096"]
)
def test_prompts_longer_than_the_context_are_refused_early(
    command, disagg, monkeypatch
):
    monkeypatch.setattr(
        Child, "__init__", lambda *_: pytest.fail("started for nothing")
    )

    output = disagg(command, code=4)

    assert output.err.startswith("error: 4,097 tokens of a prompt and its answer are")


def test_an_error_looks_as_those_of_disagg():
    command = [sys.executable, "-m", "benchmarks.chaos", "--calm", "--seed", "0"]

    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert process.returncode == 2
    assert process.stderr.startswith("error: --seed has no effect with --calm")


def test_a_program_gets_an_error_as_json():
    command = [sys.executable, "-m", "benchmarks.moves", "--runs", "0", "--json"]

    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert process.returncode == 2
    assert "--runs" in json.loads(process.stdout)["error"]["message"]


@pytest.mark.parametrize("name", bench.ALIASES)
def test_an_old_name_shows_the_help_of_the_benchmark(name, disagg):
    assert (
        f"Usage: disagg bench {name} [OPTIONS]" in disagg("bench", name, "--help").out
    )


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("bench chaos --seed 3", "benchmarks.chaos"),
        ("bench kernels --machine-code", "benchmarks.machine_code"),
    ],
)
def test_outside_of_a_checkout_an_old_name_says_where_it_went(
    command, module, disagg, monkeypatch
):
    monkeypatch.setitem(sys.modules, "benchmarks", None)
    monkeypatch.delitem(sys.modules, module, raising=False)

    output = disagg(command, code=2)

    assert f"is now `python -m {module}`" in output.err
    assert not output.out
