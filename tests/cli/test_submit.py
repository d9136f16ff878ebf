"""`disagg submit`: against a running service, with bad input, and cut off."""

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


def test_the_table_has_a_row_for_cached_bytes(running, disagg):
    running.router.kv = {**STATS, "cached_bytes": 500}

    lines = disagg("submit abc --url", running.url).out.splitlines()

    row = [line.split() for line in lines if "cached there" in line]
    assert row == [["cached", "there", "before", "500", "12.5", "25.0"]]


SHORT = {**STATS, "tokens": 5, "wire_bytes": 50_780, "resident_bytes": 49_152}
WITHOUT_TIMES = {key: x for key, x in STATS.items() if not key.endswith("_ms")}
TOO_SHORT = (
    "KV of 5 tokens: too few to save anything; 50,780 bytes sent, 4,000 as fp16\n"
)
COMPUTED_WHOLE = "KV of 5 tokens: too few to hand off; computed on the decode"


@pytest.mark.parametrize(
    ("kv", "first"),
    [
        pytest.param({}, "5 prompt tokens", id="no-figures"),
        pytest.param(SHORT, TOO_SHORT, id="short"),
        pytest.param(WITHOUT_TIMES, "KV of 300 tokens, kivi", id="no-times"),
        pytest.param({**SHORT, "tokens": 900}, "KV of 900 tokens, kivi", id="long"),
        pytest.param({**SHORT, "wire_bytes": 0}, COMPUTED_WHOLE, id="whole-short"),
        pytest.param(
            {**STATS, "wire_bytes": 0}, "KV of 300 tokens, kivi", id="whole-long"
        ),
    ],
)
def test_only_the_figures_of_an_answer_are_printed(kv, first, capsys):
    answer = Answer("x", 5, 1, "length", ttft_ms=1.0, kv=kv)

    print_savings(answer, max_tokens=1)

    printed = capsys.readouterr().out
    assert printed.startswith(first)
    assert printed.endswith("1 generated: the first after 1 ms\n")
    assert ("% of fp16" in printed) == ("kivi" in first)
    assert ("on the wire" in printed) == ("kivi" in first and kv["wire_bytes"] > 0)


def test_an_answer_cut_by_the_context_says_so_in_one_line(running, disagg):
    command = ("submit", "a" * 195, "--url", running.url, "--max-tokens", 100_000)

    output = [line for line in disagg(*command).out.splitlines() if "context" in line]
    assert output == [
        "the model's context is full: 5 of 100000 tokens could be generated"
    ]


def test_json_is_one_object_with_the_promised_keys(running, disagg):
    output = disagg("submit abc --max-tokens 5 --json --url", running.url)

    answer = json.loads(output.out)
    assert list(answer) == KEYS
    assert answer["text"] == "abcde"
    assert answer["prompt_tokens"] == 3
    assert answer["completion_tokens"] == 5
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
    command = "submit abc --max-tokens 2 --set engine.max_sequences=2 --state-file"

    with_other_settings = disagg(command, state_file).err
    state_file.unlink()
    without_a_service = disagg(command, state_file).err

    assert f"{announced_service.url} has others" in with_other_settings
    assert without_a_service == ""


def test_a_chat_template_starts_a_service_of_its_own(
    announced_service, state_file, disagg, monkeypatch
):
    templates = []

    def start(config, body):
        templates.append(config.server.chat_template)
        return nullcontext(announced_service.url)

    monkeypatch.setattr(submit, "private_service", start)
    options = "--chat --chat-template own.jinja --max-tokens 2"

    disagg(f"submit abc {options} --state-file", state_file)

    assert templates == ["own.jinja"]


def test_the_state_file_leads_to_the_running_service(
    announced_service, state_file, disagg
):
    output = disagg("submit abc --max-tokens 2 --state-file", state_file).out

    assert output.startswith("ab\n")


