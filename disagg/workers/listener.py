"""Follows the events of one worker for as long as the worker lives.

    stream open ──► events ──► broken: open again, saying what is known ──► ...
                                  │ silent for too long: down ──► reached again: fence, up

A broken stream only means that something is wrong; after a silence the worker's work is given to
others, so it has to drop everything before it takes part again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Protocol

from disagg.errors import DisaggError
from disagg.transfer.work import TokenEvent
from disagg.workers.members import Peer

REOPEN_S = 0.1  # pause before a broken event stream is opened again


class Audience(Protocol):
    """Who wants to know: the router."""

    def known(self, name: str) -> Mapping[str, int]:
        """rid -> tokens that need not be said again."""

    def hear(self, name: str, events: Sequence[TokenEvent]) -> None:
        """What a worker did."""

    def up(self, peer: Peer) -> None:
        """A worker that was down takes part again, as a new incarnation."""

    def down(self, name: str) -> None:
        """A worker did not answer for too long."""


class Listener:
    """The event stream of one worker."""

    def __init__(
        self, peer: Peer, audience: Audience, silence_s: float, clock: Callable[[], float]
    ):
        self._peer = peer
        self._audience = audience
        self._silence_s = silence_s
        self._clock = clock
        self._heard = clock()

    async def run(self) -> None:
        """Until cancelled."""
        down = False
        while True:
            with suppress(DisaggError, TimeoutError):
                if down:
                    await self._fence()
                    down = False
                await self._follow()
            if not down and self._clock() - self._heard >= self._silence_s:
                down = True
                self._audience.down(self._peer.name)
            await asyncio.sleep(REOPEN_S)

    async def _follow(self) -> None:
        """Pass events on until the stream breaks or is silent for too long."""
        name = self._peer.name
        stream = aiter(self._peer.client.events(self._audience.known(name)))
        async with aclosing(stream):  # type: ignore[type-var]
            while True:
                try:
                    async with asyncio.timeout(self._silence_s):
                        events = await anext(stream)
                except StopAsyncIteration:
                    return
                self._heard = self._clock()
                self._audience.hear(name, events)

    async def _fence(self) -> None:
        """The worker drops all it had; from now on it is a new incarnation."""
        started = self._peer.started
        fenced = replace(started, epoch=started.epoch + 1)
        await self._peer.client.fence(fenced.epoch)
        self._peer, self._heard = replace(self._peer, started=fenced), self._clock()
        self._audience.up(self._peer)
