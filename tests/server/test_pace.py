"""A burst begins and ends a few requests in each turn of the loop."""

import asyncio
import socket
from collections import Counter
from functools import partial
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from disagg.config import ServerConfig
from disagg.server.connections import (
    ACCEPTS_A_TURN,
    ConnectionPool,
    http_server,
)
from disagg.server.pace import CALLS_A_TURN, Pace, PacedRequests
from tests.server.test_connections import BODY, POST, serving

BURST = 100


class Turns:
    """Counts the turns of the running loop, and what happens in each."""

    def __init__(self) -> None:
        self.number = 0
        self.counts = Counter[int]()
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._next)

    def note(self) -> None:
        self.counts[self.number] += 1


async def until_all(turns: Turns, count: int = BURST) -> None:
    while turns.counts.total() < count:
        await asyncio.sleep(0)


async def test_calls_of_a_burst_are_spread_over_turns():
    pace, turns = Pace(calls_a_turn=8), Turns()

    for _ in range(BURST):
        pace.call(turns.note)
    await until_all(turns)

    assert max(turns.counts.values()) == 8
    assert len(turns.counts) == -(-BURST // 8)


async def test_calls_are_made_in_their_order():
    pace, order = Pace(calls_a_turn=2), list[int]()

    for number in range(9):
        pace.call(partial(order.append, number))
    while len(order) < 9:
        await asyncio.sleep(0)

    assert order == list(range(9))


async def test_a_few_calls_are_made_at_once():
    pace, made = Pace(calls_a_turn=2), list[int]()

    pace.call(partial(made.append, 1))
    pace.call(partial(made.append, 2))

    assert made == [1, 2]


async def test_a_call_that_breaks_keeps_no_other():
    pace, made = Pace(calls_a_turn=1), list[int]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    pace.call(partial(made.append, 1))
    pace.call(lambda: 1 / 0)
    pace.call(partial(made.append, 2))
    while len(made) < 2:
        await asyncio.sleep(0)

    assert made == [1, 2]


async def test_who_left_meanwhile_takes_nothing_from_others():
    pace = Pace(calls_a_turn=1)
    waiting = [asyncio.create_task(pace.turn()) for _ in range(9)]
    await asyncio.sleep(0)
    waiting[4].cancel()

    results = await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(each) for each in results if each is not None] == [
        asyncio.CancelledError
    ]


@pytest.mark.parametrize(("method", "most"), [("POST", CALLS_A_TURN), ("GET", BURST)])
async def test_only_posts_wait_for_their_turn(method, most):
    turns = Turns()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        turns.note()

    paced: Any = PacedRequests(app, Pace())
    scope = {"type": "http", "method": method}
    tasks = [asyncio.create_task(paced(scope, None, None)) for _ in range(BURST)]
    await asyncio.gather(*tasks)

    assert max(turns.counts.values()) == most


async def test_clients_that_leave_together_end_a_few_a_turn():
    turns, arrived = Turns(), list[bool]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        arrived.append(True)
        assert (await receive())["type"] == "http.disconnect"
        turns.note()

    async with serving(app, ServerConfig()) as port:
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for _, writer in clients:
            writer.write(POST + BODY)
        while len(arrived) < 50:
            await asyncio.sleep(0.001)

        for _, writer in clients:
            writer.transport.abort()
        await until_all(turns, 50)

    assert max(turns.counts.values()) <= CALLS_A_TURN


async def test_connections_are_accepted_a_few_a_turn(monkeypatch):
    """While no turn passes, the system accepts them all the same."""
    turns = Turns()
    opened = ConnectionPool.open

    def note(pool: ConnectionPool) -> bool:
        turns.note()
        return opened(pool)

    monkeypatch.setattr(ConnectionPool, "open", note)
    async with serving(None, ServerConfig()) as port:
        _, first = await asyncio.open_connection("127.0.0.1", port)
        clients = [
            socket.create_connection(("127.0.0.1", port), timeout=5.0)
            for _ in range(BURST)
        ]
        await until_all(turns, 1 + BURST)
        for client in (first, *clients):
            client.close()

    assert max(turns.counts.values()) <= ACCEPTS_A_TURN


async def test_the_server_of_an_application_is_paced():
    turns = Turns()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        turns.note()

    server = http_server(app, ServerConfig())
    paced: Any = server.config.app
    scope = {"type": "http", "method": "POST"}
    tasks = [asyncio.create_task(paced(scope, None, None)) for _ in range(BURST)]
    await asyncio.gather(*tasks)

    assert max(turns.counts.values()) == CALLS_A_TURN