@pytest.mark.parametrize(
    ("defaults", "options", "temperature"),
    [
        ({}, "", 0.0),
        ({"temperature": 0.6}, "", 0.6),
        ({"temperature": 0.6}, "--temperature 0", 0.0),
        ({"top_k": 20}, "--temperature 0.9", 0.9),
    ],
    ids=str,
)
def test_submit_is_greedy_unless_the_models_authors_name_a_temperature(
    defaults, options, temperature, running, disagg
):
    running.defaults.update(defaults)

    disagg(f"submit abc --max-tokens 2 {options} --url", running.url)

    assert running.router.asked[0][1]["temperature"] == temperature


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
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)

    error = disagg("submit - --url", running.url, code=4).err

    assert "cannot read the prompt -: 'utf-8' codec can't decode" in error


SERVED = ["abc", "--url", "{url}"]  # at the running service
ALONE = ["abc", "--state-file", "{empty}"]  # no service runs
BAD = {  # id: arguments, exit code, reason
    "empty": (["", "--url", "{url}"], 4, "request"),
    "no-file": (["@/no/such/file", "--url", "{url}"], 4, "request"),
    "too-long": (["x" * 200, "--url", "{url}"], 4, "prompt_too_long"),
    "too-large": (["x" * 9_000_000, "--url", "{url}"], 4, "too_large"),
    "other-model": ([*SERVED, "--model", "gpt-4"], 3, "model"),
    "wrong-port": (["abc", "--url", "http://127.0.0.1:1"], 8, "peer_lost"),
    "no-url": (["abc", "--url", "ftp://x"], 2, "config"),
    "port-too-large": (["abc", "--url", "http://localhost:99999"], 2, "config"),
    "port-no-number": (["abc", "--url", "http://localhost:port"], 2, "config"),
    "space-in-host": (["abc", "--url", "http://a b"], 2, "config"),
    "key-no-latin": ([*SERVED, "--api-key", "日"], 2, "config"),
    "key-of-two-lines": ([*SERVED, "--api-key", "a\nb"], 2, "config"),
    "half-an-address": (["abc", "--url", "http://[::1"], 2, "config"),
    "settings-of-another": ([*SERVED, "--set", "codec=fp8"], 2, "config"),
    "template-of-another": (
        [*SERVED, "--chat", "--chat-template", "x.jinja"],
        2,
        "config",
    ),
    "template-without-chat": ([*SERVED, "--chat-template", "x.jinja"], 2, "config"),
    "no-utf-8": (["abc\udcff", "--url", "{url}"], 2, "config"),
    "state-is-a-folder": (["abc", "--state-file", "/"], 2, "config"),
    "private-no-model": ([*ALONE, "--model", "/no/such/model"], 3, "model"),
    "private-no-template": ([*ALONE, "--chat", "--model", "{tiny}"], 4, "request"),
    "private-no-template-file": (
        [
            *ALONE,
            "--chat",
            "--chat-template",
            "/no/such/file",
            "--model",
            "{tiny}",
        ],
        2,
        "config",
    ),
    "private-empty": (["", *ALONE[1:]], 4, "request"),
    "private-too-long": (["words " * 5000, *ALONE[1:]], 4, "prompt_too_long"),
    "private-top-p": ([*ALONE, "--top-p", "2"], 4, "request"),
    "private-temperature": ([*ALONE, "--temperature", "inf"], 4, "request"),
    "private-max-tokens": ([*ALONE, "--max-tokens", str(1 << 31)], 4, "request"),
    "private-long-stop": ([*ALONE, "--stop", "x" * 257], 4, "request"),
    "private-stop-no-utf-8": ([*ALONE, "--stop", "x\udcff"], 2, "config"),
    "private-file-no-utf-8": (["abc", "--state-file", "/tmp/x\udcff"], 2, "config"),
    "private-arena": ([*ALONE, "--set", "engine.arena_bytes=2000000"], 2, "config"),
    "private-no-codec": ([*ALONE, "--codec", "zip"], 2, "unknown_name"),
    "private-codec-value": ([*ALONE, "--codec", "kivi:bits=3"], 2, "config"),
    "private-no-key": ([*ALONE, "--set", "engine.max=3"], 2, "unknown_name"),
    "private-no-value": ([*ALONE, "--set", "engine"], 2, "config"),
}


