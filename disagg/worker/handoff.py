"""The records of one sequence on their way out of a worker.

    engine thread   begin, has, offer
                                  │ └─► from a device: the thread of copies waits for the bytes
                                  ▼                                        │
    io loop                   Sender.offer ◄───────────────────────────────┘
                    result ─► Sender.finish: the commit

An OutgoingHandoff owns its Sender and pushes items into it as they become final. Nothing calls back
from there: what the engine makes of the sequence arrives through the HandoffContext.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from disagg.engine.engine import Engine
from disagg.engine.messages import Failed, Moved, Prefilled, as_disagg_error
from disagg.kv.page import FinalAt, Item, Kind
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.state import GroupState
from disagg.transfer.channel import Peers
from disagg.transfer.messages import Attach, Submit
from disagg.transfer.records import ArenaSource
from disagg.transfer.sender import Sender
from disagg.transfer.stats import HandoffStats
from disagg.wire import PlainValue, Ticket

PART_ITEMS = 64  # pushed at once by a sequence that decodes while it moves
PART_PAUSE_S = 0.005  # between two such parts
EngineResult = TypeVar("EngineResult", Prefilled, Moved)


@dataclass(frozen=True)
class HandoffContext:
    """What the outgoing hand-offs of a worker have in common.

    copies:    one thread that waits for copies from a device, in order
    in_flight: hand-offs by the engine's name of the sequence
    """

    engine: Engine
    model: str
    peers: Peers
    copies: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "copies"))
    in_flight: "dict[str, OutgoingHandoff[Any]]" = field(default_factory=dict)

    def deliver(self, outputs: Iterable[Prefilled | Moved | Failed]) -> None:
        """Pass results of an engine step on; those of hand-offs given up meanwhile are dropped."""
        for output in outputs:
            handoff = self.in_flight.get(output.rid)
            if handoff is not None and not handoff.result.done():
                handoff.result.set_result(output)


class OutgoingHandoff(Generic[EngineResult]):
    """One hand-off that leaves this worker: the engine's Handoff, and the owner of a Sender.

    name:       the engine's name of the sequence
    overlap:    items leave while later layers compute; else all of them leave with the commit
    part_items: push at most so many items at once, with pauses, until all are offered; None: all

    result:        what the engine makes of the sequence
    offered_items: by the engine
    """

    def __init__(
        self,
        context: HandoffContext,
        submit: Submit,
        name: str,
        overlap: bool = True,
        part_items: int | None = None,
    ):
        job = submit.job
        plan = context.engine.plan(job.codec)
        if job.moved:
            plan = plan.moving
        attach = Attach(
            ticket=Ticket(submit.nonce, submit.decode_epoch, gen=0),
            model=context.model,
            plan=plan.fingerprint,
            tokens=job.tokens,
        )
        channel = context.peers.get(submit.decode_address)
        self.sender = Sender(channel, attach, plan, job.deadline_s)
        self.manifest = self.sender.queue.manifest
        self.arena = context.engine.pool.arena
        self.offered_items = set[Item]()
        self._context = context
        self._name = name
        self._overlap = overlap
        self._part_items = part_items
        self._unpushed: list[Item] = []  # later parts
        self._source: ArenaSource | None = None
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[EngineResult | Failed] = self._loop.create_future()

    @property
    def all_offered(self) -> bool:
        """Whether the engine has offered every item."""
        return len(self.offered_items) == self.manifest.num_items

    # -- on the io loop

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[Self]:
        """Attach and send, until the end of the block; its records are not read afterwards."""
        self._context.in_flight[self._name] = self
        self._send_task = asyncio.create_task(self.sender.run())
        try:
            yield self
        finally:
            del self._context.in_flight[self._name]
            self._send_task.cancel()
            await asyncio.gather(self._send_task, return_exceptions=True)

    async def engine_result(self) -> EngineResult:
        """Wait for the engine; raises its error, or the sender's if that comes first."""
        either: list[asyncio.Future[Any]] = [self.result, self._send_task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self.result.done():
            self._send_task.result()  # raises: without a commit it cannot end well
        result = self.result.result()
        if isinstance(result, Failed):
            raise result.error
        return result

    async def commit(
        self, first_token: int, extras: Mapping[str, PlainValue]
    ) -> HandoffStats:
        """The engine is done: push what is left, then commit; statistics of the hand-off.

        The engine did not encode and offer what `has` says that the receiver has.
        """
        if not (self._overlap and self.all_offered):
            # a long prompt has 65,536 items: going through them would hold up the loop
            unencoded = await asyncio.to_thread(self._not_offered)
            self.sender.queue.mark_unencoded(unencoded)
            self._push(unencoded if self._overlap else self.manifest.items)
        self.sender.finish(first_token, extras)
        return await self._send_task

    def _not_offered(self) -> list[Item]:
        """The items that the engine has not offered. For any thread, once the engine is done."""
        return [x for x in self.manifest.items if x not in self.offered_items]

    def _push(self, items: Sequence[Item]) -> None:
        """Push items into the sender, at once or in parts."""
        if self._part_items is None:
            self._push_now(items)
            return
        is_pausing = bool(self._unpushed)
        self._unpushed.extend(items)
        if self.all_offered or not is_pausing:
            self._push_part(self._part_items)

    def _push_part(self, part_items: int) -> None:
        count = len(self._unpushed) if self.all_offered else part_items
        part = self._unpushed[:count]
        del self._unpushed[:count]
        if part:
            self._push_now(part)
            self._loop.call_later(PART_PAUSE_S, self._push_part, part_items)

    def _push_now(self, items: Sequence[Item]) -> None:
        try:
            self.sender.offer(items)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.sender.end(as_disagg_error(error))

    # -- on the engine's thread

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """The records are allocated; from now on they can be read."""
        self._source = ArenaSource(self.arena, self.manifest, groups)
        self.sender.queue.read_from(self._source)

    def offer(self, items: Sequence[Item]) -> None:
        """The bytes of these items are final: they may leave."""
        assert self._source is not None
        self.offered_items.update(items)
        if not self._overlap:
            return
        if self.arena.on_host:
            self._loop.call_soon_threadsafe(self._push, items)
        else:
            wait_for_copies = self._source.stage(items)
            self._context.copies.submit(self._push_copied, items, wait_for_copies)

    def has(self, item: Item) -> bool:
        """Whether the receiver has an item already, as far as is known."""
        return self.manifest.index_of(item) in self.sender.queue.peer_has

    # -- on the thread of copies

    def _push_copied(
        self, items: Sequence[Item], wait_for_copies: Callable[[], None]
    ) -> None:
        try:
            wait_for_copies()
            self._loop.call_soon_threadsafe(self._push, items)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)


