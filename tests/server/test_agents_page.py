"""The example of docs/agents.md runs as written, against a model that says what the page shows."""

import re
from pathlib import Path

import pytest

from tests.server.speaking import on_a_port, speaking

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
ADDRESS = "http://localhost:8000"
ANSWERS = [
    "<think>I look it up.</think>"
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
    '{"name": "Oslo", "country": "Norway"}',
    "Blue.",
]


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(
        code
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.S)
        if ADDRESS in code
    )
    app, _ = speaking(ANSWERS)

    with on_a_port(app) as url:
        exec(example.replace(ADDRESS, url), {"__name__": "example"})

    printed = capsys.readouterr().out.splitlines()
    assert printed == re.findall(r"^# -> (.*)$", example, re.M)
