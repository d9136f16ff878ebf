"""Hand-offs over a real loopback server to a scripted receiver: whole, broken, resumed, refused."""

import asyncio
import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import TransferConfig
from disagg.errors import (
    CapacityError,
    CorruptFrameError,
    DeadlineError,
    DisaggError,
    LayoutError,
    PeerLostError,
    ReservationError,
    TransferError,
)
from disagg.page import Kind, make_layout
from disagg.transfer import rpc
from disagg.transfer.channel import Channel, Peers
from disagg.transfer.link import Pace
from disagg.transfer.messages import Attach, Attached, Credit
from disagg.transfer.sender import Sender
from disagg.wire import FRAME_BYTES, Item, PageFrame, Ticket
from tests.transfer.house import open_house
from tests.transfer.peer import QUICK, Peer, hand_over, offer_all, open_peer, until
from tests.transfer.prompts import EPOCH, MODEL, OTHER_PLAN, Prompt, make_prompt
from tests.transfer.stubs import generate_stubs, push_one


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(1500)


# -- one hand-off


async def test_a_prompt_arrives_whole_with_what_only_prefill_knows(prompt):
    async with open_peer() as (peer, channel):
        stats = await hand_over(peer.sender(prompt, channel), prompt)
        assert peer.have[7] == prompt.digests()
        (commit,) = peer.commits
        assert commit.ticket == Ticket(7, EPOCH, 1)
        assert commit.first_token == 42
        assert commit.extras == {"ids": [1, 2]}
        assert stats.payload_bytes == prompt.checklist.total_bytes
        assert (stats.attaches, stats.verify_ms, stats.admit_ms) == (1, 1.0, 2.0)
        assert stats.exposed_ms > 0
        most = 300 * len(peer.frames) + 40 * len(prompt.checklist.items)
        assert 0 < stats.wire_bytes - stats.payload_bytes < most


async def test_a_layer_is_there_before_the_next_is_offered(prompt):
    async with open_peer() as (peer, channel):
        sender = peer.sender(prompt, channel)
        running = asyncio.create_task(sender.run())
        for layer in range(3):
            sender.offer(prompt.checklist.layer(layer))
            places = set(map(prompt.checklist.place, prompt.checklist.layer(layer)))
            await until(lambda x=places: x <= set(peer.have.get(7, ())))
        assert not peer.commits
        sender.finish(1)
        await running


async def test_a_receiver_that_lost_what_it_took_ends_the_hand_off(prompt):
    async with open_peer() as (peer, channel):
        peer.on_commit = lambda frame: peer.have[7].pop(3) and None
        with pytest.raises(TransferError, match="item 3 "):
            await hand_over(peer.sender(prompt, channel), prompt)
        assert (len(peer.commits), len(peer.attaches)) == (1, 1)


async def test_a_lost_acknowledgement_is_asked_for_again(prompt):
    async with open_peer() as (peer, channel):

        def swallow(frame):
            if len(peer.commits) == 1:
                raise PeerLostError("the answer was lost")
            return

        peer.on_commit = swallow
        peer.on_attach = lambda attach: Attached(admitted=True) if peer.commits else None
        stats = await hand_over(peer.sender(prompt, channel), prompt)
        first, second = peer.commits
        assert first == replace(second, ticket=first.ticket)
        assert stats.attaches == second.ticket.gen == 2


FINAL = {
    "superseded": ("on_attach", ReservationError("superseded"), "superseded"),
    "another plan": ("on_attach", LayoutError("plan b"), "plan b"),
    "a bug": ("on_attach", KeyError("oops"), "has logged why"),
    "by the engine": ("on_commit", CapacityError("the engine is stopping"), "stopping"),
}


@pytest.mark.parametrize(("call", "error", "words"), FINAL.values(), ids=FINAL)
async def test_an_attachment_or_a_commit_that_is_refused_is_final(prompt, call, error, words):
    def refuse(_: object) -> None:
        raise error

    async with open_peer(**{call: refuse}) as (peer, channel):
        with pytest.raises(DisaggError, match=words) as caught:
            await hand_over(peer.sender(prompt, channel), prompt)
        assert type(caught.value) is (type(error) if words != "has logged why" else DisaggError)
        assert len(peer.attaches) == 1


async def test_the_deadline_ends_a_hand_off(prompt):
    async with open_peer() as (peer, channel):
        sender = peer.sender(prompt, channel, deadline_s=0.2)
        sender.offer(prompt.checklist.layer(0))
        with pytest.raises(DeadlineError, match=r"longer than 0\.2 s"):
            await sender.run()


