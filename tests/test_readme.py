"""The README's blocks marked as runnable run, and print what they say they print.

A block is runnable when the line above its fence is `<!-- run -->`. In a shell block, lines that
begin with `$ ` are commands; in a Python block every line is code, and a comment `# -> text`
states what `print` wrote.
"""

import re
import shlex
from pathlib import Path

import pytest

from disagg.cli.app import run

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(
    r"^<!-- run -->\n```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
)


def test_the_readme_has_no_figure_left_to_fill_in() -> None:
    assert "@@" not in (ROOT / "README.md").read_text()


def test_the_readme_has_runnable_blocks() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh"}


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_python_blocks_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# -> (.*)$", code, re.M)


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "sh"])
def test_shell_blocks_run(code):
    for line in re.findall(r"^\$ (.*)$", code, re.M):
        program, *arguments = shlex.split(line)
        assert (program, run(arguments)) == ("disagg", 0), line
