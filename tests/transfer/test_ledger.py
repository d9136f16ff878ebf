"""A whole hand-off by the receiver's rules, and its commit; no socket, and a number as clock."""

from dataclasses import replace

import pytest

from disagg.errors import (
    CorruptFrameError,
    LayoutError,
    ReservationError,
)
from disagg.transfer.messages import Ack, Nack, State
from disagg.wire import CommitFrame
from tests.transfer.prompts import (
    make_prompt,
)


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
