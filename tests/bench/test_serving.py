"""`disagg bench serve` against a server whose answers and pace are known."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from disagg.bench.serving import (
    RequestTimes,
    ServeOptions,
    departures,
    draw_serving,
    summarize,
)
from disagg.bench.workload import LoadRequest
from disagg.model.describe import DEFAULT_MODEL

ANSWER = ["It", " was", " so"]


class Server(BaseHTTPRequestHandler):
    """Answers with three tokens, and at /v1/teapot with an error."""

    bodies: list[dict]
    root = "default"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(
            json.dumps({"data": [{"id": "some-model", "root": self.root}]}).encode()
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.path == "/v1/teapot":
            self.reply(b"no tea", 418)
            return
        chat = "messages" in body
        events = [
            {"choices": [{"delta": {"content": x}} if chat else {"text": x}]}
            for x in ANSWER
        ]
        events.append(
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        )
        lines = [f"data: {json.dumps(x)}\n\n" for x in events]
        self.reply((": ping\n\n" + "".join(lines) + "data: [DONE]\n\n").encode())

    def reply(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def url() -> Iterator[str]:
    Server.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(url: str, *more: str) -> list[str]:
    flags = ["--base-url", url, "--tokenizer", str(DEFAULT_MODEL), "--num-prompts", "5"]
    return ["bench", "serve", *flags, "--random-input-len", "20", *more]


@pytest.mark.parametrize(
    ("backend", "limit_key"),
    [("openai", "max_tokens"), ("openai-chat", "max_completion_tokens")],
)
def test_requests_follow_the_flags_and_keys_are_those_of_vllm(
    url, backend, limit_key, disagg, tmp_path
):
    more = [
        "--backend",
        backend,
        "--ignore-eos",
        "--max-concurrency",
        "2",
        "--seed",
        "3",
    ]
    files = [
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "a.json",
    ]
    limits = ["--goodput", "ttft:60000 tpot:0.0"]

    result = json.loads(disagg(*ask(url, *more, *files, *limits, "--json")).out)

    assert json.loads((tmp_path / "a.json").read_text()) == result
    assert result["completed"] == len(Server.bodies) == 5
    assert result["total_input_tokens"] == 35
    assert result["total_output_tokens"] == 15
    assert result["model_id"] == "some-model"
    assert result["request_goodput"] == 0
    assert result["p99_ttft_ms"] > 0
    assert "ttfts" not in result
    for body in Server.bodies:
        assert body[limit_key] == 128
        assert body["ignore_eos"]


def test_people_get_the_table_of_vllm(url, disagg):
    metrics = ["--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99"]

    lines = disagg(*ask(url, *metrics)).out.splitlines()

    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == f"{'Successful requests:':<40} {5:<10}"
    names = [line.split(":")[0] for line in lines]
    assert names.index("Total input tokens") < names.index("Total generated tokens")
    assert "---------------Time to First Token----------------" in lines
    assert "P50 E2EL (ms)" in names
    assert "Mean TPOT (ms)" not in names


def test_failed_requests_are_counted_and_printed(url, disagg):
    output = disagg(*ask(url, "--endpoint", "/v1/teapot"), code=1)

    assert "a request failed: status 418: no tea" in output.err
    assert f"{'Failed requests:':<40} 5" in output.out


def test_the_default_tokenizer_is_that_of_the_servers_model(url, disagg, monkeypatch):
    flags = ["bench", "serve", "--base-url", url, "--num-prompts", "1"]

    result = json.loads(disagg(*flags, "--json").out)
    assert result["model_id"] == "some-model"
    assert result["tokenizer_id"] == "default"

    disagg(*flags, "--model", "some-model")
    monkeypatch.setattr(Server, "root", "/of/another/host")
    assert "--tokenizer FOLDER" in disagg(*flags, code=3).err


def test_an_url_without_a_server_is_an_error(disagg):
    url = "http://127.0.0.1:9"

    output = disagg("bench serve --base-url", url, code=8)

    assert f"no model is served at {url}" in output.err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--backend", "tgi"], "openai-chat"),
        (["--goodput", "ttft=5"], "ttft:500"),
        (["--goodput", "itl:5"], "no goodput of itl"),
        (["--percentile-metrics", "speed"], "ttft"),
        (["--metric-percentiles", "most"], "25,50,99"),
        (["--dataset-name", "sonnet"], "mooncake"),
        (["--dataset-name", "azure"], "--dataset-path"),
    ],
)
def test_bad_flags_are_refused(flags, word, disagg):
    flags = ["--model", "m", "--tokenizer", str(DEFAULT_MODEL), *flags]

    assert word in disagg("bench serve", *flags, code=2).err


def test_figures_are_those_of_the_requests():
    options = ServeOptions(
        "", "m", goodput={"ttft": 150, "e2el": 1000}, percentiles=(50,)
    )
    times = [
        RequestTimes(
            10, start_s=0.0, ttft_s=0.1, e2el_s=0.5, gaps_s=[0.2, 0.2], tokens=3
        ),
        RequestTimes(
            20,
            start_s=0.2,
            waited_s=0.1,
            ttft_s=0.2,
            e2el_s=1.2,
            gaps_s=[1.0],
            tokens=2,
        ),
        RequestTimes(30, error="gone"),
    ]

    result = summarize(options, times, duration_s=2.0)

    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["total_input_tokens"] == 30
    assert result["total_output_tokens"] == 5
    assert result["request_goodput"] == 0.5
    assert result["mean_tpot_ms"] == pytest.approx((200 + 1000) / 2)
    assert result["median_itl_ms"] == result["p50_itl_ms"] == pytest.approx(200)
    assert result["max_output_tokens_per_s"] == 4
    assert result["max_concurrent_requests"] == 2
    result.update(request_rate=2.0, max_concurrency=None)
    text = draw_serving(result)
    assert f"{'Request rate configured (RPS):':<40} 2.00" in text


def test_requests_leave_at_the_rate_or_at_the_times_of_a_trace():
    requests = [LoadRequest("", 1, 1, at_s) for at_s in (0.0, 1.5, 1.5)]

    by_rate = departures(ServeOptions("", "m", request_rate=2.0), requests)
    at_once = departures(ServeOptions("", "m"), requests)
    self_timed = departures(ServeOptions("", "m", self_timed=True), requests)

    assert by_rate == sorted(by_rate)
    assert by_rate[-1] == pytest.approx(1.5)
    assert at_once == [0, 0, 0]
    assert self_timed == [0, 1.5, 1.5]
