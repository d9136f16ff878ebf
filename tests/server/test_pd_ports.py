"""What foreign routers do at the ports of workers: prefill at one, decode at another."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from socket import create_connection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from disagg.config import ClusterConfig, Config, ServerConfig, TransferConfig
from disagg.errors import ConfigError, HandleError, PeerLostError
from disagg.server.pd_ports import MAX_HANDLES, PdPorts
from disagg.server.schema import CompletionRequest
from disagg.server.service import Service, bind, check_ports, open_pd_ports
from disagg.transfer.messages import Role, WorkerInfo
from tests.server.running import Running, running
from tests.server.visits import refused

WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
WANTED |= dict.fromkeys(
    ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
)
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, " * 3


@pytest.fixture(scope="module")
def service(tiny: Path) -> Iterator[Running]:
    with running(str(tiny)) as service:
        yield service
        service.empty()


def complete(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": TEXT, "max_tokens": 6, "temperature": 0} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def park(service: Running, **fields: Any) -> dict[str, Any]:
    """The handle of a prompt that was prefilled."""
    fields = {"max_tokens": 1, "kv_transfer_params": WANTED} | fields
    answer = complete(service.doors["p"], **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_computed_at_one_port_and_its_answer_said_at_another(
    stream, service
):
    prompt = f"{stream}: {TEXT}"
    handle = park(service, prompt=prompt)
    assert (handle["do_remote_decode"], handle["do_remote_prefill"]) == (False, True)
    assert (
        service.doors["p"] == f"http://{handle['remote_host']}:{handle['remote_port']}"
    )
    fields = {
        "prompt": prompt,
        "kv_transfer_params": handle,
        "kv": True,
        "stream": stream,
    }
    text = (
        complete(service.doors["d"], **fields).text.strip().removesuffix("data: [DONE]")
    )
    lines = text.split("data: ")[1:] if stream else [text]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert choices[-1]["kv"]["wire_bytes"] > 0
    assert (
        choices[-1]["kv"]["cached_tokens"] >= 64
    )  # of what the first request had computed
    alone = complete(service.url, prompt=prompt).json()["choices"][0]["text"]
    assert "".join(choice["text"] for choice in choices) == alone


def test_a_handle_is_good_once(service):
    handle = park(service)
    first, second = (
        complete(service.doors["d"], kv_transfer_params=handle) for _ in range(2)
    )
    assert first.status_code == 200
    assert "consumed" in refused(second, 409, "handle", "kv_transfer_params")


@pytest.mark.parametrize(
    ("change", "fields", "says"),
    [
        ({"remote_request_id": "f" * 32}, {}, "unknown"),
        ({"remote_request_id": None}, {}, "unknown"),
        ({"remote_engine_id": "another-engine"}, {}, "foreign"),
        ({"remote_engine_id": None}, {}, "foreign"),
        ({"remote_block_ids": [0]}, {}, "foreign"),
        ({}, {"prompt": "another prompt"}, "foreign"),
    ],
)
def test_a_handle_that_is_not_of_this_prompt_is_refused_as_such(
    change, fields, says, service
):
    handle = park(service)
    answer = complete(service.doors["d"], kv_transfer_params=handle | change, **fields)
    assert f"the handle is {says}" in refused(
        answer, 409, "handle", "kv_transfer_params"
    )
    assert complete(service.doors["d"], kv_transfer_params=handle).status_code == 200


@pytest.mark.parametrize(
    ("door", "change", "fields", "says"),
    [
        ("p", {}, {}, "max_tokens is 6; expected 1"),
        ("p", {}, {"max_tokens": 1, "stream": True}, "stream is true"),
        (
            "p",
            {},
            {"max_tokens": 1, "prompt": ["a", "b"]},
            "of 2 prompts; expected one",
        ),
        (
            "p",
            {"do_remote_prefill": True},
            {"max_tokens": 1},
            "do_remote_prefill is true too",
        ),
        ("d", {}, {"max_tokens": 1}, "; expected a worker that prefills"),
        (
            "p",
            {"do_remote_decode": False, "do_remote_prefill": True},
            {},
            "a worker that decodes",
        ),
        ("d", {"do_remote_prefill": "what"}, {}, "do_remote_prefill is 'what'"),
        ("", {}, {"max_tokens": 1}, "only accepted at a worker's port"),
    ],
)
def test_what_a_port_does_not_do_is_refused_by_the_field(
    door, change, fields, says, service
):
    url, params = service.doors.get(door, service.url), WANTED | change
    answer = complete(url, kv_transfer_params=params, **fields)
    assert says in refused(answer, 400, "request", "kv_transfer_params")


@pytest.mark.parametrize("door", ["p", "d"])
def test_a_plain_request_is_served_at_any_port(door, service):
    alone = complete(service.url).json()["choices"][0]["text"]
    assert complete(service.doors[door]).json()["choices"][0]["text"] == alone


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        (ClusterConfig(prefill=2, decode=1), ["prefill-0", "prefill-1", "decode-0"]),
        (ClusterConfig(prefill=2, colocated=True), ["both-0", "both-1"]),
    ],
)
def test_a_port_is_opened_for_each_worker_where_that_is_wanted(cluster, names):
    assert open_pd_ports(Config(cluster=cluster)) == {}
    doors = open_pd_ports(Config(cluster=cluster, server=ServerConfig(pd_ports=0)))
    with ExitStack() as stack:
        ports = {stack.enter_context(door).getsockname()[1] for door in doors.values()}
        assert (list(doors), len(ports)) == (names, len(names))
        taken = Config(cluster=cluster, server=ServerConfig(pd_ports=min(ports)))
        with pytest.raises(ConfigError, match="cannot listen"):
            open_pd_ports(taken)
    with pytest.raises(ConfigError, match=r"server\.host is ''"):
        bind("", 0)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"])],
)
def test_an_address_of_either_kind_is_listened_on_as_the_url_says(host, addresses):
    url = urlsplit(Service(Config(server=ServerConfig(host=host, port=0))).url)
    assert url.hostname == addresses[0]
    for name in addresses:
        create_connection((name, url.port), 5).close()


def test_workers_with_ports_of_their_own_stay_as_many_as_they_are():
    service = Service(Config(server=ServerConfig(port=0, pd_ports=0)))
    with pytest.raises(ConfigError, match="cannot scale"):
        service.scale(2, None)
    for listening in (service._socket, *service._pd_sockets.values()):
        listening.close()


def test_workers_that_would_find_no_port_are_refused_before_ray_starts():
    with bind("127.0.0.1", 0) as taken:
        ports = [taken.getsockname()[1]] * 2
        alone = Config(cluster=ClusterConfig(colocated=True, ports=ports))
        with pytest.raises(ConfigError, match="none is free on this host"):
            Service(alone)
    check_ports(alone)
    two = ClusterConfig(ports=ports)
    direct = replace(alone, transfer=TransferConfig(channel="direct"))
    for config in (Config(cluster=two), direct):
        with pytest.raises(ConfigError, match="none is free on this host"):
            check_ports(config)
    check_ports(Config(cluster=replace(two, address="auto")))


class Yard:
    """Doors of a prefill worker at port 1 and a decode worker at port 2, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.peers: dict[str, Any] = {}
        self.start("p-0", Role.PREFILL, 7)
        self.start("d-0.3", Role.DECODE, 7)
        router: Any = SimpleNamespace(id="us", peers=self.peers)
        self.doors = PdPorts(router, {1: "p-0", 2: "d-0"}, 10.0, lambda: self.now)

    def start(self, name: str, role: Role, epoch: int) -> None:
        self.peers[name] = SimpleNamespace(
            name=name, info=WorkerInfo(name, role, "", epoch)
        )

    def park(self) -> dict[str, Any]:
        return self.doors.park("here", 1, (1, 2))

    def bind(self, handle: dict[str, Any]) -> tuple[str, str]:
        body = {"prompt": [1, 2], "kv_transfer_params": handle}
        return self.doors.enter(
            2, CompletionRequest.read(json.dumps(body).encode()), [(1, 2)]
        )


def test_a_handle_names_both_workers_as_they_are_now():
    yard = Yard()
    assert yard.bind(yard.park()) == ("p-0", "d-0.3")


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (lambda yard: setattr(yard, "now", 10.0), HandleError("the handle is expired")),
        (lambda yard: yard.peers.pop("p-0"), HandleError("the handle is stale")),
        (
            lambda yard: yard.start("p-0", Role.PREFILL, 8),
            HandleError("the handle is stale"),
        ),
        (lambda yard: yard.peers.pop("d-0.3"), PeerLostError("d-0 is restarting")),
    ],
    ids=["expired", "gone", "anew", "nobody-behind-the-port"],
)
def test_a_handle_that_is_not_good_any_more_says_why(happens, error):
    yard = Yard()
    handle = yard.park()
    happens(yard)
    with pytest.raises(type(error), match=str(error)):
        yard.bind(handle)


def test_the_oldest_handles_are_forgotten():
    yard = Yard()
    first, *_, last = [yard.park() for _ in range(MAX_HANDLES + 1)]
    with pytest.raises(HandleError, match="the handle is unknown"):
        yard.bind(first)
    assert yard.bind(last)
