"""`disagg submit` against a running service, and every prompt that cannot be."""

import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path

import pytest

from disagg.cli import client, submit
from disagg.cli.client import Answer
from disagg.cli.output import print_savings
from disagg.cli.state_file import RunningService
from disagg.errors import PeerLostError, TransferError
from tests.cli.conftest import STATS, wait_for

KEYS = [
    "text",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "ttft_ms",
    "tpot_ms",
    "kv",
]
ROOT = Path(__file__).resolve().parents[2]
SERVICE = RunningService("http://here", 1, "")


def test_the_continuation_goes_to_stdout_and_a_table_follows(running, disagg):
    output = disagg("submit abc --max-tokens 5 --url", running.url).out
    text, _, table = output.partition("\n")
    assert text == "abcde"
    wire = next(line.split() for line in table.splitlines() if "on the wire" in line)
    assert wire[-3:] == ["1,000", "25.0", "50.0"]
    assert "3 prompt tokens, 5 generated" in table


def test_what_was_known_there_before_is_told(running, disagg):
    running.router.kv = STATS | {"cached_bytes": 500}
    lines = disagg("submit abc --url", running.url).out.splitlines()
    row = [line.split() for line in lines if "cached there" in line]
    assert row == [["cached", "there", "before", "500", "12.5", "25.0"]]


SHORT = STATS | {"tokens": 5, "wire_bytes": 50_780, "resident_bytes": 49_152}


@pytest.mark.parametrize(
    ("kv", "first"),
    [
        ({}, "5 prompt tokens"),
        (
            SHORT,
            "KV of 5 tokens: too few to save anything; 50,780 bytes sent, 4,000 as fp16\n",
        ),
        (
            {k: v for k, v in STATS.items() if not k.endswith("_ms")},
            "KV of 300 tokens, kivi",
        ),
        (SHORT | {"tokens": 900}, "KV of 900 tokens, kivi"),
        (
            SHORT | {"wire_bytes": 0},
            "KV of 5 tokens: too few to hand off, computed whole at",
        ),
        (STATS | {"wire_bytes": 0}, "KV of 300 tokens, kivi"),
    ],
    ids=["no-figures", "short", "no-times", "long", "whole-short", "whole-long"],
)
def test_the_figures_that_came_are_told_and_no_more(kv, first, capsys):
    answer = Answer("x", 5, 1, "length", ttft_ms=1.0, kv=kv)
    print_savings(answer, max_tokens=1)
    printed = capsys.readouterr().out
    assert printed.startswith(first)
    assert printed.endswith("1 generated: the first after 1 ms\n")
    assert ("% of fp16" in printed) == ("kivi" in first)
    assert ("on the wire" in printed) == ("kivi" in first and kv["wire_bytes"] > 0)


def test_an_answer_that_the_context_ended_says_so_in_one_line(running, disagg):
    request_body = "submit", "a" * 195, "--url", running.url, "--max-tokens", 100_000
    output = [
        line for line in disagg(*request_body).out.splitlines() if "context" in line
    ]
    assert output == [
        "the model's context is full: 5 of 100000 tokens could be generated"
    ]


def test_json_is_one_object_with_the_promised_keys(running, disagg):
    answer = json.loads(
        disagg("submit abc --max-tokens 5 --json --url", running.url).out
    )
    assert list(answer) == KEYS
    assert (answer["text"], answer["prompt_tokens"], answer["completion_tokens"]) == (
        "abcde",
        3,
        5,
    )
    assert answer["finish_reason"] == "length"
    assert answer["kv"] == STATS
    assert answer["ttft_ms"] > 0


def test_settings_start_a_service_of_their_own_and_say_so(
    announced_service, state_file, disagg, monkeypatch
):
    monkeypatch.setattr(
        submit,
        "private_service",
        lambda config, body: nullcontext(announced_service.url),
    )
    request_body = (
        "submit abc --max-tokens 2 --set engine.max_sequences=2 --state-file",
        state_file,
    )
    assert f"{announced_service.url} has others" in disagg(*request_body).err
    state_file.unlink()
    assert disagg(*request_body).err == ""


def test_the_state_file_leads_to_the_running_service(
    announced_service, state_file, disagg
):
    output = disagg("submit abc --max-tokens 2 --state-file", state_file).out
    assert output.startswith("ab\n")


def test_options_reach_the_service(running, disagg):
    options = "--codec kivi --seed 7 --temperature 0.5 --top-k 3 --stop cd"
    disagg(f"submit abc {options} --json --url", running.url)
    ((_, params, codec),) = running.router.asked
    assert codec == "kivi"
    assert (params["seed"], params["temperature"], params["top_k"]) == (7, 0.5, 3)


def test_a_prompt_can_come_from_a_file_or_standard_input(
    running, disagg, tmp_path, monkeypatch
):
    path = tmp_path / "prompt.txt"
    path.write_text("four")
    monkeypatch.setattr(sys, "stdin", path.open())
    for text in (f"@{path}", "-"):
        disagg("submit", text, "--url", running.url, "--json")
    assert [len(prompt) for prompt, *_ in running.router.asked] == [4, 4]


