"""Attempts that take over, aborts and fences."""

import pytest

from disagg.errors import (
    ReservationError,
)
from disagg.transfer.messages import Ack, Drop, Nack
from disagg.wire import CommitFrame, Ticket
from tests.transfer.desk import SMALL, Desk
from tests.transfer.prompts import (
    EPOCH,
    make_prompt,
)


def test_a_higher_attempt_is_offered_what_arrived_for_the_lower(desk, prompt):
    old = desk.attach(desk.reserve(prompt))
    sent = prompt.frames(old)[:3]
    for frame in sent:
        desk.store(frame)
    pages = desk.pool.referenced_pages
    grant = desk.reserve(prompt, attempt=1)
    assert desk.pool.referenced_pages == pages
    assert set(grant.offered) == {item for frame in sent for item in frame.items()}
    with pytest.raises(ReservationError, match="superseded"):
        desk.store(prompt.frames(old)[4])
    ticket = desk.attach(grant)
    for frame in prompt.frames(ticket)[3:]:
        desk.store(frame)
    assert isinstance(desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 0.0), Ack)
    (admission,) = desk.admitted()
    assert admission.attempt == 1
    assert prompt.equals(desk.pool.arena, admission.groups)


def test_offered_items_with_other_bytes_are_replaced(desk, prompt):
    desk.push(prompt, desk.attach(desk.reserve(prompt)))
    other = make_prompt(300, seed=1)
    ticket = desk.attach(desk.reserve(other, attempt=1))
    missing = desk.ledger.commit(CommitFrame(ticket, other.commit()), 0.0)
    assert isinstance(missing, Nack)
    assert len(missing.missing) == len(other.checklist.items)
    desk.push(other, ticket)
    desk.ledger.commit(CommitFrame(ticket, other.commit()), 0.0)
    (admission,) = desk.admitted()
    assert other.equals(desk.pool.arena, admission.groups)


def test_a_higher_attempt_of_another_length_frees_the_lower(desk, prompt):
    desk.reserve(prompt)
    grant = desk.reserve(make_prompt(20), attempt=1)
    assert not grant.offered
    desk.ledger.release(Ticket(grant.nonce, EPOCH, 0), 0.0)
    desk.assert_nothing_held()


def test_a_lower_attempt_comes_too_late(desk, prompt):
    desk.reserve(prompt, attempt=2)
    with pytest.raises(ReservationError, match="superseded"):
        desk.reserve(prompt, attempt=1)


def test_a_higher_attempt_drops_the_lower_one_from_the_engine(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 0.0)
    desk.admitted()
    with pytest.raises(ReservationError, match="admitted already"):
        desk.reserve(prompt)
    desk.reserve(prompt, attempt=1)
    (drop,) = [x for x in desk.ledger.take_actions() if isinstance(x, Drop)]
    assert (drop.rid, drop.attempt) == ("r", 0)


@pytest.mark.parametrize("moment", ["before", "waiting", "held", "attached", "admitted"])
def test_an_abort_ends_an_attempt_at_any_moment_and_for_good(prompt, moment):
    desk = Desk(SMALL if moment == "waiting" else 1 << 20)
    waiter = None
    if moment == "waiting":
        desk.reserve(prompt, rid="other")
        waiter = desk.ledger.reserve(prompt.request(wait_s=9.0), 0.0)
    elif moment != "before":
        grant = desk.reserve(prompt)
        if moment != "held":
            ticket = desk.attach(grant)
            desk.push(prompt, ticket)
            if moment == "admitted":
                desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 0.0)
                (admission,) = desk.admitted()
    desk.ledger.abort("r", 0, "client gone", 1.0)
    if waiter:
        assert isinstance(waiter.error, ReservationError)
        desk.ledger.abort("other", 0, "too", 1.0)
    if moment == "admitted":
        assert Drop("r", 0, "client gone") in desk.ledger.take_actions()
        for state in admission.groups:
            desk.pool.release(list(state.ids()))
    desk.assert_nothing_held()
    with pytest.raises(ReservationError, match="aborted"):
        desk.reserve(prompt, now=2.0)
    desk.reserve(prompt, attempt=1, now=2.0)


def test_an_abort_and_a_commit_end_the_same_in_either_order(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    desk.ledger.abort("r", 0, "client gone", 0.0)
    with pytest.raises(ReservationError, match="client gone"):
        desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 0.0)
    assert not desk.admitted()
    desk.assert_nothing_held()


def test_a_fence_ends_everything_of_the_old_epoch(prompt):
    desk = Desk(SMALL)
    ticket = desk.attach(desk.reserve(prompt))
    waiter = desk.ledger.reserve(prompt.request("other", wait_s=9.0), 0.0)
    desk.ledger.fence(EPOCH + 1, 0.0)
    assert isinstance(waiter.error, ReservationError)
    desk.assert_nothing_held()
    with pytest.raises(ReservationError, match="epoch"):
        desk.store(prompt.frames(ticket)[0])
    with pytest.raises(ReservationError, match="epoch"):
        desk.reserve(prompt, rid="new")
    desk.reserve(prompt, rid="new", epoch=EPOCH + 1)
    with pytest.raises(ReservationError, match="fence"):
        desk.ledger.fence(EPOCH, 0.0)


def test_a_fence_drops_what_the_engine_runs(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 0.0)
    desk.admitted()
    desk.ledger.fence(EPOCH + 1, 0.0)
    assert any(isinstance(x, Drop) for x in desk.ledger.take_actions())
