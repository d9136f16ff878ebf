"""The router's rules without sockets: workers and clients come, fail and go in any order."""

from dataclasses import dataclass, field, replace

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

from disagg.config import RouterConfig
from disagg.errors import CapacityError, DisaggError, PeerLostError
from disagg.router import moves
from disagg.router.actions import AbortAttempt, Action, Reserve, Start, TokenOutput
from disagg.router.request_state import Phase
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    TokenEvent,
    Work,
    WorkerInfo,
)
from tests.router.rules import Rules

NAMES = st.data()


@dataclass
class Running:
    """A sequence of a fake decode worker, which repeats the last token that was delivered."""

    attempt: int
    num_reported: int
    length: int


@dataclass
class FakeWorker:
    """Runs jobs one token at a time, when it is told to. `held`: attempts that have room."""

    role: Role
    slots: int = 3
    held: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, Running] = field(default_factory=dict)

    @property
    def load(self) -> Load:
        free = max(0, self.slots - len(self.held) - len(self.jobs))
        return Load(free_bytes=100 * free, slots=free, role=self.role)


def answer(rid: str, index: int) -> int:
    return (int(rid[1:]) * 31 + index) % 1000


class Interleavings(RuleBasedStateMachine):
    """Workers die, leave, stall, refuse, repeat themselves, come back, and change what they do;
    clients come and go.
    """

    @initialize(deaths=st.sampled_from([2, 3, 1000]))
    def begin(self, deaths: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(moves, "MOVE_TOKENS", 0)
        self.table = Rules(RouterConfig(max_attempts=deaths, deadline_s=1e9))
        self.now = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.delivered: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.asked: list[Reserve] = []
        self.moves: list[Start] = []
        self.count = 0
        for role in (Role.PREFILL, Role.DECODE, Role.DECODE):
            self.add_worker(role)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Reserve):
                self.asked.append(action)
                emitted = list(action.job.emitted)
                delivered = self.delivered[action.job.rid]
                is_behind = action.job.moved and emitted == delivered[:-1]
                assert emitted == delivered or is_behind
            elif isinstance(action, Start):
                self.start(action)
            elif isinstance(action, AbortAttempt):
                self.forget(action)
            elif isinstance(action, TokenOutput) and action.token is not None:
                self.delivered[action.rid].append(action.token)
            elif isinstance(action, TokenOutput):
                self.end(action.rid, str(action.finish_reason))
            else:
                self.end(action.rid, str(action.error))

    def end(self, rid: str, reason: str) -> None:
        assert rid not in self.ended, "a request ends once"
        self.ended[rid] = reason

    def start(self, start: Start) -> None:
        rid, attempt = start.job.rid, start.job.attempt
        decode = start.decode or start.worker
        assert (start.work is Work.LOCAL) == (decode == start.worker)
        if start.work is Work.MOVE:
            assert self.workers[start.worker].jobs[rid].attempt == attempt
            self.moves.append(start)
            return
        if start.work is Work.PREFILL:
            assert self.workers[decode].held.pop(rid) == attempt
        num_reported = max(0, len(start.job.emitted) - 1)
        self.workers[decode].jobs[rid] = Running(
            attempt, num_reported, self.lengths[rid]
        )

    def forget(self, action: AbortAttempt) -> None:
        """As workers do; a call that is on its way to the same worker is ended before."""
        worker, rid = self.workers[action.worker], action.rid
        self.moves = [
            x
            for x in self.moves
            if x.job.rid != rid or action.worker not in (x.worker, x.decode)
        ]
        self.asked = [
            x
            for x in self.asked
            if (x.worker, x.job.rid) != (action.worker, rid)
            or x.job.attempt > action.attempt
        ]
        if worker.held.get(rid, action.attempt + 1) <= action.attempt:
            del worker.held[rid]
        if rid in worker.jobs and worker.jobs[rid].attempt <= action.attempt:
            del worker.jobs[rid]

    @rule(role=st.sampled_from(Role))
    def add_worker(self, role: Role) -> None:
        self.count += 1
        name = f"w{self.count}"
        self.workers[name] = FakeWorker(role)
        self.act(self.table.worker_up(WorkerInfo(name, role, name, 1), self.now))

    @rule(
        length=st.integers(1, 12),
        tokens=st.integers(1, 40),
        client=st.sampled_from(["", "a", "b"]),
    )
    def submit(self, length: int, tokens: int, client: str) -> None:
        rid = f"r{len(self.lengths)}"
        self.lengths[rid], self.delivered[rid] = length, []
        job = Job(rid, 0, (1,) * tokens, sampling={"max_tokens": length})
        self.act(self.table.submit(job, self.now, client=client))

    @precondition(lambda self: self.asked)
    @rule(data=NAMES, lost=st.booleans())
    def answer_a_reservation(self, data: st.DataObject, lost: bool) -> None:
        self.reply(self.asked[data.draw(st.integers(0, len(self.asked) - 1))], lost)

    def reply(self, reserve: Reserve, lost: bool = False) -> None:
        self.asked.remove(reserve)
        job = reserve.job
        error = self.reserve_at_worker(reserve, lost)
        if error is None:
            grant = reserve.worker, job.rid, job.attempt, Grant(1, 1)
            self.act(self.table.on_grant(*grant))
        else:
            actions = self.table.refused(
                reserve.worker, job.rid, job.attempt, error, self.now
            )
            self.act(actions)

    def reserve_at_worker(self, reserve: Reserve, lost: bool) -> DisaggError | None:
        """What its worker does; returns the error that reaches the router.

        A lost answer may have been a grant. That of a move ends with its lease, since the worker
        hears no more of it. Asked for more room, a worker frees the room that it had promised.
        """
        worker, job = self.workers.get(reserve.worker), reserve.job
        if worker is None:
            return PeerLostError("gone")
        if job.moved and worker.held.get(job.rid) == job.attempt:
            del worker.held[job.rid]
        if not worker.load.slots:
            return CapacityError("full")
        if not (lost and job.moved):
            worker.held[job.rid] = job.attempt
        return PeerLostError("gone") if lost else None

    @precondition(lambda self: self.workers)
    @rule(data=NAMES, role=st.sampled_from(Role))
    def change_what_a_worker_does(self, data: st.DataObject, role: Role) -> None:
        busy = sorted({name for name, _ in self.busy()}) or sorted(self.workers)
        name = data.draw(st.sampled_from(busy))
        self.workers[name].role = role
        self.act(self.table.update_load(name, self.workers[name].load, self.now))

    def move(self, start: Start) -> None:
        """It decodes at the target from now on, which says all that was not known when it asked."""
        self.moves.remove(start)
        assert start.decode is not None
        source, target = self.workers.get(start.worker), self.workers.get(start.decode)
        job = source.jobs.pop(start.job.rid, None) if source else None
        if target and job and target.held.pop(start.job.rid, None):
            target.jobs[start.job.rid] = replace(
                job, num_reported=len(start.job.emitted)
            )
        elif job:
            event = (
                start.worker,
                start.job.rid,
                start.job.attempt,
                PeerLostError("gone"),
            )
            self.act(self.table.refused(*event, self.now))

    @precondition(lambda self: self.moves)
    @rule(data=NAMES, outgrown=st.booleans())
    def a_sequence_moves(self, data: st.DataObject, outgrown: bool) -> None:
        start = self.moves[data.draw(st.integers(0, len(self.moves) - 1))]
        if not outgrown:
            return self.move(start)
        self.moves.remove(start)
        error = CapacityError("it has outgrown its room")
        job = start.job
        actions = self.table.refused(
            start.worker, job.rid, job.attempt, error, self.now
        )
        return self.act(actions)

    @precondition(lambda self: self.table.requests)
    @rule(data=NAMES)
    def first_token_from_prefill(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.table.requests)))
        entry = self.table.requests[rid]
        if entry.prefill is not None and entry.phase is Phase.PREFILL:
            actions = self.table.token(
                entry.prefill,
                rid,
                entry.job.attempt,
                index=0,
                token=answer(rid, 0),
                now=self.now,
            )
            self.act(actions)

    def busy(self) -> list[tuple[str, str]]:
        return [
            (name, rid)
            for name, w in sorted(self.workers.items())
            for rid in sorted(w.jobs)
        ]

    def say(self, name: str, rid: str, again: bool = False) -> None:
        job = self.workers[name].jobs[rid]
        if job.num_reported >= job.length:  # more after a lost token
            actions = self.table.finished(
                name, rid, job.attempt, job.length, "length", self.now
            )
            self.act(actions)
            return
        index = job.num_reported
        job.num_reported += 1
        for _ in range(2 if again else 1):
            actions = self.table.token(
                name, rid, job.attempt, index, answer(rid, index), self.now
            )
            self.act(actions)

    @precondition(lambda self: self.busy())
    @rule(data=NAMES, again=st.booleans())
    def decode_says_a_token(self, data: st.DataObject, again: bool) -> None:
        self.say(*data.draw(st.sampled_from(self.busy())), again)

    @precondition(lambda self: self.busy())
    @rule(data=NAMES)
    def a_token_is_lost(self, data: st.DataObject) -> None:
        name, rid = data.draw(st.sampled_from(self.busy()))
        self.workers[name].jobs[rid].num_reported += 1

    @precondition(lambda self: self.workers)
    @rule(data=NAMES)
    def kill(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[name]
        self.act(self.table.worker_down(name, self.now))

    @precondition(lambda self: self.workers)
    @rule(data=NAMES, then=st.sampled_from(["", "moves", "ends", "is silent"]))
    def a_worker_leaves(self, data: st.DataObject, then: str) -> None:
        """Its sequences get room elsewhere. If all move it may end, and nothing is computed again;
        or it is silent, and drops them before it comes back.
        """
        busy = sorted({name for name, _ in self.busy()}) or sorted(self.workers)
        name = data.draw(st.sampled_from(busy))
        worker = self.workers[name]
        self.say_once_each(name)
        worker.role = Role.NONE
        self.act(self.table.update_load(name, worker.load, self.now))

        self.reply_to_all_of(name)
        if then in ("moves", "ends"):
            self.move_all_of(name)

        if then == "is silent":
            self.a_silent_worker_comes_back(name)
        elif then == "ends" and not self.has_work(name):
            self.end_without_a_retry(name)

    def reply_to_all_of(self, name: str) -> None:
        """Answer what is reserved for moves, and at a worker."""
        for reserve in [x for x in self.asked if x.job.moved or x.worker == name]:
            if reserve in self.asked:
                self.reply(reserve)

    def move_all_of(self, name: str) -> None:
        for start in [x for x in self.moves if x.worker == name]:
            if start in self.moves:
                self.move(start)

    def say_once_each(self, name: str) -> None:
        """Each sequence of a worker says its next token or its end."""
        jobs = self.workers[name].jobs
        for rid in list(jobs):
            if rid in jobs:
                self.say(name, rid)

    def has_work(self, name: str) -> bool:
        worker = self.workers[name]
        is_reserved = any(
            x.phase is Phase.RESERVE and name in x.workers
            for x in self.table.requests.values()
        )
        return bool(is_reserved or worker.jobs or worker.held)

    def end_without_a_retry(self, name: str) -> None:
        """A worker that has handed over everything reports its figures and ends."""
        for x in [x for x in self.table.requests.values() if x.prefill == name]:
            figures = TokenEvent(x.job.rid, x.job.attempt, 0, stats={"codec": "raw"})
            self.act(self.table.on_event(name, figures, self.now))
        retries = self.table.retries
        del self.workers[name]

        self.act(self.table.worker_down(name, self.now))

        assert self.table.retries == retries

    def a_silent_worker_comes_back(self, name: str) -> None:
        """Fenced: it has nothing of what it had, and grants nothing that it was asked for."""
        role = self.workers[name].role
        self.moves = [x for x in self.moves if name not in (x.worker, x.decode)]
        self.asked = [x for x in self.asked if x.worker != name]
        self.workers[name] = FakeWorker(role)
        self.act(self.table.worker_down(name, self.now, fenced=True))
        self.act(self.table.worker_up(WorkerInfo(name, role, name, 2), self.now))

    @precondition(lambda self: self.workers)
    @rule(data=NAMES)
    def a_worker_is_silent(self, data: st.DataObject) -> None:
        self.a_silent_worker_comes_back(
            data.draw(st.sampled_from(sorted(self.workers)))
        )

    @precondition(lambda self: self.workers)
    @rule(data=NAMES)
    def say_the_load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.act(self.table.update_load(name, self.workers[name].load, self.now))

    @precondition(lambda self: self.table.requests)
    @rule(data=NAMES)
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.table.requests)))
        self.ended[rid] = "cancelled"
        self.act(self.table.cancel(rid, self.now))

    @precondition(lambda self: self.table.requests)
    @rule(data=NAMES, error=st.sampled_from([PeerLostError("x"), CapacityError("x")]))
    def refuse(self, data: st.DataObject, error: DisaggError) -> None:
        rid = data.draw(st.sampled_from(sorted(self.table.requests)))
        entry = self.table.requests[rid]
        if entry.phase in (Phase.PREFILL, Phase.DECODE, Phase.MOVE):
            worker = data.draw(st.sampled_from(entry.workers))
            giver = (
                entry.phase is Phase.MOVE and worker == entry.decode
            )  # see a_sequence_moves
            if worker in self.workers and not (
                giver and isinstance(error, CapacityError)
            ):
                self.asked = [
                    x for x in self.asked if (x.worker, x.job.rid) != (worker, rid)
                ]
                if entry.is_decoding:
                    self.workers[worker].held.pop(
                        rid, None
                    )  # room to move to ends with its lease
                actions = self.table.refused(
                    worker, rid, entry.job.attempt, error, self.now
                )
                self.act(actions)

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        self.act(self.table.tick(self.now))

    @invariant()
    def tokens_are_delivered_in_order_and_once(self) -> None:
        for rid, tokens in self.delivered.items():
            assert tokens == [answer(rid, i) for i in range(len(tokens))]
            if self.ended.get(rid) == "length":
                assert len(tokens) == self.lengths[rid]
        assert self.table.unequal_tokens == 0

    @invariant()
    def nothing_is_left_of_what_ended(self) -> None:
        for worker in self.workers.values():
            assert not (set(worker.jobs) | set(worker.held)) & set(self.ended)
        assert set(self.table.requests) == set(self.lengths) - set(self.ended)

    @invariant()
    def who_runs_alone_has_nobody_beside_it(self) -> None:
        entries = [
            x for x in self.table.requests.values() if x.phase is not Phase.QUEUED
        ]
        workers = {
            x.job.rid: {x.decode, x.target} if x.is_decoding else {*x.workers}
            for x in entries
        }
        for entry in (x for x in entries if x.exclusive):
            for other in (x for x in entries if x is not entry):
                assert not workers[entry.job.rid] & workers[other.job.rid] - {None}

    def teardown(self) -> None:
        """Left alone with healthy workers, everything ends, though all others leave meanwhile."""
        if not hasattr(self, "workers"):
            return
        self.add_worker(Role.PREFILL)
        self.add_worker(Role.DECODE)
        leaving = list(self.workers)[:-2]
        for turn in range(60 * (1 + len(self.lengths))):
            self.time_passes()
            for name in leaving if turn == 2 else ():
                self.workers[name].role = Role.NONE
            for name, worker in list(self.workers.items()):
                self.act(self.table.update_load(name, worker.load, self.now))
                self.say_once_each(name)
            for start in list(self.moves):
                self.move(start)
            for reserve in list(self.asked):
                self.reply(reserve)
        self.patch.undo()
        assert not self.table.requests


Interleavings.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_interleaving_delivers_every_token_once = Interleavings.TestCase
