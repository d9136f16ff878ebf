"""The rules of the receiver: events in, results and actions out.

           reserve            attach           channel ends
    room ───────────► HELD ───────────► ATTACHED ───────────► BROKEN
                       │                 │  ▲ ▲                 │
                       │           frame └──┘ └──── attach ─────┘
                       │                 │ commit, complete and verified (BROKEN too)
                       │                 └──────────► ADMITTED
                       └─► EXPIRED (lease over) · ABORTED (router, fence, attempt+1),
                           the latter from ADMITTED too, until the engine is done

One thread calls it. A frame is checked, verified and in place within one call. What ended is
remembered by its names, so that what comes late is refused by name and lands nowhere.
"""

import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from disagg.errors import (
    AbortedError,
    CapacityError,
    CorruptFrameError,
    LayoutError,
    RequestError,
    ReservationError,
)
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.state import GroupState
from disagg.transfer.messages import Ack, Attach, Attached, Grant, Job
from disagg.transfer.prefix_cache import PendingHandoff, PrefixCache, Scrub
from disagg.wire import Commit, PageFrame, Ticket, digest, pack

MAX_RID_CHARS, MAX_CODEC_CHARS = 256, 4096
MAX_TOMBSTONES = 1 << 16
MEMORY_S = 900.0  # how long ended reservations and aborts are remembered


@dataclass(frozen=True)
class ReceiverPolicy:
    """What a decode worker promises and accepts.

    model:           fingerprint of config and weights
    plan_of:         the plan of a job's codec, whose records it allocates
    epoch:           its incarnation; a fence raises it by one
    lease_s:         a reservation ends this long after the last sign of life
    rows:            of decode steps: a reservation takes one, until its answer has ended
    watermark_bytes: what a reservation leaves free for sequences that grow
    may_reserve:     False while sequences here wait for room
    share:           prompts that begin alike share the records of their beginning
    """

    model: str
    plan_of: Callable[[str], Plan]
    epoch: int
    lease_s: float = 10.0
    rows: DecodeSlots = field(default_factory=lambda: DecodeSlots(1 << 16))
    watermark_bytes: int = 0
    may_reserve: Callable[[], bool] = lambda: True
    share: bool = True

    def plan_for(self, job: Job) -> Plan:
        """The plan of a job that can be served some day; RequestError or ConfigError if not."""
        if (
            not job.rid
            or len(job.rid) > MAX_RID_CHARS
            or len(job.codec) > MAX_CODEC_CHARS
        ):
            raise RequestError(
                f"a request id has 1 to {MAX_RID_CHARS} characters, a codec spec at most "
                f"{MAX_CODEC_CHARS}; these have {len(job.rid)} and {len(job.codec)}"
            )
        if not job.prompt or job.tokens < len(job.prompt):
            has = f"{job.tokens} of {len(job.prompt)} tokens"
            raise RequestError(f"{job.name} has no prompt, or moves with {has}")
        return self.plan_of(job.codec)


@dataclass(frozen=True)
class Admission:
    """A complete prompt for the engine. Its groups are the engine's from here on."""

    job: Job
    groups: tuple[GroupState, ...]
    commit: Commit


class State(StrEnum):
    """Where a reservation is in its life."""

    HELD = "held"
    ATTACHED = "attached"
    BROKEN = "broken"
    ADMITTED = "admitted"  # its pages are the engine's, or were
    EXPIRED = "expired"
    ABORTED = "aborted"


class Reservation:
    """One hand-off as its decode worker sees it. `holding`: None once it is over."""

    def __init__(self, nonce: int, holding: PendingHandoff):
        self.nonce, job = nonce, holding.job
        self.rid, self.attempt, self.name = job.rid, job.attempt, job.name
        self.holding: PendingHandoff | None = holding
        self.state = State.HELD
        self.reason = ""
        self.gen = 0
        self.channel: object = None  # what its frames come on
        self.lease_until = self.ended_at = 0.0
        self.pages = holding.shared  # that others may own too
        self.committed = 0  # stands for the commit
        self.ack = Ack()  # the answer to it
        self.verify_ms = 0.0

    def live(self) -> PendingHandoff:
        """What it holds; ReservationError once it is over."""
        if self.holding is not None:
            return self.holding
        kind = AbortedError if self.state is State.ABORTED else ReservationError
        raise kind(f"{self.name} is {self.state}: {self.reason}")

    def attached(self, ticket: Ticket, *states: State) -> PendingHandoff:
        """What it holds; ReservationError unless the ticket is of its last attachment."""
        holding = self.live()
        if ticket.gen == self.gen and self.state in states:
            return holding
        raise ReservationError(
            f"stream {ticket.gen} of {self.name}, which is {self.state} by stream {self.gen}"
        )


