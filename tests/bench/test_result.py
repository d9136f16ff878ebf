"""What every benchmark reports: progress for people who wait, and a table."""

import sys

import pytest

from disagg.bench import result
from disagg.bench.result import progress
from disagg.bench.tables import table

SPEC = "banded:bits=3|kivi:bits=4,residual=64"


@pytest.mark.parametrize(("interval_s", "lines"), [(0.0, 2), (3600.0, 1)])
def test_progress_goes_to_stderr_and_quick_cases_never_flood_it(
    interval_s, lines, monkeypatch, capsys
):
    monkeypatch.setattr(result, "INTERVAL_S", interval_s)

    cases = progress([3, 4], lambda case: f"case {case}")

    assert [case * 2 for case in cases] == [6, 8]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["1 of 2: case 3", "2 of 2: case 4"][:lines]


def test_remaining_time_is_estimated_from_the_expected_seconds(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 5.0, 10.0, 29.0])
    monkeypatch.setattr(result.time, "monotonic", lambda: next(clock))

    seconds = {"a": 5.0, "b": 20.0, "c": 1.0}

    list(progress("aabc", "case {}".format, seconds=seconds.get))

    assert capsys.readouterr().err.splitlines() == [
        "1 of 4: case a",
        "2 of 4, about 26 s left: case a",
        "3 of 4, about 21 s left: case b",
        "4 of 4: case c",
    ]


def test_without_expected_seconds_all_cases_take_as_long(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 5.0, 12.0])
    monkeypatch.setattr(result.time, "monotonic", lambda: next(clock))

    list(progress("abc", "case {}".format))

    assert capsys.readouterr().err.splitlines() == [
        "1 of 3: case a",
        "2 of 3, about 10 s left: case b",
        "3 of 3, about 6 s left: case c",
    ]


def test_a_table_has_every_key_and_aligns_numbers_right():
    rows = [{"kernel": "a", "us": 1234.5, "n": 7}, {"kernel": "longer", "reason": "no"}]

    assert table(rows).splitlines() == [
        "kernel     us  n  reason",
        "a       1,234  7",
        "longer            no",
    ]


def test_a_narrow_terminal_has_shared_values_above_the_table(monkeypatch):
    rows = [
        {"codec": "raw", "model": "small", "dtype": "float32", "ms": 3.5, "own": None},
        {"codec": "fp8", "model": "small", "dtype": "float32", "ms": 2.5, "own": 0.1},
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")

    lines = table(rows).splitlines()

    assert max(map(len, lines[2:])) <= 20
    assert lines[:3] == [
        "model small, dtype float32",
        "",
        "codec   ms  own",
    ]
    assert lines[4:] == [
        "raw    3.5",
        "fp8    2.5  0.1",
    ]


def test_a_table_fits_the_terminal(monkeypatch):
    row = {"codec": SPEC, "wire_bytes": 268_556_062, "time_ratio": 4.18}
    full = table([row])
    assert full.splitlines()[1] == f"{SPEC}   268556062        4.18"

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "36")

    lines = table([row]).splitlines()
    assert max(map(len, lines)) <= 36
    assert lines == [
        "                        wire   time",
        "codec                  bytes  ratio",
        "─" * 36,
        "banded:bits=3|kiv  268556062   4.18",
        "i:bits=4,residual",
        "=64",
    ]
