"""Interleavings of everything that can happen to a hand-off, found by hypothesis.

Three requests that share a page, several attempts each, a pool too small for all of them; frames
are lost, duplicated, reordered and corrupted, streams break, leases end, routers abort and fence.
"""

from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from disagg.errors import CapacityError, CorruptFrameError, ReservationError
from disagg.transfer.ledger import Ledger
from disagg.transfer.messages import Ack, Admission, Admit, Drop, Nack, State, Waiter, Write
from disagg.wire import CommitFrame, PageFrame, Ticket
from tests.transfer.prompts import EPOCH, Prompt, make_pool, make_related, make_terms

RIDS = ("a", "b", "c")
PROMPTS = {
    rid: [
        make_related(n, seed, 64, noise=noise) for n, noise in ((130, None), (130, 9), (70, None))
    ]
    for seed, rid in enumerate(RIDS)
}
LEASE_S = 10.0
MEMORY_S = 1e6


class Machine(RuleBasedStateMachine):
    """Senders, a router and an engine that may do anything, around one ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(7 << 14)
        nonces = count(1)
        terms = make_terms(self.pool, lease_s=LEASE_S, memory_s=MEMORY_S, max_waiting=3)
        self.ledger = Ledger(terms, self.pool, lambda: next(nonces))
        self.now = 0.0
        self.epoch = EPOCH
        self.attempts = dict.fromkeys(RIDS, 0)
        self.prompts: dict[tuple[str, int], Prompt] = {}
        self.waiters: list[Waiter] = []
        self.tickets: list[tuple[Ticket, tuple[str, int]]] = []
        self.open_writes: list[Write] = []
        self.engine: dict[tuple[str, int], Admission] = {}
        self.ever_admitted: set[tuple[str, int, int]] = set()
        self.gone: set[tuple[str, int]] = set()  # aborted by the router

    # -- what a sender does

    @rule(
        rid=st.sampled_from(RIDS),
        later=st.sampled_from([0, 0, 1, 1, -1]),
        wait_s=st.sampled_from([0.0, 5.0]),
        which=st.integers(0, 2),
    )
    def reserve(self, rid: str, later: int, wait_s: float, which: int) -> None:
        attempt = self.attempts[rid] = max(0, self.attempts[rid] + later)
        prompt = self.prompts.setdefault((rid, attempt), PROMPTS[rid][which])
        request = prompt.request(rid, attempt, wait_s=wait_s, epoch=self.epoch)
        try:
            waiter = self.ledger.reserve(request, self.now)
        except (ReservationError, CapacityError):
            return
        assert (rid, attempt) not in self.gone
        self.waiters.append(waiter)
        if waiter.grant:
            self.take_over(waiter, 1)

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiters))
        self.waiters.remove(waiter)
        self.ledger.leave(waiter, self.now)

    @precondition(lambda self: any(x.grant for x in self.waiters))
    @rule(data=st.data(), gen=st.integers(1, 4))
    def attach(self, data: st.DataObject, gen: int) -> None:
        self.take_over(data.draw(st.sampled_from([x for x in self.waiters if x.grant])), gen)

    def take_over(self, waiter: Waiter, gen: int) -> None:
        ticket = Ticket(waiter.grant.nonce, waiter.grant.epoch, gen)
        try:
            attached = self.ledger.attach(ticket, self.now)
        except ReservationError:
            return
        if attached.state is State.ATTACHED:
            self.tickets.append((ticket, (waiter.request.rid, waiter.request.attempt)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), how=st.sampled_from(["whole", "open", "corrupt", "foreign"]))
    def frame(self, data: st.DataObject, how: str) -> None:
        ticket, key = data.draw(st.sampled_from(self.tickets))
        prompt = self.prompts[key]
        frames = prompt.frames(ticket)
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if how == "corrupt":
            broken = bytearray(frame.payload[-1])
            broken[0] ^= 1
            frame = PageFrame(**{**vars(frame), "payload": (*frame.payload[:-1], bytes(broken))})
        elif how == "foreign":
            other = PROMPTS[{"a": "b", "b": "c", "c": "a"}[key[0]]]
            frame = other[PROMPTS[key[0]].index(prompt)].frames(ticket)[0]
        try:
            write = self.ledger.begin_write(frame, self.now)
        except (ReservationError, CorruptFrameError, CapacityError):
            return
        try:
            frame.verify()
        except CorruptFrameError:
            assert how == "corrupt"
            self.ledger.end_write(write, False)
            return
        self.open_writes.append(write)
        if how != "open":
            self.end_write(len(self.open_writes) - 1)

    @precondition(lambda self: self.open_writes)
    @rule(data=st.data())
    def close_write(self, data: st.DataObject) -> None:
        self.end_write(data.draw(st.integers(0, len(self.open_writes) - 1)))

    def end_write(self, place: int) -> None:
        write = self.open_writes.pop(place)
        for placement in write.placements:
            self.pool.arena.write([(placement.start, placement.data)])
        self.ledger.end_write(write, True)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), then_commit=st.booleans())
    def everything(self, data: st.DataObject, then_commit: bool) -> None:
        ticket, key = data.draw(st.sampled_from(self.tickets))
        frames = self.prompts[key].frames(ticket)
        for place in data.draw(st.permutations(range(len(frames)))):
            frame = frames[place]
            try:
                self.open_writes.append(self.ledger.begin_write(frame, self.now))
            except (ReservationError, CorruptFrameError, CapacityError):
                return
            self.end_write(len(self.open_writes) - 1)
        if then_commit:
            self.send_commit(ticket, key)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.send_commit(*data.draw(st.sampled_from(self.tickets)))

    def send_commit(self, ticket: Ticket, key: tuple[str, int]) -> None:
        try:
            answer = self.ledger.commit(CommitFrame(ticket, self.prompts[key].commit()), self.now)
        except (ReservationError, CorruptFrameError):
            return
        if isinstance(answer, Nack):
            assert answer.missing
        else:
            assert isinstance(answer, Ack)
            self.act()
            assert (*key, ticket.nonce) in self.ever_admitted

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), how=st.sampled_from(["end", "release", "renew"]))
    def stream(self, data: st.DataObject, how: str) -> None:
        ticket, _ = data.draw(st.sampled_from(self.tickets))
        try:
            if how == "end":
                self.ledger.stream_ended(ticket)
            elif how == "release":
                self.ledger.release(ticket, self.now)
            else:
                self.ledger.renew(ticket, self.now)
        except ReservationError:
            return

    # -- what the router, the engine and time do

    @rule(
        rid=st.sampled_from(RIDS),
        what=st.sampled_from(["wait", "wait", "wait", "abort", "lease", "fence", "forget"]),
    )
    def disturb(self, rid: str, what: str) -> None:
        if what == "abort":
            attempt = self.attempts[rid]
            self.ledger.abort(rid, attempt, "the router says so", self.now)
            self.gone |= {(rid, lower) for lower in range(attempt + 1)}
        elif what == "fence":
            self.epoch += 1
            self.ledger.fence(self.epoch, self.now)
        elif what == "forget":
            self.now += 2 * MEMORY_S
            self.gone.clear()
            self.ledger.expire(self.now)
        else:
            self.now += LEASE_S if what == "lease" else 0.7
            self.ledger.expire(self.now)

    @rule()
    def scrub(self) -> None:
        assert self.ledger.scrub(1 << 20, self.now) == []  # nobody writes to what is kept

    @precondition(lambda self: self.engine)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.engine)))
        self.free(key)
        self.ledger.finished(*key)
        self.ledger.make_room(self.now)

    # -- what must hold

    @invariant()
    def act(self) -> None:
        for action in self.ledger.take_actions():
            if isinstance(action, Admit):
                admission = action.admission
                key = (admission.rid, admission.attempt)
                assert key not in self.gone
                assert key not in self.engine
                assert (*key, action.nonce) not in self.ever_admitted
                assert self.prompts[key].equals(self.pool.arena, admission.groups)
                self.ever_admitted.add((*key, action.nonce))
                self.engine[key] = admission
            elif isinstance(action, Drop):
                self.free((action.rid, action.attempt))

    @invariant()
    def the_engine_has_what_was_admitted(self) -> None:
        assert self.ledger.gauges()["running"] == len(self.engine)
        for key, admission in self.engine.items():
            assert self.prompts[key].equals(self.pool.arena, admission.groups)

    @invariant()
    def every_page_is_owned_once(self) -> None:
        self.pool.check_integrity()
        gauges = self.ledger.gauges()
        if not (gauges["reservations"] or self.engine or self.open_writes):
            assert self.pool.referenced_pages == 0

    @invariant()
    def what_is_written_to_is_not_free(self) -> None:
        for write in self.open_writes:
            handoff = self.ledger.handoff(write.nonce)
            assert not write.placements or (handoff and handoff.groups is not None)

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        for waiter in self.waiters:
            if waiter.callers and waiter.deadline < self.now:
                assert waiter.settled

    def free(self, key: tuple[str, int]) -> None:
        for state in self.engine.pop(key).groups:
            self.pool.release(list(state.ids()))

    def teardown(self) -> None:
        self.act()
        while self.open_writes:
            self.end_write(0)
        self.ledger.expire(self.now + 1000.0)
        self.act()
        for key in list(self.engine):
            self.free(key)
            self.ledger.finished(*key)
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.ledger.gauges().values())


@pytest.mark.timeout(120)
def test_no_interleaving_leaks_or_admits_what_is_not_complete_and_verified():
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=200,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
