"""A client that is silent in the middle of a request is not waited for; one that listens is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import ASGIApp

from disagg.config import ServerConfig
from disagg.server.connections import http_server
from disagg.server.service import bind

GET = b"GET /version HTTP/1.1\r\nHost: here\r\n"
BODY = b'{"prompt": "abc", "max_tokens": 4, "stream": true}'
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """The port of a service that waits little for silent clients."""
    listening = bind("127.0.0.1", 0)
    server = http_server(app, ServerConfig(silence_s=0.2))
    run = asyncio.create_task(server.serve([listening]))
    try:
        async with asyncio.timeout(30):
            yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await run


async def send(port: int, data: bytes) -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


SILENT_AFTER = [
    (b"", 0),
    (GET, 0),
    (POST + BODY[:-1], 0),
    (GET + b"\r\n", 1),
    (GET + b"\r\n" + GET, 1),
    (GET + b"\r\n" + POST + BODY[:-1], 1),
]


@pytest.mark.parametrize(
    ("data", "answers"),
    SILENT_AFTER,
    ids=["nothing", "header", "body", "whole", "second-header", "second-body"],
)
def test_a_connection_is_closed_whose_client_says_no_more(data, answers, app):
    async def scene() -> bytes:
        async with serving(app) as port:
            reader, _writer = await send(port, data)
            return await reader.read()

    assert asyncio.run(scene()).count(b"HTTP/1.1 200") == answers


def test_who_waits_for_an_answer_may_be_silent(app, router):
    router.pause_at = 1

    async def scene() -> None:
        async with serving(app) as port:
            waiting, _writer = await send(port, POST + BODY)
            await waiting.readuntil(b"data: ")
            other, _other_writer = await send(port, GET)
            await other.read()  # closed: as long was the first one silent
            router.go.set()
            await waiting.readuntil(b"[DONE]")

    asyncio.run(scene())
