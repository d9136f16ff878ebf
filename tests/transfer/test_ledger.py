"""The receiver's rules, one at a time. The clock is a number; nothing here has a socket."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from disagg.errors import (
    CapacityError,
    CorruptFrameError,
    LayoutError,
    PromptTooLongError,
    RequestError,
    ReservationError,
)
from disagg.page import Kind
from disagg.transfer.ledger import Ledger
from disagg.transfer.messages import Ack, Admission, Admit, Drop, Grant, Nack, Settled, State
from disagg.wire import CommitFrame, Item, PageFrame, Ticket
from tests.transfer.prompts import (
    EPOCH,
    OTHER_PLAN,
    Prompt,
    make_pool,
    make_prompt,
    make_related,
    make_terms,
)

SMALL = 7 << 14  # room for one prompt of 300 tokens, not for two


class Desk:
    """A ledger over a pool, with what the receiver does around it."""

    def __init__(self, nbytes: int = 1 << 20, **terms: object):
        self.pool = make_pool(nbytes)
        nonces = count(1000)
        self.ledger = Ledger(make_terms(self.pool, **terms), self.pool, lambda: next(nonces))

    def reserve(self, prompt: Prompt, now: float = 0.0, **changes: object) -> Grant:
        waiter = self.ledger.reserve(prompt.request(**changes), now)
        if waiter.error:
            raise waiter.error
        assert waiter.grant
        return waiter.grant

    def attach(self, grant: Grant, gen: int = 1, now: float = 0.0) -> Ticket:
        ticket = Ticket(grant.nonce, grant.epoch, gen)
        assert self.ledger.attach(ticket, now).state is State.ATTACHED
        return ticket

    def store(self, frame: PageFrame, now: float = 0.0) -> None:
        write = self.ledger.begin_write(frame, now)
        written = False
        try:
            frame.verify()
            for placement in write.placements:
                self.pool.arena.write(placement.start, placement.data)
            written = True
        finally:
            self.ledger.end_write(write, written)

    def push(self, prompt: Prompt, ticket: Ticket, now: float = 0.0) -> None:
        for frame in prompt.frames(ticket):
            self.store(frame, now)

    def admitted(self) -> list[Admission]:
        return [x.admission for x in self.ledger.take_actions() if isinstance(x, Admit)]

    def assert_nothing_held(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.ledger.gauges().values())


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.pool.check_integrity()


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(300)


def test_a_whole_hand_off_ends_in_the_engine_with_the_same_bytes(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    assert isinstance(desk.ledger.commit(CommitFrame(ticket, prompt.commit()), 1.0), Ack)
    (admission,) = desk.admitted()
    assert prompt.equals(desk.pool.arena, admission.groups)
    assert (admission.rid, admission.attempt, admission.tokens) == ("r", 0, 300)
    assert desk.ledger.gauges() == {
        "reservations": 0,
        "streams": 0,
        "waiting": 0,
        "running": 1,
    }
    for state in admission.groups:
        desk.pool.release(list(state.ids()))
    desk.ledger.finished("r", 0)
    desk.assert_nothing_held()


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


def test_a_commit_before_the_last_item_is_answered_with_what_is_missing(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    *sent, last = prompt.frames(ticket)
    for frame in sent:
        desk.store(frame)
    commit = CommitFrame(ticket, prompt.commit())
    assert desk.ledger.commit(commit, 0.0) == Nack(tuple(last.items()))
    desk.store(last)
    assert isinstance(desk.ledger.commit(commit, 0.0), Ack)


def test_a_commit_again_gets_the_same_answer_and_starts_nothing(desk, prompt):
    grant = desk.reserve(prompt)
    ticket = desk.attach(grant)
    desk.push(prompt, ticket)
    commit = CommitFrame(ticket, prompt.commit())
    first = desk.ledger.commit(commit, 0.0)
    assert len(desk.admitted()) == 1
    assert desk.ledger.commit(commit, 1.0) is first
    desk.ledger.finished("r", 0)
    assert desk.ledger.commit(commit, 1.0) is first
    assert not desk.admitted()
    assert desk.ledger.attach(replace(ticket, gen=2), 1.0).state is State.ADMITTED
    with pytest.raises(ReservationError, match="another commit"):
        desk.ledger.commit(CommitFrame(ticket, prompt.commit(first_token=6)), 1.0)


WRONG_COMMITS = {
    "another length": ({"tokens": 299}, LayoutError),
    "another plan": ({"plan": "0" * 16}, LayoutError),
    "too few digests": ({"digests": (1, 2)}, CorruptFrameError),
}


@pytest.mark.parametrize(("change", "error"), WRONG_COMMITS.values(), ids=WRONG_COMMITS)
def test_a_commit_of_another_prompt_is_refused(desk, prompt, change, error):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    with pytest.raises(error):
        desk.ledger.commit(CommitFrame(ticket, replace(prompt.commit(), **change)), 0.0)
    assert not desk.admitted()


def test_a_commit_with_another_digest_than_arrived_is_refused(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    with pytest.raises(CorruptFrameError):
        desk.ledger.commit(CommitFrame(ticket, make_prompt(300, seed=1).commit()), 0.0)


def test_a_prompt_that_the_engine_refuses_is_not_acknowledged_later(desk, prompt):
    ticket = desk.attach(desk.reserve(prompt))
    desk.push(prompt, ticket)
    commit = CommitFrame(ticket, prompt.commit())
    desk.ledger.commit(commit, 0.0)
    (admission,) = desk.admitted()
    for state in admission.groups:
        desk.pool.release(list(state.ids()))
    desk.ledger.reject(ticket.nonce, "draining", 0.0)
    with pytest.raises(ReservationError, match="draining"):
        desk.ledger.commit(commit, 0.0)
    desk.assert_nothing_held()


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


def test_release_frees_and_lets_the_same_attempt_reserve_again(desk, prompt):
    grant = desk.reserve(prompt)
    desk.ledger.release(Ticket(grant.nonce, EPOCH, 0), 0.0)
    desk.assert_nothing_held()
    assert desk.reserve(prompt).nonce != grant.nonce


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