@pytest.mark.parametrize(("arguments", "code", "reason"), BAD.values(), ids=BAD)
def test_bad_input_has_an_exit_code_and_one_line(
    arguments, code, reason, running, tiny, tmp_path, disagg, monkeypatch
):
    """It starts nothing: the module that would start a service is not even imported."""
    monkeypatch.setitem(sys.modules, "disagg.server.service", None)
    places = {"url": running.url, "empty": tmp_path / "none.json", "tiny": tiny}
    command = ["submit"]
    for argument in arguments:
        is_place = argument.startswith("{")
        command.append(argument.format(**places) if is_place else argument)

    printed = disagg(*command, code=code)
    as_json = disagg(*command, "--json", code=code)

    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    if reason == "unknown_name":
        assert re.search("known: .*(kivi|engine.max_batch_tokens)", printed.err)
    assert json.loads(as_json.out)["error"]["type"] == reason


@pytest.mark.parametrize(
    "body", [b'{"a": 1}', b'{"choices": [5]}', b'{"error": "x"}', b"\xff"]
)
def test_an_answer_of_another_server_is_an_error(body, disagg):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

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


def test_https_to_a_service_without_it_is_an_error(running, disagg):
    url = running.url.replace("http", "https")

    error = disagg("submit abc --url", url, code=8).err

    assert "does it speak http?" in error


@pytest.mark.parametrize(
    "wrong", [["--nope"], ["--max-tokens", "many"], ["and", "more"]]
)
def test_a_usage_error_is_an_object_with_json(wrong, disagg):
    printed = disagg("submit abc", *wrong, code=2)
    as_json = disagg("submit abc", *wrong, "--json", code=2)

    assert "Usage: disagg submit" in printed.err
    assert json.loads(as_json.out)["error"]["type"] == "config"
    assert as_json.err == ""


def test_an_answer_that_ends_in_an_error_has_its_exit_code(running, disagg):
    running.router.pause_at = 2
    running.router.breaks = PeerLostError("the worker is gone")
    running.router.go.set()

    error = disagg("submit abc --url", running.url, code=8).err

    assert "the worker is gone" in error


def test_ctrl_c_cancels_the_request_at_the_service(running):
    running.router.pause_at = 2
    command = [sys.executable, "-m", "disagg", "submit", "abc", "--url", running.url]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert running.router.paused.wait(30)

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)

    assert process.returncode == 130
    assert out[-1:] == "\n"
    assert err == "error: cancelled\n"
    wait_for(lambda: running.router.running == 0)


class SwallowingFinder:
    """An import of Ray that swallows a Ctrl-C."""

    def find_spec(self, name, path, target=None):
        if name == "disagg.launch.ray_cluster":
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            raise PeerLostError("it went on")


def test_ctrl_c_while_ray_is_imported_is_not_lost(state_file, monkeypatch, disagg):
    monkeypatch.delitem(sys.modules, "disagg.launch.ray_cluster", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SwallowingFinder(), *sys.meta_path])

    error = disagg("submit abc --state-file", state_file, code=130).err

    assert error.endswith("error: cancelled\n")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["submit", "abc", "--url", "{url}", "--json"]],
    ids=["help", "submit"],
)
def test_a_client_imports_nothing_heavy(arguments, running):
    code = "import sys; from disagg.cli.app import run; status = run(sys.argv[1:]); "
    code += "heavy = {'torch', 'ray', 'transformers', 'grpc', 'numpy', 'fastapi', 'tokenizers'}; "
    code += "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    arguments = [x.format(url=running.url) for x in arguments]
    command = [sys.executable, "-c", code, *arguments]

    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert process.returncode == 0
    assert process.stderr == "[]\n"


