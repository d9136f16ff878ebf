"""Interleavings of everything that can happen to a hand-off, found by hypothesis.

Three requests that share a page, several attempts each, a pool too small for all of them, and two
channels; frames are lost, duplicated, reordered, corrupted and late, channels break, leases end,
routers abort and fence, and the engine refuses.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

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
from disagg.transfer.partition import Partition
from disagg.transfer.records import ArenaSource
from disagg.transfer.reservations import (
    MEMORY_S,
    Admission,
    Reservation,
    State,
)
from disagg.wire import Buffer, PageFrame, Ticket
from tests.transfer.desk import Desk, corrupt
from tests.transfer.prompts import EPOCH, MODEL, Prompt, make_related

RIDS = ("a", "b", "c")
KINDS = ((190, None), (190, 9), (70, None))  # tokens, noise
PROMPTS = {
    rid: [make_related(n, seed, 64, noise=noise) for n, noise in KINDS]
    for seed, rid in enumerate(RIDS)
}
RID = st.sampled_from(RIDS)
CHANNEL = st.sampled_from(["one", "two"])
FRAMES = st.sampled_from(["whole", "corrupt", "foreign"])
EVENTS = st.sampled_from(["wait", "wait", "wait", "abort", "lease", "fence", "forget"])
LATER = st.sampled_from([0, 0, 1, 1, -1])
WAITS = st.sampled_from([False, False, False, True])
LIVE = {State.HELD, State.ATTACHED, State.BROKEN}
LEASE_S = 10.0
MAX_SEQUENCES = 2
Key = tuple[str, int]


def channel_of(reservation: Reservation | None) -> object:
    """On which the frames of its only part come."""
    return reservation.parts[0].channel if reservation and reservation.parts else None


class Machine(stateful.RuleBasedStateMachine):
    """Senders, a router and an engine that may do anything, around one set of reservations."""

    def __init__(self) -> None:
        super().__init__()
        policy = {
            "lease_s": LEASE_S,
            "decode_slots": DecodeSlots(MAX_SEQUENCES),
            "watermark_bytes": 1 << 13,
        }
        self.desk = Desk(7 << 14, may_reserve=lambda: not self.engine_waits, **policy)
        self.desk.admit = self.admit
        self.desk.drop = self.drop
        self.pool = self.desk.pool
        self.ledger = self.desk.ledger
        self.engine_waits = False
        self.epoch = EPOCH
        self.attempts = dict.fromkeys(RIDS, 0)
        self.prompts: dict[Key, Prompt] = {}
        self.grants: dict[int, tuple[Grant, Key]] = {}
        # by nonce: the last attachment, and the digests that it was answered, by index
        self.gens: dict[int, int] = {}
        self.have: dict[int, dict[int, int]] = {}
        self.tickets: list[tuple[Ticket, Key]] = []
        self.engine: dict[Key, Admission] = {}
        # by nonce: the digests and the first token that were committed, and the answer
        self.acks: dict[int, tuple[object, Ack]] = {}
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
        earlier = {(rid, x.attempt) for x in self.ledger._of(rid)}
        try:
            grant = self.ledger.reserve(prompt.job(rid, attempt), self.epoch)
        except (ReservationError, CapacityError):
            assert not same
            return
        assert (rid, attempt) not in self.gone
        assert same == (grant.nonce in self.grants)
        assert same or not waits
        assert all(key <= (rid, attempt) for key in earlier)
        self.gone |= earlier - {(rid, attempt)}
        self.grants[grant.nonce] = grant, (rid, attempt)
        self.take_over(grant.nonce, 1)

    @stateful.precondition(lambda self: self.grants)
    @stateful.rule(data=st.data(), gen=st.integers(1, 4))
    def attach(self, data: st.DataObject, gen: int) -> None:
        self.take_over(data.draw(st.sampled_from([*self.grants])), gen)

    def take_over(self, nonce: int, gen: int) -> None:
        grant, key = self.grants[nonce]
        ticket = Ticket(nonce, grant.epoch, gen)
        prompt = self.prompts[key]
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
            self.have[nonce] = attached.received()
            assert gen > self.gens.get(nonce, 0)
            self.gens[nonce] = gen

    @stateful.precondition(lambda self: self.tickets)
    @stateful.rule(data=st.data(), kind=FRAMES, channel=CHANNEL)
    def frame(self, data: st.DataObject, kind: str, channel: str) -> None:
        ticket, key = data.draw(st.sampled_from(self.tickets))
        prompt = self.prompts[key]
        frames = prompt.frames(ticket)
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if kind == "corrupt":
            frame = corrupt(frame)
        elif kind == "foreign":
            other = PROMPTS[{"a": "b", "b": "c", "c": "a"}[key[0]]]
            frame = other[PROMPTS[key[0]].index(prompt)].frames(ticket)[0]
        self.write(frame, channel)

    def write(self, frame: PageFrame, channel: str) -> bool:
        """Whether the frame was taken; what is shared is never written to."""
        reservation = self.ledger._by_nonce.get(frame.ticket.nonce)
        bound = channel_of(reservation)

        def write(pieces: Sequence[tuple[int, Buffer]]) -> None:
            assert frame.ticket.gen == self.gens[frame.ticket.nonce]
            assert frame.ticket.epoch == self.epoch
            assert bound in (None, channel)
            assert channel_of(reservation) == channel
            pages = {start // 128 for start, _ in pieces}
            assert not pages & reservation.pending.shared
            arena_write(pieces)

        arena_write = self.pool.arena.write
        self.pool.arena.write = write
        try:
            self.ledger.store(frame, channel)
        except (ReservationError, CorruptFrameError):
            return False
        finally:
            self.pool.arena.write = arena_write
        return True

    @stateful.precondition(lambda self: self.tickets)
    @stateful.rule(
        data=st.data(), then_commit=st.booleans(), spoilt=st.booleans(), channel=CHANNEL
    )
    def everything(
        self, data: st.DataObject, then_commit: bool, spoilt: bool, channel: str
    ) -> None:
        """Send all items that the receiver lacks; if `spoilt`, one first with a flipped bit."""
        ticket, key = data.draw(st.sampled_from(self.tickets))
        prompt = self.prompts[key]
        have = self.have[ticket.nonce]
        items = [
            item
            for index, item in enumerate(prompt.manifest.items)
            if index not in have
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
        """With the digests of the receiver for items that it had when the sender attached."""
        nonce = ticket.nonce
        commit = self.prompts[key].commit(ticket, first_token)
        have = self.have[nonce]
        digests = tuple(have.get(i, own) for i, own in enumerate(commit.digests))
        self.ledger.expire()
        state = self.state_of(nonce) if ticket.epoch == self.epoch else None
        is_last = ticket.gen == self.gens[nonce]
        try:
            ack = self.ledger.commit(replace(commit, digests=digests))
        except ReservationError:
            self.check_refusal(nonce, state, is_last, (digests, first_token))
        except CorruptFrameError:
            return
        except TransferError:
            pending = self.ledger._by_nonce[nonce].pending
            assert len(pending.parts[0].digests) < len(digests)
        else:
            assert is_last or nonce in self.acks
            answered = ((digests, first_token), ack)
            assert self.acks.setdefault(nonce, answered) == answered

    def check_refusal(
        self, nonce: int, state: State | None, is_last: bool, committed: object
    ) -> None:
        """A live attachment and a repeated commit are never refused."""
        assert not (state in LIVE and is_last), "though its channel may have broken"
        if state is State.ADMITTED:
            assert self.acks[nonce][0] != committed

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
            is_bound = channel_of(reservation) == channel
            broken = is_bound and before[nonce] is State.ATTACHED
            assert reservation.state is (State.BROKEN if broken else before[nonce])

    @stateful.rule(rid=RID, event=EVENTS)
    def disturb(self, rid: str, event: str) -> None:
        if event == "abort":
            attempt = self.attempts[rid]
            self.ledger.abort(rid, attempt, "the router says so")
            self.gone |= {(rid, lower) for lower in range(attempt + 1)}
        elif event == "fence":
            gauges = self.ledger.gauges()
            for epoch in (self.epoch - 1, self.epoch + 2):
                with pytest.raises(ReservationError):
                    self.ledger.fence(epoch)
            self.ledger.fence(self.epoch)
            assert self.ledger.gauges() == gauges
            self.epoch += 1
            self.ledger.fence(self.epoch)
            assert not any(self.ledger.gauges().values())
        elif event == "forget":
            live = len(self.ledger._live)
            self.desk.now += 2 * MEMORY_S
            self.gone.clear()
            self.ledger.expire()
            assert [x.ended_at for x in self.ledger._ended] == [self.desk.now] * live
            assert not self.ledger._tombstones
        else:
            self.desk.now += LEASE_S if event == "lease" else 0.7
            self.ledger.expire()

    @stateful.rule(max_bytes=st.sampled_from([1, 1 << 20]))
    def scrub(self, max_bytes: int) -> None:
        scrub = self.ledger.cache.begin_scrub(max_bytes)
        damaged = scrub.verify()  # cached blocks are never written to
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
            source = ArenaSource(self.pool.arena, prompt.manifest, admission.groups)
            digests = replace(prompt, source=source).commit().digests
            assert digests == admission.commit.digests

    @stateful.invariant()
    def every_page_is_owned_once(self) -> None:
        self.pool.check_integrity()
        gauges = self.ledger.gauges()
        rows_in_use = gauges["reservations"] + gauges["running"]
        assert self.desk.policy.decode_slots.free == MAX_SEQUENCES - rows_in_use >= 0
        assert len(self.ledger._by_nonce) == len(self.ledger._of()) + len(
            self.ledger._ended
        )
        if not (gauges["reservations"] or self.engine):
            assert self.pool.referenced_pages == 0

    @stateful.invariant()
    def what_ended_keeps_names_and_numbers_and_nothing_of_its_prompt(self) -> None:
        assert all(x.pending is None for x in self.ledger._running.values())
        for reservation in self.ledger._ended:
            assert reservation.state not in LIVE
            values = list(vars(reservation).values())
            by_part = [value for value in values if isinstance(value, dict)]
            values = [value for value in values if not isinstance(value, dict)]
            for value in [*values, *chain(*map(dict.values, by_part))]:
                assert isinstance(value, (int, float, str, Ack, Partition)) or not value

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
def test_no_interleaving_leaks_or_admits_an_incomplete_prompt():
    size = {"max_examples": 300, "stateful_step_count": 60, "deadline": None}
    chosen = settings(suppress_health_check=list(HealthCheck), **size)
    stateful.run_state_machine_as_test(Machine, settings=chosen)
