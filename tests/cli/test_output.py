"""What commands print, for people and for programs."""

import os
import subprocess
import sys

from disagg.cli.output import print_table


def test_a_program_reads_a_value_when_it_is_there():
    code = "import sys; from disagg.cli.output import print_json; print_json(1); sys.stdin.read()"
    buffered = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, env=buffered, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "1\n"
        process.communicate()


def test_cells_are_shown_as_they_are(capsys):
    print_table("title", ["wiki[en]"], [["[/i]"]])
    assert {"wiki[en]", "[/i]"} <= set(capsys.readouterr().out.split())
