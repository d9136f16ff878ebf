"""The pages of docs/: links and files that they name are there. `make docs` builds the site.

The README's blocks marked as runnable run, and print what they say they print: those with
`<!-- run -->` in the line above their fence. In a shell block, lines that begin with `$ ` are
commands; in a Python block every line is code, and a comment `# -> text` states what `print` wrote.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disagg.cli.app import run

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^<!-- run -->\n```(\w+)\n(.*?)^```", TEXT, re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_and_files_of_a_page_are_there(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    named = re.findall(
        r"`((?:disagg|tests|kernels|protos|benchmarks|docs)/[\w./-]+)`", text
    )
    missing = [x for x in links if not (page.parent / x).exists()]
    missing += [x for x in named if not (ROOT / x).exists()]

    assert not missing


def test_the_site_shows_every_page_that_it_lists():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {name for entry in nav for name in entry.values()}

    assert listed <= {page.name for page in PAGES}
    assert "index.md" in listed


def test_settings_and_commands_are_those_of_the_code() -> None:
    command = [sys.executable, str(ROOT / "docs" / "reference.py"), "--check"]
    subprocess.run(command, check=True, cwd=ROOT)


def test_the_readme_has_no_figure_left_to_fill_in() -> None:
    assert "@@" not in TEXT


def test_the_readme_has_runnable_blocks() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh"}


@pytest.mark.parametrize(
    "code", [code for language, code in BLOCKS if language == "python"]
)
def test_python_blocks_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# -> (.*)$", code, re.M)


@pytest.mark.parametrize(
    "code", [code for language, code in BLOCKS if language == "sh"]
)
def test_shell_blocks_run(code):
    for line in re.findall(r"^\$ (.*)$", code, re.M):
        program, *arguments = shlex.split(line)
        assert (program, run(arguments)) == ("disagg", 0), line
