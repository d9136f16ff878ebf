"""The records of one sequence on their way out of a worker.

    engine thread   begin, has, offer
                                  │ └─► from a device: the thread of copies waits for the bytes
                                  ▼                                        │
    io loop                   Sender.offer ◄───────────────────────────────┘
                    result ─► Sender.finish: the commit

An OutgoingHandoff owns its Senders and pushes items into them as they become final. Nothing calls
back from there: what the engine makes of the sequence arrives through the HandoffContext.

A Sender carries one part of the heads of this rank; there is one part where a worker of one rank
hands over to another such. In a group each rank has an OutgoingHandoff, with the parts of its own
heads. That of rank 0 begins those of its followers before the engine may compute, commits them
together with its own, and is not over until they are.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from disagg.engine.engine import Engine
from disagg.engine.messages import Failed, Moved, Prefilled, as_disagg_error
from disagg.kv.arena import Arena
from disagg.kv.page import FinalAt, Item, Kind
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.state import GroupState
from disagg.transfer.channel import Peers
from disagg.transfer.follower_calls import FollowerHandler
from disagg.transfer.messages import Attach, Submit
from disagg.transfer.partition import HeadSlice, Partition, part_nonce
from disagg.transfer.records import ArenaSource
from disagg.transfer.sender import Sender
from disagg.transfer.stats import HandoffStats, joined
from disagg.wire import PlainValue, Ticket

BATCH_ITEMS = 64  # pushed at once by a sequence that decodes while it moves
BATCH_PAUSE_S = 0.005  # between two such batches
EngineResult = TypeVar("EngineResult", Prefilled, Moved)


@dataclass(frozen=True, kw_only=True)
class SendingContext:
    """What the outgoing hand-offs of a rank have in common.

    model:     fingerprint of config and weights
    plan_of:   the plan of a codec spec, with the heads of this rank
    arena:     with the records
    rank, ranks: of this worker's group
    followers: of rank 0, which begin their own hand-offs when it does
    copies:    one thread that waits for copies from a device, in order
    in_flight: hand-offs by the engine's name of the sequence
    """

    model: str
    plan_of: Callable[[str], Plan]
    arena: Arena
    peers: Peers
    rank: int = 0
    ranks: int = 1
    followers: Sequence[FollowerHandler] = ()
    copies: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "copies"))
    in_flight: "dict[str, OutgoingHandoff[Any]]" = field(default_factory=dict)

    def group_plan(self, codec: str) -> Plan:
        """The plan of a codec spec, with the heads of all ranks."""
        return self.plan_of(codec).of_group(self.ranks)

    def deliver(self, outputs: Iterable[Prefilled | Moved | Failed]) -> None:
        """Pass results of an engine step on; those of hand-offs given up meanwhile are dropped."""
        for output in outputs:
            handoff = self.in_flight.get(output.rid)
            if handoff is not None and not handoff.result.done():
                handoff.result.set_result(output)


@dataclass(frozen=True, kw_only=True)
class HandoffContext(SendingContext):
    """The same at rank 0, which has the engine."""

    engine: Engine


class OutgoingHandoff(Generic[EngineResult]):
    """One hand-off that leaves this rank: the engine's Handoff, and the owner of its Senders.

    name:       the engine's name of the sequence
    overlap:    items leave while later layers compute; else all of them leave with the commit
    batch_items: push at most so many items at once, with pauses, until all are offered; None: all

    result:        what the engine makes of the sequence
    manifest:      the items of each part
    offered_items: by the engine
    senders:       of the parts of this rank
    """

    def __init__(
        self,
        context: SendingContext,
        submit: Submit,
        name: str,
        overlap: bool = True,
        batch_items: int | None = None,
    ):
        job = submit.job
        plan = context.plan_of(job.codec)
        if job.moved:
            plan = plan.moving
        addresses = (submit.decode_address, *submit.decode_followers)
        partition = Partition(context.ranks, len(addresses))
        part_plan = partition.sent_plan(plan)
        self.senders: list[Sender] = []
        self._heads: list[HeadSlice] = []  # of each sender
        for part in partition.sent_by(context.rank):
            nonce = part_nonce(submit.nonce, part)
            attach = Attach(
                ticket=Ticket(nonce, submit.decode_epoch, gen=0),
                model=context.model,
                plan=part_plan.fingerprint,
                tokens=job.tokens,
            )
            address = addresses[partition.receiver_of(part)]
            channel = context.peers.get(address, control=submit.decode_address)
            self.senders.append(Sender(channel, attach, part_plan, job.deadline_s))
            self._heads.append(partition.sent_slice(part))
        self.manifest = self.senders[0].queue.manifest
        self._submit = submit
        self.arena = context.arena
        self.offered_items = set[Item]()
        self._context = context
        self._name = name
        self._overlap = overlap
        self._batch_items = batch_items
        self._unpushed: list[Item] = []  # later batches
        self._sources: list[ArenaSource] = []
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[EngineResult | Failed] = self._loop.create_future()
        self._computed = asyncio.Event()

    @property
    def deadline(self) -> float:
        """Of all parts, on the monotonic clock."""
        return self.senders[0].deadline

    @property
    def all_offered(self) -> bool:
        """Whether the engine has offered every item."""
        return len(self.offered_items) == self.manifest.num_items

    # -- on the io loop

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[Self]:
        """Attach and send, until the end of the block; its records are not read afterwards."""
        self._context.in_flight[self._name] = self
        self._send_task = asyncio.create_task(self._run_senders())
        followers = self._context.followers
        try:
            begins = [x.send(self._submit, self._name) for x in followers]
            await asyncio.gather(*begins)
            yield self
        finally:
            del self._context.in_flight[self._name]
            self._send_task.cancel()
            stops = [x.stop(self._name) for x in followers]
            await asyncio.gather(self._send_task, *stops, return_exceptions=True)

    async def _run_senders(self) -> HandoffStats:
        """Send all parts of this rank; the first error ends all of them."""
        tasks = [asyncio.create_task(sender.run()) for sender in self.senders]
        try:
            return joined(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def wire_bytes(self) -> int:
        """Of every message so far of the parts of this rank."""
        return sum(sender.wire_bytes for sender in self.senders)

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

    async def until_computed(self) -> None:
        """On a follower, wait for `computed`; raises the sender's error if that comes first."""
        either = [asyncio.ensure_future(self._computed.wait()), self._send_task]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            either[0].cancel()
        if not self._computed.is_set():
            await self._send_task

    async def commit(
        self, first_token: int, extras: Mapping[str, PlainValue]
    ) -> HandoffStats:
        """The engine is done: push what is left, then commit; statistics of the hand-off.

        The engine did not encode and offer what `has` says that the receiver has. The extras go
        with the first part, which is one of rank 0.
        """
        if not (self._overlap and self.all_offered):
            # a long prompt has 65,536 items: going through them would hold up the loop
            unencoded = await asyncio.to_thread(self._not_offered)
            for sender in self.senders:
                sender.queue.mark_unencoded(unencoded)
            self._push(unencoded if self._overlap else self.manifest.items)
        for sender in self.senders:
            is_first = self._context.rank == 0 and sender is self.senders[0]
            sender.finish(first_token, extras if is_first else {})
        deadline_s = self._submit.job.deadline_s
        commits = [
            follower.finish(self._name, first_token, deadline_s)
            for follower in self._context.followers
        ]
        own, *others = await asyncio.gather(self._send_task, *commits)
        return joined([own, *others])

    def _not_offered(self) -> list[Item]:
        """The items that the engine has not offered. For any thread, once the engine is done."""
        return [x for x in self.manifest.items if x not in self.offered_items]

    def _push(self, items: Sequence[Item]) -> None:
        """Push items into the sender, at once or in batches."""
        if self._batch_items is None:
            self._push_now(items)
            return
        is_pausing = bool(self._unpushed)
        self._unpushed.extend(items)
        if self.all_offered or not is_pausing:
            self._push_batch(self._batch_items)

    def _push_batch(self, batch_items: int) -> None:
        count = len(self._unpushed) if self.all_offered else batch_items
        batch = self._unpushed[:count]
        del self._unpushed[:count]
        if batch:
            self._push_now(batch)
            self._loop.call_later(BATCH_PAUSE_S, self._push_batch, batch_items)

    def _push_now(self, items: Sequence[Item]) -> None:
        try:
            for sender in self.senders:
                sender.offer(items)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for sender in self.senders:
            sender.end(as_disagg_error(error))

    # -- on the engine's thread

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """The records are allocated; from now on they can be read."""
        self._sources = [
            ArenaSource(self.arena, self.manifest, groups, heads)
            for heads in self._heads
        ]
        for sender, source in zip(self.senders, self._sources, strict=True):
            sender.queue.read_from(source)

    def offer(self, items: Sequence[Item]) -> None:
        """The bytes of these items are final: they may leave."""
        assert self._sources
        self.offered_items.update(items)
        if not self._overlap:
            return
        if self.arena.on_host:
            self._loop.call_soon_threadsafe(self._push, items)
        else:
            waits = [source.stage(items) for source in self._sources]
            self._context.copies.submit(self._push_copied, items, waits)

    def has(self, item: Item) -> bool:
        """Whether the receiver has an item already, as far as is known."""
        index = self.manifest.index_of(item)
        return all(index in sender.queue.peer_has for sender in self.senders)

    def computed(self) -> None:
        """All that this rank encodes is offered; on a follower `finish` waits for it."""
        self._loop.call_soon_threadsafe(self._computed.set)

    # -- on the thread of copies

    def _push_copied(
        self, items: Sequence[Item], waits: Sequence[Callable[[], None]]
    ) -> None:
        try:
            for wait_for_copies in waits:
                wait_for_copies()
            self._loop.call_soon_threadsafe(self._push, items)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)


class MigrationHandoff(OutgoingHandoff[Moved]):
    """A sequence that moves while it decodes.

    The engine begins it twice. At first only sealed pages are final; where the sequence stops,
    everything is. Sealed pages leave in small batches, as packing all of them at once would delay
    the next token.
    """

    def __init__(self, context: SendingContext, submit: Submit, name: str):
        super().__init__(context, submit, name, batch_items=BATCH_ITEMS)
        self._items = self.manifest.items  # listed before the engine waits for them

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        has_stopped = bool(self._sources)
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
        if has_stopped:
            self.computed()


def _sealed_records(
    group: LayerGroup, state: GroupState, tokens: int
) -> dict[Kind, int]:
    """By kind, how many records keep their bytes and their numbers until `tokens` tokens."""
    drops_pages = group.dropped_pages(tokens) > state.dropped
    if drops_pages or group.flush_page or group.final_at is FinalAt.PROMPT:
        return {}
    ids = state.ids_by_kind()
    return {kind: len(ids.get(kind, ())) for kind in (Kind.SEGMENT, Kind.PAGE)}
