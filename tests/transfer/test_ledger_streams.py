"""Frames and streams of a reservation: which are taken, which are refused."""

from dataclasses import replace

import pytest

from disagg.errors import (
    CorruptFrameError,
    ReservationError,
)
from disagg.page import Kind
from disagg.transfer.messages import Ack, Nack
from disagg.wire import CommitFrame, Item, Ticket
from tests.transfer.prompts import (
    EPOCH,
    make_prompt,
)


def test_a_younger_stream_takes_over_and_the_older_is_refused(desk, prompt):
    grant = desk.reserve(prompt)
    old = desk.attach(grant, 1)
    new = desk.attach(grant, 2)
    frame = prompt.frames(old)[0]
    with pytest.raises(ReservationError, match="stream 1"):
        desk.store(frame)
    with pytest.raises(ReservationError, match="stream 1"):
        desk.ledger.commit(CommitFrame(old, prompt.commit()), 0.0)
    with pytest.raises(ReservationError, match="attaches after"):
        desk.ledger.attach(old, 0.0)
    desk.ledger.stream_ended(old)
    desk.store(replace(frame, ticket=new))


def test_a_new_stream_learns_what_arrived_and_verified(desk, prompt):
    grant = desk.reserve(prompt)
    ticket = desk.attach(grant)
    sent = prompt.frames(ticket)[:3]
    for frame in sent:
        desk.store(frame)
    corrupt = replace(prompt.frames(ticket)[3], digests=(0,) * len(prompt.frames(ticket)[3].layers))
    with pytest.raises(CorruptFrameError):
        desk.store(corrupt)
    desk.ledger.stream_ended(ticket)
    have = desk.ledger.attach(Ticket(grant.nonce, EPOCH, 2), 0.0).have
    assert have == {x: d for f in sent for x, d in zip(f.items(), f.digests, strict=True)}


def test_frames_need_a_stream(desk, prompt):
    grant = desk.reserve(prompt)
    with pytest.raises(ReservationError):
        desk.store(prompt.frames(Ticket(grant.nonce, EPOCH, 0))[0])
    ticket = desk.attach(grant)
    desk.ledger.stream_ended(ticket)
    with pytest.raises(ReservationError, match="broken"):
        desk.store(prompt.frames(ticket)[0])


def test_frames_of_an_unknown_reservation_or_epoch_are_refused(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    with pytest.raises(ReservationError, match="no reservation"):
        desk.store(prompt.frames(replace(ticket, nonce=1))[0])
    with pytest.raises(ReservationError, match="epoch 8"):
        desk.store(prompt.frames(replace(ticket, epoch=EPOCH + 1))[0])


def test_the_same_frame_again_changes_nothing(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    frame = prompt.frames(ticket)[0]
    desk.store(frame)
    write = desk.ledger.begin_write(frame, 0.0)
    assert not write.placements
    desk.ledger.end_write(write, True)


def test_an_item_that_comes_again_with_other_bytes_is_refused(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    item = Item(Kind.PAGE, 0, 2, 1)
    desk.store(prompt.frame(ticket, [item]))
    with pytest.raises(CorruptFrameError, match="page 1 of layer 2"):
        desk.store(make_prompt(300, seed=1).frame(ticket, [item]))


def test_frames_may_come_in_any_order(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    for frame in reversed(prompt.frames(ticket)):
        desk.store(frame)
    desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 0.0)
    (admission,) = desk.admitted()
    assert prompt.equals(desk.pool.arena, admission.groups)


def test_memory_is_freed_only_when_the_last_write_closes(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    write = desk.ledger.begin_write(prompt.frames(ticket)[0], 0.0)
    desk.ledger.abort("r", 0, "client gone", 0.0)
    assert desk.pool.referenced_pages > 0
    desk.ledger.end_write(write, True)
    desk.assert_nothing_held()


def test_an_item_whose_write_is_open_is_missing(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    *sent, last = prompt.frames(ticket)
    for frame in sent:
        desk.store(frame)
    write = desk.ledger.begin_write(last, 0.0)
    commit, missing = CommitFrame(ticket, prompt.commit()), Nack(tuple(last.items()))
    desk.store(last)  # again: it has no bytes of its own to write
    assert desk.ledger.commit(commit, 0.0) == missing
    desk.ledger.end_write(write, False)
    assert desk.ledger.commit(commit, 0.0) == missing
    desk.store(last)
    assert isinstance(desk.ledger.commit(commit, 0.0), Ack)
