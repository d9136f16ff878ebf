"""Step 7: the tests that want a GPU. A rehearsal collects them and runs none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.setting import Setting
from disagg.bench.result import Row

ROOT = Path(__file__).parents[2]
MARK = "mark.gpu"


class Tally:
    """A plugin that notes what came of each test."""

    def __init__(self) -> None:
        self.collected = 0
        self.rows: list[Row] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            row: Row = {"test": report.nodeid, "seconds": round(report.duration, 2)}
            self.rows.append(row | ({"failure": report.longreprtext[-600:]} if report.failed else {}))


def files() -> list[str]:
    """Test files that have the mark, relative to the checkout."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(x.relative_to(ROOT)) for x in found if MARK in x.read_text()]


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each test, then one of the whole run."""
    tally = Tally()
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu", f"--rootdir={ROOT}"]
    options += ["--collect-only"] if setting.rehearsal else ["-x", "--maxfail=5"]
    code = pytest.main([*options, *(str(ROOT / x) for x in files())], plugins=[tally])
    yield from tally.rows
    whole: Row = {"collected": tally.collected, "exit_code": int(code)}
    if int(code) or not tally.collected:
        whole["failure"] = f"pytest ended with {int(code)}; {tally.collected} tests collected"
    yield whole


def headline(rows: list[Row]) -> list[str]:
    """How many passed."""
    tests = [row for row in rows if "test" in row]
    passed = sum("failure" not in row for row in tests)
    collected = sum(row.get("collected", 0) for row in rows)
    return [f"{passed} passed, {len(tests) - passed} failed of {collected} collected"]
