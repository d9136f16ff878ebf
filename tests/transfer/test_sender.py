"""Hand-offs over a real loopback server: whole, broken, resumed, refused."""

import asyncio
import gc
import os
import weakref
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest

from disagg import errors
from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import TransferConfig
from disagg.kv.page import Kind, make_layout
from disagg.transfer import rpc
from disagg.transfer.channel import PROBED_BYTES, Channel, ChannelOptions, Peers
from disagg.transfer.link import LinkReport, RateLimiter
from disagg.transfer.messages import Attach, Attached, FrameAnswer
from disagg.transfer.sender import Sender
from disagg.wire import FRAME_BYTES, PageFrame, Ticket
from tests.transfer.peer import QUICK, hand_over, offer_all, open_peer, until
from tests.transfer.prompts import EPOCH, MODEL, OTHER_PLAN, make_prompt, make_related

TOKENS = 1500


# -- one hand-off
@pytest.mark.parametrize("direct", [False, True], ids=["grpc", "direct"])
async def test_prompts_arrive_whole_and_both_ends_count_equal_bytes(direct):
    prompts = {
        "one": make_related(1500, 1, 1000),
        "two": make_related(1500, 2, 1000),
    }

    async with open_peer(replace(QUICK, direct=direct)) as (peer, channel):
        for rid, prompt in prompts.items():
            peer.nbytes = 0

            stats = await hand_over(peer.sender(prompt, channel, rid), prompt)

            commit = peer.engine[rid].commit
            manifest = prompt.manifest
            overhead_bytes = stats.wire_bytes - stats.payload_bytes
            most_overhead = 300 * len(peer.frames) + 40 * len(manifest.items)
            assert (commit.first_token, commit.extras) == (42, {"ids": [1, 2]})
            assert stats.wire_bytes == peer.nbytes
            assert stats.payload_bytes + stats.cached_bytes == manifest.total_bytes
            assert 0 < overhead_bytes < most_overhead
            assert stats.attaches == 1
            assert min(stats.verify_ms, stats.admit_ms, stats.exposed_ms) > 0
        assert stats.cached_bytes > 0
        peer.assert_admitted(**prompts)
        peer.close()


async def test_an_unknown_link_is_measured_before_a_long_hand_off(monkeypatch):
    """Without, frames of a new worker had 2 MiB: on a slow link, gRPC's ping came too late."""
    prompt = make_prompt(5000)
    async with open_peer(ChannelOptions()) as (peer, channel):
        slow = LinkReport(peer.address, "a modem", 90.0, 35e-6)
        measure = AsyncMock(return_value=slow)
        monkeypatch.setattr("disagg.transfer.channel.measure", measure)

        await hand_over(peer.sender(prompt, channel), prompt)

        payloads = [sum(map(len, frame.payload)) for frame in peer.frames]
        assert len(payloads) > 1
        assert max(payloads) < 14_000
        assert str(channel.report).startswith(f"link to {peer.address}")
        peer.close()


async def test_a_hand_off_smaller_than_a_probe_needs_none(prompt, monkeypatch):
    """A probe of 6 MB once crossed before each hand-off of 25 kB to a worker that was idle."""
    measure = AsyncMock()
    monkeypatch.setattr("disagg.transfer.channel.measure", measure)
    peers = Peers(None, TransferConfig())
    peers.options = replace(peers.options, idle_s=0.0, stall_s=0.1)
    async with open_peer() as (peer, _):
        for rid in ("first", "second", "third"):
            channel = peers.get(peer.address)
            assert prompt.manifest.total_bytes < PROBED_BYTES

            await hand_over(peer.sender(prompt, channel, rid), prompt)

            peer.free()
            closed = weakref.ref(channel)
            del channel
            await until(lambda x=closed: not gc.collect() and x() is None)

        assert not measure.called
        await peers.close()


async def test_a_link_is_known_from_its_frames(prompt):
    async with open_peer() as (peer, channel):
        await hand_over(peer.sender(prompt, channel), prompt)

        assert channel.report.round_trip_ms > 0
        assert channel.report.gbytes_per_s > 0
        assert channel.report.peer == peer.address


