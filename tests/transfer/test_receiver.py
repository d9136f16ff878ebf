"""The receiving end by its bytes: what a broken or hostile sender can say to it."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
from tests.transfer.wires import Clock, open_house

from disagg.errors import CorruptFrameError, DisaggError, ReservationError, VersionError
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.transfer import convert
from disagg.transfer.messages import Ack, Admission, Nack, State
from disagg.transfer.receiver import Receiver
from disagg.wire import CommitFrame, Frame, RenewFrame, Ticket, pack
from tests.transfer.prompts import EPOCH, Prompt, make_pool, make_prompt, make_terms


class Booth:
    """A receiver without a server, spoken to in bytes."""

    def __init__(self, **terms: object):
        self.pool = make_pool()
        self.admitted: list[Admission] = []
        self.receiver = Receiver(
            make_terms(self.pool, **terms),
            self.pool,
            self.pool.arena,
            self.admitted.append,
            lambda *drop: None,
        )

    async def reserve(self, prompt: Prompt, gen: int = 1, **changes: object) -> Ticket:
        message = convert.request_to(prompt.request(**changes)).SerializeToString()
        grant = pb.ReserveResponse.FromString(await self.receiver.reserve(message))
        ticket = Ticket(grant.nonce, grant.epoch, gen)
        await self.attach(ticket)
        return ticket

    async def attach(self, ticket: Ticket) -> pb.AttachResponse:
        message = pb.AttachRequest(ticket=convert.ticket_to(ticket)).SerializeToString()
        return pb.AttachResponse.FromString(await self.receiver.attach(message))

    async def commit_again(self, data: bytes) -> Ack | Nack:
        answer = await self.receiver.commit(data)
        return convert.answer_from(pb.CommitResponse.FromString(answer))

    async def push(self, messages: Iterable[bytes]) -> list[pb.PushResponse]:
        async def stream() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        replies = self.receiver.push(stream())
        return [pb.PushResponse.FromString(reply) async for reply in replies]


def message(frame: Frame) -> bytes:
    return convert.frame_message(pack(frame))


def whole(prompt: Prompt, ticket: Ticket) -> list[bytes]:
    frames = [RenewFrame(ticket), *prompt.frames(ticket), CommitFrame(ticket, prompt.commit())]
    return [message(frame) for frame in frames]


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(300)


def test_every_frame_gives_its_own_bytes_of_credit_back(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        sent = whole(prompt, ticket)
        first, *credits, last = await booth.push(sent)
        assert first.credit.bytes == prompt.checklist.window_bytes
        assert [x.credit.bytes for x in credits] == [len(x) for x in sent[1:-1]]
        assert {x.credit.frames for x in credits} == {1}
        assert isinstance(convert.answer_from(last), Ack)
        assert prompt.equals(booth.pool.arena, booth.admitted[0].groups)

    asyncio.run(scene())


def test_a_clean_end_of_stream_completes_nothing(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        await booth.push(whole(prompt, ticket)[:-1])
        assert not booth.admitted
        assert booth.receiver.gauges() == {
            "reservations": 1,
            "streams": 0,
            "waiting": 0,
            "running": 0,
        }
        again = Ticket(ticket.nonce, ticket.epoch, 2)
        assert len((await booth.attach(again)).have) > 0
        await booth.push([message(RenewFrame(again)), whole(prompt, again)[-1]])
        assert len(booth.admitted) == 1

    asyncio.run(scene())


def test_frames_may_be_duplicated_and_reordered(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        renew, *pages, commit = whole(prompt, ticket)
        await booth.push([renew, *pages[::-1], renew, *pages[:4], commit])
        assert prompt.equals(booth.pool.arena, booth.admitted[0].groups)

    asyncio.run(scene())


def test_a_commit_that_comes_early_names_what_is_missing(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        renew, *pages, commit = whole(prompt, ticket)
        replies = await booth.push([renew, *pages[:-1], commit, pages[-1], commit])
        nack = convert.answer_from(replies[-3])
        assert isinstance(nack, Nack)
        assert list(nack.missing) == prompt.frames(ticket)[-1].items()
        assert isinstance(convert.answer_from(replies[-1]), Ack)

    asyncio.run(scene())


def test_one_corrupt_byte_in_any_message_of_a_stream_admits_nothing(prompt):
    async def scene():
        booth = Booth()
        for place in range(0, sum(map(len, whole(prompt, Ticket(0, 0, 1)))), 997):
            ticket = await booth.reserve(prompt, rid=f"r{place}")
            stream = [bytearray(x) for x in whole(prompt, ticket)]
            offset = place
            for data in stream:
                if offset < len(data):
                    data[offset] ^= 0x40
                    break
                offset -= len(data)
            with pytest.raises(DisaggError):
                await booth.push(map(bytes, stream))
            assert not booth.admitted
            booth.receiver.abort(f"r{place}", 0, "corrupt")
            assert booth.pool.referenced_pages == 0

    asyncio.run(scene())


def test_a_stream_that_is_cut_anywhere_admits_nothing(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        renew, *rest = whole(prompt, ticket)
        for size in (0, 1, 40, len(rest[0]) - 1):
            ticket = Ticket(ticket.nonce, EPOCH, ticket.gen + 1)
            await booth.attach(ticket)
            renew, *rest = whole(prompt, ticket)
            with pytest.raises(CorruptFrameError):
                await booth.push([renew, rest[0][:size]])
            assert booth.receiver.gauges()["streams"] == 0
        assert not booth.admitted

    asyncio.run(scene())


def test_a_stream_begins_with_a_renew_frame_and_keeps_its_ticket(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        other = await booth.reserve(prompt, rid="other")
        with pytest.raises(CorruptFrameError, match="begins"):
            await booth.push(whole(prompt, ticket)[1:])
        with pytest.raises(ReservationError, match="on the stream"):
            await booth.push([message(RenewFrame(ticket)), *whole(prompt, other)[1:]])
        with pytest.raises(ReservationError):
            await booth.push([message(RenewFrame(Ticket(ticket.nonce, EPOCH, 9)))])

    asyncio.run(scene())


def test_a_frame_larger_than_the_window_is_beyond_credit(prompt, monkeypatch):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        with pytest.raises(CorruptFrameError, match="beyond credit"):
            await booth.push(whole(prompt, ticket))

    monkeypatch.setattr("disagg.transfer.items.Checklist.window_bytes", 3000)
    asyncio.run(scene())


def test_a_frame_of_another_version_is_refused_as_such(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        data = bytearray(message(RenewFrame(ticket)))
        data[data.index(b"dgKV") + 4] += 1
        with pytest.raises(VersionError):
            await booth.push([bytes(data)])

    asyncio.run(scene())


def test_refusals_and_expired_leases_are_counted_by_name(prompt):
    async def scene():
        clock = Clock()
        async with open_house(clock=clock) as house:
            for change in ({"model": "b"}, {"plan": "b"}, {"epoch": EPOCH - 1}):
                with pytest.raises(DisaggError):
                    await house.sender(prompt, **change).reserve()
            assert house.receiver.failures == {"layout": 2, "reservation": 1}
            await house.sender(prompt).reserve()
            clock.now += 11.0
            house.receiver.tick()
            assert house.receiver.ledger.counts["expired"] == 1
            house.assert_nothing_held()

    asyncio.run(scene())


def test_a_replayed_stream_is_refused_by_name_and_lands_nowhere(prompt):
    """Every frame of a finished hand-off again, when its pages belong to another prompt."""

    async def scene():
        booth, other = Booth(), make_prompt(300, seed=7)
        ticket = await booth.reserve(prompt)
        recorded = whole(prompt, ticket)
        await booth.push(recorded)
        for state in booth.admitted[0].groups:
            booth.pool.release(list(state.ids()))
        booth.receiver.finished("r", 0)
        await booth.push(whole(other, await booth.reserve(other, rid="other")))
        before = bytes(booth.pool.arena.read(0, booth.pool.arena.nbytes))
        for first in (ticket, Ticket(ticket.nonce, EPOCH, 2)):
            for frame in recorded:
                with pytest.raises(DisaggError):
                    await booth.push([message(RenewFrame(first)), frame])
                with pytest.raises(DisaggError):
                    await booth.push([frame])
        assert isinstance(await booth.commit_again(recorded[-1]), Ack)  # the same answer as before
        assert len(booth.admitted) == 2
        assert bytes(booth.pool.arena.read(0, booth.pool.arena.nbytes)) == before
        assert other.equals(booth.pool.arena, booth.admitted[1].groups)

    asyncio.run(scene())


def test_a_commit_outside_of_a_stream_completes_what_arrived(prompt):
    async def scene():
        booth = Booth()
        ticket = await booth.reserve(prompt)
        *pages, commit = whole(prompt, ticket)
        await booth.push(pages)
        again = Ticket(ticket.nonce, EPOCH, 2)
        await booth.attach(again)
        commit = whole(prompt, again)[-1]
        first = await booth.receiver.commit(commit)
        assert isinstance(convert.answer_from(pb.CommitResponse.FromString(first)), Ack)
        assert await booth.receiver.commit(commit) == first
        assert len(booth.admitted) == 1
        assert (await booth.attach(Ticket(ticket.nonce, EPOCH, 3))).state == (
            convert.attached_to(convert.Attached(State.ADMITTED)).state
        )
        with pytest.raises(CorruptFrameError, match="RenewFrame"):
            await booth.receiver.commit(pages[0])

    asyncio.run(scene())


@pytest.mark.parametrize("call", ["reserve", "attach", "commit", "abort_call", "release"])
@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a\x7f", b"", b"\x08\x01\x10\x02"])
def test_control_messages_of_nobody_end_in_a_typed_error(call, data):
    async def scene():
        booth = Booth()
        with pytest.raises(DisaggError):
            await getattr(booth.receiver, call)(data)

    asyncio.run(scene())
