"""A decode worker's receiver on a real loopback server, and a proxy that mistreats its bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from disagg.transfer.channel import Link, connect, start_server
from disagg.transfer.keeping import KeepingPool
from disagg.transfer.messages import Admission
from disagg.transfer.receiver import Receiver
from disagg.transfer.security import Security
from disagg.transfer.sender import Sender
from disagg.transfer.sending import Options, Receipt
from tests.transfer.prompts import Prompt, make_pool, make_terms

QUICK = Options(deadline_s=20.0, silence_s=1.0, stall_s=5.0, call_s=2.0, frame_bytes=4000)


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class House:
    """A decode worker without an engine: what was admitted stays here."""

    pool: KeepingPool
    receiver: Receiver
    address: str
    link: Link
    admitted: list[Admission] = field(default_factory=list)
    dropped: list[tuple[str, int, str]] = field(default_factory=list)
    refuse: Callable[[Admission], None] | None = None

    def sender(self, prompt: Prompt, options: Options = QUICK, **request: object) -> Sender:
        return Sender(self.link, prompt.request(**request), prompt.plan, prompt.read, options)

    def free(self) -> None:
        """The engine finishes everything."""
        for admission in self.admitted:
            for state in admission.groups:
                self.pool.release(list(state.ids()))
            self.receiver.finished(admission.rid, admission.attempt)
        self.admitted.clear()

    def assert_nothing_held(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.receiver.gauges().values())


@asynccontextmanager
async def open_house(
    nbytes: int = 1 << 20,
    clock: Callable[[], float] | None = None,
    security: Security | None = None,
    client: Security | None = None,
    **terms: object,
) -> AsyncIterator[House]:
    """A receiver on a free port; everything is closed and checked at the end."""
    pool = make_pool(nbytes)
    admitted: list[Admission] = []
    dropped: list[tuple[str, int, str]] = []

    def admit(admission: Admission) -> None:
        if house.refuse:
            house.refuse(admission)
        admitted.append(admission)

    options = {} if clock is None else {"clock": clock}
    receiver = Receiver(
        make_terms(pool, **terms),
        pool,
        pool.arena,
        admit,
        lambda *drop: dropped.append(drop),
        **options,
    )
    async with receiver:
        handlers = [receiver.serve("127.0.0.1", security)]
        server, address = await start_server(handlers, "127.0.0.1", security)
        link = connect(address, client or security)
        house = House(pool, receiver, address, link, admitted, dropped)
        try:
            yield house
        finally:
            await link.close()
            await server.stop(None)
    pool.check_integrity()


async def hand_over(sender: Sender, prompt: Prompt, pause: float = 0.0) -> Receipt:
    """Offer layer by layer, as an engine would, and wait for the receipt."""
    running = asyncio.create_task(sender.run())
    for layer in range(len(prompt.plan.group_of)):
        sender.offer(prompt.checklist.layer(layer))
        await asyncio.sleep(pause)
    sender.finish(42, {"ids": [1, 2]}, {"encode": 1.5})
    return await running


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that will happen soon."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Proxy:
    """A TCP proxy in front of both ports of a house that cuts or freezes what goes through it.

    budget:  bytes from the client that pass before `fate` strikes, once; None: all pass
    """

    def __init__(self, house: House, budget: int | None = None, fate: str = "cut"):
        self.budget = budget
        self.fate = fate
        self.struck = 0
        self._receiver = house.receiver
        self._targets = [int(house.address.split(":")[1]), house.receiver.streams.port]
        self._ports = [0, 0]
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Proxy":
        await self._listen()
        self.address = f"127.0.0.1:{self._ports[0]}"
        self._receiver.streams.port = self._ports[1]
        return self

    async def close_for(self, seconds: float) -> None:
        """Cut everything, and let nobody in for a while: a link that is down."""
        for server in self._servers:
            server.close()
            await server.wait_closed()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(seconds)
        await self._listen()

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()

    async def _listen(self) -> None:
        self._servers = [
            await asyncio.start_server(partial(self._serve, target), "127.0.0.1", port)
            for target, port in zip(self._targets, self._ports, strict=True)
        ]
        self._ports = [server.sockets[0].getsockname()[1] for server in self._servers]

    async def _serve(
        self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
        self._writers += [writer, there_writer]
        for task in (
            asyncio.ensure_future(self._pump(reader, there_writer, True, writer)),
            asyncio.ensure_future(self._pump(there_reader, writer, False, there_writer)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        counted: bool,
        back: asyncio.StreamWriter,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                if counted and self._strikes(len(data)):
                    if self.fate == "cut":
                        break
                    await asyncio.Event().wait()  # frozen: nothing passes, nothing closes
                writer.write(data)
                await writer.drain()
        writer.close()
        back.close()

    def _strikes(self, nbytes: int) -> bool:
        if self.budget is None:
            return False
        self.budget -= nbytes
        if self.budget >= 0:
            return False
        self.budget = None
        self.struck += 1
        return True