@pytest.mark.parametrize(
    ("times", "error"),
    [(2, CorruptFrameError), (3, CorruptFrameError), (1, ReservationError)],
    ids=["twice", "three times", "once, for good"],
)
async def test_a_frame_that_is_corrupt_there_is_sent_again_until_the_third(prompt, times, error):
    async with open_peer() as (peer, channel):

        def drop(frame: PageFrame) -> Credit | None:
            refused = len(peer.frames) <= times
            return Credit(7, frame.ticket.gen, error("a bit was flipped")) if refused else None

        peer.on_frame = drop
        running = hand_over(peer.sender(prompt, channel), prompt)
        if times == 2:
            assert (await running).payload_bytes > prompt.checklist.total_bytes
            assert peer.have[7] == prompt.digests()
        else:
            with pytest.raises(error, match="flipped"):
                await running
        assert len(peer.attaches) == peer.opened == 1  # the stream went on


async def test_a_prompt_that_no_frame_can_carry_is_refused_at_once():
    huge = make_layout("toy", Kind.PAGE, 64, [("k", "uint8", (2 << 20,))])
    plan = replace(OTHER_PLAN, groups=(replace(OTHER_PLAN.groups[0], page=huge),))
    attach = Attach(Ticket(7, EPOCH, 0), MODEL, plan.fingerprint, 130)
    with pytest.raises(LayoutError, match="an item of a prompt of 130 tokens takes"):
        Sender(Channel("127.0.0.1:1"), attach, plan, None)


@pytest.mark.parametrize("when", ["before", "while attaching", "between two attachments"])
async def test_a_failure_of_the_prefill_side_ends_a_hand_off_whenever_it_comes(prompt, when):
    """One that came while no attachment was open was lost: the hand-off waited for its deadline."""
    async with open_peer() as (peer, channel):
        sender = peer.sender(prompt, channel, deadline_s=3.0)

        def fail(_: object = None) -> None:
            sender.end(KeyError("a copy failed"))

        def cut(frame: PageFrame) -> None:
            peer.on_frame = lambda frame: None
            asyncio.get_running_loop().call_later(0.05, fail)
            raise ConnectionError("cut")

        if when == "before":
            fail()
        elif when == "while attaching":
            peer.on_attach = fail
        else:
            peer.on_frame = cut
        sender.offer(prompt.checklist.layer(0))
        with pytest.raises(KeyError, match="a copy failed"):
            await sender.run()


# -- a channel that breaks


async def test_a_broken_stream_is_resumed_by_all_its_hand_offs_with_what_is_missing(prompt):
    async with open_peer() as (peer, channel):

        def cut(frame: PageFrame) -> None:
            if peer.opened == 1 and len(peer.frames) == 4:
                raise ConnectionError("cut")

        peer.on_frame = cut
        senders = [peer.sender(prompt, channel, nonce) for nonce in (7, 8)]
        several = await asyncio.gather(*(hand_over(x, prompt) for x in senders))
        assert peer.have == {7: prompt.digests(), 8: prompt.digests()}
        assert [stats.attaches for stats in several] == [2, 2]
        assert peer.opened == 2
        sent = sum(stats.payload_bytes for stats in several)
        assert sent < 2 * prompt.checklist.total_bytes + 5 * QUICK.frame_bytes


async def test_a_receiver_that_breaks_every_stream_is_a_lost_peer(prompt):
    """Control works, and every stream begins well: without a frame that arrives it is hopeless."""

    def cut(frame):
        raise ConnectionError("cut")

    async with open_peer(replace(QUICK, silence_s=0.4), on_frame=cut) as (peer, channel):
        async with asyncio.timeout(10.0):
            with pytest.raises(PeerLostError):
                await hand_over(peer.sender(prompt, channel), prompt)
        assert peer.opened > 2


async def test_nobody_at_the_address_is_a_lost_peer_after_its_silence(prompt):
    channel = Channel("127.0.0.1:1", options=replace(QUICK, silence_s=0.3))
    with pytest.raises(PeerLostError):
        await hand_over(Peer().sender(prompt, channel), prompt)
    await channel.close()


async def test_a_stream_that_answers_nothing_breaks_for_all(prompt):
    """Frames that are taken but never credited: not one hand-off is blamed, the channel is."""
    async with open_peer(replace(QUICK, stall_s=0.3)) as (peer, channel):

        async def stall(frame: PageFrame) -> None:
            if peer.opened == 1:
                await asyncio.Event().wait()

        peer.pause = stall
        senders = [peer.sender(prompt, channel, nonce) for nonce in (7, 8)]
        several = await asyncio.gather(*(hand_over(x, prompt) for x in senders))
        assert [stats.attaches for stats in several] == [2, 2]
        assert peer.opened == 2