def test_standard_input_that_is_no_text_is_refused(running, monkeypatch, disagg):
    values = io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", values)
    output = disagg("submit - --url", running.url, code=4).err
    assert "cannot read the prompt -: 'utf-8' codec can't decode" in output


ALONE = ["abc", "--state-file", "{empty}"]  # no service runs
BAD = {  # arguments, exit code, reason
    "empty": (["", "--url", "{url}"], 4, "request"),
    "no-file": (["@/no/such/file", "--url", "{url}"], 4, "request"),
    "too-long": (["x" * 200, "--url", "{url}"], 4, "prompt_too_long"),
    "too-large": (["x" * 9_000_000, "--url", "{url}"], 4, "too_large"),
    "other-model": (["abc", "--url", "{url}", "--model", "gpt-4"], 3, "model"),
    "wrong-port": (["abc", "--url", "http://127.0.0.1:1"], 8, "peer_lost"),
    "no-url": (["abc", "--url", "ftp://x"], 2, "config"),
    "port-too-large": (["abc", "--url", "http://localhost:99999"], 2, "config"),
    "port-no-number": (["abc", "--url", "http://localhost:port"], 2, "config"),
    "space-in-host": (["abc", "--url", "http://a b"], 2, "config"),
    "key-no-latin": (["abc", "--url", "{url}", "--api-key", "日"], 2, "config"),
    "key-of-two-lines": (["abc", "--url", "{url}", "--api-key", "a\nb"], 2, "config"),
    "half-an-address": (["abc", "--url", "http://[::1"], 2, "config"),
    "settings-of-another": (
        ["abc", "--url", "{url}", "--set", "codec=fp8"],
        2,
        "config",
    ),
    "no-utf-8": (["abc\udcff", "--url", "{url}"], 2, "config"),
    "state-is-a-folder": (["abc", "--state-file", "/"], 2, "config"),
    "private-no-model": ([*ALONE, "--model", "/no/such/model"], 3, "model"),
    "private-no-template": ([*ALONE, "--chat", "--model", "{tiny}"], 4, "request"),
    "private-empty": (["", *ALONE[1:]], 4, "request"),
    "private-too-long": (["words " * 5000, *ALONE[1:]], 4, "prompt_too_long"),
    "private-top-p": ([*ALONE, "--top-p", "2"], 4, "request"),
    "private-temperature": ([*ALONE, "--temperature", "inf"], 4, "request"),
    "private-max-tokens": ([*ALONE, "--max-tokens", str(1 << 31)], 4, "request"),
    "private-long-stop": ([*ALONE, "--stop", "x" * 257], 4, "request"),
    "private-stop-no-utf-8": ([*ALONE, "--stop", "x\udcff"], 2, "config"),
    "private-file-no-utf-8": (["abc", "--state-file", "/tmp/x\udcff"], 2, "config"),
    "private-small-arena": (
        [*ALONE, "--set", "engine.arena_bytes=2000000"],
        2,
        "config",
    ),
    "private-no-codec": ([*ALONE, "--codec", "zip"], 2, "unknown_name"),
    "private-codec-value": ([*ALONE, "--codec", "kivi:bits=3"], 2, "config"),
    "private-no-key": ([*ALONE, "--set", "engine.max=3"], 2, "unknown_name"),
    "private-no-value": ([*ALONE, "--set", "engine"], 2, "config"),
}


@pytest.mark.parametrize(("arguments", "code", "reason"), BAD.values(), ids=BAD)
def test_bad_input_has_an_exit_code_and_one_line(
    arguments, code, reason, running, tiny, tmp_path, disagg, monkeypatch
):
    """Nothing is started for any of them: what would start a service is not even imported."""
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)
    places = {"url": running.url, "empty": tmp_path / "none.json", "tiny": tiny}
    values = [
        "submit",
        *(x.format(**places) if x.startswith("{") else x for x in arguments),
    ]
    printed = disagg(*values, code=code)
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    announced_service = re.search(
        "known: .*(kivi|engine.max_batch_tokens)", printed.err
    )
    assert announced_service or reason != "unknown_name"
    error = json.loads(disagg(*values, "--json", code=code).out)["error"]
    assert error["type"] == reason


@pytest.mark.parametrize(
    "output", [b'{"a": 1}', b'{"choices": [5]}', b'{"error": "x"}', b"\xff"]
)
def test_a_server_of_something_else_is_told_from_a_service(output, disagg):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(output)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for command in ("submit Once", "status"):
            err = disagg(f"{command} --url", url, code=8).err
            assert err.splitlines()[-1].startswith("error: ")
            assert "is it a disagg service?" in err
        server.shutdown()


def test_who_asks_for_https_where_there_is_none_is_told(running, disagg):
    url = running.url.replace("http", "https")
    assert "does it speak http?" in disagg("submit abc --url", url, code=8).err


