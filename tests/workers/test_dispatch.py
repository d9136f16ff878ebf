"""The router's rules without sockets, one by one."""

import pytest

from disagg.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    DisaggError,
    LayoutError,
    PeerLostError,
    RequestError,
)
from disagg.workers.dispatch import Dispatch
from disagg.workers.lifecycle import (
    Abort,
    Action,
    Deliver,
    Fail,
    Finish,
    Member,
    Phase,
    Release,
    Start,
    Work,
)


def work(rid: str = "r", deadline: float = 100.0) -> Work:
    return Work(rid, (1, 2, 3), {"max_tokens": 4}, "raw", deadline)


def pair(**options: int) -> Dispatch:
    dispatch = Dispatch(**options)
    dispatch.worker_up(Member("p", True, False), 0.0)
    dispatch.worker_up(Member("d", False, True), 0.0)
    return dispatch


def started(**options: int) -> Dispatch:
    dispatch = pair(**options)
    assert dispatch.submit(work(), 0.0) == [Start("p", "d", work(), 1, ())]
    return dispatch


def test_a_request_waits_until_there_is_a_worker_of_each_kind() -> None:
    dispatch = Dispatch()
    assert dispatch.submit(work(), 0.0) == []
    assert dispatch.worker_up(Member("p", True, False), 1.0) == []
    assert dispatch.worker_up(Member("d", False, True), 2.0) == [Start("p", "d", work(), 1, ())]


def test_one_worker_of_both_roles_is_a_pair() -> None:
    dispatch = Dispatch()
    dispatch.worker_up(Member("w", True, True), 0.0)
    assert dispatch.submit(work(), 0.0) == [Start("w", "w", work(), 1, ())]
    dispatch.token("w", "r", 1, 0, 7, 0.0)
    assert dispatch.finished("r", 1, 1, "stop", 0.0) == [Finish("r", "stop"), Release("w", "r", 1)]


def test_the_least_loaded_workers_are_chosen() -> None:
    dispatch = pair()
    dispatch.worker_up(Member("p2", True, False), 0.0)
    dispatch.worker_up(Member("d2", False, True), 0.0)
    chosen = [dispatch.submit(work(f"r{i}"), 0.0)[0] for i in range(2)]
    assert [(s.prefill, s.decode) for s in chosen if isinstance(s, Start)] == [
        ("p", "d"),
        ("p2", "d2"),
    ]


def test_a_token_said_twice_is_delivered_once() -> None:
    dispatch = started()
    assert dispatch.token("p", "r", 1, 0, 7, 0.0) == [Deliver("r", 7)]
    assert dispatch.token("d", "r", 1, 0, 7, 0.0) == []
    assert dispatch.unequal_tokens == 0
    assert dispatch.token("d", "r", 1, 0, 8, 0.0) == []
    assert dispatch.unequal_tokens == 1


def test_tokens_of_an_old_attempt_are_not_delivered() -> None:
    dispatch = started()
    dispatch.worker_up(Member("p2", True, False), 0.0)
    assert Start("p2", "d", work(), 2, ()) in dispatch.worker_down("p", 1.0)
    assert dispatch.token("d", "r", 1, 0, 7, 1.0) == []
    assert dispatch.finished("r", 1, 0, "stop", 1.0) == []


def test_a_gap_starts_another_attempt_with_what_was_delivered() -> None:
    dispatch = started()
    dispatch.token("d", "r", 1, 0, 7, 0.0)
    assert set(dispatch.token("d", "r", 1, 2, 9, 0.0)) == {Abort("p", "r", 1), Abort("d", "r", 1)}
    assert dispatch.tick(0.05) == []
    assert dispatch.tick(0.1) == [Start("p", "d", work(), 2, (7,))]


def test_an_end_that_counts_more_tokens_than_arrived_is_no_end() -> None:
    dispatch = started()
    dispatch.token("d", "r", 1, 0, 7, 0.0)
    actions = dispatch.finished("r", 1, 2, "stop", 0.0)
    assert not any(isinstance(action, Finish) for action in actions)
    assert dispatch.entries["r"].phase is Phase.QUEUED


