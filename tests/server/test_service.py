"""A whole service but for Ray: its one worker lives in this process."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from disagg.config import Config, load_config
from disagg.errors import PeerLostError
from disagg.server.service import Service
from disagg.transfer.messages import Role
from disagg.workers import launch
from disagg.workers.members import Started
from disagg.workers.worker import Worker


class Alone:
    """In place of a cluster. `told`: who hears of workers that come and go, and of the end."""

    security, links = None, ()

    def __init__(self, config: Config, session: None):
        self._worker = Worker(config, Role.BOTH, "both-0")

    def connect(self) -> None:
        pass

    def start(self, tell: Callable[[str], None]) -> list[Started]:
        return [self._worker.start()]

    def watch(self, *told: Callable[[Any], None]) -> None:
        self.told = told

    def close(self) -> None:
        self._worker.stop(0.0)
        self._worker.wait()


def test_open_streams_and_their_service_end_at_once_when_ray_is_lost_for_good(monkeypatch):
    monkeypatch.setattr(launch, "Cluster", Alone)
    flags = {"cluster.address": "any:1", "cluster.colocated": True, "cluster.grace_s": 3600}
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=60) as client, ExitStack() as stack:
        service = stack.enter_context(Service(load_config(None, flags | {"server.port": 0})))
        request = client.build_request("POST", f"{service.url}/v1/completions", json=body)
        lines = filter(None, client.send(request, stream=True).iter_lines())
        assert "text" in next(lines)
        _, on_down, on_end = service._workers.told
        on_down("both-0")
        on_end(PeerLostError("Ray is lost; given up"))
        assert service.stopped.is_set()
        with pytest.raises(PeerLostError, match="given up"):
            stack.close()
        *_, error, done = lines
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "peer_lost"
