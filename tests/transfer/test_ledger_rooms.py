"""Who gets room for a prompt, and in which order. The clock is a number."""

from dataclasses import replace

import pytest

from disagg.errors import (
    CapacityError,
    LayoutError,
    PromptTooLongError,
    RequestError,
    ReservationError,
)
from disagg.transfer.messages import Ack, Settled
from disagg.wire import CommitFrame, Ticket
from tests.transfer.desk import SMALL, Desk
from tests.transfer.prompts import (
    EPOCH,
    OTHER_PLAN,
    make_prompt,
    make_related,
)


def test_the_same_request_gets_the_same_reservation(desk, prompt):
    first = desk.reserve(prompt)
    pages = desk.pool.referenced_pages
    assert desk.reserve(prompt, now=1.0) == first
    assert desk.pool.referenced_pages == pages


def test_a_reservation_for_another_prompt_under_the_same_name_is_refused(desk, prompt):
    desk.reserve(prompt)
    with pytest.raises(ReservationError, match="another prompt"):
        desk.reserve(prompt, tokens=299)


WRONG_REQUESTS = {
    "another model": ({"model": "b-model"}, LayoutError),
    "another plan": ({"plan": OTHER_PLAN.fingerprint}, LayoutError),
    "another epoch": ({"epoch": EPOCH - 1}, ReservationError),
    "no tokens": ({"tokens": 0}, PromptTooLongError),
    "more tokens than the pool holds": ({"tokens": 10**9}, PromptTooLongError),
    "no name": ({"rid": ""}, RequestError),
    "a name without end": ({"rid": "x" * 300}, RequestError),
}


@pytest.mark.parametrize(("change", "error"), WRONG_REQUESTS.values(), ids=WRONG_REQUESTS)
def test_requests_that_can_never_be_served_are_refused_by_name(desk, prompt, change, error):
    with pytest.raises(error):
        desk.reserve(prompt, **change)
    desk.assert_nothing_held()


def test_reserving_touches_no_byte_and_everything_is_written_before_it_is_admitted(prompt):
    desk = Desk()
    arena = desk.pool.arena
    arena.write([(0, b"\xa5" * arena.nbytes)])
    ticket = desk.attach(desk.reserve(prompt))
    assert arena.read(0, arena.nbytes) == b"\xa5" * arena.nbytes
    desk.push(prompt, ticket)
    assert isinstance(desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 0.0), Ack)
    (admission,) = desk.admitted()
    assert prompt.equals(arena, admission.groups)


def test_without_room_and_patience_a_request_is_refused_at_once(prompt):
    desk = Desk(SMALL)
    desk.reserve(prompt)
    with pytest.raises(CapacityError):
        desk.reserve(prompt, rid="second")


def test_what_an_empty_pool_cannot_hold_is_never_waited_for(prompt):
    """Slabs have ends that no record fits into: fewer bytes than the pool has can be too many."""
    wasted = []
    for tokens in range(1, 6000, 37):
        desk = Desk(SMALL)
        waiter = None
        try:
            waiter = desk.ledger.reserve(prompt.request(tokens=tokens, wait_s=9.0), 0.0)
        except PromptTooLongError:
            if prompt.plan.nbytes(tokens) <= SMALL:
                wasted.append(tokens)
        assert waiter is None or waiter.grant
    assert wasted


def test_who_fits_an_empty_pool_waits_for_a_full_one():
    desk, large = Desk(SMALL), make_prompt(600)
    first = desk.reserve(large)
    waiter = desk.ledger.reserve(large.request("second", wait_s=9.0), 0.0)
    assert not waiter.settled
    desk.ledger.release(Ticket(first.nonce, EPOCH, 0), 1.0)
    assert waiter.grant


def test_cached_pages_make_room_for_a_prompt_as_large_as_the_pool():
    desk, shared = Desk(SMALL), make_related(300, 1, 256)
    ticket = desk.attach(desk.reserve(shared))
    desk.push(shared, ticket)
    desk.ledger.commit(CommitFrame(ticket, shared.commit()), 0.0)
    (admission,) = desk.admitted()
    for state in admission.groups:
        desk.pool.release(list(state.ids()))
    desk.ledger.finished("r", 0)
    assert desk.pool.cached_pages
    desk.reserve(make_prompt(600), rid="large", now=1.0)


def test_room_is_given_in_the_order_of_asking():
    small, large, desk = make_prompt(10), make_prompt(300), Desk(SMALL)
    held = desk.reserve(large, rid="first")
    waiting = [
        desk.ledger.reserve(large.request("large", wait_s=9.0), 0.0),
        desk.ledger.reserve(small.request("small", wait_s=9.0), 0.0),
    ]
    assert not any(waiter.settled for waiter in waiting)
    desk.ledger.take_actions()
    desk.ledger.release(Ticket(held.nonce, EPOCH, 0), 1.0)
    settled = [x.waiter for x in desk.ledger.take_actions() if isinstance(x, Settled)]
    assert settled == waiting
    assert all(waiter.grant for waiter in waiting)


def test_who_waits_for_room_until_the_deadline_gets_a_capacity_error(prompt):
    desk = Desk(SMALL)
    desk.reserve(prompt)
    waiter = desk.ledger.reserve(prompt.request("late", wait_s=2.0), 0.0)
    desk.ledger.expire(1.9)
    assert not waiter.settled
    desk.ledger.expire(2.0)
    assert isinstance(waiter.error, CapacityError)
    assert desk.ledger.gauges()["waiting"] == 0


def test_the_last_caller_to_leave_gives_up_the_place_in_the_queue(prompt):
    desk = Desk(SMALL)
    desk.reserve(prompt)
    request = prompt.request("late", wait_s=9.0)
    waiter = desk.ledger.reserve(request, 0.0)
    assert desk.ledger.reserve(replace(request, wait_s=3.0), 1.0) is waiter
    desk.ledger.leave(waiter, 2.0)
    assert desk.ledger.gauges()["waiting"] == 1
    desk.ledger.leave(waiter, 2.0)
    assert desk.ledger.gauges()["waiting"] == 0


def test_the_queue_for_room_has_an_end(prompt):
    desk = Desk(SMALL, max_waiting=1)
    desk.reserve(prompt)
    desk.ledger.reserve(prompt.request("second", wait_s=9.0), 0.0)
    with pytest.raises(CapacityError, match="waiting"):
        desk.ledger.reserve(prompt.request("third", wait_s=9.0), 0.0)


def test_a_draining_worker_takes_nothing_new_and_completes_the_rest(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.ledger.draining = True
    with pytest.raises(CapacityError, match="stopping"):
        desk.reserve(prompt, rid="new")
    desk.push(prompt, ticket)
    assert isinstance(desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 1.0), Ack)


def test_release_frees_and_lets_the_same_attempt_reserve_again(desk, prompt):
    grant = desk.reserve(prompt)
    desk.ledger.release(Ticket(grant.nonce, EPOCH, 0), 0.0)
    desk.assert_nothing_held()
    assert desk.reserve(prompt).nonce != grant.nonce
