"""The router's rules without sockets: single rules in tables, interleavings in a machine."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

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


@dataclass
class Job:
    """What a fake decode worker still has to say: it repeats the last token that was known."""

    attempt: int
    said: int
    length: int


@dataclass
class FakeWorker:
    """Runs jobs one token at a time, when it is told to."""

    jobs: dict[str, Job] = field(default_factory=dict)


def answer(rid: str, index: int) -> int:
    return (int(rid[1:]) * 31 + index) % 1000


class Interleavings(RuleBasedStateMachine):
    """Workers die, stall, repeat themselves and come back; clients come and go, in any order."""

    @initialize()
    def begin(self) -> None:
        self.dispatch = Dispatch(max_attempts=1000)
        self.now = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.delivered: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.count = 0
        for prefills in (True, False):
            self.add_worker(prefills)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                said = max(0, len(action.emitted) - 1)
                job = Job(action.attempt, said, self.lengths[action.work.rid])
                self.workers[action.decode].jobs[action.work.rid] = job
                assert list(action.emitted) == self.delivered[action.work.rid]
            elif isinstance(action, Deliver):
                self.delivered[action.rid].append(action.token)
            elif isinstance(action, Abort | Release):
                job_of = self.workers[action.worker].jobs
                job = job_of.get(action.rid)
                if job and (isinstance(action, Release) or job.attempt <= action.attempt):
                    del job_of[action.rid]
            else:
                assert action.rid not in self.ended, "a request ends once"
                self.ended[action.rid] = type(action).__name__

    @rule(prefills=st.booleans())
    def add_worker(self, prefills: bool) -> None:
        self.count += 1
        name = f"w{self.count}"
        self.workers[name] = FakeWorker()
        self.act(self.dispatch.worker_up(Member(name, prefills, not prefills), self.now))

    @rule(length=st.integers(1, 6))
    def submit(self, length: int) -> None:
        rid = f"r{len(self.lengths)}"
        self.lengths[rid], self.delivered[rid] = length, []
        self.act(self.dispatch.submit(work(rid, 1e9), self.now))

    @precondition(lambda self: self.dispatch.entries)
    @rule(data=st.data())
    def first_token_from_prefill(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.dispatch.entries)))
        entry = self.dispatch.entries[rid]
        if entry.prefill is not None:
            said = self.dispatch.token(
                entry.prefill, rid, entry.attempt, 0, answer(rid, 0), self.now
            )
            self.act(said)

    @precondition(lambda self: any(w.jobs for w in self.workers.values()))
    @rule(data=st.data(), again=st.booleans())
    def decode_says_a_token(self, data: st.DataObject, again: bool) -> None:
        busy = [(name, rid) for name, w in sorted(self.workers.items()) for rid in sorted(w.jobs)]
        name, rid = data.draw(st.sampled_from(busy))
        job = self.workers[name].jobs[rid]
        if job.said < job.length:
            event = (name, rid, job.attempt, job.said, answer(rid, job.said), self.now)
            job.said += 1
            for _ in range(1 + again):
                self.act(self.dispatch.token(*event))
        else:
            self.act(self.dispatch.finished(rid, job.attempt, job.length, "length", self.now))

    @precondition(lambda self: any(w.jobs for w in self.workers.values()))
    @rule(data=st.data())
    def a_token_is_lost(self, data: st.DataObject) -> None:
        busy = [(name, rid) for name, w in sorted(self.workers.items()) for rid in sorted(w.jobs)]
        name, rid = data.draw(st.sampled_from(busy))
        self.workers[name].jobs[rid].said += 1

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[name]
        self.act(self.dispatch.worker_down(name, self.now))

    @precondition(lambda self: self.dispatch.entries)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.dispatch.entries)))
        self.ended[rid] = "cancelled"
        self.act(self.dispatch.cancel(rid))

    @precondition(lambda self: self.dispatch.entries)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.dispatch.entries)))
        attempt = self.dispatch.entries[rid].attempt
        self.act(self.dispatch.refused(rid, attempt, PeerLostError("x"), self.now))

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        self.act(self.dispatch.tick(self.now))

    @invariant()
    def tokens_are_delivered_in_order_and_once(self) -> None:
        for rid, tokens in getattr(self, "delivered", {}).items():
            assert tokens == [answer(rid, i) for i in range(len(tokens))]
            if self.ended.get(rid) == "Finish":
                assert len(tokens) == self.lengths[rid]

    @invariant()
    def nothing_is_left_of_what_ended(self) -> None:
        if not hasattr(self, "workers"):
            return
        for worker in self.workers.values():
            assert not set(worker.jobs) & set(self.ended)
        assert set(self.dispatch.entries) == set(self.lengths) - set(self.ended)
        assert self.dispatch.unequal_tokens == 0

    def teardown(self) -> None:
        """Left alone with healthy workers, everything ends."""
        if not hasattr(self, "workers"):
            return
        self.add_worker(True)
        self.add_worker(False)
        for _ in range(40 * (1 + len(self.lengths))):
            self.time_passes()
            for name, worker in list(self.workers.items()):
                for rid, job in list(worker.jobs.items()):
                    if job.said < job.length:
                        event = (name, rid, job.attempt, job.said, answer(rid, job.said))
                        job.said += 1
                        self.act(self.dispatch.token(*event, self.now))
                    else:
                        done = (rid, job.attempt, job.length, "length", self.now)
                        self.act(self.dispatch.finished(*done))
        assert not self.dispatch.entries


Interleavings.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_interleaving_delivers_every_token_once = Interleavings.TestCase
