"""The live page and the Grafana board read nothing that the service does not tell."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from disagg.server.info_routes import LIVE_PAGE
from tests.server.running import Running, running

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "disagg.json"
SERIES = re.compile(r"(?:vllm|disagg)[:_][a-z_:]+")
CHROME = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def service(tiny: Path) -> Iterator[Running]:
    """One that has answered, and failed to."""
    with running(str(tiny)) as service:
        for codec, status in (("raw", 200), ("none such", 400)):
            body = {"prompt": "Call me Ishmael", "max_tokens": 5, "codec": codec}
            answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == status
        yield service


def exported(service: Running) -> str:
    return httpx.get(f"{service.url}/metrics").text


def names(text: str) -> set[str]:
    """The series that a text tells of, those without a value too."""
    series = {
        line.split("{")[0].split(" ")[0]
        for line in text.splitlines()
        if line[:1] != "#"
    }
    types = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M)
    for name, kind in types:
        series |= (
            {f"{name}_total"}
            if kind == "counter" and not name.endswith("_total")
            else {name}
        )
    return series


def test_the_page_is_one_file_that_reads_nothing_from_elsewhere(service):
    page = httpx.get(service.url).text
    assert page == LIVE_PAGE.read_text()
    assert not re.search(r'https?://|src=|href=(?!"data:)|@import', page)
    assert set(re.findall(r'fetch\("(\w+)"\)', page)) == {"metrics", "ready"}


def test_every_figure_of_the_page_is_told(service):
    page, text = LIVE_PAGE.read_text(), exported(service)
    series = set(re.findall(r'"((?:vllm:|disagg_)\w+)"', page))
    averages = set(re.findall(r'average\("([\w:]+)"\)', page))
    assert len(series) > 10
    exported_names = names(text)
    assert series - averages <= exported_names
    assert {
        f"{name}_{what}" for name in averages for what in ("sum", "count")
    } <= exported_names
    gauges = set(re.findall(r'gauge\(worker, "(\w+)"\)', page))
    assert gauges
    assert gauges <= set(re.findall(r'disagg_worker\{.*what="(\w+)"', text))
    kinds = set(re.findall(r'kv\("(\w+)"', page))
    assert kinds <= set(
        re.findall(r'disagg_kv_transfer_bytes_total\{.*kind="(\w+)"', text)
    )
    sources = set(re.findall(r'source\("(\w+)"\)', page))
    assert sources <= set(
        re.findall(r'prompt_tokens_by_source_total\{.*source="(\w+)"', text)
    )


def test_every_figure_of_the_board_is_told(service):
    board = json.loads(BOARD.read_text())
    expressions = [
        target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    expressions += [
        each["definition"]
        for each in board["templating"]["list"]
        if "definition" in each
    ]
    assert len(expressions) > 10
    exported_names = names(exported(service))
    for expression in expressions:
        read = set(SERIES.findall(expression))
        assert read, expression
        assert read <= exported_names, expression


@pytest.mark.browser
@pytest.mark.skipif(CHROME is None, reason="no Chromium")
def test_a_browser_shows_the_figures(service):
    command = [CHROME, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=5000", service.url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    )
    text = re.sub(r"<[^>]+>", " ", done.stdout.split("<script>")[0])
    for shown in (
        "ready",
        "tiny",
        "5 tokens in total, answers: 1",
        "raw",
        "prefill",
        "decode",
        "15 tokens in total",
    ):
        assert shown in text
    assert "NaN" not in text
    assert "<path" in done.stdout