class MigrationHandoff(OutgoingHandoff[Moved]):
    """A sequence that moves while it decodes.

    The engine begins it twice. At first only sealed pages are final; where the sequence stops,
    everything is. Sealed pages leave in small parts, as packing all of them at once would delay the
    next token.
    """

    def __init__(self, context: HandoffContext, submit: Submit, name: str):
        super().__init__(context, submit, name, part_items=PART_ITEMS)
        self._items = self.manifest.items  # listed before the engine waits for them

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        has_stopped = self._source is not None
        super().begin(plan, groups)
        items = [item for item in self._items if item not in self.offered_items]
        if has_stopped:
            self.manifest.match(groups)
        else:
            sealed = [
                _sealed_records(group, state, self.manifest.tokens)
                for group, state in zip(plan.groups, groups, strict=True)
            ]
            items = [x for x in items if x.record < sealed[x.group].get(x.kind, 0)]
        self.offer(items)


def _sealed_records(
    group: LayerGroup, state: GroupState, tokens: int
) -> dict[Kind, int]:
    """By kind, how many records keep their bytes and their numbers until `tokens` tokens."""
    drops_pages = group.dropped_pages(tokens) > state.dropped
    if drops_pages or group.flush_page or group.final_at is FinalAt.PROMPT:
        return {}
    ids = state.ids_by_kind()
    return {kind: len(ids.get(kind, ())) for kind in (Kind.SEGMENT, Kind.PAGE)}
