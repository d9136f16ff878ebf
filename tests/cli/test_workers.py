"""`status`, `scale` and `drain`: what the owner of a service sees and may change."""

import json
from itertools import islice

import pytest

from disagg.cli import workers
from disagg.cli.client import post
from disagg.cli.state_file import RunningService
from disagg.errors import AuthError, RequestError

STATUS = {
    "model": "m",
    "codec": "raw",
    "requests": 3,
    "queued": 2,
    "moved": 1,
    "retried": 0,
    "fp16_bytes": 4000,
    "wire_bytes": 1000,
}
WORKER = {
    "name": "d",
    "role": "decode",
    "address": "h:1",
    "epoch": 7,
    "gauges": {"engine_running": 2.0, "used_bytes": 250.0, "arena_bytes": 1000.0},
    "node": "host",
    "backend": "avx2",
    "tokens_fit": 12345,
}


def test_scale_and_drain_ask_the_service_with_its_key(
    announced_service, state_file, disagg
):
    where = ("--state-file", state_file)

    output = disagg("scale prefill=2 decode=3 --json", *where).out
    disagg("scale decode=1", *where)
    disagg("drain d", *where)

    assert json.loads(output) == {"prefill": 2, "decode": 3}
    assert announced_service.worker_pool.calls == [(2, 3), (None, 1), "d"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["scale", "decoders=3"],
            "'decoders=3': expected prefill=NUMBER or decode=NUMBER",
        ),
        (["scale", "decode=many"], "'decode=many': expected"),
        (["scale", "decode:3"], "'decode:3': expected"),
        (["scale", "decode=2", "decode=3"], "'decode=2 decode=3' names a role twice"),
        (["drain", "e"], "unknown worker 'e'; known: d"),
        (["drain", "d?/ü"], "unknown worker 'd?/ü'; known: d"),
        (["drain", ""], "unknown worker ''; known: d"),
    ],
)
def test_a_wrong_role_number_or_worker_is_refused(
    command, message, announced_service, state_file, disagg
):
    output = disagg(*command, "--state-file", state_file, code=2)

    assert message in output.err
    assert not announced_service.worker_pool.calls


def test_scale_needs_the_key_of_the_service(announced_service):
    stranger = RunningService(announced_service.url, 0, "wrong")

    with pytest.raises(AuthError):
        post(stranger, "/scale", {"decode": 2})

    assert not announced_service.worker_pool.calls


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"decode": "two"}, "decode is 'two'"),
        ({"decoders": 2}, "decoders is 2"),
    ],
)
def test_scale_refuses_a_wrong_body(body, message, announced_service):
    service = RunningService(announced_service.url, 0, "secret")

    with pytest.raises(RequestError, match=message):
        post(service, "/scale", body)

    assert not announced_service.worker_pool.calls


def test_status_says_where_the_ranks_of_a_worker_are(capsys):
    hosts = ["10.0.0.2", "10.0.0.3", "10.0.0.3"]
    worker = {**WORKER, "ranks": 3, "rank_hosts": hosts}

    workers.draw({**STATUS, "workers": [worker]})

    assert "avx2, 3 ranks on 10.0.0.2, 10.0.0.3 (2)" in capsys.readouterr().out


def test_status_says_what_room_workers_wait_for(capsys):
    lacks_room = {"prefill-0": "2 ranks on one host"}

    workers.draw({**STATUS, "workers": [WORKER], "lacks_room": lacks_room})

    assert "prefill-0 waits for room: 2 ranks on one host" in capsys.readouterr().out


def test_status_says_how_many_ranks_a_worker_has(capsys):
    workers.draw({**STATUS, "workers": [{**WORKER, "ranks": 2}]})

    assert "avx2, 2 ranks" in capsys.readouterr().out


def test_status_is_one_screen(capsys):
    broken = {"name": "p", "role": "prefill", "address": "h:2", "error": "it is gone"}
    summary = (
        "m · raw · 3 requests · 2 queued · 1 moved · 1,000 bytes sent, 25 % of fp16"
    )

    workers.draw({**STATUS, "workers": [WORKER, broken]})

    out = capsys.readouterr().out
    assert summary in out
    for cell in ("host", "25", "12,345", "avx2", "h:2", "it is gone"):
        assert cell in out


def test_watching_reports_again_and_again(announced_service, monkeypatch):
    monkeypatch.setattr(workers, "PAUSE_S", 0.0)
    service = RunningService(announced_service.url, 0, "")

    reports = list(islice(workers.reports(service, repeat=True), 3))

    assert [report["model"] for report in reports] == ["tiny"] * 3


def test_only_a_terminal_is_cleared(disagg, monkeypatch):
    status = {**STATUS, "workers": [WORKER]}
    monkeypatch.setattr(workers, "reports", lambda *_: [status])

    output = disagg("status --watch --url http://there")

    assert "\033" not in output.out