async def test_a_channel_that_opens_again_has_the_report_of_its_link(
    monkeypatch,
):
    measured = LinkReport("somewhere", "a modem", 90.0, 35e-6)
    measure = AsyncMock(return_value=measured)
    monkeypatch.setattr("disagg.transfer.channel.measure", measure)
    peers = Peers(None, TransferConfig())
    first = peers.get("127.0.0.1:1")
    await first.meet()
    await first.close()
    del first
    gc.collect()

    again = peers.get("127.0.0.1:1")
    await again.meet()

    assert again.frame_bytes == 14_000
    assert measure.await_count == 1
    await peers.close()


async def test_a_layer_arrives_before_the_next_is_offered(prompt):
    async with open_peer() as (peer, channel):
        sender = peer.sender(prompt, channel)
        running = asyncio.create_task(sender.run())
        num_offered = 0

        for layer in range(3):
            items = list(prompt.manifest.layer(layer))
            sender.offer(items)
            num_offered += len(items)
            await until(lambda n=num_offered: peer.arrived() == n)

        assert not peer.commits
        sender.finish(1)
        await running


async def test_a_receiver_that_lost_an_item_it_took_ends_the_hand_off(prompt):
    async with open_peer() as (peer, channel):

        def take_and_lose(frame: PageFrame) -> FrameAnswer | None:
            if 3 not in frame.indices:
                return None
            return FrameAnswer(frame.ticket.nonce, frame.ticket.gen)

        peer.on_frame = take_and_lose

        with pytest.raises(
            errors.TransferError, match="items of the commit never came"
        ):
            await hand_over(peer.sender(prompt, channel), prompt)

        assert len(peer.attaches) == 1


@pytest.mark.parametrize("lost", ["broken", "silent"])
async def test_a_lost_acknowledgement_is_asked_for_again(prompt, lost):
    async with open_peer(replace(QUICK, stall_s=0.5)) as (peer, channel):

        async def swallow() -> None:
            if peer.commits == 1 and lost == "broken":
                raise errors.PeerLostError("the answer was lost")
            if peer.commits == 1:
                await asyncio.Future()

        peer.on_commit = swallow

        stats = await hand_over(peer.sender(prompt, channel), prompt)

        peer.assert_admitted(r=prompt)
        assert (stats.attaches, peer.commits) == (2, 2)


FINAL = {
    "superseded": (
        "on_attach",
        errors.ReservationError("superseded"),
        errors.ReservationError,
        "superseded",
    ),
    "another plan": (
        "on_attach",
        errors.LayoutError("plan b"),
        errors.LayoutError,
        "plan b",
    ),
    "a bug": (
        "on_attach",
        KeyError("oops"),
        errors.DisaggError,
        "has logged why",
    ),
    "by the engine": (
        "admit",
        errors.CapacityError("the engine is stopping"),
        errors.CapacityError,
        "stopping",
    ),
}


@pytest.mark.parametrize(
    ("call", "refusal", "expected", "words"), FINAL.values(), ids=FINAL
)
async def test_an_attachment_or_a_commit_that_is_refused_is_final(
    prompt, call, refusal, expected, words
):
    async with open_peer() as (peer, channel):
        setattr(peer, call, Mock(side_effect=refusal))

        with pytest.raises(errors.DisaggError, match=words) as caught:
            await hand_over(peer.sender(prompt, channel), prompt)

        assert type(caught.value) is expected
        assert len(peer.attaches) == 1


async def test_the_deadline_ends_a_hand_off(prompt):
    async with open_peer() as (peer, channel):
        sender = peer.sender(prompt, channel, deadline_s=0.2)
        sender.offer(prompt.manifest.layer(0))

        with pytest.raises(errors.DeadlineError, match=r"longer than 0\.2 s"):
            await sender.run()


def refuse_first(peer, times: int, error: type[errors.DisaggError]):
    """A receiver that answers its first frames with an error."""

    def answer(frame: PageFrame) -> FrameAnswer | None:
        if len(peer.frames) > times:
            return None
        return FrameAnswer(frame.ticket.nonce, frame.ticket.gen, error("a bit flipped"))

    return answer


