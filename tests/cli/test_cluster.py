"""Workers on a Ray cluster: stopped with their service, taken over if it was killed.

Says how long a restart took (`-s`); such a log is benchmarks/results/restart.txt.
"""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import pytest

from disagg.cli import client
from disagg.cli.client import complete, get, persist
from disagg.cli.state_file import RunningService
from tests.cli.conftest import PATIENCE_S, answering, free_port, wait_for
from tests.cli.test_private import BODY, PROMPT, Home, idle, workers
from tests.processes import ray_head

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

STREAMS, PROMPTS, TOKENS = 40, 4, 150
STATUS = "`disagg status` shows"
LONG = 600  # tokens of an answer that is to outlive a drain, on a busy host too


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray that workers join."""
    port = free_port()
    environment = {**os.environ, "HOME": str(tmp_path_factory.mktemp("ray"))}
    options = ("--num-cpus=8", "--include-dashboard=false", "--disable-usage-stats")
    with ray_head(port, environment, *options):
        wait_for(lambda: answers(port))
        yield f"127.0.0.1:{port}"


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def pids(state: RunningService, role: str = "") -> set[int]:
    """Those of the workers whose role begins so."""
    return {
        worker["pid"]
        for worker in workers(state)
        if worker["role"].startswith(role) and "pid" in worker
    }


def alive(pids: set[int]) -> bool:
    """Whether any of the processes is there."""
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


class Talk:
    """Streams that send requests as `disagg submit` does, again and again, and check each answer.

    shown: pieces of the current answers, by stream
    """

    def __init__(self, state: RunningService, streams: int, tokens: int = TOKENS):
        self._state = state
        self._tokens = tokens
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(streams)
        self.shown = [0] * streams
        self._texts = [self._ask(number) for number in range(PROMPTS)]

    def _ask(self, number: int) -> str:
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            self.shown[number] = len(pieces)

        body = {
            **BODY,
            "prompt": f"{number % PROMPTS}. {PROMPT}",
            "max_tokens": self._tokens,
        }
        answer = persist(self._state, body, show)
        assert answer.completion_tokens == self._tokens
        return "".join(pieces)

    def _stream(self, number: int) -> None:
        while not self._over.is_set():
            assert self._ask(number) == self._texts[number % PROMPTS]

    def __enter__(self) -> Self:
        self.shown = [0] * len(self.shown)
        numbers = range(len(self.shown))
        self._streams = [self._pool.submit(self._stream, x) for x in numbers]
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        with self._pool:
            for stream in self._streams:
                stream.result()


def test_a_service_takes_over_the_workers_of_a_killed_one(address, tmp_path):
    """No other service may, and workers stop with their service unless they are detached."""
    home = Home(tmp_path)
    cluster = ("--set", f"cluster.address={address}", "--set", "cluster.orphan_s=30")
    serve = partial(home.start, "serve", "--port", "0", *cluster)

    first = serve()
    first_pids = pids(home.service())
    first.kill()
    _, error = first.communicate()
    assert "gRPC over TLS" in error

    # workers do not use this setting, so they need no restart
    second = serve("--set", "router.max_queue=7")
    state = home.service()
    wait_for(lambda: pids(state) == first_pids)
    answer = complete(state, {**BODY, "max_tokens": 8}, lambda piece: None)
    assert answer.completion_tokens == 8

    intruder = serve("--state-file", str(tmp_path / "intruder.json"))
    _, error = intruder.communicate(timeout=60)
    assert intruder.returncode == 2
    assert "works for another service" in error
    assert complete(state, BODY, lambda piece: None).completion_tokens == 16

    neighbour = serve("--name", "neighbour", "--set", "security.plane=token")
    neighbour_state = home.service("neighbour")
    assert not pids(neighbour_state) & first_pids
    answer = complete(neighbour_state, BODY, lambda piece: None)
    assert answer.completion_tokens == 16

    stop(second)
    assert not alive(first_pids)
    stop(neighbour)

    detached = serve("--set", "cluster.detach=true")
    last_pids = pids(home.service())
    stop(detached)
    other = serve("--codec", "raw")
    _, error = other.communicate(timeout=60)
    assert other.returncode == 2
    changed = "runs with other settings (codec), until 30 s after its last router"
    assert changed in error
    wait_for(lambda: not alive(last_pids))


def test_a_worker_that_cannot_start_leaves_the_others_serving(address, tmp_path):
    """Three workers share two ports."""
    home = Home(tmp_path)
    ports = free_pair()
    settings = [f"cluster.address={address}", f"cluster.ports=[{ports[0]},{ports[1]}]"]
    sets = [option for each in settings for option in ("--set", each)]
    process = home.start("serve", "--port", "0", "--colocated", "--prefill", "3", *sets)
    state = home.service()

    wait_for(lambda: len(pids(state)) == 2)
    answer = complete(state, {**BODY, "max_tokens": 8}, lambda piece: None)

    assert answer.completion_tokens == 8
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.search(r"both-\d at \S+ did not start: .*; trying again in 10 s", error)


def free_pair() -> tuple[int, int]:
    """Two free ports, one after the other."""
    while True:
        port = free_port()
        with suppress(OSError):
            socket.create_server(("", port + 1)).close()
            return port, port + 1


def test_forty_streams_go_on_when_their_router_is_killed(
    address, tmp_path, monkeypatch
):
    """The next router is started as `keep.py` does; clients still use the token of the first."""
    monkeypatch.setattr(client, "RESUME_S", PATIENCE_S)
    home = Home(tmp_path)
    cluster = ("--name", "restarted", "--set", f"cluster.address={address}")
    key = ("--api-key", "sk-1", "--port", str(free_port()))
    first = home.start("serve", *key, *cluster)
    state = home.service("restarted")
    before = pids(state)
    with Talk(state, STREAMS) as talk:
        wait_for(lambda: all(talk.shown))
        first.kill()
        first.communicate()
        cut = list(talk.shown)
        killed_at = time.monotonic()

        second = home.start("serve", *key, *cluster)
        wait_for(lambda: answering(state, "/health"))
        listens_at = time.monotonic()
        with ThreadPoolExecutor() as pool:
            body = {**BODY, "max_tokens": 8}
            next_state = replace(state, token="sk-1")
            answer = pool.submit(complete, next_state, body, lambda piece: None)
            wait_for(lambda: answering(state, "/ready"))
            ready_at = time.monotonic()
            assert answer.result().completion_tokens == 8
        served_at = time.monotonic()

    listens_s = listens_at - killed_at
    ready_s = ready_at - listens_at
    served_s = served_at - ready_at
    print(
        f"\n{STREAMS} streams cut off behind {min(cut)} to {max(cut)} of {TOKENS} tokens"
    )
    print(f"the next router listens {listens_s:.1f} s after the last one was killed")
    print(f"has its workers {ready_s:.1f} s later, an answer {served_s:.1f} s later")
    home.service("restarted")
    wait_for(lambda: pids(state) == before)
    wait_for(lambda: idle(state), describe=lambda: workers(state))
    stop(second)
    assert not alive(before)


def test_answers_stay_the_same_while_workers_come_and_leave(address, tmp_path):
    """And the next router takes over all workers that run."""
    home = Home(tmp_path)
    cluster = ("--name", "scaled", "--port", "0", "--set", f"cluster.address={address}")
    first = home.start("serve", *cluster)
    state = home.service("scaled")
    state_file = ("--state-file", str(tmp_path / "scaled.json"))

    def output_of(*command: str) -> str:
        process = home.start(*command, *state_file)
        output, error = process.communicate(timeout=PATIENCE_S)
        assert error == ""
        return output

    old = pids(state, "decode")
    with Talk(state, 8, LONG):  # on both workers, whenever one is drained
        scaled = output_of("scale", "decode=2")
        assert (
            scaled == f"2 decode: workers start and leave one by one; {STATUS} them\n"
        )
        wait_for(lambda: len(pids(state, "decode")) == 2)
        drained = output_of("drain", "decode-0")
        assert (
            drained == f"decode-0 leaves once its replacement serves; {STATUS} both\n"
        )
        wait_for(lambda: not alive(old))
        wait_for(lambda: len(pids(state, "decode")) == 2)
        assert get(state, "/status")["moved"] > 0
    before = pids(state)
    first.kill()
    first.communicate()
    second = home.start("serve", *cluster)
    state = home.service("scaled")
    wait_for(lambda: pids(state) == before)
    stop(second)
