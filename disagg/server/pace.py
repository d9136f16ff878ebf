"""Limits how much begins and ends in one turn of the event loop.

The requests of a burst become readable in the same turn. If all of them began in the next one, or
ended there when their clients leave, every stream would stand still meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

CALLS_A_TURN = 16  # each takes some 0.2 ms, and as much again in the turns that follow


class Pace:
    """Makes a limited number of calls in each turn of the loop, in the order in which they came."""

    def __init__(self, calls_a_turn: int = CALLS_A_TURN):
        self._calls_a_turn = calls_a_turn
        self._left = calls_a_turn  # in this turn
        self._calls: deque[Callable[[], object]] = deque()
        self._is_counting = False  # `_begin_turn` will run in the next turn

    def call(self, call: Callable[[], object]) -> None:
        """Make a call, at once or in a later turn."""
        self._calls.append(call)
        if len(self._calls) == 1:
            self._make_calls()
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    async def turn(self) -> None:
        """Wait for a turn in which one more may begin."""
        future = asyncio.get_running_loop().create_future()
        self.call(partial(_resolve, future))
        await future

    def _begin_turn(self) -> None:
        is_idle = self._left == self._calls_a_turn and not self._calls
        if is_idle:
            self._is_counting = False
            return
        self._left = self._calls_a_turn
        asyncio.get_running_loop().call_soon(self._begin_turn)
        self._make_calls()

    def _make_calls(self) -> None:
        while self._calls and self._left:
            self._left -= 1
            self._calls.popleft()()


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class PacedRequests:
    """Lets a few POST requests begin in each turn of the loop. Others begin at once."""

    def __init__(self, app: ASGIApp, pace: Pace):
        self._app = app
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope.get("method") == "POST":
            await self._pace.turn()
        await self._app(scope, receive, send)