def test_a_dead_decode_worker_costs_no_token() -> None:
    dispatch = started()
    dispatch.token("p", "r", 1, 0, 7, 0.0)
    dispatch.token("d", "r", 1, 1, 8, 0.0)
    assert dispatch.worker_down("d", 1.0) == [Abort("p", "r", 1)]
    started_again = dispatch.worker_up(Member("d2", False, True), 2.0)
    assert started_again == [Start("p", "d2", work(), 2, (7, 8))]
    assert dispatch.known("d2") == {"r": 2}


def test_a_prefill_worker_that_dies_after_the_hand_off_is_not_missed() -> None:
    dispatch = started()
    dispatch.token("d", "r", 1, 0, 7, 0.0)
    assert dispatch.worker_down("p", 1.0) == []
    assert dispatch.token("d", "r", 1, 1, 8, 1.0) == [Deliver("r", 8)]


def test_a_decode_worker_that_waits_for_pages_keeps_them_for_the_next_attempt() -> None:
    dispatch = started()
    assert dispatch.worker_down("p", 1.0) == []  # no Abort to d: attempt 2 supersedes attempt 1
    assert dispatch.worker_up(Member("p2", True, False), 2.0) == [Start("p2", "d", work(), 2, ())]


def test_pages_kept_for_another_attempt_are_freed_when_the_client_leaves() -> None:
    dispatch = started()
    dispatch.worker_down("p", 1.0)
    assert dispatch.cancel("r") == [Abort("d", "r", 1)]


def test_a_request_under_which_three_workers_died_is_refused() -> None:
    dispatch = started(max_attempts=3)
    actions: list[Action] = []
    for name in ("d", "d2", "d3"):
        actions = dispatch.worker_down(name, 1.0)
        dispatch.worker_up(Member(f"d{int(name[1:] or 1) + 1}", False, True), 1.0)
    assert isinstance(actions[-1], Fail)
    assert isinstance(actions[-1].error, PeerLostError)
    assert not dispatch.entries


@pytest.mark.parametrize("error", [RequestError("no"), ConfigError("no")], ids=lambda e: e.reason)
def test_what_can_never_succeed_fails_at_once(error: DisaggError) -> None:
    assert Fail("r", error) in started().refused("r", 1, error, 0.0)


def test_a_lasting_disagreement_fails_after_three_attempts() -> None:
    dispatch, error, now = started(), LayoutError("another plan"), 0.0
    for attempt in (1, 2):
        dispatch.refused("r", attempt, error, now)
        now += 1.0
        assert any(isinstance(action, Start) for action in dispatch.tick(now))
    assert Fail("r", error) in dispatch.refused("r", 3, error, now)


@pytest.mark.parametrize("error", [PeerLostError("x"), CapacityError("x")], ids=lambda e: e.reason)
def test_what_may_pass_is_tried_until_the_deadline(error: DisaggError) -> None:
    dispatch, now, attempts = started(), 0.0, 1
    actions: list[Action] = []
    while dispatch.entries:
        actions = dispatch.refused("r", dispatch.entries["r"].attempt, error, now)
        now += 1.0
        actions += dispatch.tick(now)
        attempts += 1
    assert attempts > 10
    assert isinstance(actions[-1], Fail)
    assert isinstance(actions[-1].error, DeadlineError)


def test_the_deadline_aborts_both_sides() -> None:
    actions = started().tick(100.0)
    assert actions[:2] == [Abort("p", "r", 1), Abort("d", "r", 1)]
    assert isinstance(actions[2], Fail)


def test_a_client_that_left_frees_both_sides_and_is_forgotten() -> None:
    dispatch = started()
    assert dispatch.cancel("r") == [Abort("p", "r", 1), Abort("d", "r", 1)]
    assert dispatch.cancel("r") == []
    assert dispatch.token("d", "r", 1, 0, 7, 0.0) == []


def test_a_name_in_use_is_refused() -> None:
    with pytest.raises(RequestError, match="exists"):
        started().submit(work(), 0.0)
