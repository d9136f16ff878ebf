"""Slow and silent clients, too many connections, and the limit of open files."""

import asyncio
import errno
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp

from disagg.config import ServerConfig
from disagg.server import connections
from disagg.server.connections import (
    BODY_RATE,
    MAX_HEADER_BYTES,
    Arrival,
    HeaderFilter,
    LoopErrors,
    http_server,
)
from disagg.server.service import bind

CONFIG = ServerConfig(silence_s=0.2, idle_s=0.2)
GET = b"GET /version HTTP/1.1\r\nHost: here\r\n"
BODY = b'{"prompt": "abc", "max_tokens": 4, "stream": true}'
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
)
LONG_POST = POST.replace(b"%d" % len(BODY), b"1000000")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(app: ASGIApp, config: ServerConfig = CONFIG) -> AsyncIterator[int]:
    """The port of a service that waits little for silent clients."""
    listening = bind("127.0.0.1", 0)
    server = http_server(app, config)
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


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
def test_an_offer_of_http_2_loses_no_body(name, app):
    """As every stock Java client makes it; also of a second request on the connection."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\n%s: h2c\r\nHTTP2-Settings: AAM\r\n"
        % name
    )
    length, chunked = (
        b"Content-Length: %d\r\n" % len(BODY),
        b"Transfer-Encoding: chunked\r\n",
    )
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

    async def scene() -> bytes:
        async with serving(app) as port:
            whole = POST.replace(length, length + offer) + BODY
            reader, writer = await send(port, whole)
            first = await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.write(POST.replace(length, chunked + offer) + chunks)
            return first + await reader.read()

    assert asyncio.run(scene()).count(b"HTTP/1.1 200") == 2


OFFER = (
    POST.removesuffix(b"\r\n")
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n\r\n"
)


@pytest.mark.parametrize("position", range(len(OFFER)))
def test_an_offer_of_http_2_is_found_wherever_it_is_cut(position):
    headers = HeaderFilter()
    whole = OFFER + BODY

    first, nothing = headers.split(whole[:position])
    second, rest = headers.split(whole[position:])

    assert first + second == OFFER.replace(b"Upgrade:", b"ignored:")
    assert (nothing, rest) == (b"", BODY)
    assert not headers.is_inside


def test_only_a_line_that_begins_with_upgrade_is_an_offer():
    line = b"GET / HTTP/1.1\r\nNote: an upgrade: none\r\nDo-Upgrade: yes\r\n\r\n"
    headers = HeaderFilter()

    parts = [headers.split(line[i : i + 1])[0] for i in range(len(line))]

    assert b"".join(parts) == line


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_offer_of_http_2_in_pieces_loses_no_body(size, app):
    whole = GET + b"\r\n" + OFFER + BODY
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]

    async def scene() -> bytes:
        async with serving(app, replace(CONFIG, silence_s=60.0)) as port:
            reader, writer = await send(port, b"")
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            return await reader.readuntil(b"[DONE]")

    assert asyncio.run(scene()).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("number", [4, 5], ids=["second-header", "second-body"])
def test_a_half_sent_request_does_not_count_as_idle(number, app):
    data, answers = SILENT_AFTER[number]

    async def scene() -> bytes:
        async with serving(app, replace(CONFIG, idle_s=3600.0)) as port:
            reader, _writer = await send(port, data)
            return await reader.read()

    assert asyncio.run(scene()).count(b"HTTP/1.1 200") == answers


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the end; a cut may be a reset, where bytes of ours were on their way."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("pieces", [GET, LONG_POST], ids=["header", "body"])
def test_a_client_that_trickles_a_request_is_cut_off(pieces, app):
    """However short its pauses are."""

    async def scene() -> bytes:
        async with serving(app) as port:
            reader, writer = await send(port, pieces)
            answer = asyncio.ensure_future(rest_of(reader))
            while not answer.done():
                writer.write(b"X")
                await asyncio.sleep(0.02)
            return await answer

    assert asyncio.run(scene()) == b""


LONG = b"x" * MAX_HEADER_BYTES


@pytest.mark.parametrize(
    "data",
    [
        GET + b"X: " + LONG + b"\r\n\r\n",
        GET + b"X: " + LONG,
        b"GET /" + LONG,
        GET + b"X: y\r\n" * MAX_HEADER_BYTES,
    ],
    ids=["whole", "line", "path", "lines"],
)
def test_a_long_header_is_refused(data, app):
    async def scene() -> bytes:
        async with serving(app, replace(CONFIG, silence_s=60.0)) as port:
            reader, _writer = await send(port, data)
            return await reader.read()

    assert asyncio.run(scene()).startswith(b"HTTP/1.1 400 ")


def test_a_long_body_before_a_header_is_no_header(app):
    """Both may arrive at once."""
    body = BODY + b" " * (2 * MAX_HEADER_BYTES)
    head = POST.replace(b"%d" % len(BODY), b"%d" % len(body))
    rest = b"Connection: close\r\n\r\n"

    async def scene() -> bytes:
        async with serving(app, replace(CONFIG, silence_s=60.0)) as port:
            reader, writer = await send(port, head + body + GET)
            await reader.readuntil(b"[DONE]")
            writer.write(rest)
            return await reader.read()

    assert b"HTTP/1.1 200 " in asyncio.run(scene())


def test_a_connection_stays_open_between_requests(app):
    async def scene() -> int:
        async with serving(app, replace(CONFIG, idle_s=60.0)) as port:
            idle, idle_writer = await send(port, GET + b"\r\n")
            silent, _writer = await send(port, GET)
            await silent.read()  # closed after silence_s
            idle_writer.write(GET + b"Connection: close\r\n\r\n")
            return (await idle.read()).count(b"HTTP/1.1 200")

    assert asyncio.run(scene()) == 2


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


def test_a_header_has_one_deadline_however_much_arrives():
    arrival = Arrival(began=100.0, heard_at=100.0)

    arrival.add(10_000, now=119.0)

    assert arrival.deadline(20.0, in_body=False) == 120.0


def test_a_body_has_to_come_at_a_least_rate():
    arrival = Arrival(began=100.0, heard_at=100.0)

    arrival.add(10, now=119.9)
    assert arrival.deadline(20.0, in_body=True) == pytest.approx(120.0, abs=0.01)
    arrival.add(60 * BODY_RATE, now=119.9)

    assert arrival.deadline(20.0, in_body=True) == pytest.approx(139.9)


def test_one_connection_too_many_is_answered_503(app):
    async def scene() -> list[bytes]:
        async with serving(app, replace(CONFIG, max_connections=1)) as port:
            first, writer = await send(port, GET + b"\r\n")
            served = await first.readuntil(b"\r\n")
            second, _writer = await send(port, GET + b"\r\n")
            refused = await second.read()
            writer.close()
            await first.read()
            third, _writer = await send(port, GET + b"Connection: close\r\n\r\n")
            return [served, refused, await third.read()]

    served, refused, later = asyncio.run(scene())
    head, _, body = refused.partition(b"\r\n\r\n")
    assert b" 200 " in served
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: " in head
    assert json.loads(body)["error"]["type"] == "capacity"
    assert later.startswith(b"HTTP/1.1 200 ")


def test_a_flood_of_connections_is_closed_without_answers(app, monkeypatch):
    monkeypatch.setattr(connections, "MAX_REFUSALS", 0)

    async def scene() -> bytes:
        async with serving(app, replace(CONFIG, max_connections=1)) as port:
            first, _writer = await send(port, GET + b"\r\n")
            await first.readuntil(b"\r\n")
            second, _other = await send(port, GET + b"\r\n")
            with suppress(ConnectionResetError):
                return await second.read()
            return b""

    assert asyncio.run(scene()) == b""


def test_failed_accepts_are_logged_once_in_a_while(caplog):
    loop: Any = SimpleNamespace(time=lambda: 100.0)
    report = LoopErrors()
    failed = {"exception": OSError(errno.EMFILE, "Too many open files")}

    with caplog.at_level(logging.ERROR):
        for _ in range(128):
            report(loop, failed)

    assert len(caplog.messages) == 1


def test_other_errors_of_the_loop_are_reported_as_usual():
    reported = []
    loop: Any = SimpleNamespace(default_exception_handler=reported.append)

    LoopErrors()(loop, {"message": "a task was lost"})

    assert reported == [{"message": "a task was lost"}]
