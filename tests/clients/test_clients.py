"""Clients that others wrote, unmodified, against a service with the packaged model.

They are run as README.md says, from the PATH: each is skipped where it is not installed.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from disagg.model.describe import DEFAULT_MODEL
from tests.cli.conftest import free_port
from tests.server.running import Running, running

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running(None) as service:
        yield service


def run(*command: str, cwd: Path = ROOT) -> str:
    """What a client says; the test is skipped where there is none."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on the PATH")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_lm_eval_scores_and_generates(service, tmp_path):
    """Its default mode: token ids in, `echo` with log-probabilities for what it scores."""
    model_args = (
        f"model=tiny,base_url={service.url}/v1/completions,tokenizer={DEFAULT_MODEL}"
    )
    tasks = "disagg_choose,disagg_continue"
    command = ["lm_eval", "--model", "local-completions", "--model_args", model_args]
    command += ["--include_path", str(HERE / "tasks"), "--tasks", tasks]
    run(*command, "--output_path", str(tmp_path))
    (file,) = tmp_path.rglob("results_*.json")

    results = json.loads(file.read_text())["results"]

    assert results["disagg_choose"]["acc,none"] == 1.0
    assert results["disagg_continue"]["exact_match,none"] > 0.5

    service.empty()


def test_guidellm_finishes_every_request(service, tmp_path):
    backend = (
        f"kind=openai_http,target={service.url},request_format=/v1/chat/completions"
    )
    command = ["guidellm", "run", "--backend", backend, "--disable-progress"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={DEFAULT_MODEL}"]
    run(*command, "--constraint", "kind=max_requests,count=8", cwd=tmp_path)
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]

    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (8, 0, 0)

    service.empty()


def test_vllm_router_prefills_at_one_port_and_decodes_at_another(service):
    """Unmodified, in its P/D mode; its own answers are those of the service."""
    if shutil.which("vllm-router") is None:
        pytest.skip("vllm-router is not on the PATH")
    port, figures = (free_port() for _ in range(2))
    command = ["vllm-router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", service.doors["p"], "--decode", service.doors["d"]]
    command += ["--port", str(port), "--prometheus-port", str(figures)]
    body = {
        "model": "tiny",
        "prompt": "Call me Ishmael. " * 30,
        "max_tokens": 8,
        "temperature": 0,
    }
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as router:
        try:
            transport = httpx.HTTPTransport(
                retries=8
            )  # the last pauses are of half a minute
            with httpx.Client(transport=transport, timeout=60) as client:
                url = f"http://127.0.0.1:{port}/v1/completions"
                whole = client.post(url, json=body)
                streamed = client.post(url, json=body | {"stream": True})
        finally:
            router.terminate()

    alone = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).json()

    assert whole.json()["choices"] == alone["choices"]

    lines = streamed.text.split("data: ")[1:-1]
    text = "".join(json.loads(x)["choices"][0]["text"] for x in lines)

    assert text == whole.json()["choices"][0]["text"]

    chosen = 'disagg_routed_total{model_name="tiny",reason="knows_most",role="prefill"}'

    assert f"{chosen} 4.0" in httpx.get(f"{service.url}/metrics").text

    service.empty()


def test_the_npm_client_lists_completes_and_chats(service, tmp_path):
    folder = Path(run("npm", "root", "--global").strip())
    if not (folder / "openai").is_dir():
        pytest.skip("no `openai` among the global packages of npm")
    (tmp_path / "node_modules").symlink_to(folder)
    script = shutil.copy(HERE / "openai.mjs", tmp_path)

    answers = json.loads(run("node", script, service.url))

    assert answers["models"] == ["tiny"]
    assert (answers["completion"]["total_tokens"], answers["logprobs"]) == (10, 5)
    assert answers["text"]
    assert answers["usage"]["completion_tokens"] == 5
    assert answers["missing"] == [404, "not_found"]

    service.empty()
