"""A decode worker without an engine, on ports of its own and the clock of the world."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from disagg.pool import Pool
from disagg.transfer.direct import DirectServer
from disagg.transfer.messages import Attach
from disagg.transfer.receiver import Receiver
from disagg.transfer.reservations import Admission, Reservations
from disagg.transfer.rpc import start_server
from disagg.wire import Ticket
from tests.transfer.prompts import EPOCH, MODEL, Prompt, make_pool, make_terms

HOST = "127.0.0.1"


@dataclass
class House:
    """What was admitted stays here."""

    pool: Pool
    receiver: Receiver
    admitted: list[Admission]
    address: str = ""
    direct_port: int = 0

    def reserve(self, prompt: Prompt, rid: str = "r") -> Attach:
        grant = self.receiver.reservations.reserve(prompt.job(rid), EPOCH)
        ticket = Ticket(grant.nonce, grant.epoch, 0)
        return Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens)

    def arrived(self) -> int:
        """Items of all prompts that are here."""
        held = self.receiver.reservations._by_nonce.values()
        return sum(len(x.contents.arrivals.here) for x in held if x.contents is not None)

    @property
    def held(self) -> int:
        """Reservations that wait for their pages."""
        return self.receiver.reservations.gauges()["reservations"]

    def free(self) -> None:
        """The engine finishes everything it has; then nothing is held."""
        for admission in self.admitted:
            for state in admission.groups:
                self.pool.release(list(state.ids()))
            self.receiver.reservations.finished(admission.job.rid, admission.job.attempt)
        self.admitted.clear()
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.receiver.reservations.gauges().values())


@asynccontextmanager
async def open_house(kind: type[Receiver] = Receiver, **terms: object) -> AsyncIterator[House]:
    """A receiver on free ports, on the clock of the world."""
    pool, admitted = make_pool(1 << 20), []
    receiver = kind(Reservations(make_terms(**terms), pool, admitted.append, lambda *drop: None))
    sockets = DirectServer(receiver)
    house = House(pool, receiver, admitted, direct_port=sockets.listen(HOST))
    receiver.direct = lambda: (house.direct_port, sockets.make_key())
    tasks = [asyncio.create_task(x.run()) for x in (receiver, sockets)]
    server, house.address = await start_server([receiver.handlers()], HOST)
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
