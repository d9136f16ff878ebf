"""What every benchmark says: progress for people who wait, a file, a table."""

import json

from disagg.bench import result
from disagg.bench.result import result_of, table, tell, write


def test_progress_goes_to_stderr_with_number_and_name(monkeypatch, capsys):
    monkeypatch.setattr(result, "TELL_S", 0.0)
    assert [case * 2 for case in tell([3, 4], lambda case: f"case {case}")] == [6, 8]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["1 of 2: case 3", "2 of 2: case 4"]


def test_quick_cases_do_not_flood_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(result, "TELL_S", 3600.0)
    list(tell(range(1000), str))
    assert capsys.readouterr().err == "1 of 1000: 0\n"


def test_a_written_result_is_read_back_with_what_it_was_measured_with(tmp_path):
    found = result_of([{"name": "a", "ms": 1.5}], "notes", gpu="none")
    write(found, tmp_path / "new" / "pairs.json")
    assert json.loads((tmp_path / "new" / "pairs.json").read_text()) == found
    assert found["rows"] == [{"name": "a", "ms": 1.5}]
    assert found["gpu"] == "none"
    assert found["versions"]["torch"] != "none"
    assert found["machine"]["cores"] > 0


def test_a_table_has_a_column_for_every_key_and_aligns_numbers_to_the_right():
    rows = [{"kernel": "a", "us": 1234.5, "n": 7}, {"kernel": "longer", "reason": "no"}]
    assert table(rows).splitlines() == [
        "kernel     us  n  reason",
        "a       1,234  7",
        "longer            no",
    ]
