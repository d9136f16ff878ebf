"""The pages of docs/: links and files that they name are there. `make docs` builds the site."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_and_files_of_a_page_are_there(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    named = re.findall(r"`((?:disagg|tests|kernels|protos|benchmarks|docs)/[\w./-]+)`", text)
    missing = [x for x in links if not (page.parent / x).exists()]
    missing += [x for x in named if not (ROOT / x).exists()]
    assert not missing


def test_the_site_shows_every_page_that_it_lists():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {name for entry in nav for name in entry.values()}
    assert listed <= {page.name for page in PAGES}
    assert "index.md" in listed
