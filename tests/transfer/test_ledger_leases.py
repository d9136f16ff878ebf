"""How long a reservation lasts, and what is remembered of it."""

import pytest

from disagg.errors import (
    ReservationError,
)
from disagg.transfer.messages import State
from disagg.wire import CommitFrame, Ticket
from tests.transfer.desk import SMALL, Desk
from tests.transfer.prompts import (
    EPOCH,
)


def test_a_lease_ends_without_a_sign_of_life(desk, prompt):
    grant = desk.reserve(prompt)
    ticket = desk.attach(grant, now=1.0)
    desk.ledger.renew(ticket, 10.0)
    desk.ledger.expire(19.9)
    assert desk.ledger.gauges()["reservations"] == 1
    desk.ledger.expire(20.0)
    desk.assert_nothing_held()
    assert desk.ledger.attach(Ticket(grant.nonce, EPOCH, 2), 21.0).state is State.EXPIRED


def test_frames_of_an_expired_reservation_are_refused_and_land_nowhere(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    before = bytes(desk.pool.arena.read(0, desk.pool.arena.nbytes))
    for frame in prompt.frames(ticket):
        with pytest.raises(ReservationError, match="expired"):
            desk.store(frame, now=50.0)
    assert desk.pool.arena.read(0, desk.pool.arena.nbytes) == before
    with pytest.raises(ReservationError, match="expired"):
        desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 50.0)


def test_an_expired_request_may_reserve_again(desk, prompt):
    first = desk.reserve(prompt)
    second = desk.reserve(prompt, now=60.0)
    assert second.nonce != first.nonce


def test_a_sender_that_never_commits_leaves_nothing_behind(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    desk.ledger.stream_ended(ticket)
    assert not desk.admitted()
    desk.ledger.expire(60.0)
    desk.assert_nothing_held()


def test_what_ended_is_forgotten_after_a_while_and_refused_all_the_same(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.ledger.abort("r", 0, "client gone", 0.0)
    desk.ledger.expire(901.0)
    with pytest.raises(ReservationError, match="no reservation"):
        desk.store(prompt.frames(ticket)[0], now=901.0)
    desk.reserve(prompt, now=902.0)


def test_the_next_event_is_the_earliest_lease_or_deadline(prompt):
    desk = Desk(SMALL)
    assert desk.ledger.next_event() is None
    desk.reserve(prompt, now=3.0)
    assert desk.ledger.next_event() == 13.0
    desk.ledger.reserve(prompt.request("other", wait_s=2.0), 4.0)
    assert desk.ledger.next_event() == 6.0