async def test_a_peer_that_attaches_and_takes_no_frame_is_lost(prompt):
    async with open_peer(replace(QUICK, silence_s=0.25, stall_s=0.5)) as (peer, channel):
        peer.pause = lambda frame: asyncio.Future()
        with pytest.raises(PeerLostError):
            await hand_over(peer.sender(prompt, channel, deadline_s=10.0), prompt)
        assert len(peer.attaches) == 2


async def test_a_commit_without_a_stream_leaves_no_debt_to_the_next_one(prompt):
    async with open_peer(QUICK) as (peer, channel):
        held = asyncio.Event()
        call = channel._call

        async def slow(name: str, *rest: Any) -> bytes:
            if name == "Commit":
                await held.wait()
            return await call(name, *rest)

        channel._call = slow
        frame = prompt.commit(Ticket(7, EPOCH, 1))
        sender = peer.sender(prompt, channel, 8)
        commit = asyncio.create_task(channel.commit(sender, frame, 5.0))
        handing = asyncio.create_task(hand_over(sender, prompt))
        await until(lambda: channel._serving is not None)
        held.set()
        await asyncio.gather(commit, handing, return_exceptions=True)
        assert channel._owed == 0


# -- many hand-offs on one stream


async def test_frames_leave_by_deadline_then_by_layer(prompt):
    """All that is offered before the stream opens: the most urgent hand-off goes first, whole."""
    async with open_peer(credit=1 << 20) as (peer, channel):
        patient = peer.sender(prompt, channel, 1, deadline_s=30.0)
        urgent = peer.sender(prompt, channel, 2, deadline_s=20.0)
        late = peer.sender(prompt, channel, 3, deadline_s=30.0)
        late.deadline = patient.deadline
        patient.offer(prompt.checklist.layer(1))
        late.offer(prompt.checklist.layer(0))
        urgent.offer(prompt.checklist.layer(2))
        order = []
        for sender in (patient, urgent, late):
            sender.outbox.attached({}, credit=1 << 20)
            channel._attached[sender.ticket.nonce] = sender
        while chosen := channel._next():
            sender, _ = chosen
            sender.outbox.answered()
            order.append(sender.ticket.nonce)
        channel._attached.clear()
        assert sorted(order, key=[2, 3, 1].index) == order


async def test_a_hand_off_without_credit_holds_up_no_other(prompt):
    async with open_peer() as (peer, channel):
        peer.on_attach = lambda attach: (
            Attached(credit=0, lease_s=10.0) if attach.ticket.nonce == 1 else None
        )
        poor = peer.sender(prompt, channel, 1, deadline_s=5.0)
        waiting = asyncio.create_task(hand_over(poor, prompt))
        await hand_over(peer.sender(prompt, channel, 2), prompt)
        assert {frame.ticket.nonce for frame in peer.frames} == {2}
        waiting.cancel()


async def test_a_cancelled_hand_off_leaves_the_stream_to_the_others(prompt):
    async with open_peer() as (peer, channel):
        held = asyncio.Event()
        peer.pause = lambda frame: held.wait()
        senders = [peer.sender(prompt, channel, nonce) for nonce in (1, 2)]
        first, second = (asyncio.create_task(hand_over(x, prompt)) for x in senders)
        await until(lambda: all(sender.payload_bytes for sender in senders))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        left = senders[0].payload_bytes
        held.set()
        await second
        assert peer.opened == 1
        assert senders[0].payload_bytes == left  # nothing more of it was sent
        assert peer.have[2] == prompt.digests()


async def test_an_error_of_one_hand_off_ends_that_one(prompt, caplog):
    class Broken:
        def read(self, items: Sequence[Item]) -> list[memoryview]:
            raise KeyError("no such page")

    async with open_peer() as (peer, channel):
        bad = peer.sender(prompt, channel, 1)
        bad.outbox._source = Broken()
        good = peer.sender(prompt, channel, 2)
        failed, fine = await asyncio.gather(
            hand_over(bad, prompt), hand_over(good, prompt), return_exceptions=True
        )
        assert isinstance(failed, KeyError)
        assert fine.attaches == peer.opened == 1
        assert "cannot be sent" in caplog.text


# -- leases


async def test_one_call_renews_all_hand_offs_of_a_channel_and_ends_those_that_are_over(prompt):
    async with open_peer(lease_s=0.3) as (peer, channel):
        senders = [peer.sender(prompt, channel, nonce) for nonce in (1, 2)]
        first, second = (asyncio.create_task(sender.run()) for sender in senders)
        await until(lambda: len(peer.renewals) >= 3)
        assert {ticket.nonce for ticket in peer.renewals[-1]} == {1, 2}
        peer.over.add(1)
        with pytest.raises(ReservationError, match="over at"):
            await first
        offer_all(senders[1], prompt)
        assert (await second).attaches == 1