async def test_a_frame_that_arrives_corrupt_twice_is_sent_again(prompt):
    async with open_peer() as (peer, channel):
        peer.on_frame = refuse_first(peer, 2, errors.CorruptFrameError)

        stats = await hand_over(peer.sender(prompt, channel), prompt)

        assert stats.payload_bytes > prompt.manifest.total_bytes
        peer.assert_admitted(r=prompt)
        assert len(peer.attaches) == peer.opened == 1  # the stream went on


@pytest.mark.parametrize(
    ("times", "error"),
    [
        (3, errors.CorruptFrameError),
        (1, errors.ReservationError),
    ],
    ids=["corrupt three times", "refused once"],
)
async def test_a_frame_that_is_refused_for_good_ends_a_hand_off(prompt, times, error):
    async with open_peer() as (peer, channel):
        peer.on_frame = refuse_first(peer, times, error)

        with pytest.raises(error, match="flipped"):
            await hand_over(peer.sender(prompt, channel), prompt)

        assert len(peer.attaches) == peer.opened == 1


async def test_a_prompt_that_no_frame_can_carry_is_refused_at_once():
    huge = make_layout("toy", Kind.PAGE, 64, [("k", "uint8", (2 << 20,))])
    plan = replace(OTHER_PLAN, groups=(replace(OTHER_PLAN.groups[0], page=huge),))
    attach = Attach(Ticket(7, EPOCH, 0), MODEL, plan.fingerprint, 130)

    with pytest.raises(
        errors.LayoutError, match="an item of a prompt of 130 tokens takes"
    ):
        Sender(Channel("127.0.0.1:1"), attach, plan)


@pytest.mark.parametrize("codec", ["raw", "kivi", "gear", "alignedkv", "ott", "h2o"])
async def test_prompts_of_models_with_eight_heads_fit_into_frames(codec):
    """Llama 3.1 70B, 32K tokens: no item and no commit is too large."""
    plan = parse_plan(codec, KVShape.uniform(80, 8, 128, "float16"))
    attach = Attach(Ticket(7, EPOCH, 0), MODEL, plan.fingerprint, 32768)

    sender = Sender(Channel("127.0.0.1:1"), attach, plan)

    assert sender.queue.frame_bytes == FRAME_BYTES


@pytest.mark.parametrize(
    "when", ["before", "while attaching", "between two attachments"]
)
async def test_a_failure_at_the_prefill_worker_ends_a_hand_off(prompt, when):
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
        sender.offer(prompt.manifest.layer(0))

        with pytest.raises(KeyError, match="a copy failed"):
            await sender.run()


# -- a channel that breaks
@pytest.mark.parametrize("direct", [False, True], ids=["grpc", "direct"])
async def test_hand_offs_are_resumed_after_a_bug_at_the_receiver(prompt, direct):
    async with open_peer(replace(QUICK, direct=direct)) as (peer, channel):

        def fail(frame: PageFrame) -> None:
            if len(peer.channels) == 1 and len(peer.frames) == 4:
                raise KeyError("oops")

        peer.on_frame = fail
        senders = [peer.sender(prompt, channel, rid) for rid in "ab"]
        running = [asyncio.create_task(sender.run()) for sender in senders]
        await until(lambda: all(sender.queue.credit for sender in senders))

        for sender in senders:
            offer_all(sender, prompt)
        both = await asyncio.gather(*running)

        sent_bytes = sum(stats.payload_bytes for stats in both)
        most_bytes = 2 * prompt.manifest.total_bytes + 5 * QUICK.frame_bytes
        assert [stats.attaches for stats in both] == [2, 2]
        assert len(peer.channels) == 2
        assert sent_bytes < most_bytes
        peer.assert_admitted(a=prompt, b=prompt)
        peer.close()


async def test_a_receiver_that_breaks_every_stream_is_a_lost_peer(prompt):
    """Attaching works and every stream opens, but no frame is ever stored."""
    async with open_peer(replace(QUICK, silence_s=0.4)) as (peer, channel):
        peer.on_frame = Mock(side_effect=ConnectionError("cut"))

        async with asyncio.timeout(10.0):
            with pytest.raises(errors.PeerLostError):
                await hand_over(peer.sender(prompt, channel), prompt)

        assert peer.opened > 2


