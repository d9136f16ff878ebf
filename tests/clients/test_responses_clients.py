"""Clients that others wrote, unmodified, at /v1/responses; they are run as README.md says."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.config import Config, ModelConfig, ServerConfig
from disagg.model.describe import DEFAULT_MODEL
from disagg.server.service import Service
from tests.server.running import serving
from tests.server.speaking import on_a_port, speaking

HERE = Path(__file__).parent
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

NAME = "deepseek-r1-tiny"  # llm-comply tests reasoning only of models with such names
# of llm-comply; README.md says why
EXPECTED_FAILURES = {"error-handling", "image-input"}
END_WORDS = ".;!?"
CONTEXT = 512  # an answer without any of these ends soon too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model with a template for tools; any punctuation mark ends its answers.

    These are special tokens, so that a grammar allows them at its end alone.
    """
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(DEFAULT_MODEL, folder, dirs_exist_ok=True)
    shutil.copy(HERE / "thinking.jinja", folder / "chat_template.jinja")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ends = {tokenizer["model"]["vocab"][word]: word for word in END_WORDS}
    (example,) = tokenizer["added_tokens"]
    tokenizer["added_tokens"] += [
        {**example, "id": token, "content": word} for token, word in ends.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    sampling = {"eos_token_id": [*ends]}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    http = ServerConfig(port=0, served_model_name=NAME, reasoning_parser="none")
    model = ModelConfig(str(folder), context=CONTEXT)
    with serving(Config("raw", model=model, server=http)) as service:
        yield service


def run(*command: str, cwd: Path | None = None, **more: str) -> str:
    """What a client says; the test is skipped where there is none."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on the PATH")
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | more,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr[-3000:]
    return done.stdout


def test_llm_comply_passes_but_for_what_is_not_supported(service):
    command = ["llm-comply", "--format", "open-responses", "--json"]
    command += ["-u", f"{service.url}/v1", "-k", "any", "-m", NAME]

    results = json.loads(run(*command))["results"]

    assert len(results) == 13
    failures = {x["id"] for x in results if x["status"] != "passed"}
    assert failures == EXPECTED_FAILURES


def test_the_npm_client_responds_streams_and_calls(service, tmp_path):
    modules = Path(run("npm", "root", "--global").strip())
    if not (modules / "openai").is_dir():
        pytest.skip("no `openai` among the global packages of npm")
    (tmp_path / "node_modules").symlink_to(modules)
    script = shutil.copy(HERE / "responses.mjs", tmp_path)

    answers = json.loads(run("node", script, service.url))

    assert answers["whole"]
    assert answers["text"] == answers["final"] == answers["whole"]
    assert (answers["first"], answers["last"]) == (
        "response.created",
        "response.completed",
    )
    assert answers["call"] == ["get_weather", "boolean"]
    assert answers["next"] == "completed"
    assert answers["missing"] == 404


CODEX_CONFIG = """
model = "tiny"
model_provider = "disagg"

[model_providers.disagg]
name = "disagg"
base_url = "URL/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
CALL = '{"name": "exec_command", "arguments": {"cmd": "echo $((6 * 7))"}}'
TEXTS = [
    f"<think>I compute.</think>Wait.<tool_call>{CALL}</tool_call>",
    "<think>Good.</think>The answer is there.",
]


CODEX_CONTEXT = (
    1_000_000  # a token is a byte, and its instructions and tools have 40,000
)


def test_codex_runs_a_command_and_answers(tmp_path):
    """It sends tools in namespaces and its own thoughts back; all of that reaches the model."""
    template = (HERE / "thinking.jinja").read_text()
    app, router = speaking(TEXTS, template, context_length=CODEX_CONTEXT)
    with on_a_port(app) as url:
        (tmp_path / "config.toml").write_text(CODEX_CONFIG.replace("URL", url))
        command = ["codex", "exec", "--skip-git-repo-check", "--json"]
        command += ["--dangerously-bypass-approvals-and-sandbox", "What is 6 * 7?"]
        said = run(*command, cwd=tmp_path, CODEX_HOME=str(tmp_path))

    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    assert texts == ["Wait.", "The answer is there."]

    _, prompt = router.prompts
    _, behind = prompt.split("What is 6 * 7?")
    assert "<think>I compute.</think>Wait.<tool_call>" in behind
    assert "42" in behind
