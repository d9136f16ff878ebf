"""The receiving end by its bytes: what a broken or hostile sender can say."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from disagg.errors import (
    CorruptFrameError,
    RequestError,
    ReservationError,
    VersionError,
)
from disagg.kv.page import Item
from disagg.kv.pool import Pool
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.messages import Ack, Attach, Attached, FrameAnswer, ticket_to_proto
from disagg.wire import Commit, Frame, Ticket, frame_message, pack
from tests.transfer.desk import corrupt
from tests.transfer.peer import Peer, open_peer, until
from tests.transfer.prompts import EPOCH, MODEL, Prompt, SlowArena, make_related


class Booth(Peer):
    """Spoken to in bytes; its clock stands still."""

    def __init__(self, **desk: object):
        super().__init__(clock=None, **desk)

    async def take_over(
        self, prompt: Prompt, ticket: Ticket, direct: bool = False
    ) -> Attached:
        attach = Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens, direct)
        data = await self.receiver.attach(attach.to_proto().SerializeToString())
        return Attached.from_proto(kv.AttachResponse.FromString(data))

    async def stream(self, messages: Iterable[bytes]) -> list[FrameAnswer]:
        """All answers of one channel."""

        async def each() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        replies = self.receiver.push(each())
        return [
            FrameAnswer.from_proto(kv.PushResponse.FromString(x)) async for x in replies
        ]

    async def commit(self, commit: Commit) -> Ack:
        data = await self.receiver.commit(message(commit))
        return Ack.from_proto(kv.CommitResponse.FromString(data))


@pytest.fixture
def booth() -> Booth:
    return Booth()


def message(frame: Frame) -> bytes:
    return frame_message(pack(frame))


def pages(prompt: Prompt, ticket: Ticket) -> list[bytes]:
    return [message(frame) for frame in prompt.frames(ticket)]


def test_the_methods_of_the_proto_are_served_by_their_names(booth):
    service = kv.DESCRIPTOR.services_by_name["KvTransferService"]
    handler = booth.receiver.handlers()
    for method in service.methods:
        name = f"/{service.full_name}/{method.name}"
        served = handler.service(SimpleNamespace(method=name, invocation_metadata=()))
        streams = method.client_streaming, method.server_streaming
        assert (served.request_streaming, served.response_streaming) == streams


# -- frames of one channel
async def test_a_refused_frame_is_answered_with_its_error(prompt, booth):
    gone, old, live = [booth.begin(prompt, rid=rid) for rid in ("gone", "old", "live")]
    booth.ledger.abort("gone", 0, "client gone")
    held = booth.reserve(prompt, rid="held")
    await booth.take_over(prompt, replace(old, gen=2))
    first = prompt.frames(live)[0]
    cut = replace(first, payload=tuple(part[1:] for part in first.payload))
    frames = {
        "dead nonce": (prompt.frames(gone)[0], "aborted"),
        "old gen": (prompt.frames(old)[0], "reservation"),
        "never attached": (
            prompt.frames(Ticket(held.nonce, EPOCH, 0))[0],
            "reservation",
        ),
        "unknown nonce": (replace(first, ticket=Ticket(1, EPOCH, 1)), "reservation"),
        "other epoch": (
            replace(first, ticket=replace(live, epoch=EPOCH + 1)),
            "reservation",
        ),
        "foreign sizes": (cut, "layout"),
        "corrupt payload": (corrupt(first), "corrupt_frame"),
    }
    sent = [message(frame) for frame, _ in frames.values()] + pages(prompt, live)

    credits = await booth.stream(sent)

    reasons = {name: x.error.reason for name, x in zip(frames, credits, strict=False)}
    assert reasons == {name: reason for name, (_, reason) in frames.items()}
    assert "client gone" in str(credits[0].error)
    assert credits[len(frames) :] == [FrameAnswer(live.nonce, 1)] * len(
        prompt.frames(live)
    )
    counted = {"reservation": 4, "aborted": 1, "layout": 1, "corrupt_frame": 1}
    assert booth.receiver.failures == counted
    # the channel is over, `old` was not on it
    assert booth.ledger.gauges()["streams"] == 1
    assert isinstance(await booth.commit(prompt.commit(live)), Ack)


OTHER_VERSION = b"dgKV\x09"
BROKEN = {
    "a cut frame": (lambda data: data[:-1], CorruptFrameError),
    "another version": (
        lambda data: data.replace(b"dgKV\x04", OTHER_VERSION),
        VersionError,
    ),
}


@pytest.mark.parametrize(("breaking", "error"), BROKEN.values(), ids=BROKEN)
async def test_bytes_that_are_no_frame_end_a_channel_and_break_all(
    prompt, booth, breaking, error
):
    ticket = booth.begin(prompt)
    first, second, *_ = pages(prompt, ticket)

    with pytest.raises(error):
        await booth.stream([first, breaking(second)])
    assert booth.ledger.gauges() == {"reservations": 1, "streams": 0, "running": 0}

    again = replace(ticket, gen=2)
    attached = await booth.take_over(prompt, again)
    assert len(attached.have) == len(prompt.frames(again)[0].indices)
    await booth.stream(pages(prompt, again))
    assert isinstance(await booth.commit(prompt.commit(again)), Ack)


async def test_a_commit_among_pages_ends_the_channel(prompt, booth):
    ticket = booth.begin(prompt)
    with pytest.raises(CorruptFrameError, match="Commit"):
        await booth.stream([message(prompt.commit(ticket))])
    with pytest.raises(CorruptFrameError, match="PageFrame"):
        await booth.receiver.commit(pages(prompt, ticket)[0])


async def test_bytes_that_are_no_message_are_refused_and_counted():
    async with open_peer() as (peer, channel):
        with pytest.raises(RequestError):
            await channel.link.call("/disagg.v1.KvTransferService/Attach", b"\xff", 5.0)
        assert peer.receiver.failures == {"request": 1}


async def test_a_sender_that_asks_for_a_direct_channel_gets_its_port(prompt, booth):
    ticket = booth.begin(prompt)
    answers = []
    for gen, direct in ((2, True), (3, True), (4, False)):
        answers.append(await booth.take_over(prompt, replace(ticket, gen=gen), direct))
        booth.receiver.direct = lambda: (4711, b"once")
    assert [(x.port, x.key) for x in answers] == [(0, b""), (4711, b"once"), (0, b"")]


# -- timers
async def test_leases_end_by_themselves_unless_they_are_renewed(prompt, booth):
    live = booth.begin(prompt, rid="live")
    lost = booth.begin(prompt, rid="lost")
    timers = asyncio.create_task(booth.receiver.run())

    booth.now += 6.0
    tickets = [live, Ticket(1, EPOCH, 1)]
    request = kv.RenewRequest(tickets=map(ticket_to_proto, tickets))
    answer = await booth.receiver.renew(request.SerializeToString())
    assert list(kv.RenewResponse.FromString(answer).over) == [1]

    booth.now += 6.0
    await until(lambda: booth.held == 1)
    assert booth.ledger.counts["expired"] == 1
    with pytest.raises(ReservationError, match="expired"):
        await booth.take_over(prompt, replace(lost, gen=2))
    timers.cancel()


@pytest.mark.parametrize("broken", ["expire", "scrub"])
async def test_the_failure_of_a_timer_is_raised_to_the_worker(booth, broken):
    part = booth.ledger if broken == "expire" else booth.receiver
    setattr(part, broken, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(booth.receiver.run(), 30)


async def test_pages_on_a_device_are_verified_in_a_thread():
    """A synchronous read would wait behind the kernels of a decode step, on the io loop."""
    booth = Booth(pool=Pool(SlowArena(bytearray(1 << 20)), 1 << 14))
    booth.give(make_related(500, 1, 400))
    await booth.receiver.scrub()
    assert not booth.damaged
    device = booth.pool.arena
    assert device.waited
    assert "MainThread" not in device.waited
    page = booth.admitted().groups[1].page_ids()[2]
    (byte,) = device.read(page * 128, 1)
    device.write([(page * 128, bytes([byte ^ 1]))])
    await booth.receiver.scrub()
    assert booth.damaged == [("r", 0, "corrupt_frame")]
    ((rid, attempt, reason),) = booth.dropped
    assert (rid, attempt) == ("r", 0)
    assert str(Item("page", 1, 1, 2)) in reason
    booth.close()
