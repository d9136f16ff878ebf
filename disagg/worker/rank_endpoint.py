"""The part of a follower that hands over: an io loop on a thread of its own.

    engine   Follower ── begin, offer, computed ──► OutgoingHandoff of this rank
    io       FollowerService, on a server ◄── rank 0, and the workers that send to this one

A failure here ends the process, and with it the group.
"""

import asyncio
import os
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

from disagg.config import TransferConfig
from disagg.engine.follower import Follower
from disagg.transfer.channel import Peers
from disagg.transfer.direct import DirectServer
from disagg.transfer.follower_calls import follower_handler
from disagg.transfer.rpc import start_server, tune_malloc
from disagg.worker.follower_service import FollowerService
from disagg.worker.handoff import OutgoingHandoff, SendingContext
from disagg.worker.rank_start import RankPlace


@dataclass(frozen=True)
class ServeOrder:
    """A follower begins to hand over, at an address of its own.

    model: fingerprint of config and weights
    ports: the first and the last to choose from; None: any
    """

    model: str
    transfer: TransferConfig
    ports: Sequence[int] | None = None


class RankEndpoint:
    """Takes and sends the parts of one follower.

    in_flight: as of `SendingContext`; the follower reads it
    """

    def __init__(self, rank: int, ranks: int, place: RankPlace):
        self.in_flight: dict[str, OutgoingHandoff[Any]] = {}
        self._rank = rank
        self._ranks = ranks
        self._host = place.host
        self._security = place.security
        self._address: Future[str] = Future()

    def start(self, order: ServeOrder, follower: Follower) -> str:
        """Serve until the process ends; the "host:port"."""
        tune_malloc()
        arguments = order, follower
        thread = Thread(target=self._run, args=arguments, name="rank-io", daemon=True)
        thread.start()
        return self._address.result()

    def _run(self, order: ServeOrder, follower: Follower) -> None:
        try:
            asyncio.run(self._serve(order, follower))
        except BaseException as error:
            if not self._address.done():
                self._address.set_exception(error)
                return
            traceback.print_exc()
            os._exit(1)

    async def _serve(self, order: ServeOrder, follower: Follower) -> None:
        context = self._context(order, follower)
        service = FollowerService(context, order.transfer.overlap)
        handlers = [follower_handler(service), service.receiver.handlers()]
        direct: DirectServer | None = None
        if order.transfer.channel == "direct":
            direct = DirectServer(service.receiver, self._security)
            direct.listen(self._host, order.ports)
        server, address = await start_server(
            handlers, self._host, self._security, order.ports
        )
        self._address.set_result(address)
        if direct is not None:
            await direct.run()
        await server.wait_for_termination()

    def _context(self, order: ServeOrder, follower: Follower) -> SendingContext:
        return SendingContext(
            model=order.model,
            plan_of=follower.plan,
            arena=follower.pages,
            peers=Peers(self._security, order.transfer),
            rank=self._rank,
            ranks=self._ranks,
            in_flight=self.in_flight,
        )
