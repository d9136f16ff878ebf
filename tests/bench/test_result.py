"""What every benchmark says: progress for people who wait, a table."""

import pytest

from disagg.bench import result
from disagg.bench.result import table, tell


@pytest.mark.parametrize(("pause_s", "told"), [(0.0, 2), (3600.0, 1)])
def test_progress_goes_to_stderr_and_quick_cases_never_flood_it(
    pause_s, told, monkeypatch, capsys
):
    monkeypatch.setattr(result, "TELL_S", pause_s)
    assert [case * 2 for case in tell([3, 4], lambda case: f"case {case}")] == [6, 8]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["1 of 2: case 3", "2 of 2: case 4"][:told]


def test_a_table_has_a_column_for_every_key_and_aligns_numbers_to_the_right():
    rows = [{"kernel": "a", "us": 1234.5, "n": 7}, {"kernel": "longer", "reason": "no"}]
    assert table(rows).splitlines() == [
        "kernel     us  n  reason",
        "a       1,234  7",
        "longer            no",
    ]
