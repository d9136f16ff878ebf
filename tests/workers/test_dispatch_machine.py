"""The router's rules without sockets: workers and clients come, fail and go in any order."""

from dataclasses import dataclass, field

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
    PeerLostError,
)
from disagg.workers.dispatch import Dispatch
from disagg.workers.lifecycle import (
    Abort,
    Action,
    Deliver,
    Member,
    Release,
    Start,
    Work,
)


def work(rid: str = "r", deadline: float = 100.0) -> Work:
    return Work(rid, (1, 2, 3), {"max_tokens": 4}, "raw", deadline)


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