TOO_LONG = "error: 4,097 tokens of a prompt and its answer are too"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("eval --text /no/such", "error: no text '/no/such': no such file; 'python'"),
        ("eval --model no/such", "error: no model 'no/such'"),
        ("eval --resume", "error: --resume continues"),
        ("bench compare --model no/such", "error: no model 'no/such'"),
        ("bench auto --tokens 4095", TOO_LONG),
        ("bench compare --tokens 4081", TOO_LONG),
        ("bench latency --tokens 4096", TOO_LONG),
        ("fetch such", "error: unknown model to fetch 'such'"),
        ("eval --codec such", "  0.0 s  loading torch"),
        ("doctor such", "  0.0 s  loading torch"),
    ],
)
def test_the_first_line_comes_before_torch_is_imported(arguments, line):
    """It says what is wrong, or what takes so long."""
    code = "import sys; sys.modules['torch'] = None; from disagg.cli.app import run; "
    code += "sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments.split()]

    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert process.stderr.startswith(line)


def breaking_off(answers: list[list[str]], seeds: list[int]) -> Callable[..., Answer]:
    """A client of a service with these answers, by pieces; all but the last break off.

    seeds: gets the seed of each request
    """

    def complete(service, body, show, show_thought):
        seeds.append(body["seed"])
        pieces = answers.pop(0)
        for piece in pieces:
            show(piece)
        if answers:
            raise PeerLostError("nobody is there")
        return Answer("".join(pieces))

    return complete


def test_an_answer_goes_on_when_the_service_comes_back(monkeypatch):
    """It is computed anew with the same seed; pieces that were shown are not shown again."""
    seeds = []
    shown = []
    lookups = count()

    def get(service, path):  # gone at every other lookup
        if next(lookups) % 2 == 0:
            raise PeerLostError("nobody is there")

    answers = [["ab", "c"], ["a"], [], ["a", "bcd", "e"]]
    monkeypatch.setattr(client, "complete", breaking_off(answers, seeds))
    monkeypatch.setattr(client, "get", get)
    monkeypatch.setattr(client, "RETRY_S", 0.0)

    body = {"prompt": "x", "seed": None}
    answer = client.persist(SERVICE, body, shown.append)

    assert answer.text == "abcde"
    assert shown == ["ab", "c", "d", "e"]
    assert len(seeds) == 4
    assert len(set(seeds)) == 1
    assert None not in seeds


def test_an_answer_that_differs_the_second_time_is_an_error(monkeypatch):
    monkeypatch.setattr(client, "complete", breaking_off([["ab"], ["ax"], []], []))
    monkeypatch.setattr(client, "_comes_back", lambda service: True)

    with pytest.raises(TransferError, match="differs from the text"):
        client.persist(SERVICE, {"prompt": "x", "seed": 7}, lambda piece: None)


def test_thoughts_go_to_standard_error_once(monkeypatch, capsys):
    """They are repeated with the answer when the service comes back."""
    thoughts = [["Ra"], ["R", "ain?"]]

    def complete(service, body, show, show_thought):
        for piece in thoughts.pop(0):
            show_thought(piece)
        if thoughts:
            raise PeerLostError("nobody is there")
        show("Yes")
        return Answer("Yes")

    monkeypatch.setattr(client, "complete", complete)
    monkeypatch.setattr(client, "_comes_back", lambda service: True)
    printed = submit.PrintedAnswer()
    client.persist(SERVICE, {"messages": []}, printed.content, printed.thought)

    assert capsys.readouterr() == ("Yes", "Rain?\n")


def test_a_chat_chunk_may_have_a_thought_and_no_content():
    choice = {"delta": {"content": None, "reasoning_content": "Hm"}}
    thoughts = []

    answer = Answer()
    client._add_event(answer, {"choices": [choice]}, [], print, thoughts.append)

    assert thoughts == ["Hm"]
    assert answer.text == ""