async def test_a_peer_that_attaches_and_takes_no_frame_is_lost(prompt):
    options = replace(QUICK, silence_s=0.25, stall_s=0.5)
    async with open_peer(options) as (peer, channel):
        peer.pause = asyncio.Future

        with pytest.raises(errors.PeerLostError):
            await hand_over(peer.sender(prompt, channel, deadline_s=10.0), prompt)

        assert len(peer.attaches) == 2


# -- many hand-offs on one stream
async def test_frames_leave_by_deadline_then_by_layer(prompt):
    async with open_peer() as (peer, channel):
        patient = peer.sender(prompt, channel, "patient", deadline_s=30.0)
        urgent = peer.sender(prompt, channel, "urgent", deadline_s=20.0)
        late = peer.sender(prompt, channel, "late", deadline_s=30.0)
        late.deadline = patient.deadline
        for layer, sender in enumerate((late, patient, urgent)):
            sender.offer(prompt.manifest.layer(layer))
            sender.queue.restart({}, credit=1 << 20)
            channel._attached[sender.ticket.nonce] = sender

        order = []
        while most_urgent := channel._next_frame():
            sender, _ = most_urgent
            sender.queue.on_answer()
            order.append(sender)

        channel._attached.clear()
        assert sorted(order, key=[urgent, late, patient].index) == order


async def test_a_hand_off_without_credit_holds_up_no_other(prompt):
    async with open_peer() as (peer, channel):
        poor = peer.sender(prompt, channel, "poor", deadline_s=5.0)
        nonce = poor.ticket.nonce
        no_credit = Attached(credit=0, lease_s=10.0)
        peer.on_attach = lambda attach: (
            no_credit if attach.ticket.nonce == nonce else None
        )
        waiting = asyncio.create_task(hand_over(poor, prompt))

        await hand_over(peer.sender(prompt, channel, "rich"), prompt)

        assert nonce not in {frame.ticket.nonce for frame in peer.frames}
        waiting.cancel()


async def test_hand_offs_over_a_slow_link_share_its_window(prompt):
    async with open_peer() as (peer, channel):
        may_go_on = asyncio.Event()
        peer.pause = may_go_on.wait
        channel.host.report = LinkReport(peer.address, "a modem", 90.0, 10e-6)
        senders = [peer.sender(prompt, channel, rid) for rid in "abcdef"]

        running = [asyncio.create_task(hand_over(x, prompt)) for x in senders]
        await until(lambda: all(sender.queue.credit for sender in senders))
        await until(lambda: channel.meter.bytes_in_flight >= 8000)  # the window

        assert channel.meter.bytes_in_flight < 8000 + QUICK.frame_bytes
        may_go_on.set()
        await asyncio.gather(*running)
        peer.assert_admitted(**dict.fromkeys("abcdef", prompt))


async def test_a_cancelled_hand_off_leaves_the_stream_to_the_others(prompt):
    async with open_peer() as (peer, channel):
        may_go_on = asyncio.Event()
        peer.pause = may_go_on.wait
        senders = [peer.sender(prompt, channel, rid) for rid in "ab"]
        first, second = (asyncio.create_task(hand_over(x, prompt)) for x in senders)
        await until(lambda: all(sender.queue.payload_bytes for sender in senders))

        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        sent_bytes = senders[0].queue.payload_bytes
        may_go_on.set()
        await second

        assert peer.opened == 1
        assert senders[0].queue.payload_bytes == sent_bytes  # nothing more of it
        peer.assert_admitted(b=prompt)


async def test_an_error_of_one_hand_off_ends_that_one(prompt, caplog):
    async with open_peer() as (peer, channel):
        bad = peer.sender(prompt, channel, "bad")
        good = peer.sender(prompt, channel, "good")
        bad.queue._source = Mock(read=Mock(side_effect=KeyError("no such page")))

        failed, fine = await asyncio.gather(
            hand_over(bad, prompt),
            hand_over(good, prompt),
            return_exceptions=True,
        )

        assert isinstance(failed, KeyError)
        assert fine.attaches == peer.opened == 1
        assert "cannot be sent" in caplog.text


