"""Step 7: the tests that want a GPU. A rehearsal collects them and runs none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.setting import Setting
from disagg.bench.result import Row

ROOT = Path(__file__).parents[2]


class Tally:
    """A plugin that notes what came of each test."""

    def __init__(self) -> None:
        self.collected, self.files = 0, set[str]()
        self.rows: list[Row] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)
        self.files = {x.nodeid.partition("::")[0] for x in session.items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            row: Row = {"test": report.nodeid, "seconds": round(report.duration, 2)}
            self.rows.append(
                row | ({"failure": report.longreprtext[-600:]} if report.failed else {})
            )


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each test, then one of the whole run."""
    tally = Tally()
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu", f"--rootdir={ROOT}"]
    options += ["--collect-only"] if setting.rehearsal else ["--maxfail=5"]
    code = pytest.main([*options, str(ROOT / "tests")], plugins=[tally])
    yield from tally.rows
    whole: Row = {"collected": tally.collected, "files": sorted(tally.files)}
    if int(code) or not tally.collected:
        whole["failure"] = (
            f"pytest ended with {int(code)}; {tally.collected} tests collected"
        )
    yield whole


def headline(rows: list[Row]) -> list[str]:
    """How many passed."""
    tests = [row for row in rows if "test" in row]
    passed = sum("failure" not in row for row in tests)
    collected = sum(row.get("collected", 0) for row in rows)
    return [f"{passed} passed, {len(tests) - passed} failed of {collected} collected"]
