"""`disagg bench serve` against a server whose answers and pace are known."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from disagg.bench import workload
from disagg.bench.serving import (
    RequestTimes,
    ServeOptions,
    departures,
    draw_serving,
    summarize,
)
from disagg.bench.workload import LoadRequest
from disagg.errors import ConfigError
from disagg.model.describe import DEFAULT_MODEL
from disagg.model.tokenizer import Tokenizer

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


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_it_asks_as_told_and_saves_the_keys_of_vllm(url, backend, disagg, tmp_path):
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
    found = json.loads(disagg(*ask(url, *more, *files, *limits, "--json")).out)
    assert json.loads((tmp_path / "a.json").read_text()) == found
    assert found["completed"] == len(Server.bodies) == 5
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (35, 15)
    assert found["model_id"] == "some-model"
    assert found["request_goodput"] == 0
    assert found["p99_ttft_ms"] > 0
    assert "ttfts" not in found
    asked = {"max_completion_tokens" if "chat" in backend else "max_tokens": 128}
    assert all(
        asked.items() <= body.items() and body["ignore_eos"] for body in Server.bodies
    )


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


def test_failed_requests_are_counted_and_told(url, disagg):
    said = disagg(*ask(url, "--endpoint", "/v1/teapot"), code=1)
    assert "a request failed: status 418: no tea" in said.err
    assert f"{'Failed requests:':<40} 5" in said.out


def test_without_a_tokenizer_it_takes_that_of_the_model_of_the_server(
    url, disagg, monkeypatch
):
    flags = ["bench", "serve", "--base-url", url, "--num-prompts", "1"]
    found = json.loads(disagg(*flags, "--json").out)
    assert (found["model_id"], found["tokenizer_id"]) == ("some-model", "default")
    disagg(*flags, "--model", "some-model")
    monkeypatch.setattr(Server, "root", "/of/another/host")
    assert "--tokenizer FOLDER" in disagg(*flags, code=3).err


def test_where_nobody_answers_it_says_so(disagg):
    url = "http://127.0.0.1:9"
    assert (
        f"no model is served at {url}"
        in disagg("bench serve --base-url", url, code=8).err
    )


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
def test_what_cannot_be_asked_is_refused(flags, word, disagg):
    given = ["--model", "m", "--tokenizer", str(DEFAULT_MODEL), *flags]
    assert word in disagg("bench serve", *given, code=2).err


def test_figures_are_those_of_the_requests():
    options = ServeOptions(
        "", "m", goodput={"ttft": 150, "e2el": 1000}, percentiles=(50,)
    )
    first = RequestTimes(10, 0.0, 0.0, 0.1, 0.5, [0.2, 0.2], 3)
    seen = [
        first,
        RequestTimes(20, 0.2, 0.1, 0.2, 1.2, [1.0], 2),
        RequestTimes(30, error="gone"),
    ]
    found = summarize(options, seen, 2.0)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 5)
    assert found["request_goodput"] == 0.5
    assert found["mean_tpot_ms"] == pytest.approx((200 + 1000) / 2)
    assert found["median_itl_ms"] == found["p50_itl_ms"] == pytest.approx(200)
    assert found["max_output_tokens_per_s"] == 4
    assert found["max_concurrent_requests"] == 2
    shown = draw_serving(found | {"request_rate": 2.0, "max_concurrency": None})
    assert f"{'Request rate configured (RPS):':<40} 2.00" in shown


def test_requests_leave_at_the_rate_or_when_the_trace_says():
    visits = [LoadRequest("", 1, 1, at) for at in (0.0, 1.5, 1.5)]
    times = departures(ServeOptions("", "m", request_rate=2.0), visits)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1.5)
    assert departures(ServeOptions("", "m"), visits) == [0, 0, 0]
    assert departures(ServeOptions("", "m", self_timed=True), visits) == [0, 1.5, 1.5]


def visits_of(dataset: str, path: Path | None = None, **more: int) -> list[LoadRequest]:
    options = workload.WorkloadOptions(dataset, path, **{"num_prompts": 9} | more)
    return workload.make_requests(options, Tokenizer.load())


def test_random_prompts_have_their_length_and_come_again_with_the_seed():
    found = visits_of("random", input_len=50, output_len=6, prefix_len=5)
    tokenizer = Tokenizer.load()
    assert len(found) == 9
    for visit in found:
        assert visit.prompt_tokens == len(tokenizer.encode(visit.prompt, special=False))
        assert abs(visit.prompt_tokens - 55) <= 2
        assert visit.max_tokens == 6
    assert len({visit.prompt for visit in found}) == 9
    again = visits_of("random", input_len=50, output_len=6, prefix_len=5)
    assert found == again
    assert found != visits_of(
        "random", input_len=50, output_len=6, prefix_len=5, seed=1
    )


def test_a_conversation_gives_its_first_turn_and_the_length_of_its_answer(tmp_path):
    file = tmp_path / "talks.json"
    long, short = {"value": "The ship left the harbour. " * 5}, {"value": "No"}
    talks = [{"conversations": x} for x in ([long, long], [long], [short, long])]
    file.write_text(json.dumps(talks))
    (found,) = visits_of("sharegpt", file)
    assert found.prompt == long["value"]
    assert found.max_tokens == found.prompt_tokens


def test_traces_give_lengths_times_and_shared_prefixes(tmp_path):
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    lines = "2023-11-16 18:15:46.6805900,37,4\n2023-11-16 18:15:50.9951690,39,1\n"
    azure.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{lines}")
    first, second = visits_of("azure", azure)
    assert (first.max_tokens, second.max_tokens) == (4, 1)
    assert abs(first.prompt_tokens - 37) <= 2
    assert (first.at_s, second.at_s) == (0, pytest.approx(4.314579))
    rows = [
        {"timestamp": 500, "input_length": 520, "output_length": 2, "hash_ids": [0, 1]},
        {
            "timestamp": 2500,
            "input_length": 600,
            "output_length": 3,
            "hash_ids": [0, 2],
        },
    ]
    mooncake.write_text("\n".join(map(json.dumps, rows)))
    first, second = visits_of("mooncake", mooncake)
    assert second.at_s == 2.0
    assert abs(second.prompt_tokens - 600) <= 2
    assert first.prompt[:1000] == second.prompt[:1000]
    assert first.prompt != second.prompt


def test_a_file_of_something_else_is_named(tmp_path):
    file = tmp_path / "a"
    file.write_text("nothing\n")
    for dataset in ("sharegpt", "azure", "mooncake"):
        with pytest.raises(ConfigError, match=str(file)):
            visits_of(dataset, file)
