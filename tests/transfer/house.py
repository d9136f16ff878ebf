"""A decode worker without an engine: a desk behind the service, and on ports of its own."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from disagg.transfer.direct import DirectServer
from disagg.transfer.messages import Attach, Credit
from disagg.transfer.receiver import Receiver
from disagg.transfer.rpc import start_server
from disagg.transfer.security import Security
from disagg.wire import Buffer, Ticket, message_frame
from tests.transfer.desk import Desk
from tests.transfer.prompts import MODEL, Prompt

HOST = "127.0.0.1"


class House(Desk):
    """A desk behind the service. `channels`: on which frames came; `ended`: how many have."""

    def __init__(self, clock: Callable[[], float] | None = time.monotonic, **desk: object):
        super().__init__(clock=clock, **desk)
        self.damaged: list[tuple[str, int, str]] = []
        note = lambda rid, attempt, error: self.damaged.append((rid, attempt, error.reason))  # noqa: E731
        self.receiver = Watched(self.ledger, note)
        self.door: DirectServer | None = None
        self.address, self.direct_port = "", 0

    def promise(self, prompt: Prompt, rid: str = "r") -> Attach:
        """A reservation, as a sender gets it."""
        grant = self.reserve(prompt, rid=rid)
        ticket = Ticket(grant.nonce, grant.epoch, 0)
        return Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens)

    def arrived(self) -> int:
        """Items of all prompts that are here."""
        held = self.ledger._live.values()
        return sum(len(x.contents.arrivals.here) for x in held if x.contents is not None)

    @property
    def held(self) -> int:
        """Reservations that wait for their pages."""
        return self.ledger.gauges()["reservations"]

    def close(self) -> None:
        """The engine finishes everything it has; then nothing is held."""
        self.free()
        self.assert_nothing_held()


class Watched(Receiver):
    """Notes the channels of frames and counts the bytes of all messages, both ways."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.channels, self.ended, self.nbytes = set[object](), 0, 0

    async def attach(self, data: bytes) -> bytes:
        return self._count(data, await super().attach(data))

    async def commit(self, data: bytes) -> bytes:
        return self._count(data, await super().commit(data))

    async def push(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async def noted() -> AsyncIterator[bytes]:
            async for message in messages:
                self.nbytes += len(message) - len(message_frame(message))
                yield message

        async for answer in super().push(noted()):
            yield answer

    def take(self, data: Buffer, channel: object) -> Credit:
        self.channels.add(channel)
        credit = super().take(data, channel)
        self._count(data, credit.to_message().SerializeToString())
        return credit

    def channel_ended(self, channel: object) -> None:
        super().channel_ended(channel)
        self.ended += 1

    def _count(self, data: Buffer, answer: bytes) -> bytes:
        self.nbytes += len(data) + len(answer)
        return answer


@asynccontextmanager
async def open_house(security: Security | None = None, **terms: object) -> AsyncIterator[House]:
    """A house on free ports."""
    house = House(**terms)
    receiver, door = house.receiver, DirectServer(house.receiver, security)
    house.door, house.direct_port = door, door.listen(HOST)
    receiver.direct = lambda: (house.direct_port, door.make_key())
    tasks = [asyncio.create_task(x.run()) for x in (receiver, door)]
    server, house.address = await start_server([receiver.handlers()], HOST, security)
    try:
        yield house
    finally:
        await server.stop(None)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextmanager
def process(target: object, *arguments: object) -> Iterator[tuple[BaseProcess, Connection]]:
    """Another process, and where it answers; killed at the end if it still lives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.transfer.house", "tests.transfer.peer"])
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()
