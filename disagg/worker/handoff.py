"""What leaves a worker: the pages of one sequence, from the engine to the sender of its hand-off.

engine thread: begin, offer ─► thread of copies, from a device ─► io loop: sender ─► peer
               what it made of the sequence ────────────────────► io loop: who waits for it
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar
from weakref import proxy

from disagg.engine.engine import Engine
from disagg.engine.messages import Failed, Moved, Prefilled, as_disagg_error
from disagg.errors import TransferError
from disagg.kv.page import Item
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState
from disagg.transfer.channel import Peers
from disagg.transfer.messages import Attach, Submit
from disagg.transfer.records import ArenaSource
from disagg.transfer.sender import Sender
from disagg.transfer.stats import HandoffStats
from disagg.wire import PlainValue, Ticket

Made = TypeVar("Made", Prefilled, Moved)


@dataclass(frozen=True)
class HandoffContext:
    """What the hand-offs of a worker have in common. `copies` waits for them, in order.

    leaving: what leaves now, by the engine's name
    """

    engine: Engine
    model: str
    peers: Peers
    copies: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "copies"))
    leaving: "dict[str, OutgoingHandoff[Any]]" = field(default_factory=dict)

    def step(self, outputs: Iterable[Prefilled | Moved | Failed]) -> None:
        """What an engine step brought; who was given up meanwhile is not here any more."""
        for output in outputs:
            if (offering := self.leaving.get(output.rid)) and not offering.made.done():
                offering.made.set_result(output)


class OutgoingHandoff(Generic[Made]):
    """One hand-off that leaves, by the names that the engine and the sender call it.

    name:    of the sequence in the engine · made: what that makes of it
    overlap: pages leave while later layers compute
    """

    def __init__(
        self, way: HandoffContext, submit: Submit, name: str, overlap: bool = True
    ):
        job, plan = submit.job, way.engine.plan(submit.job.codec)
        ticket = Ticket(submit.nonce, submit.decode_epoch, 0)
        attach = Attach(ticket, way.model, plan.fingerprint, job.tokens)
        channel = way.peers.get(submit.decode_address)
        # weak, or the garbage collector would have to find each of a prompt's thousands of items
        self.sender = Sender(channel, attach, plan, proxy(self), job.deadline_s)
        self.checklist = self.sender.outbox.checklist
        self.arena = way.engine.pool.arena
        self._way, self._name, self._overlap = way, name, overlap
        self._loop = asyncio.get_running_loop()
        self.made: asyncio.Future[Made | Failed] = self._loop.create_future()
        self._source: ArenaSource | None = None
        self._items = self.checklist.items  # asked for now, while there is time
        self._offered = set[Item]()
        self._left_out = set[Item]()

    # -- on the io loop

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[Self]:
        """From its attachment on; afterwards nobody reads its records."""
        self._way.leaving[self._name] = self
        self._sending = asyncio.create_task(self.sender.run())
        try:
            yield self
        finally:
            del self._way.leaving[self._name]
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def computed(self) -> Made:
        """What the engine makes of it; raises what came in between."""
        both: list[asyncio.Future] = [self.made, self._sending]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self.made.done():
            self._sending.result()  # raises: without a commit it cannot end well
        if isinstance(made := self.made.result(), Failed):
            raise made.error
        return made

    async def commit(
        self, first_token: int, extras: Mapping[str, PlainValue]
    ) -> HandoffStats:
        """All is computed: what was kept back goes, and what was left out as it is there; then the
        commit; the figures."""
        left_out = [x for x in self._items if x not in self._offered]
        self._left_out.update(left_out)
        if items := left_out if self._overlap else self._items:
            self._pass(items)
        self.sender.finish(first_token, extras)
        return await self._sending

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items that were offered."""
        assert self._source is not None
        if lost := self._left_out.intersection(items):
            raise TransferError(
                f"{min(lost)} was there, so it was not encoded, and is there no more"
            )
        return self._source.read(items)

    def _pass(self, items: Sequence[Item]) -> None:
        try:
            self.sender.offer(items)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        self.sender.end(as_disagg_error(error))

    # -- on the engine's thread

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """The records are there; from now on they can be read."""
        self._source = ArenaSource(self.arena, self.checklist, groups)

    def offer(self, items: Sequence[Item]) -> None:
        """Bytes are final: they may leave, unless nothing shall leave before all is computed."""
        assert self._source is not None
        self._offered.update(items)
        if not self._overlap:
            return
        if self.arena.on_host:
            self._loop.call_soon_threadsafe(self._pass, items)
        else:
            self._way.copies.submit(self._land, items, self._source.stage(items))

    def has(self, item: Item) -> bool:
        """Whether the other side has it, as far as is known."""
        return self.checklist.place(item) in self.sender.outbox.there

    # -- on the thread that waits for copies

    def _land(self, items: Sequence[Item], copied: Callable[[], None]) -> None:
        try:
            copied()
            self._loop.call_soon_threadsafe(self._pass, items)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._break, error)
