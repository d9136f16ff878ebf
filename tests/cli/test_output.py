"""What commands print, for people and for programs."""

import errno
import io
import os
import subprocess
import sys

import pytest

from disagg.cli.output import print_table, stages


def test_a_program_reads_a_value_when_it_is_there():
    code = "import sys; from disagg.cli.output import print_json; print_json(1); sys.stdin.read()"
    buffered = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(
        command, env=buffered, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "1\n"
        process.communicate()


def test_cells_are_shown_as_they_are(capsys):
    print_table("title", ["wiki[en]"], [["[/i]"]])
    assert {"wiki[en]", "[/i]"} <= set(capsys.readouterr().out.split())


def test_what_goes_on_does_so_though_nobody_can_hear_of_it(monkeypatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    with stages() as say:
        say("loading")
    assert "loading ..." in sys.stderr.getvalue()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_one_that_nobody_reads(closed):
    code = "import disagg.__main__ as m, sys; from disagg.cli import app; app.run = lambda _: sum("
    code += "x.fileno() for x in (sys.stdin, sys.stdout, sys.stderr)); m.main()"

    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    )

    assert done.returncode == 0 + 1 + 2


@pytest.mark.parametrize(("is_live", "owner"), [(False, True), (True, False)])
def test_a_command_in_the_background_overwrites_nothing(
    is_live, owner, monkeypatch, capsys
):
    """Its spinner would move the cursor over the answer of another command."""
    monkeypatch.setattr("disagg.cli.output._owns_terminal", lambda: owner)

    with stages(is_live) as report:
        report("loading")

    assert "\033" not in capsys.readouterr().err