async def test_leases_are_renewed_while_a_frame_is_slow(prompt):
    """One frame that takes longer than a lease."""
    async with open_peer(lease_s=0.3) as (peer, channel):

        async def slow(frame: PageFrame) -> None:
            renewed = len(peer.renewals)
            if len(peer.frames) == 1:
                await until(lambda: len(peer.renewals) >= renewed + 4)

        peer.pause = slow
        stats = await hand_over(peer.sender(prompt, channel), prompt)
        assert stats.attaches == 1


async def test_a_failure_in_renewing_breaks_the_channel_loudly_and_its_hand_offs_attach_again(
    prompt, monkeypatch, caplog
):
    async with open_peer(lease_s=0.3) as (peer, channel):
        sender = peer.sender(prompt, channel)
        running = asyncio.create_task(sender.run())
        await until(lambda: bool(peer.renewals))
        with monkeypatch.context() as broken:
            broken.setattr("disagg.transfer.channel.fill", None)
            await until(lambda: len(peer.attaches) >= 2)
        renewed = len(peer.renewals)
        await until(lambda: len(peer.renewals) > renewed)
        assert "failed" in caplog.text
        assert "Traceback" in caplog.text
        offer_all(sender, prompt)
        await running


# -- links


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_links_close_when_idle_and_with_their_channel_and_leak_nothing(prompt, monkeypatch):
    quick = [*rpc.CLIENT_OPTIONS, ("grpc.client_idle_timeout_ms", 1000)]  # the least that there is
    async with open_peer() as (peer, channel):
        await hand_over(peer.sender(prompt, channel), prompt)  # what gRPC keeps, it has now
        before = open_files()
        with monkeypatch.context() as patch:
            patch.setattr(rpc, "CLIENT_OPTIONS", quick)
            idle = Channel(peer.address, None, replace(QUICK, idle_s=0.0, stall_s=0.1))
        await hand_over(peer.sender(prompt, idle, 8), prompt)
        await until(lambda: open_files() <= before)
        await hand_over(peer.sender(prompt, idle, 9), prompt)
        await idle.close()
        peers = Peers(None, TransferConfig())
        peers.options = QUICK
        await hand_over(peer.sender(prompt, peers.get(peer.address), 10), prompt)
        await peers.close()
        await until(lambda: open_files() <= before)


async def test_the_channel_to_a_worker_that_is_gone_is_closed(prompt):
    peers = Peers(None, TransferConfig())
    peers.options = QUICK
    async with open_peer() as (peer, _):
        sender = peer.sender(prompt, peers.get(peer.address))
        gone = weakref.ref(sender._channel)
        await hand_over(sender, prompt)
        del sender
        gc.collect()
        assert peers.get(peer.address) is gone(), "the next hand-off finds its stream open"

    def closed() -> bool:
        gc.collect()
        return gone() is None

    await until(closed)


async def test_a_paced_channel_takes_the_time_of_the_link(prompt):
    pace = Pace(400_000.0, burst_bytes=4000)
    async with open_peer(replace(QUICK, pace=pace)) as (peer, channel):
        stats = await hand_over(peer.sender(prompt, channel), prompt)
        assert stats.wire_ms >= 1000 * (stats.payload_bytes - 8000) / 400_000.0


def test_a_slow_link_of_the_configuration_paces_every_channel_in_frames_of_its_burst():
    config = TransferConfig(link_mbps=8.0, burst_bytes=5000)
    options = Peers(None, config).options
    assert (options.pace.bytes_per_s, options.frame_bytes) == (1e6, 5000)
    assert Peers(None, TransferConfig()).options.pace is None


# -- other clients


async def test_a_client_generated_from_the_proto_reaches_the_engine(prompt, tmp_path):
    stubs = generate_stubs(tmp_path)

    async with open_house() as house:
        nonce = house.promise(prompt).ticket.nonce
        await asyncio.to_thread(push_one, stubs, house.address, prompt, nonce, EPOCH)
        assert prompt.equals(house.pool.arena, house.admitted().groups)
        house.close()


@pytest.mark.parametrize("codec", ["raw", "kivi", "gear", "alignedkv", "ott", "h2o"])
async def test_prompts_of_models_with_eight_heads_fit_into_frames(codec):
    """Llama 3.1 70B, 32K tokens: no item and no commit is too large."""
    plan = parse_plan(codec, KVShape(80, 8, 128, "float16", (None,) * 80))
    attach = Attach(Ticket(7, EPOCH, 0), MODEL, plan.fingerprint, 32768)

    assert Sender(Channel("127.0.0.1:1"), attach, plan, None).outbox.frame_bytes == FRAME_BYTES
