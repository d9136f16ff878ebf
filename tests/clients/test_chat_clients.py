"""Clients that others wrote, unmodified, with tools; they are run as README.md says.

Left out: semantic-kernel, AutoGen and the OpenAI Agents SDK, which send the same chats through the
`openai` client that the others use too.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.config import ServerConfig
from tests.server.running import Running, running
from tests.server.speaking import PLAIN_TEMPLATE, on_a_port, speaking

HERE = Path(__file__).parent
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
WET, ANSWER = "It is wet in Oslo.", "Yes, it is raining."


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    """The packaged model, with a template for tools."""
    http = ServerConfig(port=0, chat_template=str(HERE / "hermes.jinja"))
    with running(None, http) as service:
        yield service


def run(*command: str, **environment: str) -> str:
    """What a client says; the test is skipped where there is none."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on the PATH")
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def is_trip(value: Any) -> bool:
    return value["days"] in (1, 2, 3) and value["by"] in ("train", "ship")


def test_agents_of_python_call_tools_and_go_on(service):
    modules = "import litellm, langchain_openai, pydantic_ai"
    if subprocess.run(["python", "-c", modules], capture_output=True).returncode:
        pytest.skip("no litellm, langchain-openai and pydantic-ai on the PATH")
    app, _ = speaking([CALL, ANSWER] * 2, PLAIN_TEMPLATE)
    with on_a_port(app) as url:
        said = run(
            "python",
            str(HERE / "agents.py"),
            service.url,
            url,
            LITELLM_LOCAL_MODEL_COST_MAP="True",
            PYTHONPATH="",
        )

    answers = json.loads(said.splitlines()[-1])

    reasons, arguments = zip(*answers["litellm"].values(), strict=True)
    assert reasons == ("tool_calls", "tool_calls")
    assert all(is_trip(json.loads(each)) for each in arguments)
    assert all(is_trip(each) for each in answers["langchain"].values())
    assert is_trip(answers["pydantic_ai"])
    assert answers["langchain_loop"] == [WET, ANSWER]
    assert answers["pydantic_ai_loop"] == [WET, ANSWER]

    service.empty()


def test_the_npm_client_parses_calls_and_schemas(service, tmp_path):
    modules = Path(run("npm", "root", "--global").strip())
    if not (modules / "openai").is_dir():
        pytest.skip("no `openai` among the global packages of npm")
    (tmp_path / "node_modules").symlink_to(modules)
    script = shutil.copy(HERE / "tools.mjs", tmp_path)

    answers = json.loads(run("node", script, service.url))

    assert all(is_trip(answers[name]) for name in ("whole", "streamed", "parsed"))
    assert answers["whole"] == answers["streamed"]
    assert answers["reason"] == "stop"
    assert answers["pieces"] > 1

    service.empty()
