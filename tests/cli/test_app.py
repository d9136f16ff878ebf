"""What every command line offers: help, a version, completion, and a quiet terminal."""

import io
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest

from disagg import __main__ as program
from disagg.cli.app import run

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_told(disagg):
    assert disagg("--version").out == f"disagg {version('disagg')}\n"


@pytest.mark.parametrize("command", ["", "submit", "serve", "bench", "bench decode"])
def test_help_has_a_short_name_everywhere(command, disagg):
    shown = []
    for flag in ("-h", "--help"):
        shown.append(disagg(*command.split(), flag).out)

    assert shown[0] == shown[1]
    assert "-h, --help" in shown[0]


def test_no_summary_is_cut(disagg, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, _, commands = disagg("--help").out.partition("Commands:")

    assert "submit" in commands
    assert "..." not in commands


def test_a_shell_can_complete_commands():
    words = {
        "COMP_WORDS": "disagg se",
        "COMP_CWORD": "1",
        "_DISAGG_COMPLETE": "complete_bash",
    }
    environment, command = os.environ | words, [sys.executable, "-m", "disagg"]

    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert done.stdout.split() == ["serve"]


def test_a_full_disk_is_an_error_and_no_traceback():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "disagg", "--version"]
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )

    assert done.returncode == 2
    assert done.stderr == "error: input or output: No space left on device\n"


def test_too_much_memory_is_an_error_and_no_traceback(disagg, monkeypatch):
    full = Mock(side_effect=MemoryError("Unable to allocate 373 TiB"))
    monkeypatch.setattr("disagg.codecs.describe.describe_all", full)

    assert disagg("codecs", code=7).err == "error: Unable to allocate 373 TiB\n"


URL = "--url http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("bench kernels --target sm_90", "--target"),
        ("bench kernels --machine-code --runs 3", "--runs"),
        ("bench kernels --machine-code --device cuda", "--device"),
        ("bench streams --part batch --rounds 3", "--rounds"),
        ("bench chaos --calm --seed 0", "--seed"),
        ("bench transfer --plane --threads 2", "--threads"),
        ("bench transfer --plane --no-netns --gbps 2", "--gbps"),
        ("bench serve --result-filename a.json", "--result-filename"),
        ("bench serve --dataset-path a.json", "--dataset-path"),
        ("bench serve --self-timed", "--self-timed"),
        (
            "bench serve --dataset-name azure --self-timed --request-rate 3",
            "--request-rate",
        ),
        (
            "bench serve --dataset-name azure --random-prefix-len 0",
            "--random-prefix-len",
        ),
        ("bench serve --burstiness 2", "--burstiness"),
        (f"status {URL} --state-file a.json", "--state-file"),
        (f"submit hello {URL} --state-file a.json", "--state-file"),
    ],
)
def test_an_option_that_would_be_left_out_is_refused(words, idle, disagg):
    assert f"{idle} has no effect" in disagg(words, code=2).err


def test_ctrl_c_while_commands_are_imported_ends_quietly(monkeypatch):
    class Pressed:
        def find_spec(self, name, *_):
            if name == "disagg.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "disagg.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Pressed(), *sys.meta_path])
    with pytest.raises(SystemExit, match="130"):
        program.main()


@pytest.mark.parametrize(("before", "after"), [(None, "NONE"), ("DEBUG", "DEBUG")])
def test_libraries_are_quiet_unless_the_user_wants_to_hear_them(
    before, after, monkeypatch
):
    """Before anything is run, so before they are imported, and for all processes of a service."""
    for name in program.QUIET:
        monkeypatch.setenv(name, "")  # whatever is set below goes when the test ends
        monkeypatch.delenv(name)
    if before is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", before)
    heard: list[str | None] = []
    run = "disagg.cli.app.run"

    monkeypatch.setattr(run, lambda _: heard.append(os.environ.get("GRPC_VERBOSITY")))

    with pytest.raises(SystemExit):
        program.main()
    assert heard == [after]


def test_a_terminal_that_has_not_all_of_unicode_gets_what_it_has(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))

    assert run(["page", "raw"]) == 0
    assert b"layers 0, 1, 2, 3, 4, 5 ? raw" in written.getvalue()
