"""Workers of two versions or models beside each other, as in a rolling upgrade."""

from dataclasses import replace

import pytest

from disagg.errors import DisaggError, LayoutError, VersionError
from disagg.router.actions import Action, FailRequest, Reserve, Start
from disagg.router.request_state import Phase
from disagg.transfer.messages import Load, Role, TokenEvent, WorkerInfo
from tests.router.rules import Rules
from tests.router.test_requests import decoding, house, job, leave, only, room

OLD = ("control 1", "wire 4", "model m", "plan raw 1")
NEW = ("control 1", "wire 5", "model m", "plan raw 1")
OTHER_MODEL = ("control 1", "wire 4", "model other", "plan raw 1")
ERRORS = [LayoutError("another plan"), VersionError("4, not 5")]


def mixed(**speaks: tuple[str, ...]) -> Rules:
    """Workers by name, with what they speak: p.. prefills, d.. decodes, b.. does both."""
    table = Rules()
    for name, spoken in speaks.items():
        join(table, name, spoken)
    return table


def join(table: Rules, name: str, speaks: tuple[str, ...]) -> list[Action]:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
    info = WorkerInfo(name, role, name, 1, speaks=speaks)
    return table.worker_up(info, 0.0)


# -- what workers say
def test_only_workers_that_speak_the_same_are_paired():
    table = mixed(p_old=OLD, p_new=NEW, d_new=NEW, d_old=OLD)

    for number in range(20):
        table.submit(job(f"r{number}"), 0.0)

    placed = [x for x in table.requests.values() if x.prefill and x.decode]
    pairs = {(x.prefill, x.decode) for x in placed}
    assert pairs == {("p_old", "d_old"), ("p_new", "d_new")}


def test_a_full_group_leaves_requests_to_the_other():
    table = mixed(p_old=OLD, p_new=NEW, d_old=OLD, d_new=NEW)
    table.update_load("d_old", Load(0, 0), 0.0)

    (reserve,) = only(Reserve, table.submit(job("r"), 0.0))

    assert reserve.worker == "d_new"
    assert table.requests["r"].prefill == "p_new"


@pytest.mark.parametrize(
    ("speaks", "error"), [(NEW, VersionError), (OTHER_MODEL, LayoutError)]
)
def test_what_no_pair_can_do_is_refused_at_once(speaks, error):
    table = mixed(p=OLD, d=speaks)

    (failed,) = table.submit(job("r"), 0.0)

    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, error)
    assert "p speaks" in str(failed.error)
    assert not table.requests


def test_a_half_done_upgrade_lets_requests_wait():
    """The only prefill worker of the new version is lost: another one takes its place."""
    table = mixed(p_old=OLD, p_new=NEW, d=NEW)
    table.worker_down("p_new", 0.0)
    assert table.submit(job("r"), 0.0) == []

    (reserve,) = join(table, "p_newer", NEW)

    assert isinstance(reserve, Reserve)
    assert reserve.worker == "d"


def test_a_worker_of_both_roles_needs_no_other():
    table = mixed(b=OLD, d=NEW)

    (start,) = table.submit(job("r"), 0.0)

    assert isinstance(start, Start)
    assert start.worker == "b"


def test_a_single_token_needs_no_pair():
    table = mixed(p=OLD, d=NEW)

    (start,) = table.submit(job("r", length=1), 0.0)

    assert isinstance(start, Start)


def test_requests_wait_while_a_role_has_no_worker():
    table = mixed(p=OLD)
    assert table.submit(job("r"), 0.0) == []

    (reserve,) = join(table, "d", OLD)

    assert isinstance(reserve, Reserve)


def test_a_sequence_moves_to_a_worker_that_speaks_the_same():
    table = decoding()
    join(table, "d_new", NEW)
    assert leave(table) == []

    (reserve,) = join(table, "d_old", ())

    assert reserve.worker == "d_old"


# -- what shows in a hand-off
def refuse(table: Rules, error: DisaggError, rid: str = "r") -> list[Action]:
    """The hand-off of a request is refused."""
    request = table.requests[rid]
    room(table, rid)
    event = TokenEvent(rid, request.job.attempt, 0, error=error)
    return table.on_event(request.prefill, event, 0.0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda x: x.reason)
def test_a_pair_that_does_not_fit_is_not_tried_again(error):
    table = house("p", "p2", "d", "d2")
    refused = set()
    for number in range(12):
        rid = f"r{number}"
        table.submit(job(rid), 0.0)
        pair = table.requests[rid].prefill, table.requests[rid].decode
        if not refused:
            refused.add(pair)
            refuse(table, error, rid)
            pair = table.requests[rid].prefill, table.requests[rid].decode
        assert pair not in refused
        table.cancel(rid, 0.0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda x: x.reason)
def test_a_mismatch_is_no_failure_of_a_worker(error):
    table = house("p", "p2", "d", "d2")
    table.submit(job("r"), 0.0)

    refuse(table, error)

    assert not any(worker.failures for worker in table.workers.values())
    assert table.requests["r"].phase is Phase.RESERVE


@pytest.mark.parametrize("error", ERRORS, ids=lambda x: x.reason)
def test_a_request_tries_every_pair_before_it_fails(error):
    table = house("p", "p2", "p3", "d", "d2", "d3")
    table.submit(job("r"), 0.0)

    pairs = []
    actions: list[Action] = []
    while "r" in table.requests:
        request = table.requests["r"]
        pairs.append((request.prefill, request.decode))
        actions = refuse(table, error)

    assert len(set(pairs)) == len(pairs) == 9
    assert FailRequest("r", error) in actions


def test_a_mismatch_of_one_codec_leaves_the_others():
    table = house("p", "d")
    table.submit(job("r"), 0.0)
    refuse(table, LayoutError("another plan"))

    actions = table.submit(replace(job("other"), codec="raw"), 0.0)

    assert only(Reserve, actions)


def test_all_requests_of_a_codec_that_no_pair_fits_are_refused():
    table = house("p", "d")
    table.submit(job("r"), 0.0)
    refuse(table, LayoutError("another plan"))

    (failed,) = table.submit(job("next"), 0.0)

    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, LayoutError)


def test_a_worker_that_was_replaced_is_tried_again():
    table = house("p", "d")
    table.submit(job("r"), 0.0)
    refuse(table, VersionError("4, not 5"))

    table.worker_down("d", 1.0)
    table.worker_up(WorkerInfo("d", Role.DECODE, "d", 2), 1.0)

    assert only(Reserve, table.submit(job("next"), 1.0))
