"""The receiving end by its bytes: what a broken or hostile sender can say; and over a server."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from disagg.errors import (
    CorruptFrameError,
    DisaggError,
    RequestError,
    ReservationError,
    VersionError,
)
from disagg.pool import Pool
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.channel import Channel
from disagg.transfer.link import measure
from disagg.transfer.messages import Ack, Attach, Attached, Credit, fill
from disagg.transfer.rpc import connect
from disagg.transfer.sender import Sender
from disagg.wire import Frame, Item, Ticket, frame_message, pack
from tests.transfer.desk import corrupt
from tests.transfer.house import House, open_house
from tests.transfer.peer import QUICK, hand_over, offer_all, until
from tests.transfer.prompts import (
    EPOCH,
    MODEL,
    Prompt,
    SlowArena,
    make_prompt,
    make_related,
)


class Booth(House):
    """Spoken to in bytes."""

    def __init__(self, **desk: object):
        super().__init__(clock=None, **desk)

    async def take_over(self, prompt: Prompt, ticket: Ticket, direct: bool = False) -> Attached:
        attach = Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens, direct)
        data = await self.receiver.attach(attach.to_message().SerializeToString())
        return Attached.from_message(kv.AttachResponse.FromString(data))

    async def stream(self, messages: Iterable[bytes]) -> list[Credit]:
        """All answers of one channel."""

        async def each() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        replies = self.receiver.push(each())
        return [Credit.from_message(kv.PushResponse.FromString(x)) async for x in replies]

    async def commit(self, ticket: Ticket, prompt: Prompt) -> Ack:
        data = await self.receiver.commit(message(prompt.commit(ticket)))
        return Ack.from_message(kv.CommitResponse.FromString(data))


def bytes_of(frame: Frame) -> bytes:
    return b"".join(pack(frame))


def message(frame: Frame) -> bytes:
    return frame_message(pack(frame))


def pages(prompt: Prompt, ticket: Ticket) -> list[bytes]:
    return [message(frame) for frame in prompt.frames(ticket)]


# -- frames of one channel


async def test_frames_of_several_hand_offs_come_on_one_channel_and_each_is_answered(prompt):
    booth = Booth()
    tickets = [booth.begin(prompt, rid=rid) for rid in ("a", "b")]
    one, two = (pages(prompt, ticket) for ticket in tickets)
    sent = [x for pair in zip(one, two[::-1], strict=True) for x in pair] + one[:2]
    credits = await booth.stream(sent)
    assert credits == [
        Credit(tickets[place % 2 if place < 2 * len(one) else 0].nonce, 1)
        for place in range(len(sent))
    ]
    for ticket in tickets:
        assert isinstance(await booth.commit(ticket, prompt), Ack)
    for admission in booth.engine.values():
        assert prompt.equals(booth.pool.arena, admission.groups)
    booth.close()


async def test_a_refused_frame_is_answered_with_its_error_and_the_channel_goes_on(prompt):
    booth = Booth()
    gone, old, live = [booth.begin(prompt, rid=rid) for rid in ("gone", "old", "live")]
    booth.ledger.abort("gone", 0, "client gone")
    await booth.take_over(prompt, replace(old, gen=2))
    first = prompt.frames(live)[0]
    wrong = replace(first, payload=tuple(part[1:] for part in first.payload))
    frames = {
        "dead nonce": prompt.frames(gone)[0],
        "old gen": prompt.frames(old)[0],
        "unknown nonce": replace(first, ticket=Ticket(1, EPOCH, 1)),
        "other epoch": replace(first, ticket=replace(live, epoch=EPOCH + 1)),
        "foreign sizes": wrong,
        "corrupt payload": corrupt(first),
    }
    sent = [message(x) for x in frames.values()] + pages(prompt, live)
    credits = await booth.stream(sent)
    reasons = {name: x.error.reason for name, x in zip(frames, credits, strict=False)}
    assert reasons == dict.fromkeys(frames, "reservation") | {
        "dead nonce": "aborted",
        "foreign sizes": "layout",
        "corrupt payload": "corrupt_frame",
    }
    assert all(x.error is None for x in credits[len(frames) :])
    assert booth.receiver.failures == {
        "reservation": 3,
        "aborted": 1,
        "layout": 1,
        "corrupt_frame": 1,
    }
    rules = booth.ledger
    assert rules.gauges()["streams"] == 1  # the channel is over, `old` was not on it
    assert isinstance(await booth.commit(live, prompt), Ack)


BROKEN = {
    "no frame": (lambda data: b"\x0a\x03abc", CorruptFrameError),
    "another message": (lambda data: b"\x12" + data[1:], CorruptFrameError),
    "nothing": (lambda data: b"", CorruptFrameError),
    "a cut frame": (lambda data: data[:-1], CorruptFrameError),
    "a flipped header": (lambda data: data[:45] + bytes([data[45] ^ 1]) + data[46:], DisaggError),
    "another version": (
        lambda data: data[: data.index(b"dgKV") + 4] + b"\x09" + data[data.index(b"dgKV") + 5 :],
        VersionError,
    ),
}


@pytest.mark.parametrize(("breaking", "error"), BROKEN.values(), ids=BROKEN)
async def test_what_is_no_frame_ends_the_channel_by_name_and_breaks_what_was_on_it(
    prompt, breaking, error
):
    booth = Booth()
    ticket = booth.begin(prompt)
    first, second, *_ = pages(prompt, ticket)
    with pytest.raises(error):
        await booth.stream([first, breaking(second)])
    assert booth.ledger.gauges() == {"reservations": 1, "streams": 0, "running": 0}
    again = replace(ticket, gen=2)
    assert len((await booth.take_over(prompt, again)).have) == len(prompt.frames(again)[0].places)
    await booth.stream(pages(prompt, again))
    assert isinstance(await booth.commit(again, prompt), Ack)


async def test_a_commit_among_pages_ends_the_channel(prompt):
    booth = Booth()
    ticket = booth.begin(prompt)
    with pytest.raises(CorruptFrameError, match="Commit"):
        await booth.stream([message(prompt.commit(ticket))])
    with pytest.raises(CorruptFrameError, match="PageFrame"):
        await booth.receiver.commit(pages(prompt, ticket)[0])


async def test_an_error_that_nobody_expected_ends_the_channel_and_pins_no_page(prompt, monkeypatch):
    booth = Booth()
    ticket = booth.begin(prompt)
    monkeypatch.setattr(booth.pool.arena, "write", lambda places: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await booth.stream(pages(prompt, ticket))
    assert booth.ledger.gauges()["streams"] == 0
    booth.ledger.abort("r", 0, "client gone")
    booth.close()


async def test_a_replayed_hand_off_is_refused_by_name_and_lands_nowhere(prompt):
    """Every frame of a finished hand-off again, when its pages belong to another prompt."""
    booth, other = Booth(), make_prompt(300, seed=7)
    ticket = booth.begin(prompt)
    await booth.stream(pages(prompt, ticket))
    first = await booth.commit(ticket, prompt)
    booth.close()
    second = booth.begin(other, rid="other")
    await booth.stream(pages(other, second))
    await booth.commit(second, other)
    before = bytes(booth.pool.arena.read(0, booth.pool.arena.nbytes))
    for again in (ticket, replace(ticket, gen=2)):
        credits = await booth.stream(pages(prompt, again))
        assert {x.error.reason for x in credits} == {"reservation"}
        assert (await booth.take_over(prompt, again)).admitted
    assert await booth.commit(ticket, prompt) == first  # the same answer as before
    assert list(booth.engine) == ["other"]
    assert bytes(booth.pool.arena.read(0, booth.pool.arena.nbytes)) == before


async def test_who_asks_for_a_direct_channel_is_told_where(prompt):
    booth = Booth()
    ticket = booth.begin(prompt)
    again = await booth.take_over(prompt, replace(ticket, gen=2), direct=True)
    assert (again.port, again.key) == (0, b"")
    booth.receiver.direct = lambda: (4711, b"once")
    for gen, direct, port in ((3, True, 4711), (4, False, 0)):
        attached = await booth.take_over(prompt, replace(ticket, gen=gen), direct)
        assert attached.port == port


# -- what happens by itself


async def test_leases_end_without_anybody_asking_and_a_renewal_is_a_call_of_its_own(prompt):
    booth = Booth()
    kept, lost = booth.begin(prompt, rid="kept"), booth.begin(prompt, rid="lost")
    timers = asyncio.create_task(booth.receiver.run())
    booth.now += 6.0
    request = fill(kv.RenewRequest, tickets=[kept, Ticket(1, EPOCH, 1)])
    answer = await booth.receiver.renew(request.SerializeToString())
    assert list(kv.RenewResponse.FromString(answer).over) == [1]
    booth.now += 6.0
    await until(lambda: booth.ledger.gauges()["reservations"] == 1)
    assert booth.ledger.counts["expired"] == 1
    with pytest.raises(ReservationError, match="expired"):
        await booth.take_over(prompt, replace(lost, gen=2))
    timers.cancel()
    booth.ledger.abort("kept", 0, "client gone")
    booth.close()


@pytest.mark.parametrize("broken", ["expire", "scrub"])
async def test_what_breaks_a_timer_is_raised_to_the_worker(monkeypatch, broken):
    booth = Booth()
    if broken == "expire":
        monkeypatch.setattr(booth.ledger, "expire", lambda: 1 // 0)
    else:
        monkeypatch.setattr(booth.ledger.cache, "begin_scrub", lambda nbytes: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(booth.receiver.run(), 30)


async def test_pages_on_a_device_are_verified_in_a_thread_and_damage_is_told():
    """A synchronous read would wait behind the kernels of a decode step, on the io loop."""
    booth = Booth(pool=Pool(SlowArena(bytearray(1 << 20)), 1 << 14))
    prompt = make_related(500, 1, 400)
    ticket = booth.begin(prompt)
    await booth.stream(pages(prompt, ticket))
    await booth.commit(ticket, prompt)
    await booth.receiver.scrub()
    assert not booth.damaged
    device = booth.pool.arena
    assert device.waited
    assert "MainThread" not in device.waited
    page = booth.admitted().groups[1].page_ids()[2]
    device.write([(page * 128, bytes([device.read(page * 128, 1)[0] ^ 1]))])
    await booth.receiver.scrub()
    assert booth.damaged == [("r", 0, "corrupt_frame")]
    ((rid, attempt, reason),) = booth.dropped
    assert (rid, attempt) == ("r", 0)
    assert str(Item("page", 1, 1, 2)) in reason
    booth.close()


# -- what peers say


@asynccontextmanager
async def open_door(direct: bool = False, **terms: object) -> AsyncIterator[tuple[House, Channel]]:
    """A receiver on free ports, and a channel to it; everything is closed and checked."""
    async with open_house(**terms) as house:
        channel = Channel(house.address, None, replace(QUICK, direct=direct))
        try:
            yield house, channel
        finally:
            await channel.close()
        house.close()


def sender_of(house: House, channel: Channel, prompt: Prompt, rid: str) -> Sender:
    return Sender(channel, house.promise(prompt, rid), prompt.plan, prompt.read, 20.0)


@pytest.mark.parametrize("direct", [False, True])
async def test_hand_offs_over_a_server_end_in_the_engine_and_both_sides_count_the_same_bytes(
    direct,
):
    prompts = {"one": make_related(1500, 1, 1000), "two": make_related(1500, 2, 1000)}

    async with open_door(direct) as (house, channel):
        for rid, prompt in prompts.items():
            house.receiver.nbytes = 0
            stats = await hand_over(sender_of(house, channel, prompt, rid), prompt)
            admission = house.engine[rid]
            assert prompt.equals(house.pool.arena, admission.groups)
            assert admission.job.rid == rid
            assert admission.commit.first_token == 42
            assert stats.wire_bytes == house.receiver.nbytes
            assert stats.payload_bytes + stats.cached_bytes == prompt.checklist.total_bytes
        assert stats.cached_bytes > 0


async def test_many_hand_offs_share_a_channel_and_one_that_is_aborted_harms_no_other():
    prompts = {f"r{seed}": make_prompt(1500, seed) for seed in range(4)}

    async with open_door(lease_s=2.0) as (house, channel):
        senders = {rid: sender_of(house, channel, x, rid) for rid, x in prompts.items()}
        runs = {rid: asyncio.create_task(x.run()) for rid, x in senders.items()}
        await until(lambda: house.ledger.gauges()["streams"] == 4)
        house.ledger.abort("r1", 0, "client gone")
        for rid, sender in senders.items():
            offer_all(sender, prompts[rid])
        done = dict(
            zip(runs, await asyncio.gather(*runs.values(), return_exceptions=True), strict=True)
        )
        assert isinstance(done.pop("r1"), ReservationError)
        assert {stats.attaches for stats in done.values()} == {1}
        for rid, admission in house.engine.items():
            assert prompts[rid].equals(house.pool.arena, admission.groups)
        assert len(house.engine) == 3


async def test_refusals_and_probes_over_a_server(prompt):
    async with open_door() as (house, channel):
        link = connect(channel.address)
        with pytest.raises(RequestError):
            await link.call("/disagg.v1.KvTransferService/Attach", b"\xff", 5.0)
        assert house.receiver.failures == {"request": 1}
        assert (await measure(link)).gbytes_per_s > 0
        await link.close()
