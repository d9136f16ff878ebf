"""The log: text and JSON lines, and one line for each request."""

import io
import json
import logging
import re

import pytest

from disagg.errors import CapacityError, PeerLostError
from disagg.log import configure, fields
from disagg.server import request_log
from tests.server.visits import ask, chat, get, post, send

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture
def stream() -> io.StringIO:
    """What is logged."""
    logging.getLogger().handlers = []
    return io.StringIO()


def json_lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_text_line_has_time_level_message_and_fields(stream):
    configure("info", "text", stream)
    values = fields(codec="kivi:bits=4", why="no room", nothing=None)
    logging.getLogger("disagg.test").info("served %d", 2, extra=values)

    line = stream.getvalue()
    assert re.fullmatch(
        TIME + r' INFO served 2 codec=kivi:bits=4 why="no room"\n', line
    )


def test_a_json_line_has_the_fields_as_keys(stream):
    configure("info", "json", stream)
    logging.getLogger("disagg.test").warning("served", extra=fields(tokens=3))

    (line,) = json_lines(stream)
    assert re.fullmatch(TIME, line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "disagg.test",
        "message": "served",
        "tokens": 3,
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_logged(log_format, stream):
    configure("info", log_format, stream)
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError:
        logging.getLogger("disagg.test").exception("broke")

    text = stream.getvalue()
    assert "Traceback" in text
    assert "ZeroDivisionError: by zero" in text
    if log_format == "json":
        assert len(json_lines(stream)) == 1


def test_a_client_cannot_begin_a_line_of_its_own(app, stream):
    configure("info", "text", stream)
    get(app, "/nowhere%0A2026-01-01T00:00:00.000Z ERROR forged")

    (line,) = stream.getvalue().splitlines()
    assert r"\n2026" in line


@pytest.mark.parametrize(
    ("level", "levels"),
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("info", ["INFO", "WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"]),
        ("error", ["ERROR"]),
    ],
)
def test_lines_below_the_level_are_left_out(level, levels, stream):
    configure(level, "text", stream)
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("disagg.test"), name)("x")

    assert [line.split()[1] for line in stream.getvalue().splitlines()] == levels


def test_other_packages_log_from_warning_on(stream):
    configure("debug", "text", stream)
    logging.getLogger("httpx").info("HTTP Request")
    logging.getLogger("httpx").warning("slow")

    assert stream.getvalue().endswith("WARNING slow\n")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("stream_response", [False, True])
def test_a_finished_request_has_one_line(stream_response, app, stream):
    configure("info", "json", stream)
    headers = {"X-Request-Id": "mine-7"}
    body = ask(stream=stream_response, codec="kivi")
    send(app, "POST", "/v1/completions", json=body, headers=headers)

    (line,) = json_lines(stream)
    assert line["message"] == "request"
    assert line["id"] == "mine-7"
    assert (line["method"], line["route"]) == ("POST", "/v1/completions")
    assert line["status"] == 200
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 4)
    assert line["codec"] == "raw"  # the one that the hand-off reports
    assert 0 <= line["seconds"] < 30
    assert "error" not in line


def test_without_a_hand_off_the_codec_is_that_of_the_request(app, router, stream):
    configure("info", "json", stream)
    router.kv = {}
    chat(app, codec="kivi")

    (line,) = json_lines(stream)
    assert line["codec"] == "kivi"


@pytest.mark.parametrize("stream_response", [False, True])
def test_a_refused_request_has_the_reason(stream_response, app, router, stream):
    configure("info", "json", stream)
    router.refuses = CapacityError("full")
    post(app, stream=stream_response)
    post(app, prompt="", stream=stream_response)

    full, empty = json_lines(stream)
    assert (full["status"], full["error"]) == (503, "capacity")
    assert (empty["status"], empty["error"]) == (400, "request")


def test_an_error_in_mid_stream_is_logged_though_the_status_is_200(app, router, stream):
    configure("info", "json", stream)
    router.pause_at = 2
    router.breaks = PeerLostError("gone")
    router.go.set()
    post(app, max_tokens=9, stream=True)

    (line,) = json_lines(stream)
    assert (line["status"], line["error"]) == (200, "peer_lost")
    assert line["output_tokens"] == 2


@pytest.mark.parametrize("path", sorted(request_log.QUIET_PATHS))
def test_probes_and_dashboards_are_logged_at_level_debug(path, app, stream):
    configure("info", "json", stream)
    get(app, path)
    assert json_lines(stream) == []

    configure("debug", "json", stream)
    get(app, path)
    (line,) = json_lines(stream)
    assert (line["level"], line["route"]) == ("debug", path)


def test_a_failure_of_ours_is_logged_as_an_error(app, router, stream):
    configure("info", "json", stream)
    router.refuses = ZeroDivisionError("a bug")
    post(app, raises=False)

    (line,) = json_lines(stream)
    assert (line["level"], line["status"]) == ("error", 500)
    assert line["error"] == "internal"
