"""The hand-offs of a follower: the parts of its heads, in and out. Lives on its io loop.

    frames of other workers ─► PageReceiver ─► FollowerParts ─► arena
    rank 0 ─► FollowerService
                 │ open, attach, check, close   what arrives here
                 │ send, finish, stop           OutgoingHandoff: what leaves
                 └ digests                      what is cached here

A follower decides nothing: reservations, leases, commits and the results of requests are those of
rank 0. The engine of this rank, which computes what rank 0 broadcasts, finds a hand-off by its name
in `context.in_flight`, and tells it what is final.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from disagg.errors import ReservationError
from disagg.transfer.follower_calls import FollowerHandler, Opening
from disagg.transfer.incoming import FollowerParts
from disagg.transfer.messages import Attach, Attached, Submit, Work
from disagg.transfer.receiver import PageReceiver
from disagg.transfer.stats import HandoffStats
from disagg.wire import Commit, digest
from disagg.worker.handoff import MigrationHandoff, OutgoingHandoff, SendingContext

# after the deadline of a hand-off, when rank 0 waits for it no longer
GIVEN_UP_S = 10.0


@dataclass(frozen=True)
class _Sending:
    """A hand-off that leaves; `ends` gives it up."""

    handoff: OutgoingHandoff[Any]
    ends: AsyncExitStack


class FollowerService(FollowerHandler):
    """What rank 0 calls, and the page endpoint of this rank.

    `start_server` serves both: `follower_handler(service)` and `service.receiver.handlers()`.

    receiver: takes frames; `receiver.direct` as on rank 0
    """

    def __init__(
        self,
        context: SendingContext,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.parts = FollowerParts(
            context.rank, context.ranks, context.arena, context.plan_of
        )
        self.receiver = PageReceiver(self.parts)
        self._context = context
        self._overlap = overlap
        self._clock = clock
        self._sending: dict[str, _Sending] = {}  # by the engine's name

    # -- what arrives

    async def open(self, opening: Opening) -> None:
        self.parts.open(opening)

    async def attach(self, attach: Attach) -> Attached:
        digests = self.parts.attach(attach.ticket)
        attached = Attached(have=[*digests.keys()], digests=[*digests.values()])
        return self.receiver.offer_direct(attach, attached)

    async def check(self, commit: Commit) -> float:
        return self.parts.check(commit)

    async def close(self, nonce: int) -> None:
        self.parts.close(nonce)

    # -- what leaves

    async def send(self, submit: Submit, name: str) -> None:
        await self._stop_overdue()
        await self.stop(name)
        handoff: OutgoingHandoff[Any]
        if submit.work is Work.MOVE:
            handoff = MigrationHandoff(self._context, submit, name)
        else:
            handoff = OutgoingHandoff(self._context, submit, name, self._overlap)
        ends = AsyncExitStack()
        await ends.enter_async_context(handoff.sending())
        self._sending[name] = _Sending(handoff, ends)

    async def finish(
        self, name: str, first_token: int, deadline_s: float
    ) -> HandoffStats:
        if name not in self._sending:
            raise ReservationError(f"rank {self._context.rank} does not send {name}")
        handoff = self._sending[name].handoff
        await handoff.until_computed()
        return await handoff.commit(first_token, {})

    async def stop(self, name: str) -> None:
        if sending := self._sending.pop(name, None):
            await sending.ends.aclose()

    async def _stop_overdue(self) -> None:
        """What rank 0 has given up long ago: its call was lost while this process was frozen."""
        latest = self._clock() - GIVEN_UP_S
        overdue = [
            name
            for name, sending in self._sending.items()
            if sending.handoff.deadline < latest
        ]
        for name in overdue:
            await self.stop(name)

    async def digests(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        copies = self._context.arena.stage(spans)
        return await asyncio.to_thread(lambda: [*map(digest, copies())])

    async def ping(self) -> None:
        """Its io loop runs."""
