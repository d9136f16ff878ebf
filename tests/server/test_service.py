"""A whole service except Ray: its one worker lives in this process."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from disagg.config import load_config
from disagg.errors import PeerLostError
from disagg.server.service import Service
from tests.server.running import serving

SHORT = {"prompt": "a", "max_tokens": 1}
LONG = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@contextmanager
def colocated(drain_s: float) -> Iterator[tuple[Service, ExitStack]]:
    """A service of one worker, and the stack whose close ends it."""
    flags = {
        "cluster.colocated": True,
        "server.drain_s": drain_s,
        "server.port": 0,
    }
    with ExitStack() as stack:
        yield stack.enter_context(serving(load_config(None, flags))), stack


def open_stream(client: httpx.Client, service: Service) -> Iterator[str]:
    """The lines of an answer that has begun."""
    url = f"{service.url}/v1/completions"
    request = client.build_request("POST", url, json=LONG)
    lines = filter(None, client.send(request, stream=True).iter_lines())
    assert "text" in next(lines)
    return lines


def error_of(line: str) -> dict[str, Any]:
    return json.loads(line.removeprefix("data: "))["error"]


def test_streams_and_service_end_at_once_when_ray_is_lost_for_good():
    with httpx.Client(timeout=60) as client, colocated(3600) as (service, stack):
        lines = open_stream(client, service)
        _, on_down, on_end, _ = service._workers.watch.call_args.args
        on_down("both-0")
        on_end(PeerLostError("Ray is lost; given up"))
        assert service.stopped.is_set()
        with pytest.raises(PeerLostError, match="given up"):
            stack.close()
        *_, last, done = lines

    assert done == "data: [DONE]"
    error = error_of(last)
    assert error["type"] == "stopping"
    assert error["message"] == "the service is shutting down"


def test_the_watch_of_workers_asks_the_router_who_is_silent():
    with colocated(0) as (service, _):
        *_, silent_s = service._workers.watch.call_args.args

        assert silent_s() == {"both-0": 0.0}


def test_a_busy_router_calls_nobody_silent(monkeypatch):
    monkeypatch.setattr("disagg.server.service.ANSWER_S", 0.01)
    with colocated(0) as (service, _):
        *_, silent_s = service._workers.watch.call_args.args
        is_over = threading.Event()
        service._on_loop(is_over.wait)

        assert silent_s() == {}

        is_over.set()


def test_a_service_is_not_ready_from_the_stop_request_on():
    with colocated(0) as (service, _):
        assert httpx.get(f"{service.url}/ready").status_code == 200

        headers = {"Authorization": f"Bearer {service.secret}"}
        assert httpx.post(f"{service.url}/stop", headers=headers).status_code == 200

        ready = httpx.get(f"{service.url}/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
        assert httpx.get(f"{service.url}/health").status_code == 200


def test_a_service_that_drains_ends_at_once_when_told_again(caplog):
    caplog.set_level(logging.INFO, "disagg")
    with httpx.Client(timeout=60) as client, colocated(3600) as (service, stack):
        lines = open_stream(client, service)
        ending = threading.Thread(target=stack.close)
        ending.start()
        while "stopping" not in caplog.messages:
            time.sleep(0.01)
        service.end_now()
        *_, last, _ = lines
        ending.join()

    assert error_of(last)["type"] == "stopping"


def test_a_service_that_is_told_to_end_at_once_does_not_drain():
    with httpx.Client(timeout=60) as client, colocated(3600) as (service, stack):
        lines = open_stream(client, service)
        headers = {"Authorization": f"Bearer {service.secret}"}
        client.post(f"{service.url}/stop", headers=headers, json={"now": True})
        stack.close()
        *_, last, _ = lines

    assert service.stopped.is_set()
    assert error_of(last)["type"] == "stopping"


def test_while_a_stream_ends_the_service_is_not_ready_and_refuses_requests(caplog):
    caplog.set_level(logging.INFO, "disagg")
    with httpx.Client(timeout=60) as client, colocated(3.0) as (service, stack):
        lines = open_stream(client, service)
        ending = threading.Thread(target=stack.close)
        ending.start()
        while "stopping" not in caplog.messages:
            time.sleep(0.01)
        ready = client.get(f"{service.url}/ready")
        response = client.post(f"{service.url}/v1/completions", json=SHORT)
        while response.status_code == 200:  # the router closes a moment later
            response = client.post(f"{service.url}/v1/completions", json=SHORT)
        *_, last, _ = lines
        ending.join()

    assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "stopping"
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["connection"] == "close"
    assert error_of(last)["type"] == "stopping"
