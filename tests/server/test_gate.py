"""What no route sees: ambiguous framing, pages of other sites, proxies' way to write a path."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Scope

from disagg.server.app import create_app
from disagg.server.auth import KeyRing
from tests.server.test_connections import POST, send, serving
from tests.server.visits import ask, refused
from tests.server.visits import send as visit

PAGE = "https://chat.example"
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: here\r\n\r\n"


def test_two_framings_of_one_request_end_the_connection(app):
    """Else the second request, which a proxy took for a body, would be answered."""
    head = POST.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def scene() -> bytes:
        async with serving(app) as port:
            reader, _writer = await send(port, head + b"0\r\n\r\n" + SMUGGLED)
            return await reader.read()

    answers = asyncio.run(scene())
    assert answers.count(b"HTTP/1.1 ") == 1
    assert answers.startswith(b"HTTP/1.1 400 ")


def status_for(app: Any, origin: str, host: str, address: str = "10.0.0.1") -> int:
    """The status of GET /version, asked by a page of an origin."""
    statuses: list[int] = []

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": "/version",
        "query_string": b"",
        "server": (address, 8000),
        "headers": [(b"host", host.encode()), (b"origin", origin.encode())],
    }
    asyncio.run(app(scope, receive, sent))
    return statuses[0]


@pytest.mark.parametrize(
    ("origin", "host", "address", "status"),
    [
        (PAGE, "10.0.0.1:8000", "10.0.0.1", 403),
        ("null", "10.0.0.1:8000", "10.0.0.1", 403),
        ("http://10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.1", 200),
        ("http://llm.example", "llm.example", "10.0.0.1", 200),
        ("http://localhost:8000", "localhost:8000", "127.0.0.1", 200),
        ("http://[::1]:8000", "[::1]:8000", "::1", 200),
        ("http://evil.example:8000", "evil.example:8000", "127.0.0.1", 403),
    ],
    ids=["foreign", "file", "own", "own-name", "loopback", "ipv6", "rebound-name"],
)
def test_without_keys_pages_of_other_sites_are_refused(
    origin, host, address, status, app
):
    assert status_for(app, origin, host, address) == status


def test_a_refused_page_learns_which_setting_allows_it(app):
    answer = visit(app, "POST", "/v1/completions", json=ask(), headers={"Origin": PAGE})

    assert "server.allowed_origins" in refused(answer, 403, "auth")


@pytest.mark.parametrize("origins", [[PAGE], ["*"]], ids=["listed", "all"])
def test_pages_of_allowed_sites_are_served(origins, completions):
    app = create_app(completions, origins=origins)

    assert status_for(app, PAGE, "10.0.0.1:8000") == 200


def test_with_keys_the_key_decides_and_not_the_page(completions):
    app = create_app(completions, keys=["one"])
    headers = {"Origin": PAGE, "Authorization": "Bearer one"}

    assert visit(app, "GET", "/status", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/version", "/status", "/nowhere"])
def test_a_path_may_come_with_its_host(path, completions):
    """As clients write it to a proxy; keys are asked for all the same."""
    app = create_app(completions, keys=["one"])

    async def scene(target: str) -> bytes:
        async with serving(app) as port:
            line = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            reader, _writer = await send(port, line.encode())
            return (await reader.read()).split(b"\r\n")[0]

    assert asyncio.run(scene(f"http://x{path}")) == asyncio.run(scene(path))


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
def test_keys_can_be_replaced_while_the_service_serves(path, completions):
    ring = KeyRing(["old"], metrics="old")
    app = create_app(completions, keys=ring)
    ring.replace(["new"], metrics="new")

    statuses = [
        visit(app, "GET", path, headers={"Authorization": f"Bearer {key}"}).status_code
        for key in ("old", "new")
    ]

    assert statuses == [401, 200]


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("figures", 200), ("one", 200), ("owner", 200)]
)
def test_metrics_may_need_a_key_of_their_own(key, status, completions):
    app = create_app(completions, keys=KeyRing(["one"], "owner", "figures"))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    assert visit(app, "GET", "/metrics", headers=headers).status_code == status


def test_a_key_for_metrics_opens_nothing_else(completions):
    app = create_app(completions, keys=KeyRing(["one"], metrics="figures"))
    headers = {"Authorization": "Bearer figures"}

    assert visit(app, "GET", "/status", headers=headers).status_code == 401
