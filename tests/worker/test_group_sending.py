"""Hand-offs of groups over sockets: every rank sends its parts to the ranks that want them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from unittest.mock import AsyncMock

import grpc
import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import DEFAULT_CODEC, TransferConfig
from disagg.errors import DeadlineError, ReservationError, TransferError
from disagg.kv.page import Item
from disagg.transfer.channel import Peers
from disagg.transfer.follower_calls import (
    FollowerClient,
    FollowerHandler,
    Opening,
    follower_handler,
)
from disagg.transfer.messages import Grant, Submit, Work
from disagg.transfer.rpc import connect, start_server
from disagg.transfer.stats import HandoffStats
from disagg.wire import digest
from disagg.worker.follower_service import FollowerService
from disagg.worker.handoff import OutgoingHandoff, SendingContext
from tests.transfer.groups import ReceivingGroup, SendingRank, slice_bytes
from tests.transfer.prompts import EPOCH, MODEL, Prompt, make_prompt
from tests.transfer.test_group_handoffs import check_idle, make_whole

HOST = "127.0.0.1"
NAME = "r#0/p"


async def listen(
    stack: AsyncExitStack, handlers: Iterable[grpc.GenericRpcHandler]
) -> str:
    """Serve until the end of the stack; the address."""
    server, address = await start_server([*handlers], HOST, None)
    stack.push_async_callback(server.stop, None)
    return address


def handlers_of(service: FollowerService) -> list[grpc.GenericRpcHandler]:
    return [follower_handler(service), service.receiver.handlers()]


async def reach(stack: AsyncExitStack, address: str) -> FollowerClient:
    link = connect(address, None)
    stack.push_async_callback(link.close)
    return FollowerClient(link)


class SendingGroup:
    """The ranks of a prefill worker, on sockets; the test is their engine."""

    def __init__(self, whole: Prompt, ranks: int):
        self.whole = whole
        self.ranks = [SendingRank.of(whole, rank, ranks) for rank in range(ranks)]
        self.contexts: list[SendingContext] = []
        self.services: list[FollowerService] = []

    async def open(self, stack: AsyncExitStack) -> None:
        clients = []
        for rank in reversed(range(len(self.ranks))):
            followers = tuple(reversed(clients)) if rank == 0 else ()
            context = self.make_context(rank, followers)
            stack.push_async_callback(context.peers.close)
            self.contexts.insert(0, context)
            if rank:
                service = FollowerService(context)
                self.services.insert(0, service)
                address = await listen(stack, handlers_of(service))
                clients.append(await reach(stack, address))

    def make_context(
        self, rank: int, followers: Sequence[FollowerHandler]
    ) -> SendingContext:
        own = self.ranks[rank]
        return SendingContext(
            model=MODEL,
            plan_of=lambda spec: own.plan,
            arena=own.arena,
            peers=Peers(None, TransferConfig()),
            rank=rank,
            ranks=len(self.ranks),
            followers=followers,
        )

    def handoff(self, submit: Submit) -> OutgoingHandoff:
        """That of rank 0."""
        return OutgoingHandoff(self.contexts[0], submit, NAME)

    def compute(self, items: Sequence[Item] | None = None) -> None:
        """What the engines of all ranks say of the prompt."""
        for own, context in zip(self.ranks, self.contexts, strict=True):
            handoff = context.in_flight[NAME]
            handoff.begin(own.plan, own.states)
            missing = [x for x in handoff.manifest.items if not handoff.has(x)]
            handoff.offer(missing)
            handoff.computed()


class ListeningGroup(ReceivingGroup):
    """The ranks of a decode worker, on sockets."""

    async def open(self, stack: AsyncExitStack) -> None:
        addresses = [await listen(stack, handlers_of(x)) for x in self.services]
        clients = [await reach(stack, address) for address in addresses]
        self.followers.handlers = clients
        self.followers.addresses = tuple(addresses)
        self.address = await listen(stack, [self.receiver.handlers()])


@asynccontextmanager
async def groups(
    whole: Prompt, senders: int, receivers: int
) -> AsyncIterator[tuple[SendingGroup, ListeningGroup]]:
    sending = SendingGroup(whole, senders)
    receiving = ListeningGroup(whole.plan.divided(receivers), receivers)
    async with AsyncExitStack() as stack:
        await sending.open(stack)
        await receiving.open(stack)
        yield sending, receiving


async def reserve(
    sending: SendingGroup, receiving: ListeningGroup, rid: str = "r"
) -> Submit:
    """What the router does: room for the prompt, and the job for the sender."""
    job = sending.whole.job(rid=rid, senders=len(sending.ranks), deadline_s=20.0)
    grant: Grant = await receiving.receiver.reserve(job, EPOCH)
    return Submit(
        job,
        Work.PREFILL,
        epoch=1,
        decode_address=receiving.address,
        decode_epoch=grant.epoch,
        nonce=grant.nonce,
        decode_followers=grant.followers,
    )


async def hand_over(
    sending: SendingGroup, receiving: ListeningGroup, rid: str = "r"
) -> HandoffStats:
    handoff = sending.handoff(await reserve(sending, receiving, rid))
    async with handoff.sending():
        sending.compute()
        return await handoff.commit(5, {"ids": [1, 2]})


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 4)])
async def test_all_parts_cross_directly_and_are_admitted_once(senders, receivers):
    whole = make_whole("gear")
    async with groups(whole, senders, receivers) as (sending, receiving):
        stats = await hand_over(sending, receiving)

        for rank, expected in enumerate(slice_bytes(whole, receivers)):
            assert receiving.bytes_of(rank) == expected
        assert stats.payload_bytes == whole.manifest.total_bytes
        commit = receiving.admitted().commit
        assert (commit.first_token, commit.extras) == (5, {"ids": [1, 2]})
        assert not any(context.in_flight for context in sending.contexts)
        receiving.free()
        await until_idle(receiving)


@pytest.mark.parametrize("spec", ["raw", DEFAULT_CODEC.partition("|")[0]])
async def test_groups_of_unequal_sizes_send_at_most_two_percent_more(spec):
    """Every message between the two workers, both ways, as the hand-off counts them."""
    plan = parse_plan(spec, KVShape.uniform(4, 4, 64, "bfloat16"))
    whole = make_prompt(512, plan=plan)
    totals = {}
    for shape in [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)]:
        async with groups(whole, *shape) as (sending, receiving):
            stats = await hand_over(sending, receiving)
            assert stats.payload_bytes == whole.manifest.total_bytes
            totals[shape] = stats.wire_bytes

    one = totals.pop((1, 1))
    assert one > whole.manifest.total_bytes
    for total in totals.values():
        assert one < total < 1.02 * one


async def until_idle(receiving: ListeningGroup) -> None:
    async with asyncio.timeout(10.0):
        while any(service.parts.num_open for service in receiving.services):
            await asyncio.sleep(0.01)
    await check_idle(receiving)


async def test_an_error_of_a_follower_is_that_of_the_hand_off(monkeypatch):
    whole = make_whole("kivi")
    async with groups(whole, 2, 2) as (sending, receiving):
        handoff = sending.handoff(await reserve(sending, receiving))

        async with handoff.sending():
            (follower,) = sending.services
            sender = follower._sending[NAME].handoff.senders[0]
            sender.end(TransferError("the copy failed"))
            sending.compute()
            with pytest.raises(TransferError, match="the copy failed"):
                await handoff.commit(5, {})

        assert not receiving.engine
        assert not follower._sending
        receiving.ledger.abort("r", 0, "the router retries")
        await until_idle(receiving)


async def test_a_hand_off_given_up_ends_at_all_ranks():
    whole = make_whole("kivi")
    async with groups(whole, 2, 1) as (sending, receiving):
        handoff = sending.handoff(await reserve(sending, receiving))
        async with handoff.sending():
            assert all(NAME in context.in_flight for context in sending.contexts)

        assert not any(context.in_flight for context in sending.contexts)
        assert not receiving.engine
        with pytest.raises(ReservationError, match="rank 1 does not send"):
            await sending.contexts[0].followers[0].finish(NAME, 5, 1.0)


async def test_a_hand_off_that_rank_0_could_not_stop_ends_after_its_deadline(
    monkeypatch,
):
    """The follower was frozen, and later requests find nothing of it."""
    whole = make_whole("kivi")
    async with groups(whole, 2, 1) as (sending, receiving):
        (follower,) = sending.services
        lost = AsyncMock(side_effect=DeadlineError("no answer"))
        handoff = sending.handoff(await reserve(sending, receiving))
        async with handoff.sending():
            (client,) = sending.contexts[0].followers
            monkeypatch.setattr(client, "stop", lost)
        assert [*follower._sending] == [NAME]

        monkeypatch.setattr(follower, "_clock", lambda: time.monotonic() + 3600.0)
        await client.send(await reserve(sending, receiving, "other"), "other#0/p")

        assert lost.called
        assert [*follower._sending] == [*follower._context.in_flight] == ["other#0/p"]
        await follower.stop("other#0/p")


async def test_followers_answer_pings_and_say_what_is_in_their_arenas():
    whole = make_whole("kivi")
    async with groups(whole, 1, 2) as (_, receiving):
        (client,) = receiving.followers.handlers
        _, arena = receiving.arenas

        await client.ping()

        spans = [(0, 64), (128, 100)]
        expected = [digest(arena.read(start, nbytes)) for start, nbytes in spans]
        assert await client.digests(spans) == expected
        assert await client.digests([]) == []


async def test_an_opening_after_the_end_opens_nothing():
    whole = make_whole("kivi")
    async with groups(whole, 1, 2) as (_, receiving):
        (client,) = receiving.followers.handlers
        (service,) = receiving.services
        await client.close(7)
        await client.open(Opening(7, "kivi", whole.tokens))
        assert not service.parts.num_open