# -- leases, by a clock of the peer that stands still
async def test_one_call_renews_all_hand_offs_of_a_channel(prompt):
    """Meanwhile one frame takes longer than a lease."""
    async with open_peer(clock=None, lease_s=0.3) as (peer, channel):
        may_go_on = asyncio.Event()
        peer.pause = may_go_on.wait
        senders = [peer.sender(prompt, channel, rid) for rid in "ab"]
        first, second = (asyncio.create_task(sender.run()) for sender in senders)
        senders[1].offer(prompt.manifest.layer(0))

        await until(lambda: len(peer.renewals) >= 5)
        assert {*peer.renewals[-1]} == {sender.ticket for sender in senders}

        peer.ledger.abort("a", 0, "client gone")
        with pytest.raises(errors.ReservationError, match="over at"):
            await first

        may_go_on.set()
        for layer in (1, 2):
            senders[1].offer(prompt.manifest.layer(layer))
        senders[1].finish(42)
        assert (await second).attaches == 1


async def test_a_failed_renewal_breaks_the_channel_and_all_attach_anew(
    prompt, monkeypatch, caplog
):
    async with open_peer(clock=None, lease_s=0.3) as (peer, channel):
        sender = peer.sender(prompt, channel)
        running = asyncio.create_task(sender.run())
        await until(lambda: bool(peer.renewals))

        with monkeypatch.context() as broken:
            broken.setattr("disagg.transfer.channel.ticket_to_proto", None)
            await until(lambda: len(peer.attaches) >= 2)

        num_renewals = len(peer.renewals)
        await until(lambda: len(peer.renewals) > num_renewals)
        assert "failed" in caplog.text
        assert "Traceback" in caplog.text
        offer_all(sender, prompt)
        await running


# -- links
def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_idle_and_closed_links_leak_no_files(prompt, monkeypatch):
    shortest = ("grpc.client_idle_timeout_ms", 1000)  # gRPC allows no less
    options = [*rpc.CLIENT_OPTIONS, shortest]
    async with open_peer() as (peer, channel):
        await hand_over(peer.sender(prompt, channel), prompt)
        before = open_files()  # with those that gRPC opens once
        with monkeypatch.context() as patch:
            patch.setattr(rpc, "CLIENT_OPTIONS", options)
            idle = Channel(peer.address, None, replace(QUICK, idle_s=0.0, stall_s=0.1))

        await hand_over(peer.sender(prompt, idle, "idle"), prompt)
        await until(lambda: open_files() <= before)

        await hand_over(peer.sender(prompt, idle, "again"), prompt)
        await idle.close()
        peers = Peers(None, TransferConfig())
        peers.options = QUICK
        await hand_over(peer.sender(prompt, peers.get(peer.address), "peers"), prompt)
        await peers.close()
        await until(lambda: open_files() <= before)


async def test_the_next_hand_off_finds_the_stream_open(prompt):
    peers = Peers(None, TransferConfig())
    peers.options = QUICK
    async with open_peer() as (peer, _):
        channel = peers.get(peer.address)
        await hand_over(peer.sender(prompt, channel), prompt)
        channel = weakref.ref(channel)
        gc.collect()

        assert peers.get(peer.address) is channel()


async def test_the_channel_to_a_worker_that_is_gone_is_closed(prompt):
    peers = Peers(None, TransferConfig())
    peers.options = QUICK
    async with open_peer() as (peer, _):
        sender = peer.sender(prompt, peers.get(peer.address))
        channel = weakref.ref(sender._channel)
        await hand_over(sender, prompt)
        del sender

    def closed() -> bool:
        gc.collect()
        return channel() is None

    await until(closed)


async def test_a_paced_channel_takes_the_time_of_the_link(prompt):
    pace = RateLimiter(400_000.0, burst_bytes=4000)
    async with open_peer(replace(QUICK, pace=pace)) as (peer, channel):
        stats = await hand_over(peer.sender(prompt, channel), prompt)

        least_s = (stats.payload_bytes - 8000) / 400_000.0
        assert stats.wire_ms >= 1000 * least_s


def test_a_configured_slow_link_paces_every_channel():
    config = TransferConfig(link_mbps=8.0, burst_bytes=5000)

    options = Peers(None, config).options

    assert (options.pace.bytes_per_s, options.frame_bytes) == (1e6, 5000)


def test_a_link_without_a_configured_rate_is_not_paced():
    assert Peers(None, TransferConfig()).options.pace is None