@pytest.mark.parametrize(
    "wrong", [["--nope"], ["--max-tokens", "many"], ["and", "more"]]
)
def test_a_usage_error_is_an_object_too_for_who_asks_for_json(wrong, disagg):
    assert "Usage: disagg submit" in disagg("submit abc", *wrong, code=2).err
    printed = disagg("submit abc", *wrong, "--json", code=2)
    assert json.loads(printed.out)["error"]["type"] == "config"
    assert printed.err == ""


def test_an_answer_that_ends_in_an_error_has_its_exit_code(running, disagg):
    running.router.pause_at, running.router.breaks = (
        2,
        PeerLostError("the worker is gone"),
    )
    running.router.go.set()
    assert "the worker is gone" in disagg("submit abc --url", running.url, code=8).err


def test_ctrl_c_cancels_the_request_at_the_service(running):
    running.router.pause_at = 2
    command = [sys.executable, "-m", "disagg", "submit", "abc", "--url", running.url]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert running.router.paused.wait(30)
    process.send_signal(signal.SIGINT)
    shown, output = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (shown[-1:], output) == ("\n", "error: cancelled\n")
    wait_for(lambda: running.router.running == 0)


class Swallows:
    """Finds Ray as what clears a Ctrl-C that comes while it is imported."""

    def find_spec(self, name, path, target=None):
        if name == "disagg.launch.ray_cluster":
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            raise PeerLostError("it went on")


def test_ctrl_c_while_ray_is_imported_is_not_lost(state_file, monkeypatch, disagg):
    monkeypatch.delitem(sys.modules, "disagg.launch.ray_cluster", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Swallows(), *sys.meta_path])
    output = disagg("submit abc --state-file", state_file, code=130).err
    assert output.endswith("error: cancelled\n")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["submit", "abc", "--url", "{url}", "--json"]],
    ids=["help", "submit"],
)
def test_a_client_imports_nothing_heavy(arguments, running):
    code = "import sys; from disagg.cli.app import run; status = run(sys.argv[1:]); "
    code += "heavy = {'torch', 'ray', 'transformers', 'grpc', 'numpy', 'fastapi', 'tokenizers'}; "
    code += "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    values = [x.format(url=running.url) for x in arguments]
    command = [sys.executable, "-c", code, *values]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ("eval --text /no/such", "error: no text '/no/such': no such file; 'python'"),
        ("eval --model no/such", "error: no model 'no/such'"),
        ("eval --resume", "error: --resume goes on"),
        ("bench compare --model no/such", "error: no model 'no/such'"),
        (
            "bench compare --tokens 4081",
            "error: 4,097 tokens of a prompt and its answer are too",
        ),
        ("fetch such", "error: unknown model to fetch 'such'"),
        ("eval --codec such", "  0.0 s  loading torch"),
        ("doctor such", "  0.0 s  loading torch"),
    ],
)
def test_a_command_says_what_is_wrong_or_what_it_waits_for_before_it_imports_torch(
    arguments, output
):
    code = "import sys; sys.modules['torch'] = None; from disagg.cli.app import run; "
    command = [
        sys.executable,
        "-c",
        code + "sys.exit(run(sys.argv[1:]))",
        *arguments.split(),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.startswith(output)


def breaking_off(answers: list[list[str]], seeds: list[int]) -> Callable[..., Answer]:
    """What asks a service that says these pieces, one answer after another; the last is whole."""

    def complete(service, body, show):
        seeds.append(body["seed"])
        pieces = answers.pop(0)
        for piece in pieces:
            show(piece)
        if answers:
            raise PeerLostError("nobody is there")
        return Answer("".join(pieces))

    return complete


def test_an_answer_goes_on_where_it_broke_off_when_the_service_comes_back(monkeypatch):
    """The second time it begins anew, by the same seed; what was shown is not shown again."""
    seeds, shown = [], []

    def get(service, path, looks=count()):  # gone at every other look
        if next(looks) % 2 == 0:
            raise PeerLostError("nobody is there")

    answers = [["ab", "c"], ["a"], [], ["a", "bcd", "e"]]
    monkeypatch.setattr(client, "complete", breaking_off(answers, seeds))
    monkeypatch.setattr(client, "get", get)
    monkeypatch.setattr(client, "RETRY_S", 0.0)
    assert (
        client.persist(SERVICE, {"prompt": "x", "seed": None}, shown.append).text
        == "abcde"
    )
    assert shown == ["ab", "c", "d", "e"]
    assert len(seeds) == 4
    assert len(set(seeds)) == 1
    assert None not in seeds


def test_an_answer_that_comes_out_otherwise_the_second_time_is_an_error(monkeypatch):
    monkeypatch.setattr(client, "complete", breaking_off([["ab"], ["ax"], []], []))
    monkeypatch.setattr(client, "_comes_back", lambda service: True)
    with pytest.raises(TransferError, match="otherwise"):
        client.persist(SERVICE, {"prompt": "x", "seed": 7}, lambda piece: None)
