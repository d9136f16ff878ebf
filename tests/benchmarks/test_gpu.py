"""The call that is made when a GPU is there, rehearsed without one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import attention, compiling, running
from benchmarks.gpu.__main__ import NAMES, parse
from benchmarks.gpu.setting import Setting, Step
from disagg.bench.result import Row
from tests.conftest import GPU

ROOT = Path(__file__).parents[2]
ABSENT = (
    "ray",
    "uvicorn",
    "fastapi",
    "starlette",
    "cryptography",
    "openai",
    "kubernetes_validate",
)
BLOCKED = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
"""
RUN = "import runpy\nrunpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)"
PROFILE = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","attend_kernel","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","71.50"
"0","attend_kernel","gpu__time_duration.sum","ns","1,250"
"1","attend_kernel","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","60"
"""


def call(
    code: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python with the modules blocked that a machine with a GPU may lack."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a rehearsal of all steps leaves."""
    out = tmp_path_factory.mktemp("gpu")
    done = call(RUN, "--rehearse", "--out", str(out))
    (out / "output").write_text(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.timeout(300)
def test_a_rehearsal_runs_every_step_where_much_is_missing(rehearsed):
    steps = json.loads((rehearsed / "gpu.json").read_text())["steps"]

    assert list(steps) == ["warmup", *NAMES]

    for name, step in steps.items():
        assert step["ended"] == "done", name
        assert step["rows"], name
        assert not step["failures"], name


def test_a_rehearsal_leaves_few_files_and_says_little(rehearsed):
    output = (rehearsed / "output").read_text().splitlines()

    assert 2 * len(NAMES) <= len(output) <= running.LINES
    assert all(any(f" {name}," in line for line in output) for name in NAMES)
    assert {x.name for x in rehearsed.iterdir()} == {"gpu.json", "gpu.log", "output"}


def test_a_rehearsal_attends_encodes_and_decodes(rehearsed):
    steps = json.loads((rehearsed / "gpu.json").read_text())["steps"]
    rows = {name: step["rows"] for name, step in steps.items()}

    assert all(
        row["errors"]["attend"] <= row["bounds"]["attend"] for row in rows["equality"]
    )
    assert all(row["error"] < 1e-3 for row in rows["attention"])
    assert rows["truth"][0]["recorded"]
    assert {"raw", "static cache"} <= {row["codec"] for row in rows["decode"]}
    assert [
        row["link_gbps"] for row in rows["transfer"] if row["what"] == "hand-off"
    ] == [None, 25]


def test_the_tests_of_a_gpu_are_collected_where_much_is_missing(rehearsed):
    (row,) = json.loads((rehearsed / "gpu.json").read_text())["steps"]["suite"]["rows"]
    marked = [
        x for x in (ROOT / "tests").rglob("test_*.py") if GPU.search(x.read_text())
    ]

    assert row["files"] == sorted(str(x.relative_to(ROOT)) for x in marked)
    assert row["collected"] >= 11


# -- steps that end badly


def failing(setting: Setting) -> Any:
    yield {"case": "fine"}
    yield {"case": "odd", "failure": "is off"}


def dying(setting: Setting) -> Any:
    yield {"case": "last"}
    print("about to die")
    os.abort()


def hanging(setting: Setting) -> Any:
    yield {"case": "before"}
    time.sleep(600)


def raising(setting: Setting) -> Any:
    yield {"case": "one"}
    raise ValueError("no such thing")


def count(rows: list[Row]) -> list[str]:
    return [f"{len(rows)} rows"]


@pytest.fixture
def broken_run(tmp_path, monkeypatch) -> tuple[list[running.Result], Path]:
    """Steps that die, hang, raise and report a failure, one after the other."""
    monkeypatch.setattr(running, "GRACE_S", 0.2)
    steps = [
        Step(step.__name__, 1.0, step, count)
        for step in (dying, hanging, raising, failing)
    ]
    out = tmp_path / "out"
    results = running.run_steps(steps, True, out, tmp_path / "scratch", budget=4.0)
    return results, out


def test_the_rows_of_a_broken_step_are_kept_and_the_next_goes_on(broken_run):
    results, out = broken_run

    steps = json.loads((out / "gpu.json").read_text())["steps"]
    assert [len(step["rows"]) for step in steps.values()] == [1, 1, 1, 2]
    endings = [result.ended.split(":")[0] for result in results]
    assert endings[0].startswith("died")
    assert endings[1].startswith("out of time")
    assert endings[2].startswith("died")
    assert endings[3] == "done"
    assert "== hanging: out of time" in (out / "gpu.log").read_text()


def test_the_summary_begins_with_failures_and_their_logs(broken_run):
    lines = running.summary(broken_run[0])

    assert len(lines) <= running.LINES
    assert lines[0].startswith("FAILED dying")
    for text in ("about to die", "no such thing", "odd: is off"):
        assert any(text in line for line in lines)


def test_many_failures_leave_room_for_what_went_well():
    rows = [{"case": f"{i}", "failure": "x" * 300} for i in range(50)]
    bad = Step("bad", 1.0, failing, count)
    failures = [
        running.Result(bad, "done", 1.0, 1.0, rows, "line\n" * 100) for _ in range(6)
    ]
    good = running.Result(Step("good", 1.0, failing, count), "done", 1.0, 1.0, [], "")

    lines = running.summary([*failures, good])

    assert len(lines) <= running.LINES
    assert lines[-2:] == ["ok     good, 1 of 1 s", "       0 rows"]
    assert max(map(len, lines)) <= 160


def test_an_unknown_step_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--out", "x", "--only", "nothing"])
    assert "equality" in capsys.readouterr().err


# -- parts


def test_a_profile_is_read_codec_by_codec():
    first, second = attention.read_profile(PROFILE, ["a", "b"])

    assert first == {"profiled": "a", "dram_percent": 71.5, "microseconds": 1.25}
    assert second == {"profiled": "b", "dram_percent": 60.0}

    (row,) = attention.read_profile("==ERROR== no permission", ["a"])

    assert "no table" in row["reason"]


NOTED = """
from benchmarks.gpu.compiling import all_jobs, launches_of
for job in all_jobs()[::3]:
    print(job.name, *sorted({x.kernel.__name__ for x in launches_of(job, "sm_90")}))
"""


def test_kernels_compiled_ahead_are_launched_and_fit_all_chips():
    done = call(NOTED, TRITON_INTERPRET="0")

    assert done.returncode == 0, done.stderr

    lines = done.stdout.splitlines()

    assert len(lines) > 20
    assert all("attend_kernel" in line or "alignedkv" in line for line in lines)


def test_a_packed_cache_has_what_launches_read_and_no_more(tmp_path):
    for folder, name in (
        ("A", "x.cubin"),
        ("A", "x.json"),
        ("A", "x.ptx"),
        ("B", "__grp__y.json"),
    ):
        (tmp_path / "cache" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / folder / name).write_text(name)
    compiling.pack(tmp_path / "cache", tmp_path / "it.tar.xz")
    compiling.unpack(tmp_path / "it.tar.xz", tmp_path / "there")

    result = {
        str(x.relative_to(tmp_path / "there"))
        for x in (tmp_path / "there").rglob("*.*")
    }

    assert result == {"A/x.cubin", "A/x.json", "B/__grp__y.json"}


def test_a_table_has_each_kernel_once_and_its_latest_outcome():
    needs = {"registers": 9, "spill_bytes": 0, "shared_bytes": 1, "shared_limit": 2}
    one = {"kernel": "k", "case": "a", "hash": "x", "compiled": 1, "seconds": 2.0}
    again = one | {"case": "b", "compiled": 0, "seconds": 0.0}
    rows = [{"case": "a", "reason": "killed"}, one | needs, again]
    rows += [{"case": "a", "done": True}, {"case": "b", "reason": "no memory"}]

    kernels, failed = compiling.table(rows)

    assert kernels == [{"kernel": "k", "case": "a", "seconds": 2.0, **needs}]
    assert failed == [{"case": "b", "reason": "no memory"}]
    assert compiling.result_of(rows, "sm_90")["summary"]["over_limit"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_compiled_ahead_is_all_that_a_gpu_launches(tmp_path):
    name = "int8 8x4-D128-float16 2x2pages"
    cache, packed = tmp_path / "cache", tmp_path / "it.tar.xz"
    compile_it = [sys.executable, "-m", "benchmarks.gpu.compiling", "--match", name]
    environment = dict(os.environ)
    environment.pop(
        "TRITON_INTERPRET", None
    )  # of the tests; interpreted kernels are not compiled
    subprocess.run(
        [*compile_it, "--cache", cache, "--pack", packed],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    compiling.unpack(packed, tmp_path / "there")
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "there")
    follow = [sys.executable, "-m", "tests.benchmarks.carried", name]

    done = subprocess.run(
        follow, cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr

    row = json.loads(done.stdout.splitlines()[-1])

    assert row["launched"]
    assert row["compiled"] == 0
