"""A whole service but for Ray: its one worker lives in this process."""

import json
from contextlib import ExitStack

import httpx
import pytest

from disagg.config import load_config
from disagg.errors import PeerLostError
from tests.server.running import serving


def test_open_streams_and_their_service_end_at_once_when_ray_is_lost_for_good():
    flags = {"cluster.colocated": True, "cluster.grace_s": 3600, "server.port": 0}
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=60) as client, ExitStack() as stack:
        service = stack.enter_context(serving(load_config(None, flags)))
        request = client.build_request(
            "POST", f"{service.url}/v1/completions", json=body
        )
        lines = filter(None, client.send(request, stream=True).iter_lines())
        assert "text" in next(lines)
        _, on_down, on_end = service._workers.watch.call_args.args
        on_down("both-0")
        on_end(PeerLostError("Ray is lost; given up"))
        assert service.stopped.is_set()
        with pytest.raises(PeerLostError, match="given up"):
            stack.close()
        *_, error, done = lines
    assert done == "data: [DONE]"
    said = json.loads(error.removeprefix("data: "))["error"]
    assert (said["type"], said["message"]) == (
        "peer_lost",
        "the service is shutting down",
    )
