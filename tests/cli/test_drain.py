"""SIGTERM under streams, with the real command: what streams, probes and new requests see."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from disagg.cli.client import Answer, complete
from disagg.cli.state_file import RunningService
from disagg.errors import StoppingError
from tests.cli.conftest import PATIENCE_S
from tests.cli.test_private import BODY, Home, home

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["home"]

NUM_STREAMS = 4
NUM_VISITS = 8  # by connections of their own, so that every door is asked
DOORS = [pytest.param((), id="one-process"), pytest.param(("--doors", "2"), id="doors")]

Streams = list[Future[Answer]]


@contextmanager
def serving(
    home: Home, *options: str, tokens: int
) -> Iterator[tuple[subprocess.Popen[str], RunningService, Streams]]:
    """A service whose streams have begun; it ends at once at the end."""
    drain = f"server.drain_s={PATIENCE_S}"
    process = home.start("serve", "--port", "0", "--set", drain, *options)
    state = home.service()
    begun = [threading.Event() for _ in range(NUM_STREAMS)]
    body = {**BODY, "max_tokens": tokens}
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [
            pool.submit(complete, state, body, lambda _, x=x: x.set()) for x in begun
        ]
        assert all(each.wait(PATIENCE_S) for each in begun)
        yield process, state, streams


def visit(url: str) -> tuple[int, bool]:
    """The status of a new request on a connection of its own, and whether it may come again."""
    body = {"prompt": "a", "max_tokens": 1}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    return response.status_code, "retry-after" in response.headers


def statuses(url: str, path: str) -> set[int]:
    """What probes get, each on a connection of its own."""
    return {
        httpx.get(f"{url}{path}", timeout=60).status_code for _ in range(NUM_VISITS)
    }


def wait_until_not_ready(url: str) -> None:
    while httpx.get(f"{url}/ready", timeout=60).status_code == 200:
        pass


@pytest.mark.parametrize("options", DOORS)
def test_streams_end_by_themselves_while_new_requests_are_refused(options, home):
    with serving(home, *options, tokens=1000) as (process, state, streams):
        process.send_signal(signal.SIGTERM)
        wait_until_not_ready(state.url)
        retries = {visit(state.url) for _ in range(NUM_VISITS)}
        ready, healthy = statuses(state.url, "/ready"), statuses(state.url, "/health")
        assert not all(each.done() for each in streams)  # else nothing was shown
        num_tokens = {each.result().completion_tokens for each in streams}
    _, error = process.communicate(timeout=PATIENCE_S)

    assert num_tokens == {1000}
    assert retries == {(503, True)}
    assert (ready, healthy) == ({503}, {200})
    assert process.returncode == 0, error


@pytest.mark.parametrize("options", DOORS)
def test_a_second_signal_ends_streams_at_once(options, home):
    with serving(home, *options, tokens=4000) as (process, state, streams):
        process.send_signal(signal.SIGTERM)
        wait_until_not_ready(state.url)
        threading.Event().wait(1.0)  # two signals at once count as one
        process.send_signal(signal.SIGTERM)
        errors = [each.exception() for each in streams]
    _, error = process.communicate(timeout=PATIENCE_S)

    assert {type(each) for each in errors} == {StoppingError}
    assert "stopping at once ..." in error
    assert process.returncode == 0, error


@pytest.mark.parametrize("options", DOORS)
def test_stop_now_ends_streams_at_once(options, home):
    with serving(home, *options, tokens=4000) as (process, _, streams):
        stopping = home.start("stop", "--now")
        errors = [each.exception() for each in streams]
        _, stop_error = stopping.communicate(timeout=PATIENCE_S)
    _, error = process.communicate(timeout=PATIENCE_S)

    assert {type(each) for each in errors} == {StoppingError}
    assert stopping.returncode == 0, stop_error
    assert process.returncode == 0, error