class Reservations:
    """All hand-offs of one decode worker.

    on_admit: called with every complete prompt; only enqueues. If it raises anything the prompt is
              refused with that, and its records are freed here.
    on_drop:  called with (rid, attempt, reason) of a prompt that the engine was given and must drop
              and free; only enqueues
    clock:    in seconds; it never goes back
    """

    def __init__(
        self,
        terms: ReceiverPolicy,
        pool: Pool,
        on_admit: Callable[[Admission], None],
        on_drop: Callable[[str, int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.terms = terms
        self.epoch = terms.epoch
        # what went wrong: "expired", "damaged"; tokens of prompts: "received_tokens", and
        # "shared_tokens" whose records were here
        self.counts: Counter[str] = Counter()
        self.cache = PrefixCache(pool, terms.share)
        self._on_admit, self._on_drop = on_admit, on_drop
        self._arena, self._clock = pool.arena, clock
        self._live: OrderedDict[str, Reservation] = (
            OrderedDict()
        )  # by rid; who renewed last, last
        self._running: dict[str, Reservation] = {}  # by rid: the engine has it
        self._by_nonce: dict[int, Reservation] = {}
        self._ended: deque[Reservation] = deque()  # oldest first
        self._tombstones: OrderedDict[str, tuple[int, float]] = (
            OrderedDict()
        )  # oldest first

    # -- what the router says

    def reserve(self, job: Job, epoch: int) -> Grant:
        """Room for a prompt, at once or not at all; the same job again gets the same answer.

        Raises CapacityError if there is none now, RequestError for what can never be served,
        ReservationError for another epoch, or for an attempt that ran, was aborted or has a later
        one. One whose lease ended gets room again.
        """
        self.expire()
        plan = self.terms.plan_for(job)
        if epoch != self.epoch:
            raise ReservationError(f"epoch {epoch} is not {self.epoch}, the one of now")
        old = self._live.get(job.rid)
        if old and old.attempt == job.attempt:
            known = old.live().job
            if (
                known.moved != job.moved and old.state is State.HELD
            ):  # it said more before it left
                self._stop(old, f"room for {job.tokens} tokens is wanted now")
                return self.reserve(job, epoch)
            if (known.prompt, known.codec, known.moved) != (
                job.prompt,
                job.codec,
                job.moved,
            ):
                raise ReservationError(f"{old.name} is reserved for another prompt")
            self._renew(old)
            return Grant(old.nonce, self.epoch)
        self._refuse_late(job)
        self.cache.check(plan, job.tokens)
        if (
            job.attempt
        ):  # whether a lower one came here or not: none comes after this one
            self.abort(job.rid, job.attempt - 1, f"attempt {job.attempt} took over")
        return Grant(self._hold(job, plan).nonce, self.epoch)

    def abort(self, rid: str, attempt: int, reason: str) -> None:
        """No attempt up to this one goes on, whether it is known yet or not."""
        self._bury(rid, attempt)
        for reservation in self._of(rid):
            if reservation.attempt <= attempt:
                self._stop(reservation, reason)

    def fence(self, epoch: int) -> None:
        """The next epoch: everything of the old one is over. The epoch of now changes nothing."""
        if epoch == self.epoch:
            return
        if epoch != self.epoch + 1:
            raise ReservationError(
                f"a fence to epoch {epoch}; this worker is in {self.epoch}"
            )
        self.epoch = epoch
        for reservation in self._of():
            self._stop(reservation, f"fenced: epoch {epoch} has begun")

    # -- what the sender says

    def attach(self, attach: Attach) -> Attached:
        """A sender takes over; its gen is above those of all before. LayoutError if it encodes
        another prompt, or for another model or plan, than was reserved for.
        """
        self.expire()
        reservation = self._find(attach.ticket)
        if reservation.state is State.ADMITTED:
            return Attached(admitted=True)
        arrivals, gen = reservation.live().arrivals, attach.ticket.gen
        checklist = arrivals.checklist
        ours = self.terms.model, checklist.plan.fingerprint, checklist.tokens
        if ours != (theirs := (attach.model, attach.plan, attach.tokens)):
            raise LayoutError(
                f"model, plan and tokens are {theirs}; reserved were {ours}"
            )
        if gen <= reservation.gen:
            raise ReservationError(
                f"stream {gen} attaches after stream {reservation.gen} did"
            )
        reservation.gen, reservation.state = gen, State.ATTACHED
        reservation.channel = None
        self._renew(reservation)
        here, credit = arrivals.here, 2 * checklist.frame_bytes
        return Attached(False, [*here], [*here.values()], self.terms.lease_s, credit)

    def renew(self, tickets: Iterable[Ticket]) -> tuple[int, ...]:
        """The sender lives. The nonces of those that are over and were not admitted."""
        self.expire()
        over = []
        for ticket in tickets:
            reservation = (
                self._by_nonce.get(ticket.nonce) if ticket.epoch == self.epoch else None
            )
            if reservation and reservation.holding:
                self._renew(reservation)
            elif not (reservation and reservation.state is State.ADMITTED):
                over.append(ticket.nonce)
        return tuple(over)

    def store(self, frame: PageFrame, channel: object) -> None:
        """Take a frame in: what is verified is here."""
        self.expire()
        reservation = self._find(frame.ticket)
        arrivals = reservation.attached(frame.ticket, State.ATTACHED).arrivals
        if reservation.channel not in (None, channel):
            raise ReservationError(
                f"frames of {reservation.name} come on another channel"
            )
        reservation.channel = channel
        self._renew(reservation)
        began = self._clock()
        new, pieces = arrivals.absent(frame)
        self._arena.write(pieces)
        reservation.verify_ms += 1000 * (self._clock() - began)
        arrivals.here.update(new)

    def channel_ended(self, channel: object) -> None:
        """However a channel ended: nothing is complete without a commit."""
        for reservation in self._live.values():
            if reservation.channel is channel:
                reservation.state = State.BROKEN

    def commit(self, commit: Commit) -> Ack:
        """Admit a hand-off whose items are all here with the digests of the commit; TransferError
        where one is missing: an honest sender commits when all its frames were answered.

        The same commit again gets the same answer and admits nothing.
        """
        self.expire()
        began, reservation = self._clock(), self._find(commit.ticket)
        if reservation.state is State.ADMITTED:
            if reservation.committed != _hash(commit):
                raise ReservationError(
                    f"{reservation.name} was admitted by another commit"
                )
            return reservation.ack
        holding = reservation.attached(commit.ticket, State.ATTACHED, State.BROKEN)
        holding.arrivals.check(commit)
        reservation.committed = _hash(commit)
        self._admit(reservation, holding, commit)
        reservation.ack = Ack(reservation.verify_ms, 1000 * (self._clock() - began))
        return reservation.ack

    # -- what the engine says, and time

    def finished(self, rid: str, attempt: int) -> None:
        """The engine is done with a prompt and has freed it."""
        if (running := self._running.get(rid)) and running.attempt == attempt:
            self._end(running, State.ADMITTED, "")

    def expire(self) -> None:
        """End what is over by now: leases and memories. Every event begins with it."""
        now = self._clock()
        while (
            self._live and (first := next(iter(self._live.values()))).lease_until <= now
        ):
            self.counts["expired"] += 1
            why = f"no sign of life for a lease, {self.terms.lease_s:g} s"
            self._stop(first, why, State.EXPIRED)
        before = now - MEMORY_S
        while self._ended and self._ended[0].ended_at < before:
            self._by_nonce.pop(self._ended.popleft().nonce, None)
        while self._tombstones and next(iter(self._tombstones.values()))[1] < before:
            self._tombstones.popitem(last=False)

    def end_scrub(
        self, scrub: Scrub, damaged: Mapping[bytes, CorruptFrameError]
    ) -> dict[CorruptFrameError, list[tuple[str, int]]]:
        """Forget what is damaged; (rid, attempt) of whoever had it or was promised it: over now."""
        self.cache.end_scrub(scrub, damaged)
        struck = {}
        for note in (x for x in scrub.notes if x.key in damaged):
            error = damaged[note.key]
            hit = [x for x in self._of() if not x.pages.isdisjoint(note.pages)]
            for reservation in hit:
                self._stop(reservation, str(error))
            struck[error] = [(x.rid, x.attempt) for x in hit]
        self.counts["damaged"] += len(struck)
        return struck

    def gauges(self) -> dict[str, int]:
        """How much is held; all zero when nothing goes on."""
        streams = sum(x.state is State.ATTACHED for x in self._live.values())
        held = {"reservations": len(self._live), "streams": streams}
        return held | {"running": len(self._running)}

    def _of(self, rid: str | None = None) -> list[Reservation]:
        """The live and the running ones of one request, or of all."""
        found = [*self._running.values(), *self._live.values()]
        return [x for x in found if rid in (None, x.rid)]

    def _find(self, ticket: Ticket) -> Reservation:
        if ticket.epoch != self.epoch:
            raise ReservationError(
                f"epoch {ticket.epoch} is over; this worker is in {self.epoch}"
            )
        if reservation := self._by_nonce.get(ticket.nonce):
            return reservation
        raise ReservationError(f"no reservation {ticket.nonce:016x} is known here")

    def _refuse_late(self, job: Job) -> None:
        known = self._live.get(job.rid) or self._running.get(job.rid)
        if known and known.attempt >= job.attempt:
            raise ReservationError(
                f"{job.name} comes after {known.name}, which is {known.state}"
            )
        if job.attempt <= self._tombstones.get(job.rid, (-1, 0.0))[0]:
            raise ReservationError(f"{job.name} was aborted or superseded")

    def _hold(self, job: Job, plan: Plan) -> Reservation:
        terms = self.terms
        if not terms.may_reserve():
            raise CapacityError("sequences here wait for room already")
        if not terms.rows.take():
            raise CapacityError(
                f"{terms.rows.count} sequences are here or promised room"
            )
        try:
            holding = self.cache.hold(terms.model, plan, job, terms.watermark_bytes)
        except BaseException:
            terms.rows.give()
            raise
        reservation = Reservation(secrets.randbits(64), holding)
        self._by_nonce[reservation.nonce] = self._live[job.rid] = reservation
        self._renew(reservation)
        return reservation

    def _renew(self, reservation: Reservation) -> None:
        reservation.lease_until = self._clock() + self.terms.lease_s
        self._live.move_to_end(reservation.rid)

    def _admit(
        self, reservation: Reservation, holding: PendingHandoff, commit: Commit
    ) -> None:
        """Give the records away, to the engine; keep what can be shared."""
        reservation.pages = self.cache.keep(holding, commit.digests)
        reservation.holding, reservation.state = None, State.ADMITTED
        del self._live[reservation.rid]
        self._running[reservation.rid] = reservation
        self.counts["shared_tokens"] += holding.cached_tokens
        self.counts["received_tokens"] += commit.tokens - holding.cached_tokens
        try:
            self._on_admit(Admission(holding.job, holding.groups, commit))
        except BaseException as error:
            self.cache.release(holding.groups)
            self._end(reservation, State.ABORTED, str(error))
            raise

    def _stop(
        self, reservation: Reservation, reason: str, state: State = State.ABORTED
    ) -> None:
        admitted = reservation.state is State.ADMITTED
        self._end(reservation, state, reason)
        if admitted:
            self._on_drop(reservation.rid, reservation.attempt, reason)

    def _end(self, reservation: Reservation, state: State, reason: str) -> None:
        """Only its names stay."""
        reservation.state, reservation.reason, reservation.ended_at = (
            state,
            reason,
            self._clock(),
        )
        reservation.pages = frozenset()
        for table in (self._live, self._running):
            if table.get(reservation.rid) is reservation:
                del table[reservation.rid]
        self.terms.rows.give()
        self._ended.append(reservation)
        if holding := reservation.holding:
            reservation.holding = None
            self.cache.release(holding.groups)

    def _bury(self, rid: str, attempt: int) -> None:
        """No attempt up to this one may reserve any more."""
        known, _ = self._tombstones.pop(rid, (attempt, 0.0))
        self._tombstones[rid] = (max(known, attempt), self._clock())
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


def _hash(commit: Commit) -> int:
    """The same of the same commit, whichever attachment says it.

    CorruptFrameError for extras that nest deeper than any sender can pack.
    """
    try:
        _, said = pack(commit)
    except ValueError as error:
        raise CorruptFrameError(f"a commit that nobody could pack: {error}") from error
    return digest(said)
