"""Replicas of Ray Serve are doors: kill -9 of the router and of a replica under streams.

Says how long streams stood still (`-s`).
"""

import os
import re
import signal

import httpx
import pytest

from disagg.cli.client import get
from disagg.cli.state_file import RunningService
from tests.cli.conftest import answering, free_port
from tests.cli.test_private import idle, workers
from tests.cluster.head import Head, head
from tests.crowd import Crowd, count_cut, crowd_of, longest_pause_s, pool
from tests.processes import wait_for

for module in ("aiohttp_cors", "watchfiles"):  # of ray[default], of ray[serve]
    pytest.importorskip(module, reason="pip install 'disagg[dashboard,serve]'")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS = 12
SETTINGS = {"prefill": 1, "decode": 1, "doors": 2, "server": {"api_key": "sesame"}}
__all__ = ["head", "pool"]


def pid_of(head: Head, deployment: str) -> int:
    """The process of one replica of a deployment."""
    return next(pid for pid, name in head.replicas().items() if name == deployment)


def doors(service: RunningService) -> set[str]:
    """The doors that have generated tokens."""
    text = httpx.get(f"{service.url}/metrics").text
    series = re.findall(r'vllm:generation_tokens_total{.*door="(\w+)".*} (\S+)', text)
    return {door for door, tokens in series if float(tokens)}


def test_two_replicas_serve_and_survive_their_router_and_each_other(head, pool):
    port = free_port()
    service = head.deploy(port, "/llm", codec="raw", **SETTINGS)
    service = RunningService(service.url, 0, "sesame")
    wait_for(lambda: answering(service, "/ready"))
    crowd = crowd_of(service, pool, STREAMS)

    both_doors_answer(service, crowd)
    a_client_without_the_key_is_refused(service)
    kill_the_router(head, service, crowd)
    kill_a_replica(head, service, crowd)
    deploy_other_settings(head, port, service)

    head.ray("serve", "shutdown", "-y", "--address", head.dashboard)
    wait_for(lambda: not head.actors() and not head.replicas())


def both_doors_answer(service: RunningService, crowd: Crowd) -> None:
    crowd.begin()
    streams = crowd.end()

    assert all(crowd.is_exact(stream) for stream in streams)
    wait_for(lambda: len(doors(service)) == 2)


def a_client_without_the_key_is_refused(service: RunningService) -> None:
    refused = httpx.get(f"{service.url}/v1/models")
    public = httpx.get(f"{service.url}/ready")

    assert refused.status_code == 401
    assert public.status_code == 200
    assert len(refused.headers.get_list("x-request-id")) == 1


def kill_the_router(head: Head, service: RunningService, crowd: Crowd) -> None:
    """Every stream goes on, token by token, at the same workers."""
    before = {worker["pid"] for worker in workers(service)}
    victim = pid_of(head, "router")
    crowd.begin()
    os.kill(victim, signal.SIGKILL)
    streams = crowd.end()

    assert [stream.error for stream in streams] == [None] * STREAMS
    assert all(crowd.is_exact(stream) for stream in streams)
    assert {worker["pid"] for worker in workers(service)} == before
    pause_s = longest_pause_s(streams)
    assert pause_s > 0.5, "the streams ended before the router"
    print(f"\nrouter killed: {STREAMS} streams exact after {pause_s:.1f} s at most")


def kill_a_replica(head: Head, service: RunningService, crowd: Crowd) -> None:
    """Its streams end with an error, the others go on."""
    victim = pid_of(head, "disagg")
    crowd.begin()
    os.kill(victim, signal.SIGKILL)
    streams = crowd.end()

    num_cut, num_whole = count_cut(crowd, streams)
    print(f"replica killed: {num_cut} streams cut, {num_whole} exact")
    wait_for(lambda: idle(service), describe=lambda: workers(service))


def deploy_other_settings(head: Head, port: int, service: RunningService) -> None:
    """New doors and a new router serve with new workers."""
    head.deploy(port, "/llm", codec="kivi:bits=4", **SETTINGS)
    wait_for(lambda: codec_of(service) == "kivi:bits=4")

    assert len(head.actors()) == 2


def codec_of(service: RunningService) -> str:
    """The codec of the service, "" while it does not answer."""
    return get(service, "/status")["codec"] if answering(service, "/status") else ""
