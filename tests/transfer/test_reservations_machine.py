"""Interleavings of everything that can happen to a hand-off, found by hypothesis.

Three requests that share a page, several attempts each, a pool too small for all of them, and two
channels; frames are lost, duplicated, reordered, corrupted and late, channels break, leases end,
routers abort and fence, and the engine refuses.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

from disagg.errors import (
    CapacityError,
    CorruptFrameError,
    ReservationError,
    TransferError,
)
from disagg.kv.decode_slots import DecodeSlots
from disagg.transfer.messages import Ack, Attach, Grant
from disagg.transfer.records import ArenaSource
from disagg.transfer.reservations import MEMORY_S, Admission, State
from disagg.wire import Buffer, PageFrame, Ticket
from tests.transfer.desk import Desk, corrupt
from tests.transfer.prompts import EPOCH, MODEL, Prompt, make_related

RIDS = ("a", "b", "c")
KINDS = ((190, None), (190, 9), (70, None))  # tokens, noise
PROMPTS = {
    rid: [make_related(n, seed, 64, noise=noise) for n, noise in KINDS]
    for seed, rid in enumerate(RIDS)
}
RID, CHANNEL = st.sampled_from(RIDS), st.sampled_from(["one", "two"])
HOW = st.sampled_from(["whole", "corrupt", "foreign"])
WHAT = st.sampled_from(["wait", "wait", "wait", "abort", "lease", "fence", "forget"])
LATER, WAITS = (
    st.sampled_from([0, 0, 1, 1, -1]),
    st.sampled_from([False, False, False, True]),
)
LIVE = {State.HELD, State.ATTACHED, State.BROKEN}
LEASE_S = 10.0
MAX_SEQUENCES = 2
Key = tuple[str, int]


class Machine(stateful.RuleBasedStateMachine):
    """Senders, a router and an engine that may do anything, around one set of reservations."""

    def __init__(self) -> None:
        super().__init__()
        terms = {
            "lease_s": LEASE_S,
            "rows": DecodeSlots(MAX_SEQUENCES),
            "watermark_bytes": 1 << 13,
        }
        self.desk = Desk(7 << 14, may_reserve=lambda: not self.engine_waits, **terms)
        self.desk.admit, self.desk.drop = self.admit, self.drop
        self.pool, self.ledger = self.desk.pool, self.desk.ledger
        self.engine_waits = False
        self.epoch = EPOCH
        self.attempts = dict.fromkeys(RIDS, 0)
        self.prompts: dict[Key, Prompt] = {}
        self.grants: dict[int, tuple[Grant, Key]] = {}
        self.gens: dict[int, int] = {}  # by nonce: the last attachment
        self.have: dict[
            int, dict[int, int]
        ] = {}  # by nonce: what an attachment was told, by place
        self.tickets: list[tuple[Ticket, Key]] = []
        self.engine: dict[Key, Admission] = {}
        self.acks: dict[
            int, tuple[object, Ack]
        ] = {}  # by nonce: to which digests and first token
        self.gone: set[Key] = set()  # aborted by the router, or superseded

    # -- what a router and a sender do

    @stateful.rule(rid=RID, later=LATER, which=st.integers(0, 2), waits=WAITS)
    def reserve(self, rid: str, later: int, which: int, waits: bool) -> None:
        attempt = self.attempts[rid] = max(0, self.attempts[rid] + later)
        prompt = self.prompts.setdefault((rid, attempt), PROMPTS[rid][which])
        self.engine_waits = waits
        self.ledger.expire()
        live = self.ledger._live.get(rid)
        same = live is not None and live.attempt == attempt
        known = {(rid, x.attempt) for x in self.ledger._of(rid)}
        try:
            grant = self.ledger.reserve(prompt.job(rid, attempt), self.epoch)
        except (ReservationError, CapacityError):
            assert not same
            return
        assert (rid, attempt) not in self.gone
        assert same == (grant.nonce in self.grants)
        assert same or not waits
        assert all(key <= (rid, attempt) for key in known)
        self.gone |= known - {(rid, attempt)}
        self.grants[grant.nonce] = grant, (rid, attempt)
        self.take_over(grant.nonce, 1)

    @stateful.precondition(lambda self: self.grants)
    @stateful.rule(data=st.data(), gen=st.integers(1, 4))
    def attach(self, data: st.DataObject, gen: int) -> None:
        self.take_over(data.draw(st.sampled_from([*self.grants])), gen)

    def take_over(self, nonce: int, gen: int) -> None:
        grant, key = self.grants[nonce]
        ticket, prompt = Ticket(nonce, grant.epoch, gen), self.prompts[key]
        attach = Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens)
        self.ledger.expire()
        admitted = grant.epoch == self.epoch and self.state_of(nonce) is State.ADMITTED
        try:
            attached = self.ledger.attach(attach)
        except ReservationError:
            assert not admitted
            return
        assert attached.admitted == admitted
        if not attached.admitted:
            self.tickets.append((ticket, key))
            self.have[nonce] = attached.here()
            assert gen > self.gens.get(nonce, 0)
            self.gens[nonce] = gen

    @stateful.precondition(lambda self: self.tickets)
    @stateful.rule(data=st.data(), how=HOW, channel=CHANNEL)
    def frame(self, data: st.DataObject, how: str, channel: str) -> None:
        ticket, key = data.draw(st.sampled_from(self.tickets))
        prompt = self.prompts[key]
        frames = prompt.frames(ticket)
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if how == "corrupt":
            frame = corrupt(frame)
        elif how == "foreign":
            other = PROMPTS[{"a": "b", "b": "c", "c": "a"}[key[0]]]
            frame = other[PROMPTS[key[0]].index(prompt)].frames(ticket)[0]
        self.write(frame, channel)

    def write(self, frame: PageFrame, channel: str) -> bool:
        """Whether the frame was taken; what is shared is never written to."""
        reservation = self.ledger._by_nonce.get(frame.ticket.nonce)
        bound = reservation and reservation.channel

        def write(pieces: Sequence[tuple[int, Buffer]]) -> None:
            named = frame.ticket.gen, frame.ticket.epoch
            assert named == (self.gens[frame.ticket.nonce], self.epoch)
            assert bound in (None, channel)
            assert reservation.channel == channel
            assert (
                not {start // 128 for start, _ in pieces} & reservation.holding.shared
            )
            written(pieces)

        written = self.pool.arena.write
        self.pool.arena.write = write
        try:
            self.ledger.store(frame, channel)
        except (ReservationError, CorruptFrameError):
            return False
        finally:
            self.pool.arena.write = written
        return True

    @stateful.precondition(lambda self: self.tickets)
    @stateful.rule(
        data=st.data(), then_commit=st.booleans(), spoilt=st.booleans(), channel=CHANNEL
    )
    def everything(
        self, data: st.DataObject, then_commit: bool, spoilt: bool, channel: str
    ) -> None:
        """All that the receiver did not say it has; a bit of one item flips the first time."""
        ticket, key = data.draw(st.sampled_from(self.tickets))
        prompt, have = self.prompts[key], self.have[ticket.nonce]
        items = [
            x for place, x in enumerate(prompt.checklist.items) if place not in have
        ]
        if spoilt and items:
            self.write(corrupt(prompt.frame(ticket, items[-1:])), channel)
        for item in data.draw(st.permutations(items)):
            if not self.write(prompt.frame(ticket, [item]), channel):
                return
        if then_commit:
            self.send_commit(ticket, key)

    @stateful.precondition(lambda self: self.tickets)
    @stateful.rule(data=st.data(), first_token=st.sampled_from([5, 5, 6]))
    def commit(self, data: st.DataObject, first_token: int) -> None:
        self.send_commit(*data.draw(st.sampled_from(self.tickets)), first_token)

    def send_commit(self, ticket: Ticket, key: Key, first_token: int = 5) -> None:
        """With the digests of the receiver for what it had at the beginning."""
        commit, have = (
            self.prompts[key].commit(ticket, first_token),
            self.have[ticket.nonce],
        )
        digests = tuple(
            have.get(place, seen) for place, seen in enumerate(commit.digests)
        )
        commit, said = replace(commit, digests=digests), (digests, first_token)
        self.ledger.expire()
        state = self.state_of(ticket.nonce) if ticket.epoch == self.epoch else None
        last = ticket.gen == self.gens[ticket.nonce]
        try:
            ack = self.ledger.commit(commit)
        except ReservationError:
            assert not (state in LIVE and last), "though its channel may have broken"
            assert not (state is State.ADMITTED and self.acks[ticket.nonce][0] == said)
        except CorruptFrameError:
            return
        except TransferError:
            holding = self.ledger._by_nonce[ticket.nonce].holding
            assert len(holding.arrivals.here) < len(digests)
        else:
            assert last or ticket.nonce in self.acks
            assert self.acks.setdefault(ticket.nonce, (said, ack)) == (said, ack)

    @stateful.precondition(lambda self: self.tickets)
    @stateful.rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        ticket, _ = data.draw(st.sampled_from(self.tickets))
        over = self.ledger.renew([ticket])
        alive = self.state_of(ticket.nonce) in {*LIVE, State.ADMITTED}
        assert over == (() if alive and ticket.epoch == self.epoch else (ticket.nonce,))

    @stateful.rule(channel=CHANNEL)
    def channel_ends(self, channel: str) -> None:
        before = {nonce: x.state for nonce, x in self.ledger._by_nonce.items()}
        self.ledger.channel_ended(channel)
        for nonce, reservation in self.ledger._by_nonce.items():
            broken = reservation.channel == channel and before[nonce] is State.ATTACHED
            assert reservation.state is (State.BROKEN if broken else before[nonce])

    @stateful.rule(rid=RID, what=WHAT)
    def disturb(self, rid: str, what: str) -> None:
        if what == "abort":
            attempt = self.attempts[rid]
            self.ledger.abort(rid, attempt, "the router says so")
            self.gone |= {(rid, lower) for lower in range(attempt + 1)}
        elif what == "fence":
            gauges = self.ledger.gauges()
            for epoch in (self.epoch - 1, self.epoch + 2):
                with pytest.raises(ReservationError):
                    self.ledger.fence(epoch)
            self.ledger.fence(self.epoch)
            assert self.ledger.gauges() == gauges
            self.epoch += 1
            self.ledger.fence(self.epoch)
            assert not any(self.ledger.gauges().values())
        elif what == "forget":
            self.desk.now, live = self.desk.now + 2 * MEMORY_S, len(self.ledger._live)
            self.gone.clear()
            self.ledger.expire()
            assert [x.ended_at for x in self.ledger._ended] == [self.desk.now] * live
            assert not self.ledger._tombstones
        else:
            self.desk.now += LEASE_S if what == "lease" else 0.7
            self.ledger.expire()

    @stateful.rule(max_bytes=st.sampled_from([1, 1 << 20]))
    def scrub(self, max_bytes: int) -> None:
        scrub = self.ledger.cache.begin_scrub(max_bytes)
        damaged = scrub.verify()  # nobody writes to what is kept
        assert not self.ledger.end_scrub(scrub, damaged)

    @stateful.precondition(lambda self: self.engine)
    @stateful.rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.engine)))
        before = {nonce: self.state_of(nonce) for nonce in self.grants}
        self.free(key)
        self.ledger.finished(*key)
        assert before == {nonce: self.state_of(nonce) for nonce in self.grants}

    def state_of(self, nonce: int) -> State | None:
        """None once it is forgotten."""
        reservation = self.ledger._by_nonce.get(nonce)
        return reservation.state if reservation else None

    # -- what must hold

    def admit(self, admission: Admission) -> None:
        key = (admission.job.rid, admission.job.attempt)
        assert key not in self.gone
        assert key not in self.engine
        assert admission.job == self.prompts[key].job(*key)
        self.engine[key] = admission
        self.desk.now += 0.1  # so that every answer to a commit is one of a kind

    def drop(self, rid: str, attempt: int, reason: str) -> None:
        assert reason
        self.free((rid, attempt))

    @stateful.invariant()
    def the_engine_has_what_was_admitted_with_the_digests_of_its_commit(self) -> None:
        assert self.ledger.gauges()["running"] == len(self.engine)
        for key, admission in self.engine.items():
            prompt = self.prompts[key]
            read = ArenaSource(self.pool.arena, prompt.checklist, admission.groups)
            assert (
                replace(prompt, read=read).commit().digests == admission.commit.digests
            )

    @stateful.invariant()
    def every_page_is_owned_once(self) -> None:
        self.pool.check_integrity()
        gauges, known = self.ledger.gauges(), self.ledger._by_nonce
        taken = gauges["reservations"] + gauges["running"]
        assert self.desk.terms.rows.free == MAX_SEQUENCES - taken >= 0
        assert len(known) == len(self.ledger._of()) + len(self.ledger._ended)
        if not (gauges["reservations"] or self.engine):
            assert self.pool.referenced_pages == 0

    @stateful.invariant()
    def what_ended_keeps_names_and_numbers_and_nothing_of_its_prompt(self) -> None:
        assert all(x.holding is None for x in self.ledger._running.values())
        for reservation in self.ledger._ended:
            assert reservation.state not in LIVE
            for kept in vars(reservation).values():
                assert isinstance(kept, (int, float, str, Ack)) or not kept

    def free(self, key: Key) -> None:
        for state in self.engine.pop(key).groups:
            self.pool.release(list(state.ids()))

    def teardown(self) -> None:
        self.desk.now += 1000.0
        self.ledger.expire()
        for key in list(self.engine):
            self.free(key)
            self.ledger.finished(*key)
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.ledger.gauges().values())


@pytest.mark.timeout(120)
def test_no_interleaving_leaks_or_admits_what_is_not_complete_and_verified():
    size = {"max_examples": 300, "stateful_step_count": 60, "deadline": None}
    chosen = settings(suppress_health_check=list(HealthCheck), **size)
    stateful.run_state_machine_as_test(Machine, settings=chosen)
